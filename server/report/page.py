"""The page: one HTML file that needs nothing beside itself."""

from __future__ import annotations

import base64
import hashlib
import html
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from server.report import charts, contents, details
from server.report.contents import Options
from server.report.groups import Group, point
from server.report.runs import Run
from server.report.sections import clients, curves, drift, partitions, plural, table
from server.report.style import CSS, SCRIPT
from server.report.tables import Table

EXPERIMENTS = 60
"""So many experiment files, whole."""


def page(groups: Sequence[Group], all_: Sequence[Run], options: Options, command: Sequence[str] = ()) -> str:
    """The report as HTML. `command`: what made it."""
    style = charts.styles(groups, options.window)
    tables, targets = contents.pivots(groups, options), contents.targets(groups, options)
    parts = [
        ("summary", "Summary", _pivots(table(contents.summary(groups, options), groups, style), tables[:1])),
        ("unfinished", "Unfinished and failed runs", table(details.unfinished(all_), words=True)),
        ("targets", "Rounds and bytes to the target", _pivots(table(targets, groups, style), tables[1:])),
        ("curves", "Curves", curves(groups, options, style)),
        ("clients", "Clients", clients(groups, options, style)),
        ("drift", "Drift", drift(groups, style)),
        ("communication", "Communication", table(details.communication(groups), groups, style)),
        ("partition", "Partition", partitions(groups)),
        ("tuning", "Tuning", table(details.tuning(all_, groups))),
        ("settings", "Settings", _settings(groups)),
        ("runs", "Runs", _runs(groups, all_, options, command)),
    ]
    shown = [(key, title, body) for key, title, body in parts if body]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in shown)
    body = "".join(
        f"<section id={key} aria-labelledby={key}-h><h2 id={key}-h>{title}</h2>{b}</section>" for key, title, b in shown
    )
    title = _title(groups)
    script = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{script}'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{CSS}</style></head><body><header><h1>{html.escape(title)}</h1>{_lead(groups, all_, options)}"
        f'<nav aria-label="Sections">{links}</nav></header><main>{body}</main>'
        f"<footer>Made by fedkeel {html.escape(_version())}. The page is whole: it loads nothing.</footer>"
        f"<script>{SCRIPT}</script></body></html>"
    )


def _title(groups: Sequence[Group]) -> str:
    plans = list(dict.fromkeys(one.plan for one in groups if one.plan))
    return ", ".join(plans) if plans else groups[0].label if len(groups) == 1 else "Federated runs compared"


def _version() -> str:
    try:
        return version("fedkeel")
    except PackageNotFoundError:
        return "(not installed)"


def _lead(groups: Sequence[Group], all_: Sequence[Run], options: Options) -> str:
    final = [run for run in all_ if run.stage == "final"]
    seeds = sorted({str(run.seed) for run in final}, key=lambda seed: (len(seed), seed))
    tasks = sorted({str(one.settings.get("task.name")) for one in groups if one.settings.get("task.name")})
    words = [f"{plural(len(final), 'run')} in {plural(len(groups), 'group')}"]
    words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds[:12])}{' …' if len(seeds) > 12 else ''}")
    words += [f"task{'s' if len(tasks) > 1 else ''} {', '.join(tasks)}"] if tasks else []
    lead = f"<p class=lead>{html.escape('; '.join(words))}.</p>"
    if left := [run for run in all_ if not run.complete]:
        enter = "enters" if len(left) == 1 else "enter"
        lead += (
            f"<p class=warning role=note><b>{plural(len(left), 'run')} did not come to an end</b> and {enter} no mean "
            'beside finished ones: <a href="#unfinished">which and why</a>.</p>'
        )
    return lead


def _pivots(first: str, tables: Sequence[Table]) -> str:
    """A table and, under titles of their own, those by variant and point."""
    return first + "".join(f"<h3>{html.escape(one.title)}</h3>{table(one)}" for one in tables)


def _settings(groups: Sequence[Group]) -> str:
    varied, common = details.differing(groups)
    fair = "".join(f"<p>{html.escape(line)}</p>" for line in details.fairness(groups))
    items = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(details.value(found))}</dd>" for key, found in common.items()
    )
    shown = fair + (f"<h3>Different</h3>{table(varied)}" if varied.rows else "")
    if items:
        shown += f"<details><summary>In common ({len(common)})</summary><dl>{items}</dl></details>"
    tuned: dict[str, Any] = {
        one.label: run.cell["tuned"] for one in groups for run in one.runs if run.cell.get("tuned")
    }
    if tuned:
        lines = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(point(v))}</dd>" for k, v in tuned.items())
        shown += f"<h3>Tuned hyperparameters</h3><dl>{lines}</dl>"
    return shown


def _runs(groups: Sequence[Group], all_: Sequence[Run], options: Options, command: Sequence[str]) -> str:
    shown = table(details.runs(groups, options))
    files: dict[str, list[str]] = {}
    for one in groups:
        if run := next((run for run in one.runs if run.toml), None):
            files.setdefault(run.toml, []).append(
                f"{one.label}: python -m server simulate experiment.toml --seed {run.seed}"
            )
    parts = "".join(
        f"<details><summary>{html.escape(' / '.join(names[:3]))}</summary><pre>{html.escape(toml)}</pre></details>"
        for toml, names in list(files.items())[:EXPERIMENTS]
    )
    if parts:
        of = f" (the first {EXPERIMENTS})" if len(files) > EXPERIMENTS else ""
        shown += (
            f"<details><summary>Experiments of the groups{of}</summary><p class=note>experiment.toml of each group's "
            f"first seed, whole, and the command that runs it in one process.</p>{parts}</details>"
        )
    ran = "".join(f"<li>{html.escape(name)} ({plural(count, 'run')})</li>" for name, count in details.versions(all_))
    shown += f"<h3>Versions</h3><ul>{ran}</ul>" if ran else ""
    if command:
        shown += f"<h3>This page</h3><pre>{html.escape(shlex.join(command))}</pre>"
    return shown
