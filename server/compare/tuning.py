"""Choosing among the candidates of a tuned variant by what their runs reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from server.compare.plan import Point, Row, Tuning, axes
from server.rounds.records import EVALUATED, Record, headline, valued

Histories = Callable[[Point, int], "Sequence[Record] | None"]
"""Candidate and seed -> the finished run's records, or None if it failed."""


@dataclass(frozen=True)
class Choice:
    """The winner of a row, None if no candidate finished; a score for each candidate and each of its seeds (None:
    failed or not finite), and what to say about it."""

    winner: Point | None
    scores: list[dict[str, Any]]
    hints: list[str]


def choose(row: Row, tuning: Tuning, histories: Histories) -> Choice:
    """The candidate of the best mean score over the tuning's seeds, the first of equal ones. One that failed or was
    not finite in any seed loses."""
    scores: list[dict[str, Any]] = []
    best, winner = -math.inf, None
    for candidate in row.candidates:
        found = {seed: score(histories(candidate, seed), tuning) for seed in tuning.seeds}
        known = [value for value in found.values() if value is not None]
        mean = math.fsum(known) / len(known) if len(known) == len(found) else None
        scores.append({"tuned": candidate, "score": mean, "seeds": {str(seed): v for seed, v in found.items()}})
        if mean is not None and mean > best:
            best, winner = mean, candidate
    return Choice(winner, scores, [] if winner is None else edges(row, winner))


def score(records: Sequence[Record] | None, tuning: Tuning) -> float | None:
    """Of the evaluated rounds' headline, its sign such that more is better.

    None without a run, or if what is scored, or the last round's loss, is not finite.
    """
    evaluated = [dict(record) for record in records or () if "each" in record or "central" in record]
    heads = [found for record in evaluated if (found := headline(record)).of]
    told = [math.nan if h.value is None else h.value if h.higher else -h.value for h in heads]
    if not told or _diverged(evaluated[-1]):
        return None
    kept = told[-tuning.window :] if tuning.score == "last" else [max(told, key=_rank)]
    mean = math.fsum(kept) / len(kept)
    return mean if math.isfinite(mean) else None


def _diverged(record: Record) -> bool:
    """Whether a round's loss, on the data that its headline is of, is no number."""
    held = any("loss" in (record.get(group) or {}) for group in EVALUATED)
    loss = valued(record, "loss")
    return held and (loss is None or not math.isfinite(loss))


def _rank(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def edges(row: Row, winner: Point) -> list[str]:
    """For each tuned number whose best value is the smallest or largest tried: that the true one may lie beyond."""
    found = []
    for key, values in axes(row.variant.tune, "tune").items():
        if len(values) < 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            continue
        if winner[key] in (min(values), max(values)):
            which = "smallest" if winner[key] == min(values) else "largest"
            found.append(f"{key} = {winner[key]} is the {which} value tried: a wider grid may hold a better one")
    return found
