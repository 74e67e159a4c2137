"""Lines of a run's history, and what stands for a round in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
"""A line of history.jsonl: what a round was and gave."""

Event = Callable[..., None]
"""Told of what an audit log holds: event(what, outcome, site=, key=, **more). It never raises."""


def unheard(what: str, outcome: str = "ok", **more: Any) -> None:
    """An `Event` that nobody listens to."""


Value = float | int | str | None
"""In a record: None stands for a number that is not finite, which JSON cannot hold."""

EVALUATED = ("central", "personal", "clients")
"""Where an evaluated metric is looked for: on the server's test set, of the clients' own models, on clients' data."""


@dataclass(frozen=True)
class Headline:
    """The metric that stands for a run, in one round. `value`: None where it was not evaluated, or is no number."""

    metric: str
    higher: bool
    value: float | None
    of: str = ""
    """One of `EVALUATED`; "" where nothing was evaluated."""
    known: int = 0
    """Clients whose value entered, where it is of clients."""
    asked: int = 0

    @property
    def text(self) -> str:
        """The value for a table, and of how many clients where not all of those asked are in it."""
        told = "-" if self.value is None else f"{self.value:.4f}" if abs(self.value) < 1e5 else f"{self.value:.4g}"
        return told if self.known == self.asked else f"{told} {self.known}/{self.asked}"


def valued(record: Record, metric: str) -> float | None:
    """The one value of an evaluated metric that stands for a round; None if it was not evaluated, or is no number."""
    for group in EVALUATED:
        held = (record.get(group) or {}).get(metric)
        if held is not None or metric in (record.get(group) or {}):
            found = held.get("weighted") if isinstance(held, dict) else held
            return None if found is None else float(found)
    return None


def train_loss(record: Record) -> float | None:
    """The mean loss of a round's local steps, weighted by examples."""
    found = ((record.get("train") or {}).get("loss") or {}).get("weighted")
    return None if found is None else float(found)


def headline(record: Record) -> Headline:
    """What stands for a round. Records of 0.6 and before do not name it: there it is the accuracy, else the loss."""
    about = record.get("headline") or {}
    metric = about.get("metric")
    if metric is None:
        metric = "accuracy" if any("accuracy" in (record.get(group) or {}) for group in EVALUATED) else "loss"
    of = next((group for group in EVALUATED if record.get(group)), "")
    known = asked = 0
    if of != "central":
        known = int(((record.get(of) or {}).get(metric) or {}).get("n") or 0)
        asked = int((record.get("evaluated") or {}).get("asked") or known)
    higher = bool(about.get("higher", metric != "loss"))
    return Headline(metric, higher, valued(record, metric), of, known, asked)


def personal(record: Record) -> bool:
    """Whether a record's headline is of the clients' own models: another question than that of one model for all."""
    return bool(record.get("personal")) and not record.get("central")


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
