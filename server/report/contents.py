"""The tables of a report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.metrics.target import Target
from server.report.charts import is_share
from server.report.groups import Group, point, question
from server.report.runs import SOURCES
from server.report.scores import Reach, final
from server.report.tables import (
    BOUND,
    DASH,
    Cell,
    Table,
    bold_best,
    bound,
    byte_count,
    count,
    in_one_unit,
    plain,
    rounded,
    spread,
)

WHOSE = {
    "central": "the server's test set",
    "personal": "each client's own model on its own examples, mean weighted by examples",
    "clients": "the clients' evaluation examples, mean weighted by them",
    "train": "training, reported by the clients",
}


@dataclass(frozen=True)
class Options:
    """What a report is asked for: `targets`, `smoothing` (evaluations in the running mean that has to reach a target)
    and `window` (last evaluations whose mean is the final score)."""

    targets: tuple[Target, ...] = ()
    smoothing: int = 1
    window: int = 5

    @classmethod
    def of(cls, targets: Iterable[object], smoothing: int = 1, window: int = 5) -> Options:
        """With targets as they are written: numbers, of the headline, or "METRIC=NUMBER"."""
        return cls(tuple(map(Target.parse, targets)), smoothing, window)


def summary(groups: Sequence[Group], options: Options) -> Table:
    """A row a group."""
    window, named = options.window, headline_column(groups, options)
    columns: dict[str, Callable[[Group], Cell]] = {
        "group": _name,
        "seeds": lambda one: Cell(one.count, len(one.used)),
        "rounds": lambda one: _range([run.done for run in one.used]),
        named: lambda one: _whose(one, _final(one, one.headline, window)),
        "last": lambda one: _whose(one, _final(one, one.headline, 1)) if window > 1 else Cell(DASH),
        "best": lambda one: spread(one.best(one.headline)),
        "worst client": lambda one: _final(one, "worst", window),
        "10th percentile": lambda one: _final(one, "p10", window),
        "loss": lambda one: _final(one, "loss", window) if one.headline != "loss" else Cell(DASH),
        "train loss": lambda one: _final(one, "train loss", window),
    }
    for name in own_metrics(groups):
        columns[name] = lambda one, name=name: _final(one, name, window, "{:.4g}")  # type: ignore[misc]
    columns |= {
        "agreement": lambda one: spread(one.mean("drift"), "{:.3f}"),
        "bytes": lambda one: byte_count(one.total("bytes")),
        "seconds": lambda one: spread(one.total("seconds"), "{:.1f}"),
        "simulated s": lambda one: spread(one.total("clock"), "{:.1f}"),
        "dropped": lambda one: count(sum(sum(run.dropped.values()) for run in one.used)),
        "void": lambda one: count(sum(sum(run.void.values()) for run in one.used)),
    }
    rows = [[take(one) for take in columns.values()] for one in groups]
    if _comparable(groups):
        rows = bold_best(rows, list(columns).index(named), groups[0].better(groups[0].headline))
    names = list(columns)
    rows = in_one_unit(rows, [names.index("bytes")])
    rows = rounded(rows, [at for at, name in enumerate(names) if name not in COUNTS])
    extra = ["last", "best", "train loss", *own_metrics(groups)]
    if len({cell.text for cell in (row[2] for row in rows)}) == 1 < len(rows):
        extra.append("rounds")  # one number for all is in the line above
    shares = [named, "last", "best", "worst client", "10th percentile"] if _shares(groups) else []
    table = Table("Summary", names, rows, _summary_notes(groups, options), extra, shares).without_empty()
    if all(len(one.used) < 2 for one in groups):
        table.notes.insert(0, "Single seeds: nothing tells whether a difference is more than chance.")
    return table


COUNTS = ("group", "seeds", "rounds", "bytes", "dropped", "void")


def _shares(groups: Sequence[Group]) -> bool:
    """Whether the headline is a share in all groups."""
    return all(is_share([one], one.headline) for one in groups if one.has(one.headline)) and any(
        one.has(one.headline) for one in groups
    )


def headline_column(groups: Sequence[Group], options: Options) -> str:
    """What the final score is called: the metric that stands for all groups, or "headline" where they have several."""
    names = {one.headline for one in groups}
    name = names.pop() if len(names) == 1 else "headline"
    return name if options.window == 1 else f"{name} (last {options.window})"


def _name(one: Group) -> Cell:
    return Cell(one.label + ("" if one.complete else " †"))


def _final(one: Group, metric: str, window: int, pattern: str = "{:.4f}") -> Cell:
    """The final score; of how many runs it is not finite, if of any."""
    mean = one.final(metric, window)
    if mean is None and one.has(metric):
        scores = [final(run.metrics[metric].values, window) for run in one.used]
        return Cell(f"not finite: {sum(map(math.isnan, scores))} of {len(scores)}")
    return spread(mean, pattern)


def _whose(one: Group, cell: Cell) -> Cell:
    """Marks what is of clients' own models."""
    if one.source != "personal" or cell.number is None:
        return cell
    return replace(cell, text=f"{cell.text} own", number=replace(cell.number, after="own"))


