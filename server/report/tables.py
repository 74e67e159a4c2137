"""Tables as data: a page shows them as HTML, a terminal as Markdown, a paper as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from server.report.render import part
from server.report.scores import Mean, beyond, digits
from server.rounds.records import size

DASH = "–"
BOUND = 1e30
"""From here on a cell's number is no value but a lower bound (plus this): sorted after all values."""

UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Number:
    """What a cell counts: `mean` in `unit`, to so many `decimals`; `before` and `after` stand around it."""

    mean: Mean
    decimals: int
    unit: str = ""
    before: str = ""
    after: str = ""

    def text(self, exact: bool = False) -> str:
        """For a reader; no deviation of a lower bound, nor, unless `exact`, one that is exactly nothing."""
        deviation = None if self.before else self.mean.deviation
        spread = "" if deviation is None or (deviation == 0 and not exact) else f" ± {deviation:.{self.decimals}f}"
        parts = (f"{self.before}{self.mean.mean:.{self.decimals}f}{spread}", self.unit, self.after)
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Cell:
    """What a cell says, all digits, and the number that it is sorted by; what is best beyond the spread is in bold.

    `short`: what the page says first, "" if that is the same. `number`: what the words are made of.
    """

    text: str
    value: float | None = None
    best: bool = False
    short: str = ""
    number: Number | None = None

    @property
    def is_number(self) -> bool:
        """Whether it is sorted by its number."""
        return self.value is not None and not math.isnan(self.value)


@dataclass
class Table:
    """Rows under columns; the first cell of a row names it. `extra`: columns that are shown on demand; `shares`:
    columns of what lies from 0 to 1, so that percent may be said."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    extra: Collection[str] = ()
    shares: Collection[str] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    def without_empty(self) -> Table:
        """Without the columns in which no row has anything."""
        kept = [at for at in range(len(self.columns)) if at == 0 or any(row[at].text != DASH for row in self.rows)]
        rows = [[row[at] for at in kept] for row in self.rows]
        return replace(self, columns=[self.columns[at] for at in kept], rows=rows)

    @property
    def folded(self) -> bool:
        """Whether there is more than is shown at first."""
        return bool(set(self.columns) & set(self.extra)) or any(cell.short for row in self.rows for cell in row)

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


def spread(mean: Mean | None, pattern: str = "{:.4f}", after: str = "") -> Cell:
    """Mean and deviation; the mean alone of one value."""
    if mean is None:
        return Cell(DASH)
    shown = pattern.format(mean.mean)
    shown = shown if mean.deviation is None else f"{shown} ± {pattern.format(mean.deviation)}"
    return Cell(f"{shown} {after}".rstrip(), mean.mean, number=Number(mean, digits(mean.mean), after=after))


def bound(mean: Mean, pattern: str) -> Cell:
    """A lower bound of a mean; bytes without a pattern."""
    shown = pattern.format(mean.mean) if pattern else size(mean.mean)
    unit = "" if pattern else "B"
    return Cell(f"> {shown}", BOUND + mean.mean, number=Number(mean, digits(mean.mean), unit, "> "))


def bold_best(rows: Sequence[Sequence[Cell]], column: int, largest: bool = True) -> list[list[Cell]]:
    """The rows with the best number of a column in bold, if it is the best beyond the spread; never a bound."""
    known = [cell for row in rows if (cell := row[column]).number is not None]
    values = [cell for cell in known if cell.value is not None and cell.value < BOUND]
    if len(known) < 2 or not values:
        return [list(row) for row in rows]
    best = (max if largest else min)(values, key=lambda cell: cell.value or 0.0)
    # Behind a lower bound lies more: what is better than the bound is better than what it stands for.
    others = [
        replace(n.mean, deviation=0.0) if n.before else n.mean for c in known if c is not best and (n := c.number)
    ]
    if best.number is None or not beyond(best.number.mean, others, largest):
        return [list(row) for row in rows]
    return [
        [replace(cell, best=True) if at == column and cell is best else cell for at, cell in enumerate(row)]
        for row in rows
    ]


def byte_count(mean: Mean | None) -> Cell:
    """Bytes for people: mean and deviation in one unit."""
    if mean is None:
        return Cell(DASH)
    cell = Cell("", mean.mean, number=Number(mean, 0, "B"))
    return in_one_unit([[cell]], [0])[0][0]


def count(number: int) -> Cell:
    """A number of events; a dash for none."""
    return Cell(str(number) if number else DASH, number)


def in_one_unit(rows: Sequence[Sequence[Cell]], columns: Collection[int]) -> list[list[Cell]]:
    """The bytes of these columns together in the unit of the largest, with the digits that the smallest needs."""
    numbers = [n for row in rows for at in columns if (n := row[at].number) is not None and n.unit in UNITS]
    values = [v for n in numbers if (v := n.mean.mean * 1000.0 ** UNITS.index(n.unit)) > 0]
    largest, smallest = max(values, default=0.0), min(values, default=0.0)
    power = next((power for power in range(4) if largest < 1000 ** (power + 1)), 4)
    scale, decimals = 1000.0**power, 1 if power else 0
    while power and decimals < 4 and smallest / scale < 10.0 ** (1 - decimals):
        decimals += 1

    def cell(found: Cell) -> Cell:
        if found.number is None or found.value is None or found.number.unit not in UNITS:
            return found
        mean = found.number.mean
        back = 1000.0 ** UNITS.index(found.number.unit)
        deviation = None if mean.deviation is None else mean.deviation * back / scale
        scaled = Mean(mean.mean * back / scale, deviation, mean.n)
        number = replace(found.number, mean=scaled, decimals=decimals, unit=UNITS[power])
        short, exact = number.text(), number.text(exact=True)
        return replace(found, text=exact, short=short if short != exact else "", number=number)

    return [[cell(found) if at in columns else found for at, found in enumerate(row)] for row in rows]


def rounded(rows: Sequence[Sequence[Cell]], columns: Collection[int]) -> list[list[Cell]]:
    """Three digits of the largest number of each of these columns, in all its cells, as what is shown first."""
    made = [list(row) for row in rows]
    for at in columns:
        numbers = [n for row in rows if (n := row[at].number) is not None]
        decimals = min((digits(number.mean.mean) for number in numbers if number.mean.mean), default=3)
        for row in made:
            if (found := row[at].number) is not None:
                number = replace(found, decimals=decimals)
                short = number.text()
                if found.mean.mean and not float(f"{found.mean.mean:.{decimals}f}"):
                    short = f"{found.mean.mean:.2g}"  # beside the others it would be nothing
                row[at] = replace(row[at], short=short if short != row[at].text else "", number=number)
    return made
