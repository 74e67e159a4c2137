"""Sums of many sites as figures of all of them, and how far each site is from the rest.

Moments come in two passes: the mean from the totals; then deviations from it, which are corrected by their own mean.
In float64 the result is that of all values in one array to a few roundings, whatever their offset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from strategies.protocol.sums import ColumnSums, SiteSums

BINS, REACH = 16, 4.0
"""Of a histogram: so many bins within so many deviations of the mean, and one more on either side."""
FAR, FAR_MISSING = 0.5, 0.2
"""Which differences are shown, see `Far`."""

Sites = Mapping[str, SiteSums]


@dataclass
class ColumnFigures:
    """One column over all sites. `std` divides by the count; `edges` rise, `bins` has one more than they."""

    kind: str
    examples: int = 0
    count: int = 0
    missing: int = 0
    mean: float | None = None
    std: float | None = None
    edges: list[float] = field(default_factory=list)
    bins: list[float] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    withheld: dict[str, str] = field(default_factory=dict)
    """Site -> what its policy kept back."""
    sites: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Site -> its own examples, count, missing, mean, std."""


@dataclass(frozen=True)
class Far:
    """A site that is far from the others in a column.

    `measure`: "mean" (of the site and of the others, their difference in deviations of all), "shape" and "labels" (half
    the sum of the differences of all shares: 0 equal, 1 nothing in common) or "missing" (difference of the shares).
    """

    site: str
    column: str
    measure: str
    distance: float


def means(sites: Sites) -> dict[str, list[float]]:
    """The mean of each column of numbers, as it is asked about next."""
    found: dict[str, list[float]] = {}
    for name in _columns(sites):
        held = [each for each in _of(sites, name).values() if each.kind != "labels" and each.values]
        if count := sum(each.count for each in held):
            found[name] = [math.fsum(each.values[0] for each in held) / count]
    return found


def figures(sites: Sites, off: Sites, asked: Mapping[str, Sequence[float]]) -> dict[str, ColumnFigures]:
    """The figures of all sites, from their totals, and their deviations `off` from the means `asked`."""
    found: dict[str, ColumnFigures] = {}
    for name in _columns(sites):
        held = _of(sites, name)
        figure = found[name] = ColumnFigures(next(iter(held.values())).kind)
        for site, each in held.items():
            figure.examples += each.examples
            figure.count += each.count
            figure.missing += each.missing
            for label, count in each.classes.items():
                figure.classes[label] = figure.classes.get(label, 0) + count
            if each.withheld:
                figure.withheld[site] = each.withheld
            figure.sites[site] = {"examples": each.examples, "count": each.count, "missing": each.missing}
            if each.classes:
                figure.sites[site]["classes"] = dict(each.classes)
        if name in asked:
            _moments(figure, _of(off, name), asked[name][0])
    return found


def _moments(figure: ColumnFigures, off: Mapping[str, ColumnSums], about: float) -> None:
    held = {site: each for site, each in off.items() if len(each.values) == 2 and each.count}
    for site, each in held.items():
        figure.sites[site]["mean"], figure.sites[site]["std"] = _about(about, each.count, *each.values)
    count = sum(each.count for each in held.values())
    if count:
        first, second = (math.fsum(each.values[i] for each in held.values()) for i in (0, 1))
        figure.mean, figure.std = _about(about, count, first, second)


def _about(about: float, count: int, first: float, second: float) -> tuple[float, float]:
    """Mean and deviation from the sums of x - about and of its square."""
    shift = first / count
    return about + shift, math.sqrt(max(0.0, second / count - shift * shift))


def edges(found: Mapping[str, ColumnFigures]) -> dict[str, list[float]]:
    """The edges of each column's bins. They follow from mean and deviation: no site tells its smallest value."""
    asked: dict[str, list[float]] = {}
    for name, each in found.items():
        if each.mean is not None and each.std:
            rising = [each.mean + each.std * REACH * (2 * i / BINS - 1) for i in range(BINS + 1)]
            if all(low < high for low, high in pairwise(rising)):
                asked[name] = rising
    return asked


