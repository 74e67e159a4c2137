"""A run as Prometheus metrics. Counters count what this process saw; a round that is run again counts again."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, ProcessCollector

from server.rounds.records import Record, headline
from server.watch.names import Names

CAUSES = ("offline", "crashed", "timed out", "late", "lost", "memory-lost", "invalid", "refused", "failed", "empty")
STATES = ("unknown", "starting", "running", "stopping", "stopped", "finished", "failed")
SUMMARIES = ("weighted", "mean", "worst")

MOST_METRICS = 50
"""Names of metrics that are served, the first to be seen."""

# What a run says beside its rounds -> kind.
_NOTES = (
    ("void", r"round \d+ is void: "),
    ("refused", "refused node "),
    ("warning", "warning: "),
    ("dropped", r"round \d+: the \w+ of "),
)


class RunMetrics:
    """Feed it each record of the history, each note and each status of a run; `registry` is what is served.

    Labels hold at most `names.MOST_SITES` names of clients and `MOST_METRICS` of metrics, both cleaned where they were
    read, and nothing else that a client sent. May be called from any thread.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._lock = threading.Lock()
        self._round = 0
        self._late = 0
        self._site = Names().shown
        self._void_tries: dict[int, tuple[int, int]] = {}
        """Round -> how many void tries notes and records told of."""
        ProcessCollector(registry=self.registry)
        self._make_counters()
        self._make_gauges()

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"fedkeel_{name}", text, labels, registry=self.registry)

        self._rounds = counter("rounds", "Rounds that ended.")
        self._voids = counter("void_tries", "Tries at a round that changed nothing.")
        self._accepted = counter("uploads_accepted", "Uploads that entered an aggregate.")
        self._dropped = counter("uploads_dropped", "Sampled clients without a usable upload, void tries too.", "cause")
        self._late_replies = counter("late_replies", "Replies that came after their round.")
        self._bytes = counter("bytes", "Content of messages of ended rounds.", "direction")
        self._seconds = counter("phase_seconds", "Time spent in the phases of ended rounds.", "phase")
        self._notes = counter("notes", "Lines that the run said beside its rounds.", "kind")
        self._site_rounds = counter("site_rounds", "Rounds that a site's upload entered.", "site")
        self._site_dropped = counter("site_dropped", "Rounds without a usable upload of a site.", "site", "cause")
        self._site_steps = counter("site_steps", "Local steps of a site's accepted uploads.", "site")
        for cause in CAUSES:
            self._dropped.labels(cause)
        for kind in (*(kind for kind, _ in _NOTES), "other"):
            self._notes.labels(kind)

    def _make_gauges(self) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"fedkeel_{name}", text, labels, registry=self.registry)

        self._now = gauge("round", "The last round that ended.")
        self._generation = gauge("generation", "Generation of the trackers; a new one when a client lost its memory.")
        self._clients = gauge("round_clients", "Clients of the last round.", "state")
        self._last_seconds = gauge("round_seconds", "Duration of the last round.")
        self._ended = gauge("last_round_timestamp_seconds", "When the last round ended.")
        self._site_seen = gauge(
            "site_last_upload_timestamp_seconds", "When a site's upload last entered a round.", "site"
        )
        self._site_examples = gauge("site_examples", "Training examples of a site's last accepted upload.", "site")
        self._site_norm = gauge("site_upload_norm", "L2 norm of a site's last accepted upload.", "site")
        self._drift = gauge("drift", "Mean pairwise cosine of the last round's uploads; NaN for fewer than two.")
        self._lr = gauge("lr", "Local learning rate of the last round.")
        self._headline = gauge("headline", "The metric that stands for the run, as last evaluated.", "metric")
        self._metric = gauge(
            "metric",
            "A metric as last evaluated. data: train, central, personal or clients; more beyond 50 are left out.",
            "metric",
            "data",
            "summary",
        )
        self._metrics: set[str] = set()
        self._status = Enum("fedkeel_run_status", "What the run is doing.", registry=self.registry, states=list(STATES))

    def record(self, record: Record) -> None:
        """One more round: a line of the history."""
        with self._lock:
            round = int(record.get("round", 0))
            if round <= self._round:
                self._late = 0  # Resumed: the server app that counts is a new one.
            self._round = round
            self._count(record, round)
            self._measure(record, round)
            self._count_sites(record)

    def note(self, text: str) -> None:
        """A line that the run said: a void try, a refused client, a warning."""
        kind = next((kind for kind, pattern in _NOTES if re.match(pattern, text)), "other")
        self._notes.labels(kind).inc()
        if kind == "void":
            # Counted now: a run that makes no progress ends without a record of its void tries.
            with self._lock:
                self._count_voids(int(text.split()[1]), told=1)

    def status(self, text: str) -> None:
        """What the run is doing, a word of run.json."""
        with self._lock:
            if text == "starting":
                self._late = 0
        self._status.state(text if text in STATES else "unknown")

    def _count(self, record: Record, round: int) -> None:
        voids = record.get("void") or []
        self._count_voids(round, recorded=len(voids))
        self._rounds.inc()
        self._accepted.inc(len(record.get("accepted") or []))
        for cause, number in Tally(cause for part in (record, *voids) for cause in _causes(part)).items():
            self._dropped.labels(cause).inc(number)
        late = int(record.get("late") or 0)
        self._late_replies.inc(late - self._late if late >= self._late else late)
        self._late = late
        for direction in ("down", "up"):
            self._bytes.labels(direction).inc(record.get(f"bytes_{direction}") or 0)
        for phase, seconds in (record.get("seconds") or {}).items():
            if phase != "total":
                self._seconds.labels(phase).inc(max(0.0, seconds))

    def _count_sites(self, record: Record) -> None:
        now = time.time()
        for name in record.get("accepted") or []:
            site = self._site(name)
            self._site_rounds.labels(site).inc()
            self._site_seen.labels(site).set(now)
            for series, key in ((self._site_examples, "examples"), (self._site_norm, "norms")):
                if (value := (record.get(key) or {}).get(name)) is not None:
                    series.labels(site).set(value)
            self._site_steps.labels(site).inc((record.get("steps") or {}).get(name) or 0)
        for part in (record, *(record.get("void") or [])):
            for name, cause in zip(part.get("dropped") or {}, _causes(part), strict=True):
                self._site_dropped.labels(self._site(name), cause).inc()

    def _count_voids(self, round: int, told: int = 0, recorded: int = 0) -> None:
        """Notes and records tell of the same tries, and either may be seen first."""
        before = self._void_tries.get(round, (0, 0))
        after = self._void_tries[round] = before[0] + told, before[1] + recorded
        self._voids.inc(max(after) - max(before))
        for old in [each for each in self._void_tries if each < round - 10]:
            del self._void_tries[old]

    def _measure(self, record: Record, round: int) -> None:
        self._now.set(round)
        self._generation.set(record.get("generation") or 0)
        for state in ("sampled", "accepted", "dropped"):
            self._clients.labels(state).set(len(record.get(state) or []))
        self._last_seconds.set((record.get("seconds") or {}).get("total", math.nan))
        self._ended.set(time.time())
        for gauge, value in ((self._drift, record.get("drift")), (self._lr, record.get("lr"))):
            gauge.set(math.nan if value is None else value)
        if (found := headline(record)).of:
            self._headline.labels(found.metric).set(math.nan if found.value is None else found.value)
        for key, value in (record.get("central") or {}).items():
            self._set(key, "central", "", value)
        for data in ("train", "clients", "personal"):
            # What else clients tell of their training is named by them alone.
            of = (record.get(data) or {}).items()
            for key, held in of if data != "train" else [item for item in of if item[0] == "loss"]:
                for summary in SUMMARIES:
                    self._set(key, data, summary, held.get(summary))

    def _set(self, name: str, data: str, summary: str, value: float | None) -> None:
        """A metric of the run; names come from clients, too, so that there is a bound."""
        if name in self._metrics or len(self._metrics) < MOST_METRICS:
            self._metrics.add(name)
            self._metric.labels(name, data, summary).set(math.nan if value is None else value)


def _causes(part: Record) -> Iterable[str]:
    """Why each client of a try was dropped, as one of `CAUSES`; by its reason's first words where no cause stands."""
    causes = part.get("causes") or {}
    for name, reason in (part.get("dropped") or {}).items():
        cause = causes.get(name) or str(reason).partition(":")[0]
        yield cause if cause in CAUSES else "invalid"
