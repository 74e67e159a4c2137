"""The registry of algorithms. A named variant is a composition: an algorithm with optimizers, personal parts or
compression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from flwr.app import ConfigRecord
from pydantic import ValidationError

from common.errors import SettingsError, not_one_of
from common.experiment import Experiment, StrategySettings
from common.models.mixture import PRIVATE
from common.own import load
from common.settings import Section, checked, shown
from strategies.apfl import APFL
from strategies.base import FederatedStrategy
from strategies.centralized import Centralized
from strategies.ditto import Ditto
from strategies.fagc import FAGC, FANT
from strategies.fedala import FedALA
from strategies.fedavg import FedAvg
from strategies.fedcm import FedCM
from strategies.feddyn import FedDyn
from strategies.fedexp import FedExP
from strategies.fedlws import FedLWS
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.fedspeed import FedSpeed
from strategies.fedsplit import FedSplit
from strategies.fedzmg import FedZMG
from strategies.hafedho import HaFedHo
from strategies.local_only import LocalOnly
from strategies.mime import Mime, MimeLite
from strategies.moon import Moon
from strategies.padamfed import PAdaMFed
from strategies.perfedavg import PerFedAvg
from strategies.pfedafm import PFedAFM
from strategies.pfedme import PFedMe
from strategies.protocol.rates import rate, scheduled
from strategies.scaffold import Scaffold
from strategies.scaffoldm import ScaffoldM

Defaults = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """A registered algorithm. A composition names an algorithm with an optimizer, personal parts or compression.

    `server`, `local`, `personal`, `compression` and `options` (of `[strategy]`) are defaults that a file may override,
    but for the optimizer of a table named in `fixed`; where another optimizer is allowed, its table's defaults fall,
    unless it is Adam like the default (`ADAMS`).
    """

    cls: type[FederatedStrategy]
    paper: str
    server: Defaults = field(default_factory=dict)
    local: Defaults = field(default_factory=dict)
    personal: Defaults = field(default_factory=dict)
    compression: Defaults = field(default_factory=dict)
    options: Defaults = field(default_factory=dict)
    fixed: tuple[str, ...] = ("server", "local")


ADAMS = {"adam", "adamw", "amsgrad"}
"""Local optimizers that one rate and one form of bias correction serve."""

# FA-GC's formula, and LocalAdam with the same, so that a comparison shows the correction alone.
ADAM = {"optimizer": "adam", "lr": 1e-3, "bias_correction": False}

# Cross-silo: few clients, long rounds, inner moments that stay with each, Nesterov momentum outside.
OUTER = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
INNER = {"lr": 4e-4, "moments": "keep"}
MUON = {"optimizer": "muon", "betas": (0.9, 0.99), "muon_scale": "rms", "weight_decay": 1e-4}

UNIFORM = {"weights": "uniform"}

REGISTRY: dict[str, Entry] = {
    "fedavg": Entry(FedAvg, "arXiv 1602.05629"),
    "fedsmb": Entry(FedAvg, "arXiv 2011.07006", local={"steps": 1}),
    "fedavgm": Entry(FedAvg, "arXiv 1909.06335", {"optimizer": "momentum", "momentum": 0.9, "lr": 1.0}),
    "fedadagrad": Entry(FedAvg, "arXiv 2003.00295", {"optimizer": "adagrad", "beta1": 0.0, "lr": 0.1}),
    "fedadam": Entry(FedAvg, "arXiv 2003.00295", {"optimizer": "adam", "lr": 0.01}),
    "fedyogi": Entry(FedAvg, "arXiv 2003.00295", {"optimizer": "yogi", "lr": 0.01}),
    "fedams": Entry(FedAvg, "arXiv 2205.02719", {"optimizer": "ams", "lr": 0.01}),
    "fedcams": Entry(
        FedAvg,
        "arXiv 2205.02719",
        {"optimizer": "ams", "lr": 0.01},
        compression={"up": "top-k", "ratio": 0.015625},
    ),
    "fedexp": Entry(FedExP, "arXiv 2301.09604"),
    "fedprox": Entry(FedProx, "arXiv 1812.06127"),
    "fednova": Entry(FedNova, "arXiv 2007.07481"),
    "fednovavr": Entry(FedNova, "arXiv 2007.07481", options={"vr": "compensated"}),
    "scaffold": Entry(Scaffold, "arXiv 1910.06378"),
    "scaffoldm": Entry(ScaffoldM, "arXiv 2306.16504"),
    "padamfed": Entry(PAdaMFed, "ICLR 2025"),
    "hafedho": Entry(HaFedHo, "seed paper, Algorithm 1"),
    "fedcm": Entry(FedCM, "arXiv 2106.10874"),
    "feddyn": Entry(FedDyn, "arXiv 2111.04263"),
    "fedspeed": Entry(FedSpeed, "arXiv 2302.10429"),
    "fedsplit": Entry(FedSplit, "arXiv 2005.05238"),
    "moon": Entry(Moon, "arXiv 2103.16257"),
    "fedlws": Entry(FedLWS, "arXiv 2503.15111"),
    "fedzmg": Entry(FedZMG, "arXiv 2602.18384"),
    "fedsam": Entry(FedAvg, "arXiv 2206.02618", local={"sam_rho": 0.05}),
    "fagc": Entry(FAGC, "arXiv 2502.02727", local=ADAM, fixed=()),
    "fant": Entry(FANT, "arXiv 2502.02727", local=ADAM, fixed=()),
    "localadam": Entry(FedAvg, "arXiv 2106.02305", local=ADAM, options=UNIFORM),
    "mime": Entry(Mime, "arXiv 2008.03606"),
    "mimelite": Entry(MimeLite, "arXiv 2008.03606"),
    "fedbn": Entry(FedAvg, "arXiv 2102.07623", personal={"parts": ["batch-norm"]}, options=UNIFORM),
    "fedper": Entry(FedAvg, "arXiv 1912.00818", personal={"parts": ["head"]}),
    "fedrep": Entry(FedAvg, "arXiv 2102.07078", personal={"parts": ["head"], "head_steps": 10}, options=UNIFORM),
    "pfedafm": Entry(PFedAFM, "arXiv 2404.17847", personal={"parts": PRIVATE}),
    "centralized": Entry(Centralized, "-"),
    "local-only": Entry(LocalOnly, "-"),
    "ditto": Entry(Ditto, "arXiv 2012.04221"),
    "pfedme": Entry(PFedMe, "arXiv 2006.08848"),
    "apfl": Entry(APFL, "arXiv 2003.13461"),
    "perfedavg": Entry(PerFedAvg, "arXiv 2002.07948"),
    "fedala": Entry(FedALA, "arXiv 2212.01197"),
    "diloco": Entry(
        FedAvg, "arXiv 2311.08105", OUTER, {**INNER, "optimizer": "adamw", "weight_decay": 0.1}, options=UNIFORM
    ),
    "muloco": Entry(FedAvg, "arXiv 2505.23725", OUTER, {**INNER, **MUON}, options=UNIFORM),
}


def entry_of(name: str) -> Entry:
    """The row of a registered algorithm, or one for a class of the user's own, "package.module:Class".

    Raises SettingsError for an unknown name, and Denied where a site allows no such code.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    if ":" not in name:
        raise not_one_of("strategy.name", name, [*REGISTRY, "package.module:Class"])
    found = load(name, "strategy.name", "Class")
    if not (isinstance(found, type) and issubclass(found, FederatedStrategy)):
        raise SettingsError(f"strategy.name = {name!r} is no class of an algorithm: strategies.base.FederatedStrategy")
    return Entry(found, "-")


