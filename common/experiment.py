"""The experiment file: TOML read into strict settings. Defaults make a five-line file valid."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, field_validator, model_validator

from common.settings import Name, Opened, OpenSection, Section, checked, given, merged, tables_of, text_of

Beta = Annotated[float, Field(ge=0, lt=1)]
Schedule = Literal["constant", "exponential", "cosine", "step", "list"]
Factor = tuple[Annotated[int, Field(ge=1, strict=True)], Annotated[float, Field(gt=0, strict=True)]]
Factors = tuple[Annotated[Factor, Field(strict=False)], ...]


class TaskSettings(OpenSection):
    """`[task]`: a registered task or `package.module:function`, and that task's own keys."""

    name: str = "digits"


class StrategySettings(OpenSection):
    """`[strategy]`: a registered algorithm and its own hyperparameters."""

    name: str = "fedavg"


class PartitionSettings(Section):
    """`[partition]`: how a pooled data set is split over simulated clients, by name "0" to "clients-1"."""

    kind: Literal["iid", "dirichlet", "pathological", "shards", "natural", "size", "quantity", "file"] = "iid"
    clients: int | None = Field(None, ge=1, description="default: 10, every group of a natural split, or the file's")
    alpha: float = Field(0.5, gt=0, description="Dirichlet concentration: of classes (dirichlet), of sizes (quantity)")
    balanced: bool = Field(False, description="dirichlet: clients of equal size, each with a mix of classes of its own")
    classes_per_client: int | list[int] | str = Field(
        2, description="pathological: a number, a list that is cycled over the clients, or a range such as '1-4'"
    )
    shards_per_client: int = Field(2, ge=1, description="shards split")
    growth: Literal["linear", "square", "exponential"] = "linear"
    min_examples: int = Field(1, ge=0, description="smallest client; a Dirichlet split is drawn until it holds")
    holdout: float = Field(0.1, ge=0, lt=1, description="share of each client's examples kept for evaluation")
    file: Opened | None = Field(None, description="plan file; relative to the working directory, else to FEDKEEL_DATA")
    shift: Literal["none", "noise", "rotation", "brightness", "contrast"] = Field(
        "none", description="feature shift from client to client, with any kind of split; see common/partition/shift.py"
    )
    shift_strength: float = Field(0.1, gt=0, description="of the last client; noise: standard deviation of [0, 1]")

    @field_validator("classes_per_client", mode="plain")
    @classmethod
    def _class_counts(cls, value: Any) -> int | list[int] | str:
        counts = value if isinstance(value, list) else [value]
        ends = re.fullmatch(r"(\d+)-(\d+)", value) if isinstance(value, str) else None
        whole = bool(counts) and all(isinstance(count, int) and count is not True and count >= 1 for count in counts)
        if not whole and not (ends and 1 <= int(ends[1]) <= int(ends[2])):
            raise ValueError("allowed: a number from 1, a list of such numbers, or a range such as '1-4'")
        return value  # type: ignore[no-any-return]

    @model_validator(mode="after")
    def _coherent(self) -> PartitionSettings:
        if (self.kind == "file") != (self.file is not None):
            raise ValueError("kind = 'file' and file = '...' belong together")
        if self.balanced and self.kind != "dirichlet":
            raise ValueError(f"balanced belongs to kind 'dirichlet', not to '{self.kind}'")
        if self.shift in ("brightness", "contrast") and self.shift_strength > 1:
            raise ValueError(f"shift_strength = {self.shift_strength} of '{self.shift}': allowed: above 0, up to 1")
        return self


