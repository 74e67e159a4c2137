"""A report's charts and tables as files for a paper: PDF and SVG a column wide, LaTeX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import SettingsError
from server.compare.folder_names import slug
from server.report import charts, contents, paired
from server.report.caption import caption
from server.report.charts import Look
from server.report.contents import Options
from server.report.groups import Group
from server.report.latex import latex
from server.report.sections import PANELS, PARTITIONS, heats_of, metrics_of, partitions_of, points_of, targets_of
from server.report.styles import styles
from server.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # takes half a second that a report without pictures can do without

COLUMN = 3.3
"""Inches: a column of most two-column styles."""


def write(groups: Sequence[Group], options: Options, folder: Path, percent: bool = False) -> list[Path]:
    """Each chart as .pdf and .svg, each table as .tex, and the line for a caption as caption.txt.

    `percent`: shares times a hundred. Raises SettingsError where nothing is a share, or for a folder that cannot be
    written.
    """
    if percent and not any(charts.is_share([one], one.headline) for one in groups):
        names = ", ".join(dict.fromkeys(one.headline for one in groups))
        raise SettingsError(f"--percent: {names} is no share: more has to be better, and all values from 0 to 1")
    written: list[Path] = []
    said = caption(groups, options.window)
    taken: Counter[str] = Counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in _figures(groups, options, percent):
            taken[name] += 1
            path = folder / (name if taken[name] == 1 else f"{name}-{taken[name]}")
            written += _save(figure, path)
        for name, table in _tables(groups, options, percent):
            path = folder / f"{name}.tex"
            path.write_text(latex(table, said, percent), "utf-8")
            written.append(path)
        (folder / "caption.txt").write_text(said + "\n", "utf-8")
    except OSError as error:
        raise SettingsError(f"figures in {str(folder)!r} cannot be written: {error}") from None
    return [*written, folder / "caption.txt"]


def _tables(groups: Sequence[Group], options: Options, percent: bool) -> Iterator[tuple[str, Table]]:
    tables = [contents.summary(groups, options), *contents.pivots(groups, options), contents.targets(groups, options)]
    for table in (*tables, paired.table(groups, options.window, percent)):
        if table.rows:
            yield _name(table.title), table


def _figures(groups: Sequence[Group], options: Options, percent: bool) -> Iterator[tuple[str, Figure]]:
    look = Look(COLUMN, 2.3, 8.0, 1.2, paper=True, percent=percent)
    style, points = styles(groups, options.window), points_of(groups)
    of_clients = {"worst": "worst-client", "p10": "clients-10th-percentile", "drift": "agreement"}
    for point, members in points[:PANELS]:
        for metric in (*metrics_of(groups), *of_clients):
            lines = targets_of(metric, members, options)
            for axis in charts.AXES if metric not in of_clients else ("round",):
                if made := charts.curves(members, metric, axis, style, lines, look=look):
                    name = f"{_name(of_clients.get(metric, metric)) or 'metric'}-by-{axis}"
                    yield "--".join(filter(None, (name, _name(point)))), made[0]
    if (legend := charts.legend(groups, style, look=look)) is not None:
        yield "legend", legend
    for heat, scale in heats_of(groups, options)[0]:
        yield f"clients--{_name(heat.group)}", charts.heat(heat, scale, look=look)
    found = partitions_of(groups)[:PARTITIONS]
    for counts_of, (names, counts, whose) in enumerate(found, 1):
        name = "partition" if len(found) == 1 else f"partition-{counts_of}--{_name(whose[0])}"
        yield name, charts.partition(counts, names, look=look)


def _name(words: str) -> str:
    """A file's name without a dot, which LaTeX would take for the beginning of an ending."""
    return slug(words).replace(".", "_")


def _save(figure: Figure, path: Path) -> list[Path]:
    """As PDF and SVG, without a date: the same runs make the same files."""
    import matplotlib  # takes half a second that a report without pictures can do without

    settings: Any = Look(paper=True).settings
    with matplotlib.rc_context(settings):
        figure.savefig(pdf := path.with_name(path.name + ".pdf"), metadata={"CreationDate": None})
        figure.savefig(svg := path.with_name(path.name + ".svg"), metadata={"Date": None})
    return [pdf, svg]
