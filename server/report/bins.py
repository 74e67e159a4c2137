"""Rows and columns of a heat map that are too many to be seen, averaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from server.report.scores import Floats


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
