"""Rows that change, and what has changed since somebody looked: what a page is sent instead of everything."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from common.settings import printable

Row = dict[str, Any]
MOST_TEXT = 300


def text(value: object, most: int = MOST_TEXT) -> str:
    """What somebody else may have written, bounded and without control characters. It is no HTML: the page sets it as
    text."""
    found = "" if value is None else str(value)
    return printable(found if len(found) <= most else found[: most - 1] + "…")


def number(value: object) -> float | None:
    """A finite number, or None: JSON has no other."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


class Table:
    """Rows by key in an order, each with the tick of its last change. Ticks only grow."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, Row]] = {}
        self._ordered = 0

    def put(self, rows: Iterable[tuple[str, Row]], tick: int) -> bool:
        """All rows as they are now; whether anything is other than it was."""
        before, self._rows = self._rows, {}
        changed = False
        for key, row in rows:
            stamp, old = before.get(key, (0, None))
            if old != row:
                stamp, changed = tick, True
            self._rows[key] = stamp, row
        if list(before) != list(self._rows):
            self._ordered, changed = tick, True
        return changed

    def since(self, tick: int) -> dict[str, Any] | None:
        """{"rows": {key: row}} of what changed after `tick`, with "order", all keys, where that did; None for
        nothing."""
        found: dict[str, Any] = {"rows": {key: row for key, (stamp, row) in self._rows.items() if stamp > tick}}
        if self._ordered > tick:
            found["order"] = list(self._rows)
        return found if found["rows"] or "order" in found else None

    def rows(self) -> dict[str, Row]:
        """All of them, in their order."""
        return {key: row for key, (_, row) in self._rows.items()}
