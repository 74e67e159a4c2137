"""Charts of a report, for the page and for a paper: curves with bands over seeds, heat maps, the partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from server.report.groups import Group
from server.report.pictures import partition_picture
from server.report.scores import POINTS, Band, Floats, thin
from server.report.styles import Style, names_of

# Imported where used: matplotlib takes half a second that a report without pictures, and every run, can do without.

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHART_POINTS = 8000
"""Points of all curves of a chart together."""

LEGEND = 8
"""A chart with more curves has no legend of its own: in a paper it would be larger than the chart."""

AXES = {"round": "round", "bytes": "{} sent, down and up", "seconds": "seconds", "clock": "simulated seconds"}

NAMES = {
    "worst": "{} of the worst client",
    "p10": "{}, 10th percentile of clients from the worst",
    "drift": "agreement of uploads (cosine)",
}
"""What a metric is called where its name alone does not say it."""

Limits = tuple[float, float]


@dataclass(frozen=True)
class Look:
    """Width and height in inches, sizes of text and lines in points; `paper`: markers and a legend within the chart,
    text that needs no font of the reader's; `percent`: shares times a hundred."""

    width: float = 4.7
    height: float = 3.1
    font: float = 9.0
    line: float = 1.6
    paper: bool = False
    percent: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """matplotlib's."""
        found: dict[str, Any] = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
        found |= {"font.size": self.font, "axes.edgecolor": "#777777", "axes.formatter.useoffset": False}
        found |= {"axes.titlesize": "medium", "legend.fontsize": "medium", "svg.hashsalt": "fedkeel"}
        # Paths and TrueType: the figure looks alike wherever it is printed.
        return found | ({"svg.fonttype": "path", "pdf.fonttype": 42, "axes.linewidth": 0.6} if self.paper else {})


SCREEN, WIDE = Look(), Look(7.2, 3.4)

Drawn = TypeVar("Drawn", bound=Callable[..., Any])


def _looked(draw: Drawn) -> Drawn:
    """With the settings of the `look` that it is given."""

    @wraps(draw)
    def drawn(*given: Any, **named: Any) -> Any:
        import matplotlib

        settings: Any = named.get("look", SCREEN).settings
        with matplotlib.rc_context(settings):
            return draw(*given, **named)

    return cast("Drawn", drawn)


