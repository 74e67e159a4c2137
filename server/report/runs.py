"""What a report reads: run folders, found by themselves or in the folder of a plan."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import SettingsError
from common.experiment import Experiment
from common.metrics.directions import higher_by_name
from common.settings import dotted, tables_of, text_of
from server.report.scores import percentile
from server.rounds.folder import CELL, HISTORY, MODEL, ROLL, SETTINGS, STATUS, read_history
from server.rounds.records import Record, headline
from strategies.registry import settled, written_out

AXES = ("round", "bytes", "seconds", "clock")
SOURCES = ("central", "personal", "clients")
"""Where an evaluated metric is looked for: one source a run, never two in one curve."""

OF_HEADLINE = ("worst", "p10")
"""The headline of the worst client, and its 10th percentile from the worst."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """A metric at the rounds where it was taken: `at` are places in the run's axes (k,), `values` (k,), NaN allowed."""

    at: NDArray[np.int64]
    values: Floats


@dataclass(eq=False)
class Run:
    """One run folder, with everything that the page needs of it."""

    folder: Path
    cell: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    toml: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    roll: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, Floats] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    source: str = ""
    dropped: Counter[str] = field(default_factory=Counter)
    void: Counter[str] = field(default_factory=Counter)
    totals: dict[str, float] = field(default_factory=dict)
    sampled: list[int] = field(default_factory=list)
    sha256: str = ""
    headline: str = "accuracy"
    """The metric that stands for the run."""
    higher: dict[str, bool] = field(default_factory=dict)
    """Metric -> whether more is better, as the run says."""
    model_bytes: int | None = None
    error: str = ""

    def better(self, metric: str) -> bool:
        """Whether more is better of a metric; `worst` and `p10` are of the headline."""
        metric = self.headline if metric in OF_HEADLINE else metric
        return self.higher.get(metric, higher_by_name(metric))

    @property
    def done(self) -> int:
        """The last round in the history; 0 without one."""
        return int(self.axes["round"][-1]) if self.has_history else 0

    @property
    def has_history(self) -> bool:
        """Whether there is a round at all."""
        return bool(len(self.axes.get("round", ())))

    @property
    def planned(self) -> int | None:
        """How many rounds the run was to have."""
        value = self.settings.get("rounds", self.status.get("rounds"))
        return value if isinstance(value, int) else None

    @property
    def complete(self) -> bool:
        """Whether the run came to its end: no other enters a mean."""
        ended = self.status.get("status", "finished") == "finished"
        early = bool(self.status.get("ended"))  # by `[stop]`: that was its end
        return self.has_history and ended and (early or self.done >= (self.planned or 0))

    @property
    def state(self) -> str:
        """One word for a table, and why."""
        if self.complete:
            return "finished"
        status = str(self.status.get("status") or self.cell.get("status") or "unfinished")
        return "cut short" if status == "finished" else status

    @property
    def seed(self) -> Any:
        """The seed that tells the runs of a group apart."""
        return self.cell.get("seed", self.settings.get("seed", 0))

    @property
    def stage(self) -> str:
        """ "final", or "tune" for a run that only chose hyperparameters."""
        return str(self.cell.get("stage", "final"))

    def axis(self, name: str, metric: str) -> Floats:
        """The place of each value of a metric on an axis."""
        return self.axes[name][self.metrics[metric].at]


def read(folder: Path) -> Run:
    """One run folder. What is missing or broken in it is left out."""
    run = Run(folder, _json_object(folder / CELL), status=_json_object(folder / STATUS))
    with suppress(SettingsError):
        run.toml = text_of(folder / SETTINGS, "settings")
        run.settings = dict(dotted(tables_of(run.toml, "settings")))
        with suppress(SettingsError):
            # Settings that an older version did not write have their defaults.
            known = Experiment.parse(run.toml)
            with suppress(SettingsError):
                known = written_out(*settled(known))
            run.settings = dict(dotted(known.model_dump(mode="json", exclude_none=True)))
    roll = read_json(folder / ROLL)
    run.roll = [member for member in roll if isinstance(member, dict)] if isinstance(roll, list) else []
    run.error = str(run.status.get("error") or "")
    run.model_bytes = _model_bytes(folder / MODEL)
    _take(run, records(folder))
    return run


def records(folder: Path) -> list[Record]:
    """The rounds of a history in order, the last line of each; lines that are none are left out."""
    rounds: dict[int, Record] = {}
    with suppress(OSError, UnicodeDecodeError):
        for record in read_history(folder / HISTORY):
            if isinstance(record, dict) and isinstance(record.get("round"), int):
                rounds[record["round"]] = record
    return [rounds[number] for number in sorted(rounds)]


