"""Mean and deviation of columns that several sites hold: what each tells of its own, and what all come to.

A site tells count, mean and the sum of squared deviations from that mean, M2. They are put together by the formula of
Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979). A mean is
two numbers, the second what float64 cuts off from the first, so that nothing is lost however far it is from 0; every
sum is exact (`math.fsum`), so that no order of addition shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from common.data.examples import Examples
from common.errors import MessageError, SettingsError
from common.settings import Section, checked

MOST_TEXT = 1 << 20
"""Letters of what one client tells."""
CONSTANT = 8 * float(np.finfo(np.float64).eps)
"""A deviation that is a smaller part of the mean is rounding: that column is constant."""

LARGEST = 1e150
"""So large may a value be: its square, and sums of squares, still have numbers."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
Square = Annotated[float, Field(ge=0)]


class Moments(Section):
    """Of one client's columns, in the order of the run's: values that are there, their mean (`mean` + `rest`), M2."""

    count: list[Count]
    mean: list[float]
    rest: list[float]
    squares: list[Square]


class Scale(Section):
    """Of all: mean and deviation by column; a constant one has the deviation 0."""

    mean: dict[str, float]
    deviation: dict[str, Square]


class Census:
    """What a run must know of all clients' training examples before round 1: mean and deviation by column.

    Each client tells its moments in the roll call, the server settles them into one text, which goes with every
    message; every process adopts it. A task has one as `Task.census` and reads `scale`.
    """

    def __init__(self, names: Sequence[str], values: Callable[[Examples], NDArray[np.float64]]) -> None:
        """`names`: of the columns; `values` gives them (n, d) of examples, NaN where there is none."""
        self.names = tuple(names)
        self.scale: Scale | None = None
        self.text = ""
        self._values = values

    def tell(self, examples: Examples, least: int = 1, digits: int | None = None) -> str:
        """A client's moments as text, as coarse as its policy says; see `moments_of`."""
        return moments_of(self._values(examples), least, digits).model_dump_json()

    def check(self, text: str, examples: int) -> None:
        """Raise SettingsError for what no client with so many training examples can have told."""
        read_moments(text, len(self.names), examples)

    def silent(self, text: str) -> bool:
        """Whether a client told nothing of some column, because it has too few values for its policy."""
        return 0 in read_moments(text, len(self.names), 2**53).count

    def settle(self, told: Mapping[str, str]) -> str:
        """What all clients' moments, by name, come to. Raises SettingsError for a column without a value."""
        parts = [read_moments(text, len(self.names), 2**53) for _, text in sorted(told.items())]
        return scale_of(parts, self.names).model_dump_json()

    def adopt(self, text: str) -> None:
        """Take on what was settled; "" is nothing as yet. Raises MessageError for a text that cannot be used."""
        if text != self.text:
            self.scale = read_scale(text, self.names) if text else None
            self.text = text


def moments_of(values: NDArray[np.float64], least: int = 1, digits: int | None = None) -> Moments:
    """The moments of columns (n, d), NaN where a value is missing.

    Of a column with fewer than `least` values nothing is told; `digits` of the others. Raises SettingsError for values
    whose squares are beyond float64.
    """
    told = Moments(count=[], mean=[], rest=[], squares=[])
    for column in values.T:
        held = column[~np.isnan(column)]
        count = len(held) if len(held) >= least else 0
        mean = rest = square = 0.0
        if count:
            if float(np.abs(held).max()) * math.sqrt(count) > LARGEST:
                raise SettingsError("values so large that their squares have no number")
            mean = _sum(held) / count if (held != held[0]).any() else float(held[0])
            off = held - mean
            rest = _sum(off) / count
            square = max(0.0, _sum(off * off) - count * rest * rest)
        told.count.append(count)
        told.mean.append(_coarse(mean, digits))
        told.rest.append(0.0 if digits else rest)
        told.squares.append(_coarse(square, digits))
    return told


def read_moments(text: str, columns: int, examples: int) -> Moments:
    """What a client told. Raises SettingsError if it is not of so many columns, or counts more than its examples."""
    told = checked(Moments, _table(text), "sums over the data")
    if not len(told.count) == len(told.mean) == len(told.rest) == len(told.squares) == columns:
        sizes = sorted({len(told.count), len(told.mean), len(told.rest), len(told.squares)})
        raise SettingsError(f"sums over {' and '.join(map(str, sizes))} columns; this run's are {columns}")
    if max(told.count, default=0) > examples:
        raise SettingsError(f"sums over {max(told.count)} values of {examples} training examples")
    if any(abs(each) * math.sqrt(examples) > LARGEST for each in (*told.mean, *told.rest)) or any(
        square > LARGEST**2 for square in told.squares
    ):
        raise SettingsError("a mean whose square has no number")
    return told


def scale_of(told: Sequence[Moments], names: Sequence[str]) -> Scale:
    """Mean and deviation (of all values, divided by their number) of each column over all that told something.

    Raises SettingsError for a column of which nobody has a value.
    """
    mean: dict[str, float] = {}
    deviation: dict[str, float] = {}
    for place, name in enumerate(names):
        held = [each for each in told if each.count[place]]
        total = sum(each.count[place] for each in held)
        if not total:
            raise SettingsError(f"task: no site told anything of column {name!r}: it has too few values everywhere")
        center = min(each.mean[place] for each in held)
        off = [(each.count[place], each.mean[place] - center + each.rest[place]) for each in held]
        shift = math.fsum(count * each for count, each in off) / total
        square = math.fsum(
            [each.squares[place] for each in held] + [count * (each - shift) ** 2 for count, each in off]
        )
        spread = math.sqrt(square / total)
        mean[name] = center + shift
        deviation[name] = spread if spread > CONSTANT * abs(mean[name]) else 0.0
    return Scale(mean=mean, deviation=deviation)


def read_scale(text: str, names: Sequence[str]) -> Scale:
    """A `Scale` that came in a message. Raises MessageError if it is none, or not of these columns."""
    try:
        scale = checked(Scale, _table(text), "scale")
    except SettingsError as error:
        raise MessageError(f"the message's means and deviations cannot be used: {error}") from None
    if list(scale.mean) != list(names) or list(scale.deviation) != list(names):
        raise MessageError("the message's means and deviations are of other columns than the experiment's")
    return scale


def factors(scale: Mapping[str, tuple[float, float]], names: Sequence[str]) -> tuple[list[float], list[float]]:
    """Mean and divisor of each of `names`: (x - mean) / divisor. A column without a scale stays as it is; one whose
    deviation is 0 becomes 0 wherever it has that one value."""
    held = [scale.get(name, (0.0, 1.0)) for name in names]
    return [mean for mean, _ in held], [deviation or 1.0 for _, deviation in held]


def _sum(values: NDArray[np.float64]) -> float:
    return math.fsum(values.tolist())


def _coarse(value: float, digits: int | None) -> float:
    return float(f"{value:.{digits}g}") if digits else value


def _table(text: str) -> dict[str, object]:
    if len(text) > MOST_TEXT:
        raise SettingsError(f"{len(text)} letters; allowed: {MOST_TEXT}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise SettingsError("no table of numbers")
    return values