@_looked
def curves(
    groups: Sequence[Group],
    metric: str,
    axis: str,
    style: Mapping[int, Style],
    targets: Sequence[float] = (),
    *,
    limits: Limits | None = None,
    look: Look = SCREEN,
) -> tuple[Figure, str] | None:
    """Each group's mean line and band, and the same in words; None if no group has the metric on that axis.

    `limits`: of the values, for charts that are compared.
    """
    from matplotlib.ticker import MaxNLocator

    bands = [(one, band) for one in groups if (band := one.band(metric, axis)) is not None]
    if not bands:
        return None
    figure = _figure(look)
    axes = figure.subplots()
    unit, scale = _unit(max(float(np.nanmax(band.x)) for _, band in bands)) if axis == "bytes" else ("", 1.0)
    label = AXES[axis].format(unit)
    points = max(40, min(POINTS, CHART_POINTS // len(bands)))
    shown = 100.0 if look.percent and is_share(groups, metric) else 1.0
    for one, band in sorted(bands, key=lambda pair: style[pair[0].number].colored):
        _curve(axes, band, style[one.number], (scale, shown), points, look)
    if limits is not None:
        axes.set_ylim(*(limit * shown for limit in limits))
    low, high = axes.get_ylim()
    for target in targets:
        if low <= target * shown <= high:
            axes.axhline(target * shown, color="#666666", linewidth=0.8, linestyle=":")
    if metric.startswith("distance") and _positive(bands):
        axes.set_yscale("log")
    name = NAMES.get(metric, metric).format(bands[0][0].headline)
    axes.set(xlabel=label)
    axes.set_ylabel(f"{name} (%)" if shown > 1 else name, parse_math=False)
    if axis == "round":
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if look.paper and len({style[one.number] for one in groups}) <= LEGEND:
        _legend(figure, groups, style, look)
    ends = "; ".join(f"{one.label} ends at {_last(band):.4g}" for one, band in bands[:16])
    return figure, f"{name} against {label}: {ends}"


def limits_of(groups: Sequence[Group], metric: str, axis: str = "round") -> Limits | None:
    """Where all curves and bands of the groups fit."""
    found = [band for one in groups if (band := one.band(metric, axis)) is not None]
    parts = [part for band in found for part in (band.mean, band.low, band.high, *(y for _, y in band.single))]
    values = np.concatenate([part for part in parts if part is not None] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    room = 0.04 * (high - low) or 0.01
    return low - room, high + room


def is_share(groups: Sequence[Group], metric: str) -> bool:
    """Whether percent may be said of it: more is better, and all values lie from 0 to 1."""
    runs = [run for one in groups for run in one.used if metric in run.metrics]
    values = [run.metrics[metric].values for run in runs]
    known = np.concatenate([found[np.isfinite(found)] for found in values] or [np.zeros(0)])
    return bool(len(known) and known.min() >= 0 and known.max() <= 1 and all(run.better(metric) for run in runs))


@_looked
def legend(groups: Sequence[Group], style: Mapping[int, Style], *, look: Look = SCREEN) -> Figure | None:
    """A legend alone, for charts that have no room for one; None where they have."""
    if len({style[one.number] for one in groups}) <= LEGEND:
        return None
    figure = _figure(look)
    rows = _legend(figure, groups, style, look)
    figure.set_size_inches(look.width, (rows * 1.45 * look.font + 6) / 72)
    return figure


def _legend(figure: Figure, groups: Sequence[Group], style: Mapping[int, Style], look: Look) -> int:
    """Above the chart, in as many columns as there is width for; how many rows it has, 0 where there is none."""
    from matplotlib.lines import Line2D

    named, items = names_of(groups), {}
    for one in groups:
        found = style[one.number]
        name = named[one.number] if found.colored else "others"
        items[name] = Line2D([], [], linewidth=look.line, markersize=4, **_line(found))
    if len(items) < 2:
        return 0
    longest = max(map(len, items))
    columns = max(1, min(len(items), int(look.width * 72 / (look.font * (0.62 * longest + 3.6)))))
    made = figure.legend(
        items.values(), items, loc="outside upper center", ncols=columns, frameon=False, borderaxespad=0.1,
        columnspacing=1.0, handlelength=2.2, handletextpad=0.5,
    )  # fmt: skip
    for text in made.get_texts():
        text.set_parse_math(False)
    return -(-len(items) // columns)


def _line(style: Style) -> dict[str, Any]:
    """matplotlib's words for a style."""
    line: dict[str, Any] = {"color": style.color, "marker": style.marker or None}
    if style.dashes:
        line["dashes"] = [float(part) for part in style.dashes.split()]
    return line


def _unit(most: float) -> tuple[str, float]:
    """The unit of an axis of bytes that goes up to `most`."""
    scale = 1.0
    for unit in ("B", "kB", "MB", "GB"):
        if most < 1000 * scale:
            return unit, scale
        scale *= 1000
    return "TB", scale


def _positive(bands: Sequence[tuple[Group, Band]]) -> bool:
    values = np.concatenate([band.mean for _, band in bands])
    values = values[np.isfinite(values)]
    return bool(len(values) and (values > 0).all())


def _last(band: Band) -> float:
    known = band.mean[np.isfinite(band.mean)]
    return float(known[-1]) if len(known) else float("nan")


def _curve(axes: Axes, band: Band, style: Style, scales: tuple[float, float], points: int, look: Look) -> None:
    at, (unit, shown) = thin(len(band.x), points), scales
    x, mean = band.x[at] / unit, band.mean[at] * shown
    line = _line(style) | {"gid": f"series-{style.number}"}
    if np.isfinite(mean).any():
        alone = np.isfinite(mean).sum() == 1
        # Each curve has its markers at other places, so that they do not hide one another.
        every = max(1, len(x) // 7)
        marked: dict[str, Any] = {
            "markevery": 1 if alone else (style.number * every // 4 % every, every),
            "markersize": 4,
        }
        width = look.line if style.colored else 0.6 * look.line
        axes.plot(x, mean, linewidth=width, markeredgewidth=0, **marked, **line)
    if band.low is not None and band.high is not None and style.colored and np.isfinite(band.low).any():
        low, high = band.low[at] * shown, band.high[at] * shown
        axes.fill_between(x, low, high, color=style.color, alpha=0.16, linewidth=0, gid=line["gid"])
    for costs, values in band.single:
        at = thin(len(costs), points)
        axes.plot(costs[at] / unit, values[at] * shown, linewidth=0.7, alpha=0.7, **line | {"marker": None})


@dataclass(frozen=True)
class Heat:
    """What a heat map shows: `values` (rows, columns) of clients, the worst first, in rounds; NaN where there is none.

    `binned`: rows are averages of neighbors. `words` stand under it, `group` is whose run it is.
    """

    group: str
    words: str
    label: str
    higher: bool
    values: Floats
    names: Sequence[str]
    rounds: Sequence[int]
    binned: bool

    @property
    def telling(self) -> bool:
        """Whether there is something to see: several clients and rounds, values that differ and are not mere specks."""
        known = self.values[np.isfinite(self.values)]
        several = min(self.values.shape) > 1
        return bool(several and known.size >= 0.1 * self.values.size and np.ptp(known) > 1e-6 * np.abs(known).max())


def scale_of(heats: Sequence[Heat]) -> Limits:
    """One scale for maps of one metric: of some values the worst hundredth would leave no color to the rest."""
    known = np.concatenate([heat.values[np.isfinite(heat.values)] for heat in heats])
    low, high = np.percentile(known, (1, 100) if heats[0].higher else (0, 99))
    return float(low), float(max(high, low + 1e-12))


@_looked
def heat(shown: Heat, scale: Limits, *, look: Look = WIDE) -> Figure:
    """Clients (rows, as given) x rounds (columns); NaN is grey, what is better lighter."""
    figure = _figure(look)
    axes = figure.subplots()
    axes.set_facecolor("#dddddd")
    values, names, rounds = shown.values, shown.names, shown.rounds
    edges = (0, values.shape[1], values.shape[0], 0)
    options: dict[str, Any] = {"interpolation": "none", "extent": edges, "vmin": scale[0], "vmax": scale[1]}
    image = axes.imshow(values, aspect="auto", cmap="viridis" if shown.higher else "viridis_r", **options)
    bar = figure.colorbar(image, ax=axes, pad=0.015)
    bar.ax.set_ylabel(shown.label, parse_math=False)
    ticks = thin(len(rounds), 8)
    axes.set_xticks(ticks + 0.5, [str(rounds[tick]) for tick in ticks])
    rows = thin(len(names), 9 if look.paper or shown.binned else 24)
    axes.set_yticks(rows + 0.5, [names[row] for row in rows], fontsize=min(look.font, 7), parse_math=False)
    axes.set(xlabel="round", ylabel="clients (bins), best last" if shown.binned else "clients, best last")
    return figure


@_looked
def partition(counts: Sequence[Sequence[int]], names: Sequence[str], *, look: Look = SCREEN) -> Figure:
    """The partition picture of class counts (clients, classes)."""
    return partition_picture(np.array(counts, np.int64), names, width=look.width if look.paper else None)


def _figure(look: Look) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(look.width, look.height), layout="constrained")
