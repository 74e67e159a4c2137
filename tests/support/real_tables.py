"""scikit-learn's tables as CSV files: one at each site, its columns in an order of its own."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_csv(path: Path, columns: dict[str, Sequence[Any]]) -> Path:
    """A CSV file of columns, compressed if its name ends so."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def shuffled(columns: dict[str, Sequence[Any]], seed: int) -> dict[str, Sequence[Any]]:
    """The same columns in another order."""
    names = list(columns)
    return {names[i]: columns[names[i]] for i in np.random.default_rng(seed).permutation(len(names))}


def breast_cancer() -> tuple[dict[str, list[Any]], NDArray[np.int64]]:
    """Columns by name, 30 numbers and the diagnosis in words, and rows in an order without meaning."""
    from sklearn.datasets import load_breast_cancer

    held = load_breast_cancer()
    columns: dict[str, list[Any]] = {
        str(name).replace(" ", "_"): held.data[:, i].tolist() for i, name in enumerate(held.feature_names)
    }
    columns["diagnosis"] = [str(held.target_names[each]) for each in held.target]
    return columns, np.random.default_rng(0).permutation(len(held.target))


def diabetes() -> tuple[dict[str, list[Any]], NDArray[np.int64]]:
    """Columns by name, 10 numbers as they were measured (sex as 1 and 2) and the progression."""
    from sklearn.datasets import load_diabetes

    held = load_diabetes(scaled=False)
    columns: dict[str, list[Any]] = {name: held.data[:, i].tolist() for i, name in enumerate(held.feature_names)}
    columns["sex"] = [int(each) for each in columns["sex"]]
    columns["progression"] = held.target.tolist()
    return columns, np.random.default_rng(0).permutation(len(held.target))


def rows_of(columns: dict[str, list[Any]], rows: Sequence[int] | NDArray[np.int64]) -> dict[str, Sequence[Any]]:
    """Some rows."""
    return {name: [values[i] for i in rows] for name, values in columns.items()}


def sites(
    folder: Path, columns: dict[str, list[Any]], rows: NDArray[np.int64], tested: int, ending: str = ".csv"
) -> tuple[dict[str, Path], Path]:
    """Three sites' files, each with its columns in another order, and the server's test file of `tested` rows."""
    test = write_csv(folder / "test.csv", rows_of(columns, rows[:tested]))
    parts = np.array_split(rows[tested:], 3)
    files = {
        f"site-{i}": write_csv(folder / f"site-{i}{ending}", shuffled(rows_of(columns, part), i))
        for i, part in enumerate(parts)
    }
    return files, test