def settled(experiment: Experiment) -> tuple[FederatedStrategy, Experiment]:
    """The strategy of an experiment, and the experiment with all that its named algorithm implies written out: server
    and local optimizer, options. Only so does a copy of it (sent to clients, written to the run folder) mean the same
    as the file. What is settled settles to itself.

    Raises SettingsError for an unknown name or hyperparameter, a wrong value or a pair without meaning.
    """
    name = experiment.strategy.name
    entry = entry_of(name)
    if "server" in experiment.strategy.options:
        raise SettingsError("[strategy] server: the server optimizer stands in the table [server]")
    options = dict(entry.options) | experiment.strategy.options
    if entry.cls in (FAGC, FANT) and options.get("refresh_seed") == experiment.seed:
        del options["refresh_seed"]  # run folders of before hold it, and it is what is drawn from now
    whole = experiment.model_copy(
        update={
            "strategy": StrategySettings(name=name, **options),
            "server": _filled(name, "server", entry, experiment.server),
            "local": _filled(name, "local", entry, experiment.local),
            "personal": _filled(name, "personal", entry, experiment.personal),
            "compression": _filled(name, "compression", entry, experiment.compression),
        }
    )
    whole = _strategy(entry.cls, whole).settle(whole)
    strategy = _strategy(entry.cls, whole)  # anew: what it derives may be one of its own hyperparameters
    strategy.check(whole)
    _check_pairs(strategy, whole)
    return strategy, whole


