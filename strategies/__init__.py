"""The registry of algorithms. A named variant is a composition: an algorithm and a server optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import ValidationError

from common.errors import SettingsError, not_one_of
from common.experiment import Experiment, ServerSettings, checked
from strategies.base import FederatedStrategy
from strategies.fedavg import FedAvg
from strategies.fedcm import FedCM
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.hafedho import HaFedHo
from strategies.scaffold import Scaffold


@dataclass(frozen=True)
class Entry:
    """A registered algorithm; `server` fixes the server optimizer of a composition and gives its defaults."""

    cls: type[FederatedStrategy]
    paper: str
    server: Mapping[str, Any] = field(default_factory=dict)


REGISTRY: dict[str, Entry] = {
    "fedavg": Entry(FedAvg, "arXiv 1602.05629"),
    "fedavgm": Entry(FedAvg, "arXiv 1909.06335", {"optimizer": "momentum", "momentum": 0.9, "lr": 1.0}),
    "fedadagrad": Entry(FedAvg, "arXiv 2003.00295", {"optimizer": "adagrad", "beta1": 0.0, "lr": 0.1}),
    "fedadam": Entry(FedAvg, "arXiv 2003.00295", {"optimizer": "adam", "lr": 0.01}),
    "fedyogi": Entry(FedAvg, "arXiv 2003.00295", {"optimizer": "yogi", "lr": 0.01}),
    "fedams": Entry(FedAvg, "arXiv 2205.02719", {"optimizer": "ams", "lr": 0.01}),
    "fedprox": Entry(FedProx, "arXiv 1812.06127"),
    "fednova": Entry(FedNova, "arXiv 2007.07481"),
    "scaffold": Entry(Scaffold, "arXiv 1910.06378"),
    "hafedho": Entry(HaFedHo, "seed paper, Algorithm 1"),
    "fedcm": Entry(FedCM, "arXiv 2106.10874"),
}


def create(experiment: Experiment) -> FederatedStrategy:
    """The strategy of an experiment, checked against its other settings.

    Raises SettingsError for an unknown name or hyperparameter, a wrong value or a pair without meaning.
    """
    settings = experiment.strategy
    entry = REGISTRY.get(settings.name)
    if entry is None:
        raise not_one_of("strategy.name", settings.name, REGISTRY)
    if "server" in settings.options:
        raise SettingsError("[strategy] server: the server optimizer stands in the table [server]")
    try:
        strategy = entry.cls(server=_server(settings.name, entry, experiment.server), **settings.options)
    except ValidationError as error:
        raise SettingsError("\n".join(_line(settings.name, entry.cls, e) for e in error.errors())) from None
    strategy.check(experiment)
    return strategy


def resolve(experiment: Experiment) -> Experiment:
    """The experiment with the server optimizer that its named algorithm implies written out.

    Only so does a copy of it (sent to clients, written to the run folder) mean the same as the file.
    """
    return experiment.model_copy(update={"server": create(experiment).server})


def hyperparameter_names(cls: type[FederatedStrategy]) -> list[str]:
    """The keys that `[strategy]` takes beside `name`."""
    return [f.name for f in fields(cls) if f.name != "server"]


def _server(name: str, entry: Entry, given: ServerSettings) -> ServerSettings:
    fixed = entry.server.get("optimizer")
    if fixed and "optimizer" in given.model_fields_set and given.optimizer != fixed:
        raise SettingsError(
            f"server.optimizer = {given.optimizer!r} contradicts strategy.name = {name!r}, which means {fixed!r}; "
            "leave it out or choose 'fedavg'"
        )
    values = dict(entry.server) | given.model_dump(include=given.model_fields_set)
    return checked(ServerSettings, values, "[server]")


def _line(name: str, cls: type[FederatedStrategy], fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        allowed = ", ".join(hyperparameter_names(cls))
        return f"strategy.{key} = {fault['input']!r}: {name!r} has no such hyperparameter; allowed: {allowed}"
    return f"strategy.{key} = {fault['input']!r}: {fault['msg']}"


__all__ = ["REGISTRY", "Entry", "create", "hyperparameter_names", "resolve"]
