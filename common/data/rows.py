"""Labelled examples from the rows of tables: vectors, decoded images, or paths of image files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.arrays import KEYS, SourceSettings
from common.data.columns import difference, listed
from common.data.image_folder import TESTS, read_images
from common.data.raw import Raw
from common.data.tables import ENDINGS, column, read_table, splits
from common.errors import SettingsError, SiteError

INPUTS = (*KEYS["inputs"], "image", "img", "pixels", "features", "path", "file", "file_name", "filename")
LABELS = (*KEYS["labels"], "label", "target", "class", "fine_label", "character", "digit")
GROUPS = (*KEYS["groups"], "writer_id", "client_id", "user_id", "group_id")


SAVED = ("dataset_dict.json", "state.json")
"""What Hugging Face's `datasets` leaves in the folder of a data set."""


def holds_tables(path: Path) -> bool:
    """Whether a folder is a saved data set, or has tables in it."""
    return any(file.name in SAVED or file.name.endswith(ENDINGS) for file in path.iterdir())


def read_rows(path: Path, settings: SourceSettings, shape: tuple[int, ...] | None) -> Raw:
    """The examples of a table, or of the tables `train` and, for a central test set, the first of `test`, `val`,
    `valid`, `validation` in a folder.

    Inputs: the column `task.inputs` or the first known one: lists of numbers, images, or paths of image files,
    relative to the table. Without such a column all columns of numbers but for label and group are a vector.
    """
    held = splits(path)
    first = next((name for name in ("train", *held) if name in held), None)
    if len(held) > 1 and first != "train":
        raise SettingsError(f"{path} holds the tables {', '.join(held)}; allowed: one, or one called 'train'")
    train = read_table(path, first)
    test = next((name for name in TESTS if name in held and name != first), None)
    inputs, labels, groups, names = _columns(train, settings, shape, path)
    if test is None:
        return Raw(inputs, labels, groups, columns=names)
    test_inputs, test_labels, _, others = _columns(read_table(path, test), settings, shape, path)
    if told := difference(others, names):
        raise SiteError(
            "data-columns", f"{path}: the table {test!r} {told}; the one it is trained on has {listed(names)}"
        )
    return Raw(inputs, labels, groups, test_inputs, test_labels, columns=names)


def _columns(
    table: dict[str, Any], settings: SourceSettings, shape: tuple[int, ...] | None, path: Path
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, tuple[str, ...]]:
    """Inputs, labels, groups, and the names of the columns that are the inputs side by side."""
    labels = _flat(column(table, settings.labels, LABELS, "task.labels", path))
    named = [settings.groups] if settings.groups else [name for name in GROUPS if name in table]
    groups = _flat(column(table, named[0], GROUPS, "task.groups", path)) if named else None
    if settings.inputs is None and not any(name in table for name in INPUTS):
        # The label's column is whichever array it came from.
        used = {settings.labels or next(name for name in LABELS if name in table), *named[:1]}
        rest = {name: values for name, values in table.items() if name not in used}
        return _vectors(rest, path), labels, groups, tuple(rest)
    inputs = column(table, settings.inputs, INPUTS, "task.inputs", path)
    if isinstance(inputs, np.ndarray):
        return inputs, labels, groups, ()
    if not all(isinstance(each, str) for each in inputs):
        raise SettingsError(f"{path}: the inputs are {type(inputs[0]).__name__}; allowed: numbers, images, paths")
    base = path if path.is_dir() else path.parent
    return read_images([base / each for each in inputs], shape, settings.resize), labels, groups, ()


def _flat(values: Any) -> NDArray[Any]:
    """A column of numbers or of text as an array."""
    return values if isinstance(values, np.ndarray) else np.array(values, dtype=str)


def _vectors(table: dict[str, Any], path: Path) -> NDArray[np.float64]:
    """Columns of numbers side by side, (n, d)."""
    for name, values in table.items():
        if not (isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iufb"):
            raise SettingsError(
                f"{path}: column {name!r} is no number; allowed: columns of numbers beside label and group, or one "
                "column of inputs, named with task.inputs"
            )
    if not table:
        raise SettingsError(f"{path}: no column of inputs; name it with task.inputs")
    return np.column_stack([values.astype(np.float64) for values in table.values()])
