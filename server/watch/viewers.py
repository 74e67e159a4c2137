"""Who watches a run: the terminal, a log collector that reads JSON, and Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from common.deploy.logs import json_line
from common.experiment import Experiment
from server.rounds.records import Record, headline, train_loss, valued
from server.watch.display import Display
from server.watch.metrics import RunMetrics

# Imported where used: the server of metrics takes a quarter of a second that a run without --metrics can do without.

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

FRESH_S = 60.0
"""A command that has not looked at its run for so long is not well."""


class Viewer(Protocol):
    """Shows a run."""

    def say(self, text: str) -> None:
        """A line of its own."""

    def show(self, record: Record) -> None:
        """One more round."""

    def tick(self, status: str) -> None:
        """The run has just been looked at; `status` as in its run.json."""


class JsonLines:
    """One JSON object a line, on standard output."""

    def say(self, text: str) -> None:
        """A line of its own."""
        print(json_line("note", message=text), flush=True)

    def show(self, record: Record) -> None:
        """One more round."""
        fields = {key: record.get(key) for key in ("round", "generation", "sampled", "accepted", "causes", "sha256")}
        sizes = {key: record.get(key) for key in ("bytes_down", "bytes_up", "seconds", "late")}
        found = headline(record)
        values = {"metric": found.metric, "value": found.value, "of": found.of, "evaluated": [found.known, found.asked]}
        values |= {"loss": valued(record, "loss"), "train_loss": train_loss(record)}
        print(json_line("round", **fields, **sizes, **values), flush=True)

    def tick(self, status: str) -> None:
        """Nothing to do."""


class Watched:
    """A viewer whose run is also counted, and asked how it is."""

    def __init__(self, viewer: Viewer, metrics: Any) -> None:
        self._viewer, self._metrics = viewer, metrics
        self._round, self._looked = 0, time.monotonic()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._metrics.note(text)
        self._viewer.say(text)

    def show(self, record: Record) -> None:
        """One more round."""
        self._round = record["round"]
        self._metrics.record(record)
        self._viewer.show(record)

    def tick(self, status: str) -> None:
        """The run has just been looked at."""
        self._looked = time.monotonic()
        self._metrics.status(status)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the run is still looked at, and its last round."""
        return time.monotonic() - self._looked < FRESH_S, {"round": self._round}


@contextmanager
def watched(
    settings: Experiment, metrics: str | None, log_format: str, link: Collector | None = None
) -> Iterator[Viewer]:
    """A viewer for one run; with `metrics`, [HOST:]PORT, also an endpoint for Prometheus, `link` with it."""
    with contextlib.ExitStack() as stack:
        lines: Viewer = (
            JsonLines() if log_format == "json" else stack.enter_context(Display(settings.name, settings.rounds))
        )
        if metrics is None:
            yield lines
            return

        counted = RunMetrics()
        counted.status("starting")
        both = Watched(lines, counted)
        with endpoint(metrics, both.health, counted.registry, link):
            yield both


@contextmanager
def endpoint(
    address: str | None,
    health: Callable[[], tuple[bool, dict[str, Any]]],
    registry: CollectorRegistry | None = None,
    more: Collector | None = None,
) -> Iterator[None]:
    """/metrics and /health at [HOST:]PORT, or nothing without an address. `more`: beside the process's own metrics."""
    if address is None:
        yield
        return
    from prometheus_client import CollectorRegistry, ProcessCollector

    from common.deploy.endpoint import Endpoint

    if registry is None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
    if more is not None:
        registry.register(more)
    with Endpoint(address, registry, health):
        yield


def say(log_format: str) -> Callable[[str], None]:
    """How a command without rounds says a line."""
    if log_format == "json":
        return JsonLines().say
    return lambda text: print(text, flush=True)
