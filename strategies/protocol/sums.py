"""What a statistics query asks and what a site answers: sums over its examples, made to be added up over sites.

Three questions, so that each answer is a plain sum: counts and totals; deviations from the mean of all; counts between
edges that all share. Nothing but sums leaves a site, so that secure aggregation can add them up unseen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from common.errors import SettingsError
from common.settings import Section, checked

MOST_COLUMNS, MOST_CLASSES, MOST_BINS, MOST_NAME = 500, 1000, 64, 100
MOST_TEXT = 4 * 2**20
"""Characters of one site's answer."""

Kind = Literal["number", "channel", "length", "labels"]


def _printable(text: str) -> str:
    if not (0 < len(text) <= MOST_NAME and text.isprintable()):
        raise ValueError(f"allowed: 1 to {MOST_NAME} printable characters")
    return text


Label = Annotated[str, AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class StatisticsHead:
    """A question. `asked`: JSON, column -> its mean ("deviations") or the edges of its bins ("bins")."""

    experiment: str
    step: str
    asked: str = "{}"


@dataclass(frozen=True)
class StatisticsReply:
    """One node's answer: parallel lists over the clients that it hosts. `sums`: JSON of `SiteSums`."""

    names: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    error: str = ""


class ColumnSums(Section):
    """One column of one site. `values`: [total], [sum of x - m, sum of (x - m)^2], or counts by bin."""

    kind: Kind
    examples: Count
    """That have this column; 0 if withheld."""
    count: Count = 0
    """Of values: several an example in a channel."""
    missing: Count = 0
    values: list[float] = Field(default_factory=list, max_length=MOST_BINS)
    classes: dict[Label, Count] = Field(default_factory=dict, max_length=MOST_CLASSES)
    withheld: str = Field("", max_length=200)
    """What the site's policy kept back, in words."""


class SiteSums(Section):
    """All columns of one site, by name."""

    examples: Count
    columns: dict[Label, ColumnSums] = Field(max_length=MOST_COLUMNS)


def read_sums(text: str, source: str) -> SiteSums:
    """A site's answer. Raises SettingsError for one that is too long or not as it should be."""
    if len(text) > MOST_TEXT:
        raise SettingsError(f"{source}: an answer of {len(text)} characters; allowed: {MOST_TEXT}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise SettingsError(f"{source}: an answer that is no JSON") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{source}: an answer that is no table")
    return checked(SiteSums, values, source)


def read_asked(text: str) -> Mapping[str, list[float]]:
    """The numbers of a question, by column. Raises SettingsError if they are none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    sound = isinstance(values, dict) and all(
        isinstance(numbers, list)
        and len(numbers) <= MOST_BINS
        and all(isinstance(x, (int, float)) and type(x) is not bool and abs(x) < float("inf") for x in numbers)
        for numbers in values.values()
    )
    if not sound:
        raise SettingsError("a question whose numbers cannot be read")
    return {str(name): [float(x) for x in numbers] for name, numbers in values.items()}
