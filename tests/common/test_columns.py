"""Columns by name: the same examples from every kind of file in any order; what is wrong names line and column."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.columns import difference
from common.data.moments import Census, moments_of, read_moments, read_scale, scale_of
from common.data.tables import header
from common.errors import ExperimentError, MessageError, SettingsError, SiteError
from common.experiment import PartitionSettings
from common.tasks.table import Table
from tests.support.real_tables import write_csv

COLUMNS = {
    "ward": ["a", "b", "a", "c"],
    "age": [40, 61, 38, 70],
    "sex": ["f", "m", "m", "f"],
    "bp": [120.5, 140.0, 118.25, 150.0],
    "ill": ["no", "yes", "no", "yes"],
}


def jsonl(path: Path, columns: dict[str, Sequence[Any]]) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def parquet(path: Path, columns: dict[str, Sequence[Any]]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet as files

    files.write_table(pa.table(dict(columns)), path)
    return path


WRITERS: dict[str, Callable[[Path, dict[str, Sequence[Any]]], Path]] = {
    "t.csv": write_csv,
    "t.csv.gz": write_csv,
    "t.jsonl": jsonl,
    "t.parquet": parquet,
}
KINDS = pytest.mark.parametrize("kind", WRITERS)


def task(partition: PartitionSettings | None = None, **options: Any) -> Table:
    given = {"inputs": ["age", "sex", "bp"], "target": "ill", "classes": ["no", "yes"], "dtype": "float64"}
    given["categories"] = {"sex": ["f", "m"]}  # type: ignore[assignment]
    return Table(given | options, partition or PartitionSettings(holdout=0.0), 0)


def read(held: Table, path: Path) -> Any:
    return held.client("site-1", str(path)).train


@KINDS
def test_columns_are_found_by_name_in_any_order(kind: str, tmp_path: Path) -> None:
    """One that nobody asked for does not matter, nor what is in it."""
    wanted = [[40, 1, 0, 120.5], [61, 0, 1, 140], [38, 0, 1, 118.25], [70, 1, 0, 150]]
    for order in (list(COLUMNS), list(COLUMNS)[::-1], ["bp", "ill", "ward", "age", "sex"]):
        path = WRITERS[kind](tmp_path / kind, {name: COLUMNS[name] for name in order})
        assert header(path) == order
        held = task()
        examples = read(held, path)
        assert examples.inputs.tolist() == wanted
        assert examples.targets.tolist() == [0, 1, 0, 1]
        assert held.columns() == held.client("site-1", str(path)).columns == ("age", "sex=f", "sex=m", "bp")


@KINDS
def test_a_column_that_is_lacking_is_named(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path / kind, {"patient" if k == "age" else k: v for k, v in COLUMNS.items()})
    with pytest.raises(SiteError, match="lacks age; it has, beside those asked for, ward, patient") as error:
        read(task(), path)
    assert (error.value.code, error.value.names) == ("data-columns", "lacks age")


def changed(name: str, row: int, value: Any) -> dict[str, Sequence[Any]]:
    values = list(COLUMNS[name])
    values[row] = value
    return {**COLUMNS, name: values}


def where(kind: str, row: int) -> str:
    """How an error calls a row: the lines of a CSV file begin with its columns, our JSON lines have blank ones between
    them."""
    line = {"t.csv": row + 2, "t.csv.gz": row + 2, "t.jsonl": 2 * row + 1}.get(kind)
    return f"{kind}, line {line}: " if line else f"{kind}, row {row}: "


@KINDS
@pytest.mark.parametrize("name", ["age", "bp"])
def test_a_missing_cell_is_an_error_or_filled_in(kind: str, name: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path / kind, changed(name, 2, None))
    place = ["age", "sex=f", "sex=m", "bp"].index(name)
    with pytest.raises(SiteError, match=f"{where(kind, 2)}column '{name}' has no value, as 1 of its 4 cells") as error:
        read(task(), path)
    assert error.value.code == "data-cells"
    assert read(task(missing=-1.0), path).inputs[2, place] == -1
    held = task(missing="mean")
    examples = read(held, path)
    assert held.census is not None
    assert held.census.names == ("age", "bp")
    held.census.adopt(held.census.settle({"site-1": held.census.tell(examples)}))
    known = [value for i, value in enumerate(COLUMNS[name]) if i != 2]
    filled = held.features(examples.inputs)
    assert filled[2, place] == pytest.approx(np.mean(known), rel=1e-15)
    assert filled[0].tolist() == examples.inputs[0].tolist()


@KINDS
def test_a_category_that_was_not_declared_is_named(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path / kind, changed("sex", 3, "x"))
    with pytest.raises(SiteError, match=f"{where(kind, 3)}column 'sex' has the value 'x'; allowed: f, m") as error:
        read(task(), path)
    assert error.value.code == "data-cells"
    path = WRITERS[kind](tmp_path / kind, changed("sex", 1, None))
    with pytest.raises(SiteError, match=f"{where(kind, 1)}column 'sex' has no value; allowed: f, m"):
        read(task(), path)
    assert read(task(missing=0.0), path).inputs[1].tolist() == [61, 0, 0, 140]


@KINDS
def test_a_target_that_is_no_class_is_named(kind: str, tmp_path: Path) -> None:
    for value in ("perhaps", None):
        path = WRITERS[kind](tmp_path / kind, changed("ill", 1, value))
        with pytest.raises(SiteError, match=f"{where(kind, 1)}column 'ill' has '.*'; allowed: no, yes") as error:
            read(task(missing=0.0), path)
        assert error.value.code == "data-labels"


def test_cells_that_are_no_numbers(tmp_path: Path) -> None:
    for value, said in (("old", "is 'old', no number; .*task.categories.age"), ("inf", "is infinite"), ("1_0", "is ")):
        path = write_csv(tmp_path / "t.csv", changed("age", 0, value))
        with pytest.raises(SiteError, match=f"t.csv, line 2: column 'age' {said}"):
            read(task(missing="mean"), path)
    quoted = 'age,note,sex,bp,ill\n40,"two\nlines",f,1,no\n\n,x,f,1,no\n'
    (tmp_path / "t.csv").write_text(quoted)
    with pytest.raises(SiteError, match=r"t\.csv, line 5: column 'age' has no value"):
        read(task(), tmp_path / "t.csv")
    with pytest.raises(SiteError, match="has no row"):
        read(task(), write_csv(tmp_path / "t.csv", {name: [] for name in COLUMNS}))


@pytest.mark.parametrize("kind", ["t.csv", "t.parquet", "t.jsonl"])
def test_categories_and_classes_are_the_same_in_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    """Numbers and truth values too, whatever a file makes of them."""
    columns = {"grade": [1, 3, 2], "smokes": [True, False, True], "y": [7, 5, 7]}
    categories = {"grade": [1, 2, 3], "smokes": [False, True]}
    path = WRITERS[kind](tmp_path / kind, columns)
    if kind == "t.csv":
        path = write_csv(tmp_path / kind, {**columns, "smokes": ["true", "false", "true"]})
    held = task(inputs=["smokes", "grade"], categories=categories, target="y", classes=[5, 7])
    examples = read(held, path)
    assert examples.inputs.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1], [0, 1, 0, 1, 0]]
    assert examples.targets.tolist() == [1, 0, 1]


def test_a_pooled_table_needs_no_names(tmp_path: Path) -> None:
    """All columns but target, group and what is dropped; text among them is an error that says what to do."""
    path = write_csv(tmp_path / "t.csv", {**COLUMNS, "client": [0, 0, 1, 1]})
    base = {"file": str(path), "target": "ill", "dtype": "float64"}
    held = Table({**base, "drop": ["ward", "sex"]}, PartitionSettings(kind="natural", holdout=0.0), 0)
    assert held.columns() == ("age", "bp")
    assert held.class_names == ["no", "yes"]
    assert held.names() == ["0", "1"]
    assert held.client("1").train.inputs.tolist() == [[38, 118.25], [70, 150]]
    with pytest.raises(SettingsError, match="column 'ward' is 'a', no number; a column of words is declared with"):
        Table(base, PartitionSettings(clients=2), 0).pool()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": None}, "task.inputs is required"),
        ({"target": None}, "task.target is required"),
        ({"classes": None}, "task.classes is required"),
        ({"inputs": ["age", "age"]}, "each once"),
        ({"inputs": ["age", "ill"]}, "it would predict itself"),
        ({"drop": ["age"]}, "age is one of task.inputs"),
        ({"categories": {"ward": ["a"]}}, "task.categories.ward: no column of the inputs"),
        ({"categories": {"sex": ["f", "f"]}}, "each once"),
        ({"standardize": {"sex": [0.0, 1.0]}}, "task.standardize.sex: no column of numbers; allowed: age, bp"),
        ({"standardize": {"age": [0.0]}}, r"allowed: \[mean, deviation\]"),
        ({"standardize": {"age": [0.0, -1.0]}}, r"allowed: \[mean, deviation\]"),
        ({"standardize": "yes"}, "standardize"),
        ({"predict": "number"}, "task.classes beside"),
        ({"missing": "median"}, "missing"),
        ({"model": "linear", "norm": "batch"}, "belong to task.model = 'mlp'"),
    ],
)
def test_settings_that_cannot_work_say_so(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        task(**options)


def test_names_as_a_list_belong_to_tables() -> None:
    from common.tasks.images import images

    with pytest.raises(ExperimentError, match=r"several columns by name are of task\.name = 'table'"):
        images({"inputs": ["a", "b"], "file": "x.csv"}, PartitionSettings(), 0)


# --- standardization


def values(seed: int, sizes: Sequence[int], offset: float) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(offset + k, 1 + k, (n, 3)) for k, n in enumerate(sizes)]


@given(
    st.integers(0, 99),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([0.0, 3.0, 1e6, -1e9]),
)
@settings(max_examples=60, deadline=None)
def test_the_scale_is_that_of_all_data_in_one_place(seed: int, sizes: list[int], offset: float) -> None:
    """To 1e-12, however far from 0; and the same bits in whatever order and over whatever parts of the same sites."""
    parts = values(seed, sizes, offset)
    whole, names = np.vstack(parts), ("a", "b", "c")
    told = [moments_of(part) for part in parts]
    found = scale_of(told, names)
    assert found == scale_of(told[::-1], names)
    for i, name in enumerate(names):
        exact = whole[:, i].astype(np.longdouble)
        assert found.mean[name] == pytest.approx(float(exact.mean()), rel=1e-12, abs=1e-12)
        if len(whole) > 1:
            assert found.deviation[name] == pytest.approx(float(exact.std()), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6 + 0.1, -7e12])
def test_a_constant_column_has_the_deviation_0_and_becomes_0(value: float) -> None:
    parts = [np.full((n, 1), value) for n in (7, 1000, 3)]
    found = scale_of([moments_of(part) for part in parts], ["a"])
    assert found.mean == {"a": value}
    assert found.deviation == {"a": 0.0}
    held = task(inputs=["a"], categories={}, standardize=True)
    assert held.census is not None
    held.census.adopt(found.model_dump_json())
    import torch

    assert held.features(torch.tensor([[value], [value + 2]], dtype=torch.float64)).tolist() == [[0], [2]]


def test_features_are_standardized_in_float64_and_categories_are_left() -> None:
    """A column far from 0 keeps its digits in float32."""
    import torch

    held = task(standardize=True, dtype="float32")
    assert held.census is not None
    assert held.census.names == ("age", "bp")
    with pytest.raises(MessageError, match="without the means and deviations"):
        held.features(torch.zeros(1, 4, dtype=torch.float64))
    held.census.adopt('{"mean": {"age": 1e9, "bp": 2.0}, "deviation": {"age": 0.5, "bp": 4.0}}')
    got = held.features(torch.tensor([[1e9 + 0.25, 1, 0, 4]], dtype=torch.float64))
    assert got.dtype == torch.float32
    assert got.tolist() == [[0.5, 1, 0, 0.5]]
    given_ = task(standardize={"bp": [2.0, 4.0]})
    assert given_.census is None
    assert given_.features(torch.tensor([[3.0, 1, 0, 4]], dtype=torch.float64)).tolist() == [[3, 1, 0, 0.5]]


def test_what_a_client_cannot_have_told_is_refused() -> None:
    census = Census(("a", "b"), lambda examples: examples.inputs.numpy())
    good = {"count": [3, 3], "mean": [0.0, 1.0], "rest": [0.0, 0.0], "squares": [1.0, 1.0]}
    census.check(json.dumps(good), 3)
    for change, said in (
        ({"count": [4, 3]}, "4 values of 3"),
        ({"count": [3]}, "columns; this run's are 2"),
        ({"mean": [1e200, 0.0]}, "whose square has no number"),
        ({"squares": [-1.0, 0.0]}, "squares"),
        ({"mean": ["x", 0.0]}, "mean"),
        ({"more": 1}, "more"),
    ):
        with pytest.raises(SettingsError, match=said):
            census.check(json.dumps(good | change), 3)
    for text in ("", "[]", "{", "[" * 99999, '{"count": [NaN, 1], "mean": [NaN, 1], "squares": [NaN, 1]}'):
        with pytest.raises(SettingsError):
            census.check(text, 3)
    for text in ("{}", '{"mean": {"b": 0.0, "a": 0.0}, "deviation": {"b": 0.0, "a": 0.0}}', "null"):
        with pytest.raises(MessageError):
            read_scale(text, ("a", "b"))
    with pytest.raises(SettingsError, match="squares have no number"):
        moments_of(np.array([[1e200], [0.0]]))


def test_few_values_and_few_digits() -> None:
    """As a policy says: nothing of a column with few values, and so many digits of the others."""
    rows = np.array([[1.23456, 1.0], [2.34567, np.nan], [3.45678, np.nan]])
    told = moments_of(rows, least=2, digits=2)
    assert told.count == [3, 0]
    assert told.mean == [2.3, 0.0]
    other = moments_of(np.array([[0.0, 4.0], [0.0, 6.0]]))
    assert scale_of([told, other], ("a", "b")).mean["b"] == 5.0
    with pytest.raises(SettingsError, match="no site told anything of column 'b'"):
        scale_of([told], ("a", "b"))
    assert read_moments(told.model_dump_json(), 2, 3) == told


def test_differences_in_words() -> None:
    assert difference(["a", "b"], ["a", "b"]) == ""
    assert difference(["b", "a"], ["a", "b"]) == "has its columns in another order, from b on"
    assert difference(["a", "id"], ["a", "b"]) == "lacks b; has id too many"
