"""A SuperLink as Prometheus metrics: its sites, its runs and its queue, asked of it when they are scraped."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.errors import RunError, SettingsError
from server.watch.names import Names

log = logging.getLogger("server.watch.link_metrics")

STATES = ("waiting", "starting", "running", "stopping", "stopped", "finished", "failed", "lost")
NODES = ("online", "offline", "registered")
MOST_RUNS = 20
"""Runs that get series of their own: those that wait or go on, then the newest."""
FRESH_S = 2.0
"""Several who ask at once are told the same."""
SITES, RUNS = "/fedkeel/v1/sites", "/fedkeel/v1/runs"
OVER = ("stopped", "finished", "failed", "lost")

Found = Mapping[str, Any]


class LinkMetrics(Collector):
    """Register it; call `follow` once the SuperLink runs.

    `allowed`: the names of the nodes file, read anew each time; without one sites are known by what they called
    themselves, and only the first few hundred names have series of their own. Asking costs one call for sites and one
    for runs a scrape; a SuperLink that does not answer has `fedkeel_superlink_answers` 0 and no other series.
    """

    def __init__(self, allowed: Callable[[], Collection[str]] | None = None) -> None:
        self._read, self._names = allowed, Names()
        self._allowed: list[str] | None = None if allowed is None else []
        self._ask: Callable[[str], Any] | None = None
        self._lock = threading.Lock()
        self._held: tuple[float, list[GaugeMetricFamily]] = (-FRESH_S, [])
        self._silent = False

    def follow(self, ask: Callable[[str], Any]) -> None:
        """`ask(path)` is the SuperLink's answer to a GET of its control port."""
        self._ask = ask

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What is served."""
        with self._lock:
            asked, families = self._held
            if time.monotonic() - asked >= FRESH_S:
                families = self._look()
                self._held = time.monotonic(), families
        yield from families

    def _look(self) -> list[GaugeMetricFamily]:
        answers = GaugeMetricFamily("fedkeel_superlink_answers", "1: the SuperLink told of its sites and runs.")
        try:
            if self._ask is None:
                raise RunError("it is not there yet")
            found = [*self._of_sites(self._ask(SITES)), *_of_runs(self._ask(RUNS))]
        except (RunError, SettingsError) as error:
            if self._ask is not None and not self._silent:
                log.warning("metrics: %s; sites and runs are not shown until it answers", error)
                self._silent = True
            answers.add_metric([], 0)
            return [answers]
        self._silent = False
        answers.add_metric([], 1)
        return [answers, *found]

    def _of_sites(self, sites: Sequence[Found]) -> list[GaugeMetricFamily]:
        nodes = _gauge("nodes", "Nodes that the SuperLink knows, two where a site has two keys.", "status")
        count = Counter(site["status"] for site in sites)
        for status in NODES:
            nodes.add_metric([status], count[status])
        connected = _gauge("site_connected", "1: the SuperLink takes the site for present.", "site")
        seen = _gauge("site_last_seen_timestamp_seconds", "Until when a site was here; now, while it is.", "site")
        refused = _gauge("site_refused", "1: the newest run refuses the site; `server sites` says why.", "site")
        by_name = self._by_name(sites)
        for name, held in sorted(by_name.items()):
            connected.add_metric([name], any(site["status"] == "online" for site in held))
            refused.add_metric([name], any(bool(site["refused"]) for site in held))
            moments = [site["seen_at"] for site in held if site["seen_at"] is not None]
            if moments:
                seen.add_metric([name], max(moments))
        return [nodes, connected, seen, refused]

    def _by_name(self, sites: Sequence[Found]) -> dict[str, list[Found]]:
        """The sites that get series: all of the nodes file, also those that never came; else those with a name."""
        if self._read is not None:
            with suppress(SettingsError):  # told by who lets sites in; meanwhile they stay as they were
                self._allowed = sorted(self._read())
        by_name: dict[str, list[Found]] = {self._names.shown(name): [] for name in self._allowed or ()}
        for site in sites:
            if site["name"] and (self._allowed is None or site["name"] in self._allowed):
                by_name.setdefault(self._names.shown(site["name"]), []).append(site)
        return by_name


def _of_runs(runs: Sequence[Found]) -> list[GaugeMetricFamily]:
    total = _gauge("runs", "Runs that the SuperLink knows.", "state")
    count = Counter(_state(run) for run in runs)
    for state in STATES:
        total.add_metric([state], count[state])
    states = _gauge("run_state", "1: what a run is doing.", "run", "state")
    rounds = _gauge("run_round", "The last round of a run that ended.", "run")
    planned = _gauge("run_rounds", "How many rounds a run is to have.", "run")
    ended = _gauge("run_last_round_timestamp_seconds", "When a run's last round ended.", "run")
    place = _gauge("run_queue_place", "Of runs that wait: 1 is the next to begin.", "run")
    for turn, run in enumerate((run for run in runs if _state(run) == "waiting"), start=1):
        if turn <= MOST_RUNS:
            place.add_metric([_label(run)], turn)
    for run in _chosen(runs):
        for state in STATES:
            states.add_metric([_label(run), state], state == _state(run))
        rounds.add_metric([_label(run)], run["round"] or 0)
        for gauge, key in ((planned, "rounds"), (ended, "round_at")):
            if run[key] is not None:
                gauge.add_metric([_label(run)], run[key])
    return [total, states, rounds, planned, ended, place]


def _chosen(runs: Sequence[Found]) -> Iterable[Found]:
    """The runs that get series: of one name the one that is not over, else the newest."""
    ordered = sorted(runs, key=lambda run: _state(run) in OVER)  # stable: the newest first, as they came
    by_name: dict[str, Found] = {}
    for run in ordered:
        by_name.setdefault(_label(run), run)
    return list(by_name.values())[:MOST_RUNS]


def _label(run: Found) -> str:
    """A run that waits beside an older one of its name is told apart by its place in the queue."""
    return f"{run['name']} {run['queue']}" if _state(run) == "waiting" else str(run["name"])


def _state(run: Found) -> str:
    return run["status"] if run["status"] in STATES else "starting"


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"fedkeel_superlink_{name}", text, labels=labels)
