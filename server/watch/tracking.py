"""Who is told of a run's rounds beside its folder: TensorBoard, MLflow, Weights & Biases. See docs/tracking.md."""

from __future__ import annotations

import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from queue import Full, Queue
from typing import Any, Self

from common.experiment import Experiment
from common.settings import dotted
from server.rounds.folder import CELL
from server.rounds.records import Record, headline
from server.rounds.stopping import Stopped

TRACKERS = {
    "tensorboard": "server.watch.trackers.tensorboard:TensorBoard",
    "mlflow": "server.watch.trackers.mlflow:MLflow",
    "wandb": "server.watch.trackers.wandb:WandB",
}

WAITING = 256
"""Records that may wait for a slow tracker; more are dropped, which is said at the end."""

CLOSE_S = 30.0
"""How long the end of a run waits for what was not written yet; a stopped or failed one waits FAILED_S."""

FAILED_S = 10.0


class Tracker(ABC):
    """One place that a run's numbers go to, used by one thread. What it raises is told once and ends nothing."""

    @abstractmethod
    def open(self, experiment: Experiment, folder: Path) -> None:
        """Begin, or go on with what an earlier process began for this run folder. `experiment` is resolved."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """A round. One that an earlier process wrote already may come once more, after a resume."""

    @abstractmethod
    def close(self, status: str) -> None:
        """The end: "finished", "stopped" or "failed"."""


class Trackers:
    """All trackers of a run; a context manager, which tells them how it ended."""

    def __init__(self, experiment: Experiment, folder: Path, say: Callable[[str], None]) -> None:
        self._channels = [
            Channel(name, resolve_name(TRACKERS[name])(), experiment, folder, say)
            for name in dict.fromkeys(experiment.tracking.use)
        ]

    def write(self, record: Record) -> None:
        """Hand on a record of the history; never waits and never fails."""
        for channel in self._channels:
            channel.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        status = "finished" if kind is None else "failed"
        if kind is not None and issubclass(kind, (Stopped, KeyboardInterrupt)):
            status = "stopped"
        until = time.monotonic() + (CLOSE_S if kind is None else FAILED_S)
        for channel in self._channels:
            channel.end(status)
        for channel in self._channels:
            channel.wait(until)


class Channel:
    """Feeds one tracker from a bounded queue in a thread of its own: it can neither slow the run nor end it."""

    def __init__(
        self, name: str, tracker: Tracker, experiment: Experiment, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._begin = (experiment, folder)
        self._queue: Queue[Record | str] = Queue(WAITING)
        self._given = self._written = 0
        self._failed = self._opened = self._given_up = False
        # A daemon: one that hangs in a call must not keep the process.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def write(self, record: Record) -> None:
        """Queue a record. Loading a tracker takes seconds, so it begins with the first one."""
        if not self._given:
            self._thread.start()
        self._given += 1
        with suppress(Full):
            self._queue.put_nowait(record)

    def end(self, status: str) -> None:
        """Nothing comes any more."""
        if self._given:
            with suppress(Full):
                self._queue.put(status, timeout=1.0)

    def wait(self, until: float) -> None:
        """Wait for the rest, at the latest until then by `time.monotonic()`, and say what is missing."""
        if not self._given:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        self._given_up = self._thread.is_alive()
        missing = self._given - self._written
        if missing or self._given_up:
            late = " and did not end in time" if self._given_up else ""
            self._say(f"warning: {self._name} lacks {missing} of {self._given} rounds{late}; history.jsonl has all")

    def _work(self) -> None:
        waiting: deque[Record] = deque(maxlen=WAITING)
        while not isinstance(item := self._queue.get(), str):
            waiting.append(item)
            self._deliver(waiting)
        self._deliver(waiting)
        if self._opened:
            self._try(self._tracker.close, item)

    def _deliver(self, waiting: deque[Record]) -> None:
        """What waits, once the tracker could be opened: a server may come back."""
        if waiting and not self._opened:
            self._opened = self._try(self._tracker.open, *self._begin)
        while waiting and self._opened:
            self._written += self._try(self._tracker.write, waiting.popleft())

    def _try(self, action: Callable[..., None], *arguments: Any) -> bool:
        try:
            action(*arguments)
        except (Exception, SystemExit) as error:
            if not (self._failed or self._given_up):
                self._failed = True
                self._say(f"warning: tracking with {self._name} failed: {_cause(error)}; the run goes on")
            return False
        return True


def _cause(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return re.sub(r"//[^/@\s]+@", "//***@", text)  # an address may hold a password


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Tag and value of everything in a record that makes a curve. Nothing of a single client is among them."""
    for group in ("central", "task", "strategy", "seconds"):
        for key, value in (record.get(group) or {}).items():
            if value is not None:
                yield f"{group}/{key}", float(value)
    for group in ("train", "clients", "personal"):
        for key, summary in (record.get(group) or {}).items():
            for kind in ("weighted", "mean", "worst"):
                if summary[kind] is not None:
                    yield f"{group}/{key}/{kind}", float(summary[kind])
    if (found := headline(record)).value is not None:
        yield "headline", found.value
    for key in ("bytes_down", "bytes_up", "lr", "server_lr", "drift", "clock"):
        if record.get(key) is not None:
            yield f"round/{key}", float(record[key])
    yield "round/accepted", float(len(record["accepted"]))
    yield "round/dropped", float(len(record["dropped"]))


def settings(experiment: Experiment) -> dict[str, Any]:
    """Every setting that has a value, nested as in the file; `tracking` is no part of the experiment."""
    return experiment.model_dump(mode="json", exclude_none=True, exclude={"tracking"})


def flat(tables: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Dotted key and text of every value: what is no word or number as JSON."""
    for key, value in dotted(tables):
        yield key, value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Place:
    """Where a run belongs among others: cells of a plan lie together, the seeds of a variant in one group."""

    project: str
    group: str
    name: str
    stage: str = ""
    tags: dict[str, str] = field(default_factory=dict)


def place(experiment: Experiment, folder: Path) -> Place:
    """By the cell.json of a plan's cell; else by the names of experiment and run folder."""
    tags = {"experiment": experiment.name, "strategy": experiment.strategy.name, "seed": str(experiment.seed)}
    try:
        cell = json.loads((folder / CELL).read_text("utf-8"))
    except (OSError, json.JSONDecodeError):
        return Place("fedkeel", experiment.name, folder.name, tags=tags)
    stage = str(cell.get("stage", ""))
    about = {"plan": cell["plan"], "variant": cell.get("variant", ""), "stage": stage, "point": cell.get("point") or {}}
    group = folder.parent.name
    return Place(cell["plan"], group, f"{group}/{folder.name}", stage, tags | dict(flat(about)))