def written_out(strategy: FederatedStrategy, experiment: Experiment) -> Experiment:
    """What is settled, with every hyperparameter of the algorithm, also those that nobody set: what a run folder keeps,
    so that it means the same when a default has changed."""
    own = {name: getattr(strategy, name) for name in hyperparameter_names(type(strategy))}
    given = experiment.strategy.options | {name: value for name, value in own.items() if value is not None}
    return experiment.model_copy(update={"strategy": StrategySettings(name=experiment.strategy.name, **given)})


def identities(experiment: Experiment) -> tuple[str, ...]:
    """The identity of a settled experiment, and that under which a run of it may have been kept before."""
    strategy = experiment.strategy
    if entry_of(strategy.name).cls not in (FAGC, FANT):
        return (experiment.identity,)
    former = StrategySettings(name=strategy.name, **strategy.options, refresh_seed=experiment.seed)
    return experiment.identity, experiment.model_copy(update={"strategy": former}).identity


def config_of(experiment: Experiment) -> ConfigRecord:
    """What Flower's own `strategy.start(..., train_config=...)` needs to know of an experiment."""
    return ConfigRecord({"experiment": settled(experiment)[1].json(server=True)})


def _check_pairs(strategy: FederatedStrategy, experiment: Experiment) -> None:
    """Pairs without meaning for any algorithm of a kind."""
    local, sent = experiment.local, experiment.compression
    if local.moments == "keep" and local.optimizer == "sgd" and not local.momentum:
        raise SettingsError("local.moments = 'keep': plain sgd has none; give local.momentum or leave it out")
    personal = experiment.personal
    if strategy.personal and (personal.active or personal.head_steps):
        raise SettingsError(
            f"[personal] beside strategy.name = {experiment.strategy.name!r}: there each client has a whole model of "
            "its own; leave it out"
        )
    if personal.head_steps and not personal.parts:
        raise SettingsError(
            f"personal.head_steps = {personal.head_steps} needs personal.parts, the part of the model that is personal"
        )
    if experiment.data.may_grow and strategy.weights == "data" and strategy.trackers and not strategy.rescales:
        raise SettingsError(
            f"data.may_grow beside strategy.name = {experiment.strategy.name!r} with weights = 'data': the server "
            "cannot tell what a site whose data changed has in its average; allowed: strategy.weights = 'uniform'"
        )
    most = experiment.round.most_share
    if most is not None and strategy.weights == "data" and strategy.trackers:
        raise SettingsError(
            f"round.most_share = {most:g} beside trackers that average by data over all clients, strategy.name = "
            f"{experiment.strategy.name!r} with weights = 'data': they would average other weights than the model "
            "changes; allowed: strategy.weights = 'uniform'"
        )
    _check_server_rates(strategy, experiment)
    kinds = {*strategy.payload.values(), *strategy.expects({}).values()}
    if "increment" in kinds and sent.lossy and sent.feedback == "none":
        raise SettingsError(
            f"compression.up = {sent.up!r} with compression.feedback = 'none' loses for ever a part of what "
            f"strategy.name = {experiment.strategy.name!r} adds up on the server; allowed: 'ef14', 'ef21'"
        )