class LocalSettings(Section):
    """`[local]`: the work of a client in one round and its optimizer."""

    optimizer: Literal["sgd", "adam", "adamw", "amsgrad", "normalized", "soap", "muon"] = "sgd"
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1, description="heavy ball of sgd, its buffer zero at the round's start")
    nesterov: bool = Field(False, description="of sgd and muon")
    betas: tuple[Beta, Beta] = Field((0.9, 0.99), strict=False, description="muon, normalized: the first alone")
    eps: float = Field(1e-8, gt=0)
    bias_correction: bool = Field(True, description="of Adam's and SOAP's moments; FA-GC's formula has none")
    moments: Literal["reset", "keep"] = Field("reset", description="the optimizer's state from round to round")
    muon_scale: Literal["none", "aspect", "rms"] = Field(
        "none", description="muon's step times 1, sqrt(max(1, rows/cols)) or 0.2 sqrt(max(rows, cols))"
    )
    muon_steps: int = Field(5, ge=1, le=99, description="Newton-Schulz steps")
    aux_lr: float | None = Field(
        None, gt=0, description="muon, soap: rate of Adam for what is no matrix, follows the schedule; default: lr"
    )
    precondition_every: int = Field(10, ge=1, description="soap: steps between refreshes of the eigenbases")
    sam_rho: float = Field(0.0, ge=0, description="> 0: sharpness-aware steps, gradients at w + rho g/|g| (FedSAM)")
    weight_decay: float = Field(0.0, ge=0)
    proximal_mu: float = Field(0.0, ge=0, description="adds mu (w - w_start) to each gradient")
    clip_norm: float | None = Field(None, gt=0, description="bound of the gradient's global L2 norm")
    batch_size: int = Field(32, ge=1)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1, description="local steps a round; replaces epochs")
    step_decay: float = Field(1.0, gt=0, le=1, description="factor of the rate after each local step")
    schedule: Schedule = "constant"
    decay: float = Field(0.998, gt=0, le=1, description="factor a round of the exponential schedule")
    drop_every: int | None = Field(None, ge=1, description="rounds from drop to drop of the step schedule")
    drop_factor: float = Field(0.1, gt=0, le=1, description="of each drop")
    factors: Factors = Field(
        (), strict=False, description="list schedule: [first round, factor of lr from there on], in order"
    )
    warm_up: int = Field(0, ge=0, description="rounds in which the rate of any schedule rises in a line from near zero")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="autocast of the forward pass; float16 with loss scaling"
    )
    channels_last: bool = Field(False, description="inputs of 4 dimensions in torch.channels_last")
    deterministic: bool = Field(False, description="only deterministic kernels: one answer on a GPU too")
    arithmetic: Literal["native", "portable"] = Field(
        "native", description="portable: one answer on every x86-64 processor with AVX2; see docs/arithmetic.md"
    )
    # A server's word becomes threads at each site: too many end the process.
    threads: int = Field(1, ge=1, le=256, description="CPU threads of a client; part of the bit-equality promise")

    @property
    def adaptive(self) -> bool:
        """Whether a step is not linear in its gradients."""
        return self.optimizer != "sgd"

    @model_validator(mode="after")
    def _coherent(self) -> LocalSettings:
        if self.adaptive and self.momentum:
            raise ValueError(f"momentum belongs to optimizer 'sgd', not to '{self.optimizer}', whose beta1 is betas[0]")
        if self.nesterov and self.optimizer not in ("sgd", "muon"):
            raise ValueError(f"nesterov belongs to optimizers 'sgd' and 'muon', not to '{self.optimizer}'")
        if self.nesterov and self.optimizer == "sgd" and not self.momentum:
            raise ValueError("nesterov needs momentum > 0")
        _check_schedule(self)
        if self.optimizer == "normalized" and self.weight_decay:
            raise ValueError("weight_decay has no meaning with optimizer 'normalized'")
        return self


def _check_schedule(settings: LocalSettings | ServerSettings) -> None:
    """Raise ValueError for settings of another schedule than the one that is chosen, or none of those that it needs."""
    kind, firsts = settings.schedule, [first for first, _ in settings.factors]
    if (kind == "step") != (settings.drop_every is not None):
        raise ValueError("schedule = 'step' and drop_every = N belong together")
    if kind != "step" and settings.drop_factor != 0.1:
        raise ValueError(f"drop_factor belongs to schedule 'step', not to '{kind}'")
    if (kind == "list") != bool(firsts):
        raise ValueError("schedule = 'list' and factors = [[ROUND, FACTOR], ...] belong together")
    if firsts != sorted(set(firsts)):
        raise ValueError(f"factors begin in rounds {firsts}; allowed: each later than the one before")


