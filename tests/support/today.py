"""Which cells of a large table a day looks at: others each day, so that all have their turn."""

from __future__ import annotations

import datetime
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
DAY = int(os.environ.get("FEDKEEL_DAY") or datetime.date.today().toordinal())

REST_DAYS, FULL_DAYS = 5, 20
"""CI sees each test that is not of every day once in so many days: those marked `rest`, and the cells marked `full`."""


def drawn(table: Sequence[T], count: int, what: str) -> list[T]:
    """`count` of the cells, a function of the day (FEDKEEL_DAY) and of `what` alone; in the table's order."""
    chosen = set(random.Random(f"{what} {DAY}").sample(range(len(table)), count))
    return [cell for number, cell in enumerate(table) if number in chosen]


def cells(
    table: Sequence[T],
    daily: int,
    most: int,
    what: str,
    *,
    name: Callable[[T], str] = str,
    key: Callable[[T], object] = lambda cell: None,
) -> list[Any]:
    """The whole table for `parametrize`: `daily` cells of it run every day, `most` in all tests, the rest is `full`.
    Both numbers hold for each group of cells of one `key`."""
    order = random.Random(f"{what} {DAY}").sample(range(len(table)), len(table))
    marks: dict[int, Any] = {}
    seen: Counter[object] = Counter()
    for number in order:
        place = seen[key(table[number])]
        marks[number] = () if place < daily else pytest.mark.rest if place < most else pytest.mark.full
        seen[key(table[number])] += 1
    return [pytest.param(cell, marks=marks[number], id=name(cell)) for number, cell in enumerate(table)]


def turn(test: str, days: int) -> bool:
    """Whether it is this test's day, of so many."""
    return (zlib.crc32(test.encode()) + DAY) % days == 0
