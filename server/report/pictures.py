"""The picture of a partition: who holds how many examples of which class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Imported where used: matplotlib takes half a second that a report without pictures, and every run, can do without.

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BUBBLES = 40
"""Up to so many clients and classes each pair has a bubble; beyond, a heat map."""

NAMED = 60
"""Up to so many classes each has its name on the axis."""

Counts = NDArray[np.int64]


def partition_picture(
    class_counts: ArrayLike,
    names: Sequence[str],
    class_names: Sequence[str] | None = None,
    *,
    width: float | None = None,
) -> Figure:
    """Clients from left to right, classes from bottom to top; above them the examples of each client.

    `class_counts` (clients, classes) are whole numbers, `names` the clients' and `class_names` the classes' (default:
    their numbers). The area of a bubble, or the colour of the heat map on a logarithmic scale, is the number of
    examples. `width`: in inches; default: by how many clients there are. Save it with `figure.savefig(path)`: PNG, SVG
    or PDF by the ending.
    """
    from matplotlib.figure import Figure

    counts: Counts = np.asarray(class_counts, np.int64).reshape(len(names), -1)
    clients, classes = counts.shape
    wide, height = np.clip([2.5 + 0.3 * clients, 1.8 + 0.3 * classes], [7.5, 4.2], [14.0, 11.0])
    labels = 25 if width is None else max(2, int(4 * width))
    if width is not None:
        wide, height = width, float(np.clip(1.4 + 0.14 * classes, 0.7 * width, 1.6 * width))
    figure = Figure(figsize=(float(wide), float(height)), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2.5, float(height) - 2)])
    _sizes(above, counts.sum(axis=1))
    if max(clients, classes) <= BUBBLES:
        _bubbles(below, counts, float(min(wide * 72 / (clients + 2), height * 72 / (classes + 6))))
    else:
        _heat(figure, below, counts)
    _labels(below, names, class_names or [str(number) for number in range(classes)], labels)
    return figure


def _sizes(axes: Axes, sizes: Counts) -> None:
    edges = np.arange(len(sizes) + 1) - 0.5
    axes.stairs(sizes, edges, fill=True, color="#4c72b0")
    axes.set(ylabel="examples", ylim=(0, max(1, int(sizes.max(initial=0))) * 1.08), xlim=(edges[0], edges[-1]))
    axes.tick_params(bottom=False, labelbottom=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        axes.plot(empty, np.zeros(len(empty)), "x", color="#c44e52", clip_on=False)
        axes.set_title(f"\u00d7 {len(empty):,} empty", fontsize="small", loc="right", color="#c44e52")


def _bubbles(axes: Axes, counts: Counts, cell: float) -> None:
    """`cell` is the diameter in points that the largest count may have."""
    client, class_ = np.nonzero(counts)
    held = counts[client, class_]
    largest = max(1, int(counts.max(initial=0)))
    axes.scatter(client, class_, s=(0.95 * cell) ** 2 * held / largest, c=class_ % 10, cmap="tab10", vmin=0, vmax=9)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(f"largest bubble: {largest:,} examples", fontsize="small", loc="right")


def _heat(figure: Figure, axes: Axes, counts: Counts) -> None:
    from matplotlib.colors import LogNorm

    shown = np.ma.masked_equal(counts.T, 0)
    norm = LogNorm(1, max(2, int(counts.max(initial=0))))
    image = axes.imshow(shown, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis_r", norm=norm)
    bar = figure.colorbar(image, ax=axes, label="examples", pad=0.01)
    bar.ax.minorticks_off()
    bar.formatter = "{x:.0f}"  # type: ignore[assignment]


def _labels(axes: Axes, names: Sequence[str], class_names: Sequence[str], most: int) -> None:
    axes.set(xlabel="client", ylabel="class", ylim=(-0.5 - 0.2, len(class_names) - 0.5 + 0.2))
    every, plain = _stride(len(names), most), {"parse_math": False}  # names are no formulas
    axes.set_xticks(range(0, len(names), every), names[::every], rotation=0 if _short(names) else 60, **plain)
    every = 1 if len(class_names) <= NAMED else _stride(len(class_names), 25)
    size: Any = "small" if len(class_names) <= 25 else "x-small"
    axes.set_yticks(range(0, len(class_names), every), class_names[::every], fontsize=size, **plain)


def _short(names: Sequence[str]) -> bool:
    return max(map(len, names), default=0) <= 4


def _stride(count: int, most: int) -> int:
    """1, 2 or 5 times a power of ten, so that at most about `most` labels stand on the axis."""
    for exponent in range(9):
        for step in (1, 2, 5):
            if count <= most * step * 10**exponent:
                return int(step * 10**exponent)
    raise AssertionError(count)