class ServerSettings(Section):
    """`[server]`: the optimizer that turns the averaged client change into the next model."""

    optimizer: Literal["sgd", "momentum", "nesterov", "adagrad", "adam", "yogi", "ams"] = "sgd"
    lr: float = Field(1.0, gt=0, description="eta_g")
    momentum: float = Field(0.9, ge=0, lt=1, description="beta of momentum and nesterov")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0, description="adaptivity: not a tiny epsilon")
    schedule: Schedule = Field("constant", description="this and what follows: as in [local], of this rate")
    decay: float = Field(0.998, gt=0, le=1)
    drop_every: int | None = Field(None, ge=1)
    drop_factor: float = Field(0.1, gt=0, le=1)
    factors: Factors = Field((), strict=False)
    warm_up: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _coherent(self) -> ServerSettings:
        _check_schedule(self)
        return self


class RoundSettings(Section):
    """`[round]`: who takes part and when a round is good enough."""

    sample: int | None = Field(None, ge=1, description="clients a round; default: all")
    select: str = Field(
        "uniform", description="which: uniform, size, loss, power-of-choice, round-robin or package.module:function"
    )
    candidates: int | None = Field(None, ge=1, description="power-of-choice: drawn by size; default: twice as many")
    over_select: int = Field(0, ge=0, description="further clients asked; the round closes at `sample` replies")
    quorum: int | None = Field(None, ge=1, description="fewest uploads of a valid round; default: half of sample")
    deadline_s: float = Field(600.0, gt=0)
    max_void: int = Field(3, ge=1, description="void tries in a row that end the run")
    wait_for: int | None = Field(None, ge=1, description="clients on the roll before round 1; default: all simulated")
    max_upload_norm: float | None = Field(None, gt=0, description="L2 bound of an uploaded model change")
    norm_factor: float = Field(
        1000.0, ge=0, description="an upload so many times longer than the usual one is dropped, from 3 on; 0: none is"
    )
    most_share: float | None = Field(
        None, gt=0, le=1, description="largest share of one client in an average by data; default: any, with a warning"
    )


Compressor = Literal["none", "identity", "top-k", "random-k", "sign", "int8", "bfloat16", "float16"]


class CompressionSettings(Section):
    """`[compression]`: of the vectors that clients send (`up`) and receive (`down`); see common/compression/."""

    up: Compressor = "none"
    down: Compressor = "none"
    ratio: float = Field(0.01, gt=0, le=1, description="part of the entries that top-k and random-k send")
    feedback: Literal["ef14", "ef21", "none"] = Field(
        "ef14", description="ef14: what was not sent is added next time; ef21: differences to what the server holds"
    )
    decay: float = Field(1.0, gt=0, le=1, description="ef14: factor of what was not sent, a round")

    @property
    def lossy(self) -> bool:
        """Whether less arrives than clients mean to send."""
        return self.up not in ("none", "identity")


class PersonalSettings(Section):
    """`[personal]`: which parts of the model stay with each client, and how its own model is evaluated.

    A run's model.safetensors holds them as they were at the start: they are nobody's.
    """

    parts: list[str] = Field(
        [], description="batch-norm, layer-norm, group-norm, head (by module type), or patterns of parameter names"
    )
    head_steps: int = Field(0, ge=0, description="FedRep: first so many steps on the personal part, then the shared")
    finetune_steps: int = Field(0, ge=0, description="local steps before a client evaluates, afterwards forgotten")
    finetune_lr: float | None = Field(None, gt=0, description="default: local.lr")

    @property
    def active(self) -> bool:
        """Whether clients evaluate models of their own."""
        return bool(self.parts) or self.finetune_steps > 0

    @model_validator(mode="after")
    def _coherent(self) -> PersonalSettings:
        if self.finetune_lr is not None and not self.finetune_steps:
            raise ValueError("finetune_lr needs finetune_steps > 0")
        return self


class EvaluateSettings(Section):
    """`[evaluate]`: when and on whose data. Central and client evaluation never mix."""

    every: int = Field(1, ge=1, description="rounds; the last round is always evaluated")
    clients: Literal["auto", "none", "sampled", "all"] = Field(
        "auto", description="auto: all clients if the task has no central test set, else none"
    )
    batch_size: int = Field(256, ge=1)
    metrics: list[str] = Field(
        [], description="beside the task's: f1, auroc, r2, ... (docs/metrics.md) or package.module:name of one's own"
    )
    headline: str | None = Field(None, description="the metric that stands for a run; default: the task's")