def _take(run: Run, history: list[Record]) -> None:
    columns: dict[str, list[float]] = {"round": [], "bytes": [], "seconds": [], "clock": []}
    values: dict[str, tuple[list[int], list[float]]] = {}
    run.source = next((s for s in SOURCES if any(inner(record, s) for record in history)), "train")
    run.headline = _headline(run.status, history)
    known = inner(run.status, "metrics")
    run.higher = {str(name): bool(value) for name, value in known.items()}
    for place, record in enumerate(history):
        columns["round"].append(record["round"])
        down, up = (spent(record.get(key)) for key in ("bytes_down", "bytes_up"))
        columns["bytes"].append(down + up)
        columns["seconds"].append(number(inner(record, "seconds").get("total")))
        columns["clock"].append(number(record.get("clock")))
        for name, value in _values(record, run):
            at, taken = values.setdefault(name, ([], []))
            at.append(place)
            taken.append(value)
        run.totals["down"] = run.totals.get("down", 0.0) + down
        run.totals["up"] = run.totals.get("up", 0.0) + up
        run.totals["late"] = spent(record.get("late"))
        run.dropped.update(_causes(record))
        for void in record.get("void") or ():
            run.void[_void(void)] += 1
        run.sampled.append(hash(tuple(map(str, record.get("sampled") or ()))))
        run.sha256 = str(record.get("sha256") or "")
    if not history:
        return
    run.axes = {name: _sum(column) for name, column in columns.items() if np.isfinite(column).any()}
    run.axes["round"] = np.array(columns["round"], np.float64)
    run.metrics = {name: Series(np.array(at), np.array(taken)) for name, (at, taken) in values.items()}


def _headline(status: dict[str, Any], history: Sequence[Record]) -> str:
    """What run.json says; before its first evaluation, or of releases that had none, what the records do."""
    told = status.get("headline")
    return str(told) if told else next((headline(r).metric for r in reversed(history) if headline(r).of), "accuracy")


def _values(record: Record, run: Run) -> Iterator[tuple[str, float]]:
    """The record's metrics by name: of the evaluation, `worst` and `p10` of the clients' headlines, `drift`, `train
    loss` and the task's own (the distance to a minimizer)."""
    group, source = inner(record, run.source), run.source
    for name, value in group.items():
        taken = value if source == "central" else inner(group, name).get("weighted")
        if name != "loss" or source != "train":
            yield str(name), number(taken)
    for where in ("personal", "clients"):
        found = inner(inner(record, where), run.headline)
        if "worst" in found:
            yield "worst", number(found["worst"])
            break
    each = [number(value) for value in inner(inner(record, "each"), run.headline).values()]
    if each:
        yield "p10", percentile(each, 10, run.better(run.headline))
    if record.get("drift") is not None:
        yield "drift", number(record["drift"])
    train = inner(inner(record, "train"), "loss")
    if "weighted" in train:
        yield "train loss", number(train["weighted"])
    for owner in ("task", "strategy"):
        for name, value in inner(record, owner).items():
            yield str(name), number(value)


def _causes(record: Record) -> Iterator[str]:
    causes, dropped = inner(record, "causes"), inner(record, "dropped")
    for client in causes.keys() | dropped.keys():
        yield str(causes.get(client) or dropped.get(client) or "no cause given").split(":")[0]


def _void(void: Any) -> str:
    cause = str(inner({"void": void}, "void").get("cause") or "no cause given")
    for word, kind in (("quorum", "below quorum"), ("memory", "client memory lost"), ("finite", "not finite")):
        if word in cause:
            return kind
    return cause.split(":")[0]


def _sum(column: Sequence[float]) -> Floats:
    """What has been spent after each round; a round of unknown cost adds nothing."""
    return np.cumsum(np.nan_to_num(np.array(column, np.float64), nan=0.0, posinf=0.0))


def inner(record: Record, key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float:
    """A finite float, or NaN."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
    return found if math.isfinite(found) else float("nan")


def spent(value: Any) -> float:
    """A finite float; 0 where none is known."""
    found = number(value)
    return found if math.isfinite(found) else 0.0


def read_json(path: Path) -> Any:
    """The content of a file; None if it is missing or broken."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text("utf-8"))
    return None


def _json_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def _model_bytes(path: Path) -> int | None:
    """The size of the tensors in a safetensors file, from its header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        return path.stat().st_size - 8 - length
    except OSError:
        return None
