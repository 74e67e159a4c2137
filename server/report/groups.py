"""Runs that differ in their seed alone are one group: a line of a table, a curve."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.metrics.directions import higher_by_name
from common.metrics.target import Target
from server.report.runs import Run
from server.report.scores import Band, Mean, Reach, band, final, reached

FREE = ("seed",)
"""Settings in which the runs of one group may differ."""


@dataclass
class Group:
    """A variant at a point of the grid (or an experiment) over its seeds."""

    variant: str
    point: dict[str, Any]
    plan: str
    runs: list[Run] = field(default_factory=list)
    label: str = ""
    number: int = 0

    @property
    def complete(self) -> bool:
        """Whether at least one run came to its end; else the group's numbers are of runs that did not."""
        return any(run.complete for run in self.runs)

    @property
    def used(self) -> list[Run]:
        """The runs in the group's numbers: those that came to their end; if there is none, all that have a history."""
        return [run for run in self.runs if run.complete] or [run for run in self.runs if run.has_history]

    @property
    def count(self) -> str:
        """How many seeds, for a table."""
        used, all_ = len(self.used), len(self.runs)
        if not self.complete:
            return f"0 of {all_} (unfinished: {used})" if used else f"0 of {all_}"
        return str(used) if used == all_ else f"{used} of {all_}"

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the first run that has any."""
        return next((run.settings for run in self.runs if run.settings), {})

    @property
    def source(self) -> str:
        """Whose data the metrics are of: "central", "personal", "clients" or "train"."""
        return next((run.source for run in self.used), "train")

    @property
    def headline(self) -> str:
        """The metric that stands for its runs."""
        return next((run.headline for run in self.used), "accuracy")

    def better(self, metric: str) -> bool:
        """Whether more is better."""
        return next((run.better(metric) for run in self.used), higher_by_name(metric))

    def has(self, metric: str) -> bool:
        """Whether all runs in the numbers have the metric."""
        return bool(self.used) and all(metric in run.metrics for run in self.used)

    def final(self, metric: str, window: int) -> Mean | None:
        """Mean over the runs of the mean of their last `window` evaluations."""
        if not self.has(metric):
            return None
        return Mean.of([final(run.metrics[metric].values, window) for run in self.used])

    def best(self, metric: str) -> Mean | None:
        """Mean over the runs of their best value."""
        values = [run.metrics[metric].values for run in self.used] if self.has(metric) else []
        take = np.nanmax if self.better(metric) else np.nanmin
        return Mean.of([float(take(v)) if np.isfinite(v).any() else float("nan") for v in values])

    def mean(self, metric: str) -> Mean | None:
        """Mean over the runs of the mean over all rounds that have a value."""
        values = [run.metrics[metric].values for run in self.used] if self.has(metric) else []
        return Mean.of([float(np.nanmean(v)) if np.isfinite(v).any() else float("nan") for v in values])

    def total(self, axis: str) -> Mean | None:
        """What the runs spent in all."""
        if not self.used or any(axis not in run.axes for run in self.used):
            return None
        return Mean.of([float(run.axes[axis][-1]) for run in self.used])

    def reach(self, target: Target, axis: str, smoothing: int) -> Reach | None:
        """What the target cost on an axis; None where not every run has the metric and the axis."""
        metric = target.metric or self.headline
        if not self.has(metric) or any(axis not in run.axes for run in self.used):
            return None
        costs: list[float | None] = []
        for run in self.used:
            place = reached(run.metrics[metric].values, target.value, smoothing, self.better(metric))
            costs.append(None if place is None else float(run.axis(axis, metric)[place]))
        return Reach.of(costs, [float(run.axes[axis][-1]) for run in self.used])

    def band(self, metric: str, axis: str) -> Band | None:
        """The group's curve of a metric against an axis."""
        if not self.has(metric) or any(axis not in run.axes for run in self.used):
            return None
        used = self.used
        return band([(run.axis("round", metric), run.axis(axis, metric), run.metrics[metric].values) for run in used])


def question(one: Group) -> str:
    """What the group answers: task, split and point of a grid."""
    about = {key: found for key, found in one.settings.items() if key.startswith(("task.", "partition."))}
    return json.dumps([one.plan, one.point, about], sort_keys=True, default=str)


def group(runs: Sequence[Run]) -> list[Group]:
    """The groups of final runs in the order of their first one, labels unique.

    Cells of a plan belong together by variant and point, other runs if their experiments differ in the seed alone. A
    seed that comes twice (the same experiment in two engines, say) begins a group of its own: it is no further seed.
    """
    groups: dict[tuple[str, int], Group] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for run in runs:
        if run.stage != "final":
            continue
        key = _key(run)
        seed = (key, str(run.seed))
        place = (key, seen[seed])
        seen[seed] += 1
        groups.setdefault(place, _new(run)).runs.append(run)
    found = list(groups.values())
    _label(found)
    for number, one in enumerate(found):
        one.number = number
    return found


def point(point: dict[str, Any]) -> str:
    """A point of a grid in words, with whole keys: "server lr = 1, local lr = 0.1"."""
    return ", ".join(f"{key.replace('.', ' ')} = {shown(value)}" for key, value in point.items())


def shown(value: Any) -> str:
    """A setting in words."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _key(run: Run) -> str:
    if run.cell.get("variant") is not None:
        # A plan that ran twice into two folders is two plans.
        place = str(run.folder.resolve().parent.parent)
        return json.dumps([place, run.cell.get("plan"), run.cell["variant"], _point(run)], default=str)
    if not run.settings:
        return str(run.folder.resolve())
    kept = {key: value for key, value in run.settings.items() if key not in FREE}
    return json.dumps(kept, sort_keys=True, default=str)


def _point(run: Run) -> dict[str, Any]:
    found = run.cell.get("point")
    return found if isinstance(found, dict) else {}


def _new(run: Run) -> Group:
    if run.cell.get("variant") is not None:
        return Group(str(run.cell["variant"]), _point(run), str(run.cell.get("plan") or ""))
    name = str(run.settings.get("name") or run.folder.resolve().name)
    strategy = run.settings.get("strategy.name")
    return Group(f"{strategy}: {name}" if strategy else name, {}, "")


def _label(groups: list[Group]) -> None:
    """Variant and point; the plan, then the folder, only where needed to tell groups apart."""
    plans = {one.plan for one in groups}

    def plain(one: Group) -> str:
        return f"{one.variant} ({point(one.point)})" if one.point else one.variant

    def planned(one: Group) -> str:
        return f"{one.plan}: {plain(one)}" if one.plan and len(plans) > 1 else plain(one)

    ways = (
        planned,
        lambda one: f"{planned(one)} ({one.runs[0].folder.name})",
        lambda one: f"{planned(one)} ({one.runs[0].folder})",
        lambda one: f"{planned(one)} ({one.runs[0].folder.resolve()})",
    )
    left = groups
    for way in ways:
        for one in left:
            one.label = way(one)
        taken = Counter(one.label for one in groups)
        left = [one for one in groups if taken[one.label] > 1]
        if not left:
            return
    for number, one in enumerate(left, 1):
        one.label += f" #{number}"