class SpeedSettings(Section):
    """`[speed]`: how much of its local work a client does in a round, simulated; see strategies/protocol."""

    kind: Literal["fixed", "uniform", "stragglers", "profile"] = "fixed"
    epochs: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = Field(
        (2, 5), strict=False, description="uniform: a client's epochs in a round, drawn from the first to the second"
    )
    share: float = Field(0.5, ge=0, le=1, description="stragglers: how many do one step to all of them, at random")
    speeds: list[Annotated[float, Field(gt=0)]] = Field(
        [], description="profile: local steps a second; each client gets one of them by the seed"
    )
    file: Opened | None = Field(None, description="profile: CSV with the columns client,speed instead")
    jitter: float = Field(0.0, ge=0, description="profile: deviation of a speed's logarithm from round to round")
    deadline_s: float | None = Field(None, gt=0, description="profile: simulated seconds of local work in a round")
    late: Literal["partial", "drop"] = Field("partial", description="who is not done sends what there is, or nothing")

    @model_validator(mode="after")
    def _coherent(self) -> SpeedSettings:
        if self.epochs[0] > self.epochs[1]:
            raise ValueError(f"epochs = {list(self.epochs)}: the first must not be above the second")
        if (self.kind == "profile") != (bool(self.speeds) != (self.file is not None)):
            raise ValueError("kind 'profile' needs either speeds or file, and no other kind has them")
        if self.kind != "profile" and (self.jitter or self.deadline_s is not None):
            raise ValueError("jitter and deadline_s belong to kind 'profile'")
        return self


class PresenceSettings(Section):
    """`[presence]`: who is there in a round, simulated; see strategies/protocol/participation.py."""

    kind: Literal["always", "bernoulli", "diurnal", "trace"] = "always"
    probability: float = Field(
        0.5, gt=0, le=1, description="bernoulli: of each client in each round; diurnal: part of its day"
    )
    period: int = Field(24, ge=1, description="diurnal: rounds in a day, which begins at another time for each client")
    file: Opened | None = Field(None, description="trace: CSV with the columns client,first,last (rounds)")

    @model_validator(mode="after")
    def _coherent(self) -> PresenceSettings:
        if (self.kind == "trace") != (self.file is not None):
            raise ValueError("kind 'trace' needs file, and no other kind has one")
        return self


class StopSettings(Section):
    """`[stop]`: when a run ends before its last round; see server/rounds/ending.py. Never sent to clients."""

    patience: int | None = Field(None, ge=1, description="evaluations in a row without a better headline")
    min_change: float = Field(0.0, ge=0, description="patience: by more than so much is better")
    target: float | str | None = Field(None, description="a value of the headline, or 'METRIC=NUMBER', to be reached")
    max_seconds: float | None = Field(
        None, gt=0, description="of all rounds together, over resumes; the only one that depends on the machine"
    )

    @model_validator(mode="after")
    def _coherent(self) -> StopSettings:
        if self.min_change and self.patience is None:
            raise ValueError("min_change needs patience")
        return self


class CheckpointSettings(Section):
    """`[checkpoint]`: atomic, round-stamped files in the run folder."""

    every: int = Field(1, ge=1)
    keep: int = Field(3, ge=1)
    best: bool = Field(True, description="keep the model of the best round by the headline, too: best.safetensors")


class TrackingSettings(Section):
    """`[tracking]`: who is told of each round beside the run folder; no matter of the weights, never sent to clients.

    Addresses and keys stand in the environment of the server app, never here: see docs/tracking.md.
    """

    use: list[Literal["tensorboard", "mlflow", "wandb"]] = Field(["tensorboard"], description="[] for none")
    model: bool = Field(False, description="mlflow, wandb: store the final model.safetensors there, too")


class DataSettings(Section):
    """`[data]`: what sites may do with the data they hold while a run goes on."""

    may_grow: bool = Field(
        False, description="a site whose number of training examples changed takes part with the new one, recorded"
    )


UNSEEN = ("checkpoint", "tracking")
"""Sections that touch neither weights nor history: how a run is kept and shown."""

