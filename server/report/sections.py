"""The sections of the page that have charts, and what all sections are made of."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from server.report import charts
from server.report.charts import Style
from server.report.contents import Options, own_metrics, some
from server.report.groups import Group, point
from server.report.runs import Run, inner, number, records
from server.report.tables import Table

HEATS = 12
"""Heat maps for at most so many groups, the best."""

HEAT_ROWS, HEAT_COLUMNS = 120, 160
PARTITIONS = 8
PANELS = 9
"""Points of a grid with curves of their own."""


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def table(made: Table, groups: Sequence[Group] = (), style: dict[int, Style] | None = None, words: bool = False) -> str:
    """A table with the groups' colors before their names; "" without a row."""
    if not made.rows:
        return ""
    marks: list[str] = []
    if style:
        by = {one.label: _swatch(style[one.number]) for one in groups}
        marks = [by.get(row[0].text.removesuffix(" †"), "") for row in made.rows]
    shown = made.html(marks)
    if words:
        shown = shown.replace("<table>", "<table class=words>", 1)
    return shown.replace("<div class=scroll", '<div class="scroll tall"', 1) if len(made.rows) > 20 else shown


def _swatch(style: Style) -> str:
    dash = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
    return (
        '<svg class=swatch viewBox="0 0 26 8" aria-hidden="true"><line x1="0" y1="4" x2="26" y2="4" '
        f'stroke="{style.color}" stroke-width="3"{dash}/></svg>'
    )


def _legend(groups: Sequence[Group], style: dict[int, Style], *metrics: str) -> str:
    """The groups that are in the charts of these metrics."""
    names = charts.names_of(groups)
    groups = [one for one in groups if any(map(one.has, metrics))]
    items = {style[one.number]: names[one.number] for one in groups if style[one.number].colored}
    if rest := sum(not style[one.number].colored for one in groups):
        items[next(style[one.number] for one in groups if not style[one.number].colored)] = f"{rest} other groups"
    shown = "".join(
        f"<li><span data-toggle={one.number}>{_swatch(one)}{html.escape(name)}</span></li>"
        for one, name in items.items()
    )
    return f'<ul class=legend aria-label="Legend">{shown}</ul>'


