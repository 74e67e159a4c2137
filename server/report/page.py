"""The page: one HTML file that needs nothing beside itself."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from server.report import contents, details, paired, sections
from server.report.caption import caption
from server.report.contents import Options
from server.report.groups import Group, point
from server.report.render import TEMPLATES, render
from server.report.runs import Run
from server.report.scores import three
from server.report.styles import names_of, styles

EXPERIMENTS = 60
"""So many experiment files, whole."""


def page(groups: Sequence[Group], all_: Sequence[Run], options: Options, command: Sequence[str] = ()) -> str:
    """The report as HTML. `command`: what made it."""
    style = styles(groups, options.window)
    varied, common = details.differing(groups)
    tables = {
        "summary": contents.summary(groups, options),
        "unfinished": details.unfinished(all_),
        "targets": contents.targets(groups, options),
        "communication": details.communication(groups),
        "tuning": details.tuning(all_, groups),
        "varied": varied,
        "runs": details.runs(groups, options),
        "paired": paired.table(groups, options.window),
    }
    final = [run for run in all_ if run.stage == "final"]
    script = (TEMPLATES / "script.js").read_text("utf-8")
    return render(
        "page.html",
        title=_title(groups),
        verdicts=paired.verdicts(groups, options.window),
        caption=caption(groups, options.window),
        window=options.window,
        names=names_of(groups),
        point=point,
        three=three,
        version=_version(),
        groups=groups,
        final=len(final),
        seeds=sorted({str(run.seed) for run in final}, key=lambda seed: (len(seed), seed)),
        tasks=sorted({str(one.settings.get("task.name")) for one in groups if one.settings.get("task.name")}),
        left=sum(not run.complete for run in all_),
        tables=tables,
        styles={one.label: style[one.number] for one in groups},
        pivots=contents.pivots(groups, options),
        drawn=sections.drawn(groups, options, style),
        limits=sections,
        fairness=details.fairness(groups),
        common={key: details.value(found) for key, found in common.items()},
        tuned={one.label: point(run.cell["tuned"]) for one in groups for run in one.runs if run.cell.get("tuned")},
        experiments=_experiments(groups),
        most_experiments=EXPERIMENTS,
        versions=details.versions(all_),
        command=shlex.join(command),
        script=script,
        # The one script that a browser is to run.
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _title(groups: Sequence[Group]) -> str:
    plans = list(dict.fromkeys(one.plan for one in groups if one.plan))
    return ", ".join(plans) if plans else groups[0].label if len(groups) == 1 else "Federated runs compared"


def _version() -> str:
    try:
        return version("fedkeel")
    except PackageNotFoundError:
        return "(not installed)"


def _experiments(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The experiment of each group's first seed -> who runs it, and how."""
    files: dict[str, list[str]] = {}
    for one in groups:
        if run := next((run for run in one.runs if run.toml), None):
            how = f"{one.label}: python -m server simulate experiment.toml --seed {run.seed}"
            files.setdefault(run.toml, []).append(how)
    return files