HERE: dict[str, Any] = {
    "stop": True,
    "tracking": True,
    "checkpoint": {"best"},
    "round": {"select", "candidates"},
}
"""What is the server's affair alone."""


LATER: tuple[tuple[str, str, Any], ...] = (
    ("local", "arithmetic", "native"),
    ("round", "norm_factor", 1000.0),
    ("round", "most_share", None),
    ("round", "select", "uniform"),
    ("round", "candidates", None),
    *(("local", key, before) for key, before in (("drop_every", None), ("drop_factor", 0.1))),
    *(("local", key, before) for key, before in (("factors", []), ("warm_up", 0))),
    *(("server", key, before) for key, before in (("schedule", "constant"), ("decay", 0.998))),
    *(("server", key, before) for key, before in (("drop_every", None), ("drop_factor", 0.1))),
    *(("server", key, before) for key, before in (("factors", []), ("warm_up", 0))),
)
"""Section, key and the value that every run had before there was such a key."""


class Experiment(Section):
    """One experiment: the same file and seed give the same weights in every engine."""

    name: Name = "experiment"
    seed: int = Field(0, ge=0)
    rounds: int = Field(10, ge=1)
    task: TaskSettings = TaskSettings()
    partition: PartitionSettings = PartitionSettings()
    strategy: StrategySettings = StrategySettings()
    local: LocalSettings = LocalSettings()
    server: ServerSettings = ServerSettings()
    round: RoundSettings = RoundSettings()
    speed: SpeedSettings = SpeedSettings()
    presence: PresenceSettings = PresenceSettings()
    compression: CompressionSettings = CompressionSettings()
    personal: PersonalSettings = PersonalSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    stop: StopSettings = StopSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    data: DataSettings = DataSettings()

    @classmethod
    def load(cls, path: str | Path, sets: Iterable[str] = ()) -> Experiment:
        """Read and check a file, `sets` (KEY=VALUE, see `common.settings.given`) in place of what it says. Relative
        data files in `[task]` stay as written.

        Raises SettingsError naming the file, the key, the value and what is allowed.
        """
        tables, source, values = tables_of(text_of(path, "experiment file"), str(path)), str(path), given(sets)
        return checked(cls, merged(tables, values), f"{source} with --set {', '.join(values)}" if values else source)

    @classmethod
    def parse(cls, text: str, source: str = "experiment") -> Experiment:
        """Read and check TOML text; `source` names it in errors."""
        return checked(cls, tables_of(text, source), source)

    def toml(self, full: bool = False) -> str:
        """The settings as TOML: those that were set, or with `full` every one that has a value.

        Only the first means the same as the file for a named composition, unless it has been resolved
        (`strategies.resolve`): a default written out would count as chosen.
        """
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude_unset=not full))

    def json(self, server: bool = False) -> str:  # type: ignore[override]
        """The settings that were set, as JSON text: what travels to clients, whom `HERE` does not concern, or with
        `server` to another server app."""
        without = {"tracking": True} if server else HERE
        kept = self.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude=without)
        return json.dumps(kept, sort_keys=True)

    def portable(self) -> Experiment:
        """The same experiment in portable arithmetic."""
        local = self.local.model_copy(update={"arithmetic": "portable"})
        return self.model_copy(update={"local": local})

    @property
    def rates_need_rounds(self) -> bool:
        """Whether a rate depends on how long the run is: then it cannot be prolonged."""
        return "cosine" in (self.local.schedule, self.server.schedule)

    @property
    def identity(self) -> str:
        """Hash of all that decides the weights: a checkpoint of another identity is foreign.

        `rounds`, `stop`, `evaluate`, `checkpoint` and `tracking` are left out: a run may be prolonged or watched
        differently; `data`, too, whose changes a run records. With the cosine schedule `rounds` decides the rate, so
        there it counts.
        """
        free = {"evaluate", "data", "stop", *UNSEEN} | (set() if self.rates_need_rounds else {"rounds"})
        kept = self.model_dump(mode="json", exclude=free)
        # A run from before there was a choice goes on.
        for section, key, before in LATER:
            if kept[section][key] == before:
                del kept[section][key]
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
