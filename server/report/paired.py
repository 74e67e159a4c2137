"""Differences between groups over the seeds that they share: the interval, and what a paired test says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from server.report.charts import is_share
from server.report.groups import Group, point, question
from server.report.scores import Mean, beyond, final
from server.report.tables import DASH, Cell, Table, plain

WILCOXON = 6
"""From so many seeds on Wilcoxon's test can find anything at 5 %: of five its least p is 0.0625."""

FEW = 5
"""Fewer seeds than that prove little, whatever the test says."""


@dataclass(frozen=True)
class Paired:
    """The difference of final scores, seed by seed: its mean over `n` seeds, its 95 % interval by Student's t (none of
    one seed), two-sided p of the paired t-test and of Wilcoxon's signed ranks where it can find anything."""

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    wilcoxon: float | None


@dataclass(frozen=True)
class Verdict:
    """The best group of those that answer one question, and by how much: `beyond` the spread of both or not."""

    best: Group
    score: Mean
    next: Group | None = None
    next_score: Mean | None = None
    beyond: bool = False
    paired: Paired | None = None

    @property
    def seed_by_seed(self) -> bool:
        """Whether the interval of the paired differences leaves zero out."""
        found = self.paired
        return bool(found and found.low is not None and found.high is not None and found.low * found.high > 0)


def paired(one: Group, other: Group, window: int) -> Paired | None:
    """The first less the second; None if they share no seed, or one of them has a value that is not finite."""
    metric = one.headline
    if metric != other.headline or not (one.has(metric) and other.has(metric)):
        return None
    by_seed = [{str(r.seed): final(r.metrics[metric].values, window) for r in group.used} for group in (one, other)]
    shared = [seed for seed in by_seed[0] if seed in by_seed[1]]
    differences = np.array([by_seed[0][seed] - by_seed[1][seed] for seed in shared], np.float64)
    if not len(shared) or not np.isfinite(differences).all():
        return None
    n, mean = len(differences), float(differences.mean())
    if n == 1:
        return Paired(1, mean, None, None, None, None)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    if error <= 1e-12 * max(1.0, abs(mean)):
        # Each seed has the same difference: no test speaks of that.
        return Paired(n, mean, mean, mean, None, None)
    from scipy import stats  # takes a second that a report of single seeds can do without

    reach = float(stats.t.ppf(0.975, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    ranks = float(stats.wilcoxon(differences).pvalue) if n >= WILCOXON else None
    return Paired(n, mean, mean - reach, mean + reach, p, ranks)


def questions(groups: Sequence[Group], window: int) -> list[list[tuple[Group, Mean]]]:
    """Groups that answer one question, with their final scores, the best first."""
    found: dict[tuple[str, str, str], list[tuple[Group, Mean]]] = {}
    for one in groups:
        if (score := one.final(one.headline, window)) is not None:
            found.setdefault((question(one), one.source, one.headline), []).append((one, score))
    for rows in found.values():
        rows.sort(key=lambda row: -row[1].mean if row[0].better(row[0].headline) else row[1].mean)
    return list(found.values())


def verdicts(groups: Sequence[Group], window: int) -> list[Verdict]:
    """The best of each question, in the order of the groups."""
    found = []
    for (best, score), *others in questions(groups, window):
        if not others:
            found.append(Verdict(best, score))
            continue
        (second, next_score), higher = others[0], best.better(best.headline)
        clear = beyond(score, [each for _, each in others], higher)
        found.append(Verdict(best, score, second, next_score, clear, paired(best, second, window)))
    return found


def table(groups: Sequence[Group], window: int, percent: bool = False) -> Table:
    """A row a group: how far it lies from the best of its question over the seeds that both have."""
    rows, seeds = [], set()
    scale = 100 if percent and all(is_share([one], one.headline) for one in groups) else 1
    points = " (points)" if scale > 1 else ""

    def signed(value: float, decimals: int) -> str:
        return f"{value * scale:+.{decimals - (2 if points else 0)}f}"

    for (best, _), *others in questions(groups, window):
        for other, _ in others:
            if (found := paired(best, other, window)) is None:
                continue
            seeds.add(found.n)
            interval = Cell(DASH)
            if found.low is not None and found.high is not None:
                exact, short = (f"{signed(found.low, d)} to {signed(found.high, d)}" for d in (4, 3))
                interval = Cell(exact, found.low, short=short)
            rows.append(
                [
                    Cell(_against(best, other)),
                    Cell(str(found.n), found.n),
                    Cell(signed(found.mean, 4), found.mean, short=signed(found.mean, 3)),
                    interval,
                    plain(found.p, "{:.2g}"),
                    plain(found.wilcoxon, "{:.2g}"),
                ]
            )
    columns = ["difference to the best", "shared seeds", f"mean difference{points}", f"95 % interval{points}"]
    columns += ["p (paired t)", "p (Wilcoxon)"]
    notes = [
        "Of the final headline, seed by seed: runs of one seed have one partition and the same first weights. Interval "
        "and two-sided p by Student's t over the differences, which takes them as drawn from a normal distribution; "
        f"Wilcoxon's signed ranks from {WILCOXON} seeds on. The best was picked from these very numbers, and "
        "nothing is corrected for the number of comparisons."
    ]
    if seeds and min(seeds) < FEW:
        notes.append(f"With {min(seeds)} seed{'' if min(seeds) == 1 else 's'} this proves little, whatever p says.")
    return Table("Differences over shared seeds", columns, rows, notes).without_empty()


def _against(best: Group, other: Group) -> str:
    """Both names; what they have in common once."""
    ending = f" ({point(best.point)})" if best.point else ""
    first = best.label.removesuffix(ending) if ending and other.label.endswith(ending) else best.label
    return f"{first} less {other.label}"