def _points(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """The groups of each point of the grid (and plan): each has its own charts."""
    found: dict[str, tuple[str, list[Group]]] = {}
    plans = {one.plan for one in groups}
    for one in groups:
        name = ": ".join(part for part in (one.plan if len(plans) > 1 else "", point(one.point)) if part)
        found.setdefault(json.dumps([name, one.point], default=str), (name, []))[1].append(one)
    return list(found.values())


def curves(groups: Sequence[Group], options: Options, style: dict[int, Style]) -> str:
    metrics = ["accuracy", "loss", *own_metrics(groups), "train loss"]
    if any(one.has("loss") for one in groups):
        # The training loss stands in where nothing else was measured.
        metrics.remove("train loss")
    note = (
        "Lines are means over seeds, bands one sample standard deviation; both only where all seeds have a value, and "
        "none of a single seed. Where only some seeds go on, each is drawn thin for itself. Against bytes, seconds and "
        "simulated time a value stands at the mean cost of the seeds after its round. "
        "Bytes: of training, both directions, all clients. Seconds: of the rounds, on the machine that ran them; runs "
        "side by side slow each other. Dotted: targets. A curve has at most 500 points."
    )
    drawn = ""
    for name, members in _points(groups)[:PANELS]:
        inner = ""
        for metric in metrics:
            targets = options.targets if metric == "accuracy" else ()
            figures = [charts.curves(members, metric, axis, style, targets) for axis in charts.AXES]
            inner += _figures(figures, metric)
        if inner:
            drawn += (f"<h3>{html.escape(name)}</h3>" if name else "") + inner
    if not drawn:
        return ""
    left = len(_points(groups)) - PANELS
    more = f"<p class=note>Curves of the first {PANELS} points; {left} more are in the tables.</p>" if left > 0 else ""
    return f"{_legend(groups, style, *metrics)}<p class=note>{note}</p>{drawn}{more}"


def _figures(drawn: Sequence[str], caption: str) -> str:
    shown = [svg for svg in drawn if svg]
    if not shown:
        return ""
    inner = "".join(f"<figure>{svg}</figure>" for svg in shown)
    return f'<div class=charts role=group aria-label="{html.escape(caption)}">{inner}</div>'


def clients(groups: Sequence[Group], options: Options, style: dict[int, Style]) -> str:
    shown = ""
    for name, members in _points(groups)[:PANELS]:
        figures = [charts.curves(members, metric, "round", style, ()) for metric in ("worst", "p10")]
        if any(figures):
            shown += (f"<h3>{html.escape(name)}</h3>" if name else "") + _figures(figures, "accuracy of clients")
    if shown:
        shown = (
            f"{_legend(groups, style, 'worst', 'p10')}<p class=note>Accuracy of the worst client and the 10th "
            f"percentile of the clients (linear between the sorted values) at each evaluation.</p>{shown}"
        )
    maps = [drawn for one in _best(groups, options)[:HEATS] if (drawn := _heat(one))]
    if maps:
        more = f" Of the {HEATS} best groups." if len(groups) > HEATS else ""
        shown += (
            "<h3>Clients by rounds</h3><p class=note>One run of each group: its first seed. A row is a client, "
            f"sorted by its last known value, the best at the bottom; beyond {HEAT_ROWS} clients neighbors in that "
            f"order are averaged, beyond {HEAT_COLUMNS} columns neighboring rounds. Grey: no value.{more}</p>"
            f'<div class="charts wide">{"".join(maps)}</div>'
        )
    return shown


def _best(groups: Sequence[Group], options: Options) -> list[Group]:
    chosen = sorted(groups, key=lambda one: -charts.score(one, options.window))[:HEATS]
    return [one for one in groups if any(one is other for other in chosen)]


def _heat(one: Group) -> str:
    if not one.used:
        return ""
    run = one.used[0]
    label, values, names, rounds = client_values(run)
    if not values.size or not np.isfinite(values).any():
        return ""
    rows, row_names, binned = charts.bin_rows(values, names, HEAT_ROWS)
    columns, column_rounds = charts.bin_columns(rows, rounds, HEAT_COLUMNS)
    drawn = charts.heat(columns, row_names, column_rounds, label, binned)
    words = f"{one.label}, seed {run.seed}: {label} of {plural(len(names), 'client')}"
    if binned:
        words += f" in {len(row_names)} bins"
    return f"<figure>{drawn}<figcaption>{html.escape(words)}</figcaption></figure>"


def client_values(run: Run) -> tuple[str, Any, list[str], list[int]]:
    """What a heat map shows of a run: what it is, values (clients, rounds), the clients' names, the rounds.

    Accuracies from the evaluations, else the losses of the clients that trained.
    """
    history = records(run.folder)
    label, taken = "accuracy", [(r["round"], inner(inner(r, "each"), "accuracy")) for r in history]
    if not any(found for _, found in taken):
        label, taken = "training loss", [(record["round"], inner(record, "losses")) for record in history]
    taken = [(round, found) for round, found in taken if found]
    names = sorted({name for _, found in taken for name in found}, key=lambda name: (len(name), name))
    at = {name: place for place, name in enumerate(names)}
    values = np.full((len(names), len(taken)), np.nan)
    for column, (_, found) in enumerate(taken):
        for name, value in found.items():
            values[at[name], column] = number(value)
    return label, values, names, [round for round, _ in taken]


def drift(groups: Sequence[Group], style: dict[int, Style]) -> str:
    shown = ""
    for name, members in _points(groups)[:PANELS]:
        if drawn := charts.curves(members, "drift", "round", style, ()):
            shown += f"<figure>{drawn}<figcaption>{html.escape(name)}</figcaption></figure>"
    if not shown:
        return ""
    note = (
        "Mean pairwise cosine of the uploads of a round: 1 where all clients move the same way, 0 where their "
        "moves are at right angles."
    )
    return f"{_legend(groups, style, 'drift')}<p class=note>{note}</p><div class=charts>{shown}</div>"


def partitions(groups: Sequence[Group]) -> str:
    """A picture for each different roll with class counts, of first seeds."""
    drawn: dict[str, tuple[list[str], list[list[int]], list[str]]] = {}
    for one in groups:
        run = next((run for run in one.used if run.roll), None)
        if run is None:
            continue
        names, counts = class_counts(run)
        if counts:
            key = json.dumps([names, counts])
            drawn.setdefault(key, (names, counts, []))[2].append(f"{one.label}, seed {run.seed}")
    figures = ""
    for names, counts, labels in list(drawn.values())[:PARTITIONS]:
        whose = some(labels)
        figures += (
            f"<figure>{charts.partition(counts, names)}<figcaption>{html.escape(whose)}: training examples by client "
            "and class; above, of each client in all.</figcaption></figure>"
        )
    if not figures:
        return ""
    left = len(drawn) - PARTITIONS
    more = f"<p class=note>{left} further partitions are not drawn.</p>" if left > 0 else ""
    return f'<div class="charts wide">{figures}</div>{more}'


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
