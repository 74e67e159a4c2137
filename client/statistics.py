"""What a site tells about its data when it is asked for statistics: sums, as coarse as its policy says.

Of its own table (CSV, JSON lines, parquet) each column by name, with what is missing in it; of arrays and images each
channel, or each number of a short vector; of texts their lengths; of labels how many there are of each. A column that
names people or groups is left out. A value that is not finite is one that is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.policy import Policy
from common.data.arrays import KEYS, opened
from common.data.examples import Examples
from common.data.rows import GROUPS, LABELS, holds_tables
from common.data.tables import BLANK, ENDINGS, read_table, splits
from common.data.tokens import PADDING
from common.errors import Denied, SettingsError
from strategies.protocol.sums import MOST_CLASSES, MOST_COLUMNS, ColumnSums, Kind, SiteSums, StatisticsHead, read_asked

MOST_PARTS = 64
"""A longer vector is one column of all its numbers."""
MOST_ANSWERS = 60
"""Of one process: whoever asks again and again with other edges learns single values from the differences."""

_answered: Counter[str] = Counter()


@dataclass(frozen=True)
class Column:
    """Values of one column: numbers (n,) or (n, values an example), missing ones as NaN; or labels as text."""

    kind: Kind
    numbers: NDArray[np.float64] | None = None
    labels: Sequence[str] = ()
    missing: int = 0

    @property
    def examples(self) -> int:
        """How many examples have a value."""
        if self.numbers is None:
            return len(self.labels) - self.missing
        known = np.isfinite(self.numbers)
        return int((known if known.ndim == 1 else known.any(axis=1)).sum())


def check_allowed(policy: Policy, own: bool) -> None:
    """Raise Denied if the policy does not allow statistics. `own`: as of `answer`."""
    if not (policy.statistics if policy.statistics is not None else own):
        raise Denied("statistics-denied", "the site's policy does not allow statistics: statistics = true")


def answer(head: StatisticsHead, columns: Mapping[str, Column], examples: int, policy: Policy, own: bool) -> str:
    """A site's answer, as JSON of `SiteSums`. `own`: asked in a process of the user's own, where no policy hides what
    lies there anyway. Raises Denied if the policy does not allow statistics."""
    check_allowed(policy, own)
    least = count_answer(policy, own)
    asked = read_asked(head.asked)
    told = {
        name: _sums(name, each, head.step, asked, least, policy.statistics_digits) for name, each in columns.items()
    }
    total = examples if examples >= least else 0
    return SiteSums(examples=total, columns={k: v for k, v in told.items() if v is not None}).model_dump_json()


def count_answer(policy: Policy, own: bool) -> int:
    """Note that one more answer is given; returns the smallest count that may be told in it. Raises Denied if there
    were too many."""
    if not own:
        _answered["all"] += 1
        if _answered["all"] > MOST_ANSWERS:
            raise Denied(
                "statistics-denied",
                f"{MOST_ANSWERS} statistics were answered since this site started: more after a new start",
            )
    return (policy.statistics_min_count or 1) if policy.statistics_min_count is not None or own else 10


def _sums(
    name: str, column: Column, step: str, asked: Mapping[str, Sequence[float]], least: int, digits: int | None
) -> ColumnSums | None:
    count = column.examples
    if count < least:
        return ColumnSums(kind=column.kind, examples=0, withheld=f"fewer than {least} values")
    if column.numbers is None:
        return _labels(column, count, least, digits) if step == "totals" else None
    values = column.numbers[np.isfinite(column.numbers)]
    missing = column.numbers.size - values.size
    whole: dict[str, Any] = {"kind": column.kind, "examples": count, "count": int(values.size)}
    if step == "totals":
        hidden = 0 < missing < least
        return ColumnSums(
            **whole,
            missing=0 if hidden else missing,
            values=[_coarse(_total(values), digits)],
            withheld=f"fewer than {least} missing" if hidden else "",
        )
    if name not in asked:
        return None
    if step == "deviations":
        if len(asked[name]) != 1:
            raise SettingsError("deviations are asked from one mean")
        off = values - asked[name][0]
        return ColumnSums(**whole, values=[_coarse(_total(off), digits), _coarse(_total(off * off), digits)])
    if step == "bins":
        edges = np.asarray(asked[name])
        if len(edges) < 1 or np.any(np.diff(edges) <= 0):
            raise SettingsError("edges of bins rise")
        bins = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
        kept, small = _enough(bins, least)
        return ColumnSums(**whole, values=[_coarse(float(each), digits) for each in kept], withheld=small)
    raise SettingsError("statistics are asked in three steps: totals, deviations, bins")


def _labels(column: Column, count: int, least: int, digits: int | None) -> ColumnSums:
    found = Counter(label[:100] if label.isprintable() else "?" for label in column.labels if label)
    if len(found) > MOST_CLASSES:
        return ColumnSums(kind="labels", examples=count, count=count, withheld=f"more than {MOST_CLASSES} classes")
    names = sorted(found)
    kept, small = _enough(np.array([found[name] for name in names]), least)
    classes = {name: int(_coarse(float(n), digits)) for name, n in zip(names, kept, strict=True) if n}
    missing = column.missing if not 0 < column.missing < least else 0
    return ColumnSums(kind="labels", examples=count, count=count, missing=missing, classes=classes, withheld=small)


def _enough(counts: NDArray[Any], least: int) -> tuple[NDArray[Any], str]:
    """Counts without those that are small, and what to say of it."""
    small = (counts > 0) & (counts < least)
    return np.where(small, 0, counts), f"{int(small.sum())} counts below {least}" if small.any() else ""


def _total(values: NDArray[np.float64]) -> float:
    """A sum exact to a rounding or two: numpy adds pairwise, in blocks; these are added exactly."""
    return math.fsum(float(np.sum(block)) for block in np.array_split(values, max(1, values.size // 4096)))


def _coarse(value: float, digits: int | None) -> float:
    return float(f"{value:.{digits}g}") if digits else value


def of_file(path: Path, labels: str | None) -> tuple[dict[str, Column], int] | None:
    """The columns of a site's own table or .npz file and how many examples it has; None if it is neither.

    `labels`: how the experiment calls the labels' column.
    """
    if path.name.endswith(".npz"):
        with opened(path) as file:
            arrays = {key: file[key] for key in file.files}
        used = {name for names in KEYS.values() for name in names}
        held = {name: array for name, array in arrays.items() if name in used or name == labels} or arrays
        return _of_table({name: array for name, array in held.items() if array.ndim}, labels)
    tabled = path.name.endswith(ENDINGS) if path.is_file() else path.is_dir() and holds_tables(path)
    if not tabled:
        return None
    names = splits(path)
    split = None if not names else "train" if "train" in names else names[0]
    return _of_table(read_table(path, split), labels)


def _of_table(table: Mapping[str, Any], labels: str | None) -> tuple[dict[str, Column], int]:
    columns: dict[str, Column] = {}
    label = labels if labels in table else next((name for name in (*KEYS["labels"], *LABELS) if name in table), None)
    for name, values in table.items():
        if name in GROUPS or name in KEYS["groups"]:
            continue
        columns |= _columns(name[:80] if name.isprintable() else "?", values, name == label)
    if len(columns) > MOST_COLUMNS:
        raise SettingsError(f"{len(columns)} columns; statistics are told of up to {MOST_COLUMNS}")
    return columns, max((len(values) for values in table.values()), default=0)


def _columns(name: str, values: Any, label: bool) -> dict[str, Column]:
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return {name: _label_numbers(values)} if label and values.ndim == 1 else _of_array(name, values)
    if not all(isinstance(each, str) for each in values):
        return {}  # images and lists of a kind that has no one number
    texts = [str(each).strip() for each in values]
    blank = [each.lower() in BLANK for each in texts]
    if label:
        return {
            name: Column("labels", None, ["" if none else t for t, none in zip(texts, blank, strict=True)], sum(blank))
        }
    try:
        numbers = np.array([np.nan if none else float(t) for t, none in zip(texts, blank, strict=True)], np.float64)
        return {name: Column("number", numbers)}
    except ValueError:
        return {f"{name} (words)": Column("length", np.array([len(t.split()) or np.nan for t in texts], np.float64))}


def _label_numbers(values: NDArray[Any]) -> Column:
    if values.dtype.kind == "f" and not np.all(values[np.isfinite(values)] % 1 == 0):
        return Column("number", values.astype(np.float64))  # what is to be predicted is a number
    known = np.isfinite(values) if values.dtype.kind == "f" else np.ones(len(values), bool)
    return Column(
        "labels", None, [str(int(v)) if k else "" for v, k in zip(values, known, strict=True)], int((~known).sum())
    )


def _of_array(name: str, values: NDArray[Any]) -> dict[str, Column]:
    """Columns of an array: itself (n,), the parts of short vectors (n, d), channels (n, h, w) and (n, h, w, c)."""
    flat = values.astype(np.float64)
    if flat.ndim == 1:
        return {name: Column("number", flat)}
    if flat.ndim == 2 and flat.shape[1] <= MOST_PARTS:
        return {f"{name}[{i}]": Column("number", flat[:, i]) for i in range(flat.shape[1])}
    if flat.ndim == 4 and flat.shape[3] <= MOST_PARTS:
        return {
            f"{name} channel {i}": Column("channel", flat[..., i].reshape(len(flat), -1)) for i in range(flat.shape[3])
        }
    return {f"{name} channel 0" if flat.ndim == 3 else name: Column("channel", flat.reshape(len(flat), -1))}


def of_examples(parts: Sequence[Any]) -> tuple[dict[str, Column], int]:
    """The columns of examples as a task holds them: inputs and targets, of its training and evaluation part."""
    held = [part for part in parts if len(part)]
    if not held or not all(isinstance(part, Examples) for part in held):
        return {}, sum(len(part) for part in held)
    inputs = np.concatenate([part.inputs.cpu().numpy() for part in held])
    targets = np.concatenate([part.targets.cpu().numpy() for part in held])
    if inputs.ndim == 2 and inputs.dtype.kind == "i":
        columns = {"x (tokens)": Column("length", (inputs != PADDING).sum(axis=1).astype(np.float64))}
    else:
        columns = _of_array("x", inputs)
    if targets.dtype.kind == "f":
        columns |= _of_array("y", targets)
    elif targets.ndim == 1:
        columns["y"] = _label_numbers(targets)
    return columns, len(inputs)
