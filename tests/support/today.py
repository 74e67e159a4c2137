"""Which cells of a large table a run of all tests looks at: others each day, so that all have their turn."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
DAY = int(os.environ.get("FEDKEEL_DAY") or datetime.date.today().toordinal())


def drawn(table: Sequence[T], count: int, what: str) -> list[T]:
    """`count` of the cells, a function of the day (FEDKEEL_DAY) and of `what` alone; in the table's order."""
    chosen = set(random.Random(f"{what} {DAY}").sample(range(len(table)), count))
    return [cell for number, cell in enumerate(table) if number in chosen]
