"""Lines of a run's history, and what stands for a round in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
"""A line of history.jsonl: what a round was and gave."""

Event = Callable[..., None]
"""Told of what an audit log holds: event(what, outcome, site=, key=, **more). It never raises."""


def unheard(what: str, outcome: str = "ok", **more: Any) -> None:
    """An `Event` that nobody listens to."""


def headline(record: Record, key: str) -> float | None:
    """The one value of a metric that stands for a round."""
    central = record.get("central") or {}
    if key in central:
        return float(central[key])
    for group in ("personal", "clients", "train"):
        summary = (record.get(group) or {}).get(key)
        if summary is not None:
            return float(summary["weighted"])
    return None


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