def _comparable(groups: Sequence[Group]) -> bool:
    """Whether all groups answer the same question: one task, one split, one point of a grid, the same data."""
    return len({(one.source, one.headline, question(one)) for one in groups}) == 1


def _summary_notes(groups: Sequence[Group], options: Options) -> list[str]:
    last = f"the mean of the last {options.window} evaluations" if options.window > 1 else "the last evaluation"
    notes = [
        f"Mean ± sample standard deviation over the seeds of a group; a single seed has no deviation. "
        f"{_whats(groups)}, worst client and 10th percentile (from the worst): {last} of a run (of all, if there are "
        f"fewer); best: a run's best evaluation; agreement: mean over rounds of the mean pairwise cosine of the "
        f"uploads; bytes: sent in training, both directions. Bold: the best, where its mean less its deviation lies "
        f"beyond each other's mean and deviation."
    ]
    for source in (*SOURCES, "train"):
        labels = [one.label for one in groups if one.source == source]
        if labels:
            who = "Metrics and loss" if len(labels) == len(groups) else f"Metrics and loss of {some(labels)}"
            whose = "are clients' own models: " if source == "personal" else "are of "
            notes.append(f"{who} {whose}{WHOSE[source]}.")
    if not all(one.complete for one in groups):
        notes.append("† No run of this group came to its end: the numbers are of what there is.")
    if any(0 < len(one.used) < len(one.runs) and one.complete for one in groups):
        notes.append('Seeds "k of n": the other runs did not come to their end and are in no number here.')
    return notes


def _whats(groups: Sequence[Group]) -> str:
    names = sorted({one.headline for one in groups} - {"loss"})
    lower = [name for name in names if not next(one for one in groups if one.headline == name).better(name)]
    less = f" (less {', '.join(lower)} is better)" if lower else ""
    return f"{', '.join([*names, 'loss']).capitalize()}{less}"


def targets(groups: Sequence[Group], options: Options) -> Table:
    """A row a group and target."""
    columns = ("group", "target", "reached", "rounds", "median rounds", "bytes", "seconds", "simulated s")
    rows = []
    for one in groups:
        for target in options.targets:
            rounds = one.reach(target, "round", options.smoothing)
            if rounds is None:
                continue
            cells = [
                _name(one),
                Cell(str(target), target.value),
                Cell(f"{rounds.reached} of {rounds.n}", rounds.reached),
                reach(rounds, "{:.1f}", "rounds"),
                Cell(f"> {max(rounds.costs):.0f}", BOUND + max(rounds.costs))
                if math.isinf(rounds.median)
                else plain(rounds.median, "{:.1f}"),
                reach(one.reach(target, "bytes", options.smoothing), ""),
                reach(one.reach(target, "seconds", options.smoothing), "{:.1f}"),
                reach(one.reach(target, "clock", options.smoothing), "{:.1f}"),
            ]
            rows.append(cells)
    smooth = f"the mean of {options.smoothing} evaluations in a row is" if options.smoothing > 1 else "an evaluation is"
    missing = [
        str(target) for target in options.targets if target.metric and not any(one.has(target.metric) for one in groups)
    ]
    shares = [
        str(target)
        for target in options.targets
        if target.value > 1 and any((target.metric or one.headline) == "accuracy" for one in groups)
    ]
    notes = [
        *(f"Target {target}: an accuracy is at most 1." for target in shares),
        *(f"Target {target}: no group has that metric in all its runs." for target in missing),
        f"Until {smooth} at least the target, or at most it where less is better; bytes in both directions. Mean ± "
        f'sample standard deviation over the seeds, where all reached it. Where some did not, "> x" is a lower bound '
        f"of the mean: those count with all that they spent; the median counts them as never. Where none did, the "
        f"rounds that were run.",
    ]
    rows = in_one_unit(rows, [columns.index("bytes")])
    rows = rounded(rows, [columns.index(name) for name in ("seconds", "simulated s")])
    return Table("To the target", columns, rows, notes).without_empty()


