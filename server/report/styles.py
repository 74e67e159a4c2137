"""How a group is drawn everywhere: by color, by dashes and by marker, so that it is told apart in grey, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from server.report.groups import Group

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9", "#332288", "#000000")
"""Told apart by the color-blind and on white (Okabe and Ito's, the yellows darkened)."""

DASHES = ("", "6 2.5", "2 1.6", "7 2 1.5 2")
MARKERS = {
    "o": "M10 4a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
    "s": "M10.4 1.4h5.2v5.2h-5.2z",
    "^": "M13 .6L16.4 6.8H9.6z",
    "D": "M13 .2L16.8 4L13 7.8L9.2 4z",
    "v": "M13 7.4L16.4 1.2H9.6z",
    "P": "M12 .8h2v2.2h2.2v2H14v2.2h-2V5H9.8V3H12z",
    "X": "M10 2.4L11.4 1L13 2.6L14.6 1L16 2.4L14.4 4L16 5.6L14.6 7L13 5.4L11.4 7L10 5.6L11.6 4z",
    "*": "M13 .2L14 2.9L16.8 3L14.6 4.7L15.4 7.4L13 5.8L10.6 7.4L11.4 4.7L9.2 3L12 2.9z",
}
"""matplotlib's name -> the same as a path in the middle of a swatch of 26 x 8."""

DRAWN = len(COLORS) * 2
"""So many groups are drawn in color; the others are grey."""

GREY = "#b8b8b8"


@dataclass(frozen=True)
class Style:
    """How a group is drawn; `number` is the series that the legend switches."""

    number: int
    color: str
    dashes: str
    marker: str = ""

    @classmethod
    def nth(cls, number: int) -> Style:
        """No two of the first `DRAWN` have dashes and marker in common, nor color and dashes."""
        place, again = number % len(COLORS), number // len(COLORS)
        return cls(number, COLORS[place], DASHES[(place + again) % len(DASHES)], list(MARKERS)[place])

    @property
    def colored(self) -> bool:
        """Whether the legend names it."""
        return self.color != GREY

    @property
    def path(self) -> str:
        """The marker in a swatch."""
        return MARKERS.get(self.marker, "")


def styles(groups: Sequence[Group], window: int) -> dict[int, Style]:
    """Group number -> style: one a variant; beyond `DRAWN` variants those with the best final score have one."""
    named = names_of(groups)
    scores: dict[str, float] = {}
    for one in groups:
        scores[named[one.number]] = max(scores.get(named[one.number], -math.inf), score(one, window))
    best = set(sorted(scores, key=lambda name: -scores[name])[:DRAWN])
    drawn = {name: Style.nth(number) for number, name in enumerate(name for name in scores if name in best)}
    grey = Style(DRAWN, GREY, "")
    return {number: drawn.get(name, grey) for number, name in named.items()}


def names_of(groups: Sequence[Group]) -> dict[int, str]:
    """Group number -> the name in the legend: the variant if that tells the groups of each point apart."""
    pairs = [(one.variant, str(one.point)) for one in groups]
    return {one.number: one.variant if len(set(pairs)) == len(pairs) else one.label for one in groups}


def score(group: Group, window: int) -> float:
    """The final score, the larger the better; -inf of a group without one."""
    for metric in (group.headline, "loss", "train loss"):
        if (mean := group.final(metric, window)) is not None:
            return mean.mean if group.better(metric) else -mean.mean
    return -math.inf
