"""What the sections of the page draw: charts as SVG with the names that stand beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from server.report import bins, charts
from server.report.charts import Heat, Limits
from server.report.contents import Options, own_metrics, some
from server.report.groups import Group, point
from server.report.runs import Run, inner, number, records
from server.report.styles import Style, names_of, score
from server.report.svg import svg

HEATS = 12
"""Heat maps for at most so many groups, the best."""

HEAT_ROWS, HEAT_COLUMNS = 120, 160
PARTITIONS = 8
PANELS = 9
"""Points of a grid with curves of their own."""

FIRST = 3
"""So many points have a chart on top of the page."""

Styles = dict[int, Style]
Points = list[tuple[str, list[Group]]]


def drawn(groups: Sequence[Group], options: Options, styles: Styles) -> dict[str, Any]:
    """All charts of the page, by section, with their legends."""
    points = points_of(groups)
    metrics = metrics_of(groups)
    partitions = partitions_of(groups)
    maps, plain = heats_of(groups, options)
    return {
        "first": _first(groups, points[:FIRST], metrics[0], options, styles),
        "curves": _curves(points[:PANELS], metrics, options, styles),
        "curves_legend": _legend(groups, styles, metrics),
        "points_left": len(points) - PANELS,
        "clients": _clients(points[:PANELS], styles),
        "clients_legend": _legend(groups, styles, ("worst", "p10")),
        "heats": [(svg(charts.heat(heat, scale), heat.words), heat.words) for heat, scale in maps],
        "heats_plain": plain,
        "agreement": [
            (shown, name)
            for name, members in points[:PANELS]
            if (shown := _curve(members, "drift", "round", styles, limits=charts.limits_of(groups, "drift")))
        ],
        "agreement_legend": _legend(groups, styles, ("drift",)),
        "partitions": [
            (svg(charts.partition(counts, names), _counted(counts, names)), some(whose))
            for names, counts, whose in partitions[:PARTITIONS]
        ],
        "partitions_left": len(partitions) - PARTITIONS,
    }


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """What has curves, the headline first. The training loss stands in where nothing else was measured."""
    found = list(dict.fromkeys([*(one.headline for one in groups), "loss", *own_metrics(groups), "train loss"]))
    if any(one.has("loss") for one in groups):
        found.remove("train loss")
    return [metric for metric in found if any(one.has(metric) for one in groups)] or found


def targets_of(metric: str, members: Sequence[Group], options: Options) -> list[float]:
    """The targets that are values of a metric."""
    return [t.value for t in options.targets if metric == (t.metric or members[0].headline)]


def _curve(members: Sequence[Group], metric: str, axis: str, styles: Styles, *given: Any, **named: Any) -> str:
    made = charts.curves(members, metric, axis, styles, *given, **named)
    return svg(*made) if made else ""


def _counted(counts: list[list[int]], names: list[str]) -> str:
    return f"{len(names)} clients by {len(counts[0])} classes: number of training examples of each"


def _first(
    groups: Sequence[Group], points: Points, metric: str, options: Options, styles: Styles
) -> list[tuple[str, str]]:
    """The first metric against rounds, of the first points on one scale, with the points' names."""
    limits: Limits | None = charts.limits_of([one for _, members in points for one in members], metric)
    found = []
    for name, members in points:
        lines = targets_of(metric, members, options)
        if made := _curve(members, metric, "round", styles, lines, limits=limits):
            found.append((made, name))
    return found


def _legend(groups: Sequence[Group], styles: Styles, metrics: Sequence[str]) -> list[tuple[Style, str]]:
    """The groups that are in the charts of these metrics."""
    names = names_of(groups)
    groups = [one for one in groups if any(map(one.has, metrics))]
    items = {styles[one.number]: names[one.number] for one in groups if styles[one.number].colored}
    grey = [styles[one.number] for one in groups if not styles[one.number].colored]
    return [*items.items(), *((style, f"{len(grey)} other groups") for style in grey[:1])]


def points_of(groups: Sequence[Group]) -> Points:
    """The groups of each point of the grid (and plan): each has its own charts."""
    found: dict[str, tuple[str, list[Group]]] = {}
    plans = {one.plan for one in groups}
    for one in groups:
        name = ": ".join(part for part in (one.plan if len(plans) > 1 else "", point(one.point)) if part)
        found.setdefault(json.dumps([name, one.point], default=str), (name, []))[1].append(one)
    return list(found.values())