def reach(found: Reach | None, pattern: str, unit: str = "") -> Cell:
    """The cost of a target as a cell: mean ± deviation, a lower bound "> x", or "not reached"."""
    if found is None or (cost := found.cost) is None:
        return Cell(DASH)
    if found.reached == found.n:
        return spread(cost, pattern) if pattern else byte_count(cost)
    if unit and not found.reached:
        low, high = min(found.costs), max(found.costs)
        text = f"not reached in {low:.0f}{'' if low == high else f' to {high:.0f}'} {unit}"
        return replace(bound(cost, pattern), text=text)
    return bound(cost, pattern)


def pivots(groups: Sequence[Group], options: Options) -> list[Table]:
    """Variants x points of a grid, as papers print them; [] unless there are several of both."""
    points = list({json.dumps(one.point, default=str): one.point for one in groups}.values())
    plans = {one.plan for one in groups}
    variants = list(dict.fromkeys(one.variant for one in groups))
    by = {(one.variant, json.dumps(one.point, default=str)): one for one in groups}
    if len(points) < 2 or len(variants) < 2 or len(plans) > 1 or len(by) < len(groups):
        return []

    def table(title: str, cell: Any, largest: bool, share: bool | None = None) -> Table:
        rows = []
        for variant in variants:
            cells = [by.get((variant, json.dumps(p, default=str))) for p in points]
            rows.append([Cell(variant), *(Cell(DASH) if one is None else cell(one) for one in cells)])
        for column in range(1, len(points) + 1) if len({(one.source, one.headline) for one in groups}) == 1 else ():
            rows = bold_best(rows, column, largest)
        every, names = range(1, len(points) + 1), ["variant", *map(point, points)]
        rows = rounded(rows, every) if share is not None else in_one_unit(rows, every)
        return Table(f"{title} by variant and point", names, rows, shares=names[1:] if share else ())

    head, first = headline_column(groups, options).capitalize(), groups[0]
    largest, window = first.better(first.headline), options.window
    tables = [table(head, lambda one: _final(one, one.headline, window), largest, _shares(groups))]
    if not any(one.has(one.headline) for one in groups):
        return []
    for target in options.targets:
        for axis, pattern in (("round", "{:.1f}"), ("bytes", "")):
            word = "Rounds" if axis == "round" else "Bytes"
            unit = "rounds" if axis == "round" else ""

            def cell(
                one: Group, target: Target = target, axis: str = axis, pattern: str = pattern, u: str = unit
            ) -> Cell:
                return reach(one.reach(target, axis, options.smoothing), pattern, u)

            tables.append(table(f"{word} to {target}", cell, False))
    return tables


def own_metrics(groups: Sequence[Group]) -> list[str]:
    """Further metrics of the tasks: distances, objectives."""
    known = {"loss", "train loss", "worst", "p10", "drift", *(one.headline for one in groups)}
    return sorted({name for one in groups for run in one.used for name in run.metrics} - known)


def _range(values: Sequence[int]) -> Cell:
    low, high = min(values, default=0), max(values, default=0)
    return Cell(str(low) if low == high else f"{low} to {high}", high)


def some(labels: Sequence[str]) -> str:
    return "; ".join(labels[:3]) + (f"; and {len(labels) - 3} more" if len(labels) > 3 else "")
