"""Columns of a table by name: inputs in the order that the experiment names them, categories as numbers, targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.arrow import Column, Table
from common.data.image_folder import TESTS
from common.data.tables import BLANK, header, place, read_table, splits
from common.errors import SettingsError, SiteError
from common.settings import printable, shown

MOST_NAMED = 20
"""Columns that an error names."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are learnt from, and how.

    `inputs` in order; `categories`: column -> its values in order, each of which becomes an input of 0 or 1; `missing`:
    what stands for a cell without a value, "mean" for one that is filled in later (NaN until then), None: an error.
    """

    inputs: tuple[str, ...]
    target: str
    categories: Mapping[str, tuple[str, ...]]
    missing: float | str | None = None

    @property
    def numbers(self) -> tuple[str, ...]:
        """The inputs that are numbers."""
        return tuple(name for name in self.inputs if name not in self.categories)

    @property
    def names(self) -> tuple[str, ...]:
        """What each of the model's inputs is: the column, of a category column=value."""
        return tuple(each for name in self.inputs for each in self._of(name))

    @property
    def scaled(self) -> NDArray[np.bool_]:
        """Which of `names` are numbers, (d,)."""
        return np.array([name not in self.categories for name in self.inputs for _ in self._of(name)], bool)

    def _of(self, name: str) -> list[str]:
        return [f"{name}={value}" for value in self.categories[name]] if name in self.categories else [name]

    def encode(self, table: Table, path: Path) -> NDArray[np.float64]:
        """The inputs (n, d) of a table of `path`, in float64.

        Raises SiteError, with line and column, for a cell that is no number, has no value or is no declared category.
        """
        parts = [
            one_hot(table[name], self.categories[name], self.missing is not None, name, path)
            if name in self.categories
            else numbers(table[name], self.missing, name, path)[:, None]
            for name in self.inputs
        ]
        return np.hstack(parts)


def part_of(path: Path, test: bool = False) -> str | None:
    """Which of several tables in a folder is the training one or, with `test`, the test one; None for the only one.

    Raises SettingsError if there are several and none is called so.
    """
    held = splits(path)
    found = next((name for name in (TESTS if test else ("train",)) if name in held), None)
    if found is None and len(held) > 1:
        wanted = " or ".join(map(repr, TESTS if test else ("train",)))
        raise SettingsError(f"{path} holds the tables {', '.join(held)}; allowed: one, or one called {wanted}")
    return found


def read_columns(path: Path, columns: Sequence[str], split: str | None = None) -> Table:
    """Those columns of a table, found by name wherever they stand in it.

    Raises SiteError that says which it lacks, and which it has that nobody asked for.
    """
    held = header(path, split)
    if lacking := [name for name in columns if name not in held]:
        more = [name for name in held if name not in columns]
        told = f"lacks {listed(lacking)}"
        rest = f"; it has, beside those asked for, {listed(more)}" if more else ""
        raise SiteError("data-columns", f"{path} {told}{rest}", told)
    return read_table(path, split, columns)


def difference(held: Sequence[str], wanted: Sequence[str]) -> str:
    """How columns differ from those that are wanted, names and order; "" if they do not."""
    lacking, more = [n for n in wanted if n not in held], [n for n in held if n not in wanted]
    parts = [f"lacks {listed(lacking)}"] if lacking else []
    parts += [f"has {listed(more)} too many"] if more else []
    if not parts and (moved := [n for n, other in zip(held, wanted, strict=True) if n != other]):
        parts = [f"has its columns in another order, from {listed(moved[:1])} on"]
    return "; ".join(parts)


def listed(names: Iterable[str]) -> str:
    """Names of columns, for a line."""
    held = list(names)
    more = f" and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else ""
    return ", ".join(printable(name[:100]) or repr(name) for name in held[:MOST_NAMED]) + more


def numbers(values: Column, missing: float | str | None, name: str, path: Path) -> NDArray[np.float64]:
    """A column of numbers (n,); NaN where a value is missing and `missing` is "mean"."""
    if isinstance(values, np.ndarray) and (values.ndim != 1 or values.dtype.kind not in "biuf"):
        raise SiteError("data-cells", f"{path}: column {name!r} holds {values.dtype} {values.shape[1:]}, no numbers")
    if isinstance(values, np.ndarray):
        held = values.astype(np.float64)
    else:
        held = np.array([_number(each, row, name, path) for row, each in enumerate(values)], np.float64)
    if (wild := np.isinf(held)).any():
        row = int(wild.argmax())
        raise SiteError("data-cells", f"{place(path, row)}: column {name!r} is infinite")
    if (blank := np.isnan(held)).any():
        if missing is None:
            row = int(blank.argmax())
            raise SiteError(
                "data-cells",
                f"{place(path, row)}: column {name!r} has no value, as {int(blank.sum())} of its {len(held)} cells; "
                "task.missing may stand for them: 'mean' or a number",
            )
        if not isinstance(missing, str):
            held[blank] = missing
    return held


def _number(value: Any, row: int, name: str, path: Path) -> float:
    if value is None:
        return np.nan
    if isinstance(value, str):
        if value.strip().lower() in BLANK:
            return np.nan
        value = value if "_" not in value else None  # Python alone takes 1_000 for a number
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise SiteError(
            "data-cells",
            f"{place(path, row)}: column {name!r} is {shown(value)}, no number; a column of words is declared with "
            f"task.categories.{name} = [...]",
        ) from None


def one_hot(values: Column, allowed: Sequence[str], blanks: bool, name: str, path: Path) -> NDArray[np.float64]:
    """A column of categories as 0 and 1, (n, categories); with `blanks` a cell without a value is 0 everywhere."""
    codes = {text: code for code, text in enumerate(allowed)}
    found = [codes.get(text_of(each), -1) for each in values]
    result = np.zeros((len(found), len(allowed)))
    for row, code in enumerate(found):
        if code < 0:
            text = text_of(values[row])
            blank = text.lower() in BLANK
            if blank and blanks:
                continue
            told = "no value" if blank else f"the value {shown(text)}"
            raise SiteError(
                "data-cells", f"{place(path, row)}: column {name!r} has {told}; allowed: {', '.join(allowed)}"
            )
        result[row, code] = 1
    return result


def text_of(value: Any) -> str:
    """A category as text, the same for a number, text and a truth value from any kind of file."""
    if value is None:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (float, np.floating)):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    return str(value).strip()


def class_names(values: Column) -> list[str]:
    """The classes that a target column holds, sorted: as numbers if all are."""
    found = Counter(map(text_of, values)).keys()
    if all(each.lstrip("-").isdecimal() for each in found):
        return sorted(found, key=int)
    return sorted(found)


def class_numbers(values: Column, classes: Sequence[str], name: str, path: Path) -> NDArray[np.int64]:
    """A target column as numbers of classes (n,): by name, or as they are where the classes are called 0, 1, ..."""
    codes = {text: code for code, text in enumerate(classes)}
    found = np.array([codes.get(text_of(each), -1) for each in values], np.int64)
    if (unknown := found < 0).any():
        row = int(unknown.argmax())
        raise SiteError(
            "data-labels",
            f"{place(path, row)}: column {name!r} has {shown(text_of(values[row]))}; allowed: {listed(classes)}",
        )
    return found
