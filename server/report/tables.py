"""Tables as data: a page shows them as HTML, a terminal as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.report.render import part
from server.report.scores import Mean
from server.rounds.records import size

DASH = "–"
BOUND = 1e30
"""From here on a cell's number is no value but a lower bound (plus this): sorted after all values."""


@dataclass(frozen=True)
class Cell:
    """What a cell says and the number that it is sorted by; the best of its column is set in bold."""

    text: str
    value: float | None = None
    best: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it is sorted by its number."""
        return self.value is not None and not math.isnan(self.value)


@dataclass
class Table:
    """Rows under columns; the first cell of a row names it."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def without_empty(self) -> Table:
        """Without the columns in which no row has anything."""
        kept = [at for at in range(len(self.columns)) if at == 0 or any(row[at].text != DASH for row in self.rows)]
        return Table(
            self.title, [self.columns[at] for at in kept], [[row[at] for at in kept] for row in self.rows], self.notes
        )

    def markdown(self) -> str:
        """The table with its title and notes."""
        head = "| " + " | ".join(map(_plain, self.columns)) + " |"
        lines = [head, "|" + " --- |" * len(self.columns)]
        for row in self.rows:
            cells = (f"**{_plain(cell.text)}**" if cell.best else _plain(cell.text) for cell in row)
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join([f"## {_plain(self.title)}", "", *lines, *("\n" + _plain(note) for note in self.notes)])

    def html(self) -> str:
        """The table as it stands on the page."""
        return part("table", self)


def _plain(text: str) -> str:
    """Text that cannot end its cell or begin HTML."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())


def text(value: str) -> Cell:
    """Words."""
    return Cell(value or DASH)


def plain(value: float | None, pattern: str = "{:.4f}") -> Cell:
    """A number."""
    if value is None or math.isnan(value):
        return Cell(DASH)
    return Cell(pattern.format(value), value)


def spread(mean: Mean | None, pattern: str = "{:.4f}") -> Cell:
    """Mean and deviation; the mean alone of one value."""
    if mean is None:
        return Cell(DASH)
    shown = pattern.format(mean.mean)
    return Cell(shown if mean.deviation is None else f"{shown} ± {pattern.format(mean.deviation)}", mean.mean)


def bold_best(rows: Sequence[Sequence[Cell]], column: int, largest: bool = True) -> list[list[Cell]]:
    """The rows with the best number of a column in bold, if several have one; never a bound."""
    values = [value for row in rows if (value := row[column].value) is not None and value < BOUND]
    if sum(row[column].value is not None for row in rows) < 2 or not values:
        return [list(row) for row in rows]
    best = max(values) if largest else min(values)
    return [
        [Cell(c.text, c.value, True) if at == column and c.value == best else c for at, c in enumerate(row)]
        for row in rows
    ]


def byte_count(mean: Mean | None) -> Cell:
    """Bytes for people: mean and deviation in one unit."""
    if mean is None:
        return Cell(DASH)
    number, unit = size(mean.mean).split()
    if mean.deviation is None:
        return Cell(f"{number} {unit}", mean.mean)
    # In the mean's unit: "4.1 ± 0.8 MB".
    scale = mean.mean / float(number) if float(number) else 1.0
    digits = 0 if unit == "B" else 1
    return Cell(f"{number} ± {mean.deviation / scale:.{digits}f} {unit}", mean.mean)


def count(number: int) -> Cell:
    """A number of events; a dash for none."""
    return Cell(str(number) if number else DASH, number)
