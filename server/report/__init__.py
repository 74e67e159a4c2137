"""Compare runs and plans: one self-contained HTML page, the same tables as Markdown, everything as CSV and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.errors import SettingsError
from common.metrics.target import Target
from server.report import contents, details, paired, paper
from server.report.contents import Options
from server.report.export import export
from server.report.found import find
from server.report.groups import Group, group
from server.report.order import ordered
from server.report.page import page
from server.report.runs import Run

DEFAULT_TARGET = Target(0.9)
"""Of an accuracy; of no other metric a value is known that anybody would want."""


def write(
    folders: Sequence[Path],
    targets: Sequence[Target | float],
    out: Path,
    *,
    smoothing: int = 1,
    window: int = 5,
    tables: Path | None = None,
    figures: Path | None = None,
    percent: bool = False,
    command: Sequence[str] = (),
) -> str:
    """Write the page, with `tables` also report.md and the data, with `figures` what a paper needs (shares in
    `percent`), and return the tables as Markdown.

    `folders` are run folders or hold such (a plan's). Without `targets` those of the plans are taken, else 0.9 where
    the headline is accuracy.
    Raises SettingsError for a folder without a history or a page that cannot be written.
    """
    runs = find(folders)
    groups = ordered(group(runs))
    if not groups:
        raise SettingsError(f"{', '.join(repr(str(f)) for f in folders)} holds runs of a tuning only")
    usual = (DEFAULT_TARGET,) if all(one.headline == "accuracy" for one in groups) else ()
    options = Options.of(targets or _planned(runs) or usual, smoothing, window)
    text = markdown(groups, runs, options)
    _save(out, page(groups, runs, options, command), "page")
    if tables is not None:
        export(groups, [run for run in runs if run.stage != "final"], options, tables)
        _save(tables / "report.md", text + "\n", "report")
    if figures is not None:
        paper.write(groups, options, figures, percent)
    return text


def markdown(groups: Sequence[Group], runs: Sequence[Run], options: Options) -> str:
    """The page's tables."""
    tables = [
        contents.summary(groups, options),
        *contents.pivots(groups, options),
        paired.table(groups, options.window),
        contents.targets(groups, options),
        details.communication(groups),
        details.unfinished(runs),
        details.tuning(runs, groups),
        details.differing(groups)[0],
    ]
    return "\n\n".join(table.markdown() for table in tables if table.rows)


def _planned(runs: Sequence[Run]) -> tuple[Target, ...]:
    found = set()
    for run in runs:
        for target in run.cell.get("targets") or ():
            with suppress(ValueError):
                found.add(Target.parse(target))
    return tuple(sorted(found, key=lambda target: (target.metric, target.value)))


def _save(path: Path, text: str, what: str) -> None:
    try:
        path.write_text(text, "utf-8", errors="replace")
    except OSError as error:
        raise SettingsError(f"{what} {str(path)!r} cannot be written: {error}") from None
