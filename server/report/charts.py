"""Charts as SVG that stands in a page: curves with bands over seeds, heat maps, the partition."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from server.report.groups import Group
from server.report.pictures import partition_picture
from server.report.scores import POINTS, Band, Floats, thin

# Imported where used: matplotlib takes half a second that a report without pictures, and every run, can do without.

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#56B4E9", "#332288", "#000000")
"""Told apart by the color-blind and on white (Okabe and Ito's, the yellows darkened)."""

DASHES = ("", "6 2.5")
DRAWN = len(COLORS) * len(DASHES)
"""So many groups are drawn in color; the others are grey."""

CHART_POINTS = 8000
"""Points of all curves of a chart together."""

GREY = "#b8b8b8"
AXES = {"round": "round", "bytes": "{} sent, down and up", "seconds": "seconds", "clock": "simulated seconds"}

NAMES = {"worst": "{} of the worst client", "p10": "{}, 10th percentile of clients from the worst"}


@dataclass(frozen=True)
class Style:
    """How a group is drawn everywhere; `number` is the series that the legend switches."""

    number: int
    color: str
    dashes: str

    @property
    def colored(self) -> bool:
        """Whether the legend names it."""
        return self.color != GREY


def styles(groups: Sequence[Group], window: int) -> dict[int, Style]:
    """Group number -> style: one color a variant; beyond `DRAWN` variants those with the best final score have one."""
    named = names_of(groups)
    scores: dict[str, float] = {}
    for one in groups:
        scores[named[one.number]] = max(scores.get(named[one.number], -math.inf), score(one, window))
    best = set(sorted(scores, key=lambda name: -scores[name])[:DRAWN])
    drawn = {
        name: Style(number, COLORS[number % len(COLORS)], DASHES[number // len(COLORS)])
        for number, name in enumerate(name for name in scores if name in best)
    }
    grey = Style(DRAWN, GREY, "")
    return {number: drawn.get(name, grey) for number, name in named.items()}


def names_of(groups: Sequence[Group]) -> dict[int, str]:
    """Group number -> the name in the legend: the variant if that tells the groups of each point apart."""
    pairs = [(one.variant, str(one.point)) for one in groups]
    return {one.number: one.variant if len(set(pairs)) == len(pairs) else one.label for one in groups}


def score(group: Group, window: int) -> float:
    for metric in (group.headline, "loss", "train loss"):
        if (mean := group.final(metric, window)) is not None:
            return mean.mean if group.better(metric) else -mean.mean
    return -math.inf


def curves(
    groups: Sequence[Group], metric: str, axis: str, style: Mapping[int, Style], targets: Sequence[float] = ()
) -> str:
    """Each group's mean line and band as SVG; "" if no group has the metric on that axis."""
    bands = [(one, band) for one in groups if (band := one.band(metric, axis)) is not None]
    if not bands:
        return ""
    figure = _figure(4.7, 3.1)
    axes = figure.subplots()
    unit, scale = _unit(max(float(np.nanmax(band.x)) for _, band in bands)) if axis == "bytes" else ("", 1.0)
    label = AXES[axis].format(unit)
    points = max(40, min(POINTS, CHART_POINTS // len(bands)))
    for one, band in sorted(bands, key=lambda pair: style[pair[0].number].colored):
        _curve(axes, band, style[one.number], scale, points)
    low, high = axes.get_ylim()
    for target in targets:
        if low <= target <= high:
            axes.axhline(target, color="#666666", linewidth=0.8, linestyle=":")
    if metric.startswith("distance") and _positive(bands):
        axes.set_yscale("log")
    name = NAMES.get(metric, metric).format(bands[0][0].headline)
    axes.set(xlabel=label)
    axes.set_ylabel(name, parse_math=False)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    ends = "; ".join(f"{one.label} ends at {_last(band):.4g}" for one, band in bands[:DRAWN])
    return svg(figure, f"{name} against {label}: {ends}")


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


def _curve(axes: Axes, band: Band, style: Style, unit: float, points: int) -> None:
    at = thin(len(band.x), points)
    x = band.x[at] / unit
    gid = f"series-{style.number}"
    line: dict[str, Any] = {"color": style.color, "gid": gid}
    if style.dashes:
        line["dashes"] = [float(part) for part in style.dashes.split()]
    if np.isfinite(band.mean).any():
        marker = "o" if np.isfinite(band.mean).sum() == 1 else None
        width = 1.6 if style.colored else 0.9
        axes.plot(x, band.mean[at], linewidth=width, marker=marker, markersize=4, **line)
    if band.low is not None and band.high is not None and style.colored and np.isfinite(band.low).any():
        axes.fill_between(x, band.low[at], band.high[at], color=style.color, alpha=0.16, linewidth=0, gid=gid)
    for costs, values in band.single:
        at = thin(len(costs), points)
        axes.plot(costs[at] / unit, values[at], linewidth=0.7, alpha=0.7, **line)


def heat(values: Floats, names: Sequence[str], rounds: Sequence[int], label: str, higher: bool, binned: bool) -> str:
    """Clients (rows, as given) x rounds (columns) as SVG; NaN is grey, what is better lighter."""
    figure = _figure(7.2, 3.4)
    axes = figure.subplots()
    axes.set_facecolor("#dddddd")
    finite = values[np.isfinite(values)]
    # A share has its whole scale; of other values the worst hundredth would leave no color to the rest.
    low, high = (0.0, 1.0) if higher and finite.min() >= 0 and finite.max() <= 1 else _range(finite, higher)
    colors = "viridis" if higher else "viridis_r"
    edges = (0, values.shape[1], values.shape[0], 0)
    options: dict[str, Any] = {"interpolation": "none", "extent": edges, "vmin": low, "vmax": max(high, low + 1e-12)}
    image = axes.imshow(values, aspect="auto", cmap=colors, **options)
    figure.colorbar(image, ax=axes, label=label, pad=0.015)
    ticks = thin(len(rounds), 8)
    axes.set_xticks(ticks + 0.5, [str(rounds[tick]) for tick in ticks])
    rows = thin(len(names), 24) if not binned else thin(len(names), 9)
    axes.set_yticks(rows + 0.5, [names[row] for row in rows], fontsize=7, parse_math=False)
    axes.set(xlabel="round", ylabel="clients, best last" if not binned else "clients (bins), best last")
    return svg(figure, f"{label} of clients (rows) in rounds (columns)")


def _range(values: Floats, higher: bool) -> tuple[float, float]:
    low, high = np.percentile(values, (1, 100) if higher else (0, 99))
    return float(low), float(high)


def partition(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """The partition picture of class counts (clients, classes) as SVG."""
    counts_ = np.array(counts, np.int64)
    with _context():
        figure = partition_picture(counts_, names)
        return svg(figure, f"{len(names)} clients by {counts_.shape[1]} classes: number of training examples of each")


def bin_rows(values: Floats, names: Sequence[str], most: int, higher: bool = True) -> tuple[Floats, list[str], bool]:
    """Rows sorted by their last known value (the worst first, empty ones before), neighbors averaged into `most`.

    Shapes (clients, rounds) to (rows, rounds). The flag says whether rows were averaged.
    """
    sign = 1.0 if higher else -1.0
    last = np.array([sign * row[np.isfinite(row)][-1] if np.isfinite(row).any() else -np.inf for row in values])
    order = np.argsort(last, kind="stable")
    values, names = values[order], [names[place] for place in order]
    if len(values) <= most:
        return values, list(names), False
    parts = np.array_split(np.arange(len(values)), most)
    rows = np.stack([_mean(values[part], 0) for part in parts])
    return rows, [f"{part[0] + 1}-{part[-1] + 1}" if len(part) > 1 else f"{part[0] + 1}" for part in parts], True


def bin_columns(values: Floats, rounds: Sequence[int], most: int) -> tuple[Floats, list[int]]:
    """Neighboring columns averaged into at most `most`, named by their last round."""
    if values.shape[1] <= most:
        return values, list(rounds)
    parts = np.array_split(np.arange(values.shape[1]), most)
    return np.stack([_mean(values[:, part], 1) for part in parts], axis=1), [rounds[part[-1]] for part in parts]


def _mean(values: Floats, axis: int) -> Floats:
    """Of the finite values; NaN without any."""
    known = np.isfinite(values)
    count = known.sum(axis=axis)
    total: NDArray[np.float64] = np.where(known, values, 0.0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    with _context():
        return Figure(figsize=(width, height), layout="constrained")


def _context() -> Any:
    import matplotlib

    plain: Any = {"svg.fonttype": "none", "svg.hashsalt": "fedkeel", "font.size": 9, "axes.formatter.useoffset": False}
    return matplotlib.rc_context(plain | {"font.family": "sans-serif", "axes.edgecolor": "#777777"})


_REFERENCE = re.compile(r'(?:url\(#|href="#)([^)"]+)')
_PICTURES = iter(range(10**9))


def svg(figure: Figure, text: str) -> str:
    """The figure as an element of a page: scales with its box, `text` stands for it, ids are its own.

    Series that the legend switches have `data-series`. Numbers are cut to what a screen shows.
    """
    with _context(), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("xlink:href", "href")
    prefix, referred = f"p{next(_PICTURES)}-", set(_REFERENCE.findall(drawn))

    def named(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("series-"):
            return f' data-series="{name.removeprefix("series-")}"'
        return f' id="{prefix}{name}"' if name in referred else ""

    drawn = re.sub(r'\s+id="([^"]*)"', named, drawn)
    drawn = _REFERENCE.sub(lambda match: match[0].replace("#", f"#{prefix}"), drawn)
    drawn = re.sub(r"(\d\.\d\d)\d+", r"\1", drawn)
    box = re.search(r'viewBox="[^"]*"', drawn)
    head = f'<svg role="img" aria-label="{html.escape(text)}" {box[0] if box else ""}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, drawn, count=1)