def _check_server_rates(strategy: FederatedStrategy, experiment: Experiment) -> None:
    """What an algorithm refuses of one rate of the server it refuses of each that a schedule comes to."""
    server = experiment.server
    if not scheduled(server):
        return
    if strategy.lean():
        raise SettingsError(
            f"server.schedule = {server.schedule!r} with server.warm_up = {server.warm_up} beside strategy.name = "
            f"{experiment.strategy.name!r}, whose clients take the server's step themselves, at one rate; allowed: "
            "'constant' without warm_up"
        )
    rates = {rate(server, round, experiment.rounds): round for round in range(experiment.rounds, 0, -1)}
    for lr in {min(rates), max(rates)} - {server.lr}:
        settings = server.model_copy(update={"lr": lr})
        try:
            replace(strategy, server=settings).check(experiment.model_copy(update={"server": settings}))
        except SettingsError as error:
            raise SettingsError(f"server.schedule comes to the rate {lr:g} in round {rates[lr]}: {error}") from None


def _strategy(cls: type[FederatedStrategy], experiment: Experiment) -> FederatedStrategy:
    try:
        return cls(server=experiment.server, **experiment.strategy.options)
    except ValidationError as error:
        raise SettingsError("\n".join(_fault_line(experiment.strategy.name, cls, e) for e in error.errors())) from None


def cautions(strategy: FederatedStrategy, experiment: Experiment, steps: int) -> list[str]:
    """What to warn of before round 1; `steps` is the largest number of local steps that a client announced."""
    local, own = experiment.local, strategy.caution(experiment, steps)
    found = [own] if own else []
    if local.optimizer == "soap" and local.moments == "reset":
        found.append(
            f"local.optimizer = 'soap' with moments = 'reset': the first of {steps} steps a round makes the eigenbases "
            "and moves no matrix; moments = 'keep' has one such step in all"
        )
    return found


def hyperparameter_names(cls: type[FederatedStrategy]) -> list[str]:
    """The keys that `[strategy]` takes beside `name`."""
    return [f.name for f in fields(cls) if f.name != "server"]


S = TypeVar("S", bound=Section)


def _filled(name: str, table: str, entry: Entry, given: S) -> S:
    """A table of the experiment with the entry's defaults where the file says nothing."""
    defaults: Defaults = getattr(entry, table)
    own, chosen = defaults.get("optimizer"), getattr(given, "optimizer", None)
    if own and "optimizer" in given.model_fields_set and chosen != own:
        if table in entry.fixed:
            raise SettingsError(
                f"{table}.optimizer = {chosen!r} contradicts strategy.name = {name!r}, which means {own!r}; "
                "leave it out or choose 'fedavg'"
            )
        defaults = defaults if {own, chosen} <= ADAMS else {}
    values = dict(defaults) | given.model_dump(include=given.model_fields_set)
    return checked(type(given), values, f"[{table}]")


def _fault_line(name: str, cls: type[FederatedStrategy], fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        allowed = ", ".join(hyperparameter_names(cls))
        return f"strategy.{key} = {shown(fault['input'])}: {name!r} has no such hyperparameter; allowed: {allowed}"
    return f"strategy.{key} = {shown(fault['input'])}: {fault['msg']}"


__all__ = [
    "REGISTRY",
    "Entry",
    "cautions",
    "config_of",
    "hyperparameter_names",
    "identities",
    "settled",
    "written_out",
]