def add_bins(found: Mapping[str, ColumnFigures], bins: Sites, asked: Mapping[str, Sequence[float]]) -> None:
    """Put the histograms into the figures."""
    for name, rising in asked.items():
        held = {s: each for s, each in _of(bins, name).items() if len(each.values) == len(rising) + 1}
        figure = found[name]
        figure.edges = list(rising)
        figure.bins = [math.fsum(column) for column in zip(*(e.values for e in held.values()), strict=True)]
        for site, each in held.items():
            figure.sites[site]["bins"] = list(each.values)
            if each.withheld:
                figure.withheld.setdefault(site, each.withheld)


def far(found: Mapping[str, ColumnFigures], least: float = FAR) -> list[Far]:
    """Sites that differ from the others, the farthest first."""
    told: list[Far] = []
    for name, figure in found.items():
        if len(figure.sites) < 2:
            continue
        for site, own in figure.sites.items():
            rest = [each for other, each in figure.sites.items() if other != site]
            for measure, distance, limit in (
                ("mean", _mean_distance(own, rest, figure.std), least),
                ("shape", _variation(_shares(own.get("bins")), _shares(_added(rest, "bins"))), least),
                ("labels", _labels(own, rest), least),
                ("missing", _missing(own, rest), FAR_MISSING),
            ):
                if distance is not None and distance >= limit:
                    told.append(Far(site, name, measure, distance))
    return sorted(told, key=lambda each: (-each.distance, each.column, each.site))


def _mean_distance(own: Mapping[str, Any], rest: Sequence[Mapping[str, Any]], std: float | None) -> float | None:
    others = [each for each in rest if "mean" in each]
    count = sum(each["count"] for each in others)
    if "mean" not in own or not count or not std:
        return None
    return float(abs(own["mean"] - math.fsum(each["mean"] * each["count"] for each in others) / count) / std)


def _added(rest: Sequence[Mapping[str, Any]], key: str) -> list[float] | None:
    held = [each[key] for each in rest if key in each]
    return [math.fsum(column) for column in zip(*held, strict=True)] if held else None


def _shares(counts: Sequence[float] | None) -> list[float] | None:
    total = math.fsum(counts or ())
    return [each / total for each in counts] if counts and total > 0 else None


def _variation(one: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    if one is None or other is None:
        return None
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


def _labels(own: Mapping[str, Any], rest: Sequence[Mapping[str, Any]]) -> float | None:
    held = [each["classes"] for each in rest if "classes" in each]
    if "classes" not in own or not held:
        return None
    names = sorted(set(own["classes"]).union(*held))
    return _variation(
        _shares([own["classes"].get(name, 0) for name in names]),
        _shares([sum(each.get(name, 0) for each in held) for name in names]),
    )


def _missing(own: Mapping[str, Any], rest: Sequence[Mapping[str, Any]]) -> float | None:
    there, all_there = own["count"] + own["missing"], sum(each["count"] + each["missing"] for each in rest)
    if not there or not all_there:
        return None
    return float(abs(own["missing"] / there - sum(each["missing"] for each in rest) / all_there))


def schema(sites: Sites) -> list[str]:
    """Where sites do not hold the same columns, a sentence each."""
    told: list[str] = []
    for name in _columns(sites):
        held = _of(sites, name)
        if lacking := sorted(set(sites) - set(held)):
            have, lack = (len(held), len(lacking))
            few = f"{_some(sorted(held))} alone" if have < lack else f"all but {_some(lacking)}"
            told.append(f"column {name!r}: held by {few}")
        if len(kinds := {each.kind for each in held.values()}) > 1:
            by = "; ".join(f"{k}: {_some(sorted(s for s, e in held.items() if e.kind == k))}" for k in sorted(kinds))
            told.append(f"column {name!r} is not of one kind: {by}")
    return told


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _columns(sites: Sites) -> list[str]:
    return list(dict.fromkeys(name for each in sites.values() for name in each.columns))


def _of(sites: Sites, name: str) -> dict[str, ColumnSums]:
    return {site: each.columns[name] for site, each in sites.items() if name in each.columns}
