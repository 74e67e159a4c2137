"""The arithmetic of a report: rounds to a target, means and deviations, bands over seeds, percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
POINTS = 500
"""A curve has at most so many points on the page."""


@dataclass(frozen=True)
class Mean:
    """Mean and sample standard deviation (n - 1) of `n` values; no deviation of a single one."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean | None:
        """None without a value, or if one of them is not finite: a mean of the others would be of other runs."""
        if not values or not all(map(math.isfinite, values)):
            return None
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), deviation, len(values))


def beyond(best: Mean, others: Iterable[Mean], higher: bool = True) -> bool:
    """Whether the best is better than chance of seeds would explain at first sight: its mean less its deviation lies
    beyond each other's mean and deviation. Not of single seeds, whose deviation nobody knows."""
    if best.deviation is None:
        return False
    sign = 1.0 if higher else -1.0
    gaps = [(sign * (best.mean - one.mean), one.deviation) for one in others]
    return all(deviation is not None and gap > best.deviation + deviation for gap, deviation in gaps)


@dataclass(frozen=True)
class Reach:
    """Over the runs of a group: how many reached a target, and what it cost.

    `costs` are the costs of all runs, in which one that did not reach the target counts with all that it spent. So
    `cost.mean` is the mean if all reached it and else a lower bound of it; `median` is infinite where at least half
    did not.
    """

    reached: int
    costs: tuple[float, ...]
    median: float

    @property
    def n(self) -> int:
        """Runs."""
        return len(self.costs)

    @property
    def cost(self) -> Mean | None:
        """Mean and deviation of `costs`."""
        return Mean.of(self.costs)

    @classmethod
    def of(cls, reached: Sequence[float | None], spent: Sequence[float]) -> Reach:
        """From the cost to the target of each run (None: not reached) and what each spent in all."""
        costs = tuple(all_ if cost is None else cost for cost, all_ in zip(reached, spent, strict=True))
        known = sorted(math.inf if cost is None else cost for cost in reached)
        middle = len(known) // 2
        median = math.inf if not known else known[middle]
        if known and len(known) % 2 == 0:
            median = (known[middle - 1] + known[middle]) / 2
        return cls(sum(cost is not None for cost in reached), costs, median)


def running(values: Floats, window: int) -> Floats:
    """At each evaluation the mean of the last `window` of them; NaN before there are so many, or with a NaN among them.

    Shapes (k,) to (k,).
    """
    if window == 1:
        return values
    smooth = np.full(len(values), np.nan)
    if len(values) >= window:
        smooth[window - 1 :] = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return smooth


def reached(values: Floats, target: float, window: int = 1, higher: bool = True) -> int | None:
    """The place of the first evaluation whose running mean is at least `target`, or where less is better at most; None
    if there is none."""
    smooth = running(values, window)
    hits = np.flatnonzero(smooth >= target if higher else smooth <= target)
    return int(hits[0]) if len(hits) else None


def final(values: Floats, window: int) -> float:
    """Mean of the last `window` evaluations, or of all if there are fewer; NaN if one of them is."""
    return float(np.mean(values[-window:])) if len(values) else float("nan")


def percentile(values: Sequence[float], percent: float, higher: bool = True) -> float:
    """Linear between the sorted values, the worst first, as numpy's default (which takes ten times as long on a hundred
    values): where less is better the 10th percentile from the worst is what statistics calls the 90th.

    A value that is not finite counts as the worst: such a client is not left out.
    """
    if not higher:
        return -percentile([-value for value in values], percent)
    ordered = sorted(v if math.isfinite(v) else -math.inf for v in values)
    place = (len(ordered) - 1) * percent / 100
    low, rest = int(place), place - int(place)
    if not rest:
        found = ordered[low]
    else:
        found = ordered[low] + rest * (ordered[low + 1] - ordered[low]) if math.isfinite(ordered[low]) else -math.inf
    return found if math.isfinite(found) else float("nan")


@dataclass(frozen=True)
class Band:
    """A group's curve, shapes (k,). `mean` and `low`/`high` (mean minus and plus one deviation; None with one run) have
    values only where all runs have one; `single` are x and values of single runs where only some do, NaN elsewhere."""

    x: Floats
    mean: Floats
    low: Floats | None
    high: Floats | None
    single: tuple[tuple[Floats, Floats], ...] = ()


def band(curves: Sequence[tuple[Floats, Floats, Floats]]) -> Band:
    """Mean and deviation after each round over runs, each given as rounds (k,), costs (k,) and values (k,).

    The place on the axis is the mean of the runs' costs after that round (of rounds the round itself), as in tables
    that derive bytes and seconds from means over rounds.
    """
    rounds = np.unique(np.concatenate([found for found, _, _ in curves]))
    values, costs = np.full((2, len(curves), len(rounds)), np.nan)
    for row, (found, spent, taken) in enumerate(curves):
        at = np.searchsorted(rounds, found)
        costs[row, at], values[row, at] = spent, taken
    every, some = np.isfinite(values).all(axis=0), np.isfinite(values).any(axis=0)
    x, mean = costs.mean(axis=0), np.where(every, values.mean(axis=0), np.nan)
    if len(curves) == 1:
        return Band(x, mean, None, None)
    spread = np.where(every, values.std(axis=0, ddof=1), np.nan)
    # Single runs begin at the last value that all share.
    alone = np.convolve(some & ~every, [1, 1, 1], "same") > 0
    single = tuple((x, np.where(alone, y, np.nan)) for x, y in zip(costs, values, strict=True)) if alone.any() else ()
    return Band(x, mean, mean - spread, mean + spread, single)


def thin(count: int, points: int) -> NDArray[np.int64]:
    """Evenly spread places of at most `points` out of `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, points)).round().astype(np.int64))


def three(mean: Mean) -> str:
    """Mean and deviation to three digits, for a sentence."""
    decimals = digits(mean.mean)
    shown = f"{mean.mean:.{decimals}f}"
    return shown if mean.deviation is None else f"{shown} ± {mean.deviation:.{decimals}f}"


def digits(value: float) -> int:
    """Decimals by which three digits are told; of what is below one, three behind the point; at most six."""
    if not value or not math.isfinite(value):
        return 3
    magnitude = math.floor(math.log10(abs(value)))
    return 3 if magnitude in (-1, -2) else max(0, min(6, 2 - magnitude))
