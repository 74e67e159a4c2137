"""A site's process as Prometheus metrics: its messages, its connection, its GPU memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

KINDS = ("train", "evaluate", "query")
STATUSES = ("ok", "error", "empty", "memory-lost", "refused", "lost", "waiting", "denied")
MOST_METRICS = 50
"""Names of metrics that are served; they come from the task."""


class ClientMetrics:
    """Tell it of connections and answered messages, from any thread; `registry` is what is served.

    `names`: the clients that this process hosts. A name that is none of them counts as "other", for names in
    messages come from the server; without `names` each is taken as it comes.
    """

    def __init__(self, registry: CollectorRegistry | None = None, names: Iterable[str] | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._names = None if names is None else frozenset(names)
        ProcessCollector(registry=self.registry)
        self.registry.register(_GpuMemory())

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"fedkeel_client_{name}", text, ("name", *labels), registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"fedkeel_client_{name}", text, ("name", *labels), registry=self.registry)

        self._connected = gauge("connected", "1: the server takes messages of this client for now.")
        self._waiting = gauge("waiting_for_approval", "1: the server's run waits for somebody here to approve it.")
        self._messages = counter("messages", "Answered messages.", "kind", "status")
        self._seconds = counter("phase_seconds", "Time spent in the phases of messages.", "kind", "phase")
        self._bytes = counter("bytes", "Content of messages.", "direction")
        self._last = gauge("last_message_timestamp_seconds", "When the last message was answered.")
        self._examples = gauge("examples", "Examples of the last message.", "kind")
        self._metric = gauge("metric", "A metric of the last message, a mean over its examples.", "kind", "metric")
        self._metrics: set[str] = set()
        self._online: dict[str, bool] = {}
        self._waits: dict[str, bool] = {}
        self._told: dict[str, str] = {}
        for name in self._names or ():
            self.connected(name, False)

    def connected(self, name: str, yes: bool) -> None:
        """Whether the server holds a client for present."""
        self._online[self._known(name)] = yes
        self._connected.labels(self._known(name)).set(yes)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the server holds all clients of this process, who is missing, and what it said last of whom."""
        missing = sorted(name for name, yes in self._online.items() if not yes)
        return bool(self._online) and not missing, {
            "not connected": missing,
            "told": dict(self._told),
            **self._approval(),
        }

    def told(self, name: str, notice: str) -> None:
        """The server said why it refuses a client or dropped its upload: health shows the last word, with its time."""
        self._told[self._known(name)] = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {notice}"

    def _approval(self) -> dict[str, list[str]]:
        """Whose run waits for somebody here: no fault, and nothing goes on without a person."""
        waiting = sorted(name for name, yes in self._waits.items() if yes)
        return {"waiting for approval": waiting} if waiting else {}

    def answered(
        self,
        name: str,
        kind: str,
        status: str,
        seconds: Mapping[str, float],
        bytes_down: int,
        bytes_up: int,
        metrics: Mapping[str, float],
    ) -> None:
        """One more message was answered. `seconds`: phase ("receive", "work", "send") -> seconds.

        `metrics`: means over its examples, and their number as "examples".
        """
        name, kind = self._known(name), kind if kind in KINDS else "other"
        self._waits[name] = status == "waiting"
        self._waiting.labels(name).set(self._waits[name])
        self._messages.labels(name, kind, status if status in STATUSES else "other").inc()
        for phase in ("receive", "work", "send"):
            if phase in seconds:
                self._seconds.labels(name, kind, phase).inc(max(0.0, seconds[phase]))
        self._bytes.labels(name, "down").inc(max(0, bytes_down))
        self._bytes.labels(name, "up").inc(max(0, bytes_up))
        self._last.labels(name).set(time.time())
        for key, value in metrics.items():
            if key == "examples":
                self._examples.labels(name, kind).set(value)
            elif key == "loss" or (kind == "evaluate" and (key in self._metrics or len(self._metrics) < MOST_METRICS)):
                self._metrics.add(key)
                self._metric.labels(name, kind, key).set(value)

    def _known(self, name: str) -> str:
        return name if self._names is None or name in self._names else "other"


class _GpuMemory(Collector):
    """What this process holds on each GPU, read from torch when it is asked for, and only if it uses one."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return
        devices = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index)]
        for kind in ("allocated", "reserved"):
            for prefix, read in (("", f"memory_{kind}"), ("max_", f"max_memory_{kind}")):
                name = f"fedkeel_client_gpu_memory_{prefix}{kind}_bytes"
                family = GaugeMetricFamily(name, f"GPU memory {prefix}{kind} by this process.", labels=("device",))
                for index in devices:
                    family.add_metric((f"cuda:{index}",), getattr(cuda, read)(index))
                yield family