def _curves(
    points: Points, metrics: Sequence[str], options: Options, styles: Styles
) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Each point's name, and of each metric that it has one chart an axis."""
    found = []
    for name, members in points:
        rows = []
        for metric in metrics:
            lines = targets_of(metric, members, options)
            svgs = [_curve(members, metric, axis, styles, lines) for axis in charts.AXES]
            rows.append((metric, list(filter(None, svgs))))
        if shown := [row for row in rows if row[1]]:
            found.append((name, shown))
    return found


def _clients(points: Points, styles: Styles) -> list[tuple[str, list[str]]]:
    """Each point's name and its charts of the clients that fare worst."""
    both = ("worst", "p10")
    all_ = [(name, [_curve(members, metric, "round", styles) for metric in both]) for name, members in points]
    return [(name, list(filter(None, svgs))) for name, svgs in all_ if any(svgs)]


def partitions_of(groups: Sequence[Group]) -> list[tuple[list[str], list[list[int]], list[str]]]:
    """Names and class counts of each different roll, and whose first seeds have it."""
    found: dict[str, tuple[list[str], list[list[int]], list[str]]] = {}
    for one in groups:
        if run := next((run for run in one.used if run.roll), None):
            names, counts = class_counts(run)
            if counts:
                key = json.dumps([names, counts])
                found.setdefault(key, (names, counts, []))[2].append(f"{one.label}, seed {run.seed}")
    return list(found.values())


def heats_of(groups: Sequence[Group], options: Options) -> tuple[list[tuple[Heat, Limits]], list[str]]:
    """The heat maps of the best groups, with the scale that all of one metric share; and whose show nothing."""
    chosen = sorted(groups, key=lambda one: -score(one, options.window))[:HEATS]
    found = [heat for one in groups if any(one is other for other in chosen) and (heat := _heat(one))]
    telling = [heat for heat in found if heat.telling]
    scales = {
        heat.label: charts.scale_of([other for other in telling if other.label == heat.label]) for heat in telling
    }
    return [(heat, scales[heat.label]) for heat in telling], [heat.group for heat in found if not heat.telling]


def _heat(one: Group) -> Heat | None:
    """The heat map of a group's first seed; None without values."""
    if not one.used:
        return None
    run = one.used[0]
    label, higher, values, names, rounds = client_values(run)
    if not values.size or not np.isfinite(values).any():
        return None
    rows, row_names, binned = bins.bin_rows(values, names, HEAT_ROWS, higher)
    columns, column_rounds = bins.bin_columns(rows, rounds, HEAT_COLUMNS)
    words = f"{one.label}, seed {run.seed}: {label} of {len(names):,} client{'' if len(names) == 1 else 's'}"
    if binned:
        words += f" in {len(row_names)} bins"
    return Heat(one.label, words, label, higher, columns, row_names, column_rounds, binned)


def client_values(run: Run) -> tuple[str, bool, Any, list[str], list[int]]:
    """What a heat map shows of a run: what it is, whether more is better, values (clients, rounds), the clients' names,
    the rounds.

    Headlines from the evaluations, else the losses of the clients that trained.
    """
    history, higher = records(run.folder), run.better(run.headline)
    label, taken = run.headline, [(r["round"], inner(inner(r, "each"), run.headline)) for r in history]
    if not any(found for _, found in taken):
        label, higher = "training loss", False
        taken = [(record["round"], inner(record, "losses")) for record in history]
    taken = [(round, found) for round, found in taken if found]
    names = sorted({name for _, found in taken for name in found}, key=lambda name: (len(name), name))
    at = {name: place for place, name in enumerate(names)}
    values = np.full((len(names), len(taken)), np.nan)
    for column, (_, found) in enumerate(taken):
        for name, value in found.items():
            values[at[name], column] = number(value)
    return label, higher, values, names, [round for round, _ in taken]


def class_counts(run: Run) -> tuple[list[str], list[list[int]]]:
    """Names and class counts (clients, classes) of the clients that share theirs, in natural order."""
    known: dict[str, list[int]] = {}
    for member in run.roll:
        try:
            counts = json.loads(member.get("labels") or "null")
            if isinstance(counts, dict):
                largest = max(map(int, counts), default=-1)
                counts = [counts.get(str(label), 0) for label in range(min(largest + 1, 100_000))]
            if isinstance(counts, list):
                known[str(member.get("name"))] = [int(count) for count in counts]
        except (TypeError, ValueError):
            continue
    classes = max(map(len, known.values()), default=0)
    names = sorted(known, key=lambda name: (len(name), name)) if classes else []
    return names, [known[name] + [0] * (classes - len(known[name])) for name in names]
