"""Tables in files: CSV, JSON lines, parquet, and data sets that Hugging Face's `datasets` saved to disk."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import random
import warnings
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.data.arrow import Column, Table, arrow_table
from common.errors import SettingsError

CSV, TSV, JSONL, PARQUET = (".csv", ".csv.gz"), (".tsv", ".tsv.gz"), (".jsonl", ".jsonl.gz"), (".parquet",)
ENDINGS = (*CSV, *TSV, *JSONL, *PARQUET)
LONGEST_CELL = 2**27
BLANK = ("", "na", "n/a", "nan", "null", "none", "?", "-")
"""What stands in a cell of text, in small letters, that has no value."""

_KINDS: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def splits(path: Path) -> list[str]:
    """The names, sorted, of the tables in a folder: a saved DatasetDict, or files like `train.jsonl.gz`. None of a
    file or of a saved single Dataset."""
    if not path.is_dir() or _is_dataset(path):
        return []
    if (path / "dataset_dict.json").is_file():
        return sorted(_dataset_dict(path))
    return sorted(_files(path))


def read_table(path: Path, split: str | None = None, only: Collection[str] | None = None) -> Table:
    """Read a table: a file, a folder that `datasets` saved, or the table called `split` in a folder of several.

    A CSV file's first line names its columns; a column whose every cell is a number becomes one of numbers. JSON lines
    are objects, all with the same keys. Image columns of data sets are decoded. Nothing is ever unpickled.
    With `only` those of its columns alone are read, those that the table has, and a cell without a value is no error:
    its column is then a list, with None or blank text there.
    Raises SettingsError naming the file and the line or column at fault.
    """
    if path.is_dir():
        return _read_folder(path, split, only)
    if split is not None:
        raise SettingsError(f"{path} is one table: it has no split {split!r}")
    if not path.exists():
        raise SettingsError(f"{path}: no such file or folder")
    with _readable(path):
        if path.name.endswith((*CSV, *TSV)):
            return _read_csv(path, only)
        if path.name.endswith(JSONL):
            return _read_jsonl(path, only)
        if path.name.endswith(PARQUET):
            return _read_parquet(path, only)
    raise _no_table(path)


def _no_table(path: Path) -> SettingsError:
    return SettingsError(f"{path}: no table; allowed: {', '.join(ENDINGS)}, or a folder saved by Hugging Face datasets")


def header(path: Path, split: str | None = None) -> list[str]:
    """The names of a table's columns, in its order; `path` and `split` as of `read_table`, and what it raises."""
    if path.is_dir():
        chosen = _chosen(path, split)
        return header(chosen) if isinstance(chosen, Path) else list(chosen.column_names)
    if not path.exists():
        raise SettingsError(f"{path}: no such file or folder")
    with _readable(path):
        if path.name.endswith((*CSV, *TSV)):
            with _csv(path) as rows:
                return _names(path, rows)
        if path.name.endswith(JSONL):
            with _opened(path) as file:
                first = next(((i, line) for i, line in enumerate(file, 1) if line.strip()), None)
            return list(_json_row(first[1], f"{path}, line {first[0]}")) if first else []
        if path.name.endswith(PARQUET):
            return list(_parquet(path).schema_arrow.names)
    raise _no_table(path)


def place(path: Path, row: int) -> str:
    """Where row `row` (from 0) of a table stands, for an error: the file and its line, where it has lines."""
    with contextlib.suppress(Exception):  # the file was read before: whatever is wrong now, the row's number serves
        if path.name.endswith((*CSV, *TSV)):
            with _csv(path) as rows:
                next(rows)
                number = next(itertools.islice((rows.line_num for each in rows if each), row, None))
                return f"{path}, line {number}"
        if path.name.endswith(JSONL):
            with _opened(path) as file:
                lines = (number for number, line in enumerate(file, 1) if line.strip())
                return f"{path}, line {next(itertools.islice(lines, row, None))}"
    return f"{path}, row {row}"


def column(table: Table, named: str | None, known: Sequence[str], what: str, source: object) -> Column:
    """The column called `named` or, without a name, the first of `known` that the table has; `what` is the setting
    that names it. Raises SettingsError that lists the columns there are."""
    name = named if named is not None else next((name for name in known if name in table), None)
    if name is None:
        raise SettingsError(
            f"{source}: none of its columns ({', '.join(table)}) is one of {', '.join(known)}; name it with {what}"
        )
    if name not in table:
        raise SettingsError(f"{what} = {name!r}: {source} has no such column; allowed: {', '.join(table)}")
    return table[name]


def dataset_table(dataset: Any, source: object) -> Table:
    """The table of a `datasets.Dataset`."""
    return arrow_table(dataset.with_format("arrow")[:], source)


# --- files of text


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


def _opened(path: Path, newline: str | None = None) -> IO[str]:
    file: Any = gzip.GzipFile(path) if path.name.endswith(".gz") else path.open("rb")
    return io.TextIOWrapper(file, "utf-8-sig", newline=newline)


@contextlib.contextmanager
def _csv(path: Path) -> Iterator[Any]:
    """The rows of a CSV or TSV file. Its faults become SettingsError with their line."""
    limit = csv.field_size_limit(LONGEST_CELL)
    try:
        with _opened(path, newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.name.endswith(TSV) else ",", strict=True)
            yield reader
    except csv.Error as error:
        raise SettingsError(f"{path}, line {reader.line_num}: no CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _names(path: Path, rows: Any) -> list[str]:
    names: list[str] = next(rows, [])
    if not names or len(set(names)) < len(names):
        raise SettingsError(f"{path}: its first line must name the columns, each once; it is {names}")
    return names


def _read_csv(path: Path, only: Collection[str] | None) -> Table:
    with _csv(path) as reader:
        names = _names(path, reader)
        kept = [(i, name) for i, name in enumerate(names) if only is None or name in only]
        cells: list[list[str]] = [[] for _ in kept]
        for row in reader:
            if row and len(row) != len(names):
                raise SettingsError(
                    f"{path}, line {reader.line_num}: {len(row)} cells; the first line names {len(names)} columns"
                )
            if row:
                for held, (i, _) in zip(cells, kept, strict=True):
                    held.append(row[i])
    return {name: _parsed(held) for held, (_, name) in zip(cells, kept, strict=True)}


def _parsed(cells: list[str]) -> Column:
    """Numbers if all cells are; Python alone takes 1_000 for one."""
    if not cells or any("_" in cell for cell in cells):
        return cells
    with contextlib.suppress(ValueError, OverflowError):
        return np.array([int(cell) for cell in cells], np.int64)
    with contextlib.suppress(ValueError):
        return np.array([float(cell) for cell in cells], np.float64)
    return cells


def _read_jsonl(path: Path, only: Collection[str] | None) -> Table:
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = _json_row(line, f"{path}, line {number}")
                if not numbers:
                    columns = {name: [] for name in row if only is None or name in only}
                if only is None:
                    _same_keys(columns, row, f"{path}, line {number}")
                for name, values in columns.items():
                    values.append(row.get(name))
                numbers.append(number)
    if not numbers:
        raise SettingsError(f"{path} is empty: without a line its columns are unknown")
    if only is not None:
        return dict(columns)
    return {name: _of_values(values, numbers, path, name) for name, values in columns.items()}


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{where}: no JSON: {error}") from None
    if not isinstance(row, dict):
        raise SettingsError(f'{where}: {type(row).__name__}; every line must be an object like {{"text": ...}}')
    return row


def _same_keys(columns: dict[str, list[Any]], row: dict[str, Any], where: str) -> None:
    if missing := [name for name in columns if name not in row]:
        raise SettingsError(f"{where}: column {missing[0]!r} is missing; it has {', '.join(row) or 'none'}")
    if more := [name for name in row if name not in columns]:
        raise SettingsError(f"{where}: column {more[0]!r} is not in the lines before; they have {', '.join(columns)}")


def _of_values(values: list[Any], lines: list[int], path: Path, name: str) -> Column:
    kinds = [_KINDS.get(type(value), type(value).__name__) for value in values]
    if odd := next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None):
        raise SettingsError(
            f"{path}, line {lines[odd]}: column {name!r} is {kinds[odd]} ({values[odd]!r}); before it is {kinds[0]}"
        )
    if kinds[0] == "NoneType":
        raise SettingsError(f"{path}, line {lines[0]}: column {name!r} is null; allowed: text, numbers and lists")
    numeric = kinds[0] == "a number" or isinstance(values[0], bool)
    if numeric or (kinds[0] == "a list" and _numbers(values[0])):
        try:
            array = np.array(values)
        except (ValueError, OverflowError) as error:
            raise SettingsError(
                f"{path}, column {name!r}: lists of unequal length or other than numbers: {error}"
            ) from None
        if array.dtype.kind not in "biuf":
            raise SettingsError(f"{path}, column {name!r}: not only numbers, or numbers beyond 64 bits")
        return array
    return values


def _numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (int, float))


def _read_parquet(path: Path, only: Collection[str] | None) -> Table:
    import pyarrow  # 30 ms that only tables need

    file = _parquet(path)
    names = None if only is None else [name for name in file.schema_arrow.names if name in only]
    try:
        table = file.read(columns=names)
    except pyarrow.ArrowException as error:
        raise SettingsError(f"{path} cannot be read as parquet: {error}") from None
    return arrow_table(table, path, blanks=only is not None)


def _parquet(path: Path) -> Any:
    import pyarrow  # 30 ms that only tables need
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise SettingsError(f"{path} cannot be read as parquet: {error}") from None


# --- folders


def _read_folder(path: Path, split: str | None, only: Collection[str] | None) -> Table:
    chosen = _chosen(path, split)
    if isinstance(chosen, Path):
        return read_table(chosen, None, only)
    source = path if split is None else f"{path}, split {split!r}"
    if only is None:
        return dataset_table(chosen, source)
    kept = chosen.select_columns([name for name in chosen.column_names if name in only])
    return arrow_table(kept.with_format("arrow")[:], source, blanks=True)


def _chosen(path: Path, split: str | None) -> Any:
    """The file, or the `datasets.Dataset`, that a folder holds under the name `split`."""
    if _is_dataset(path):
        if split is not None:
            raise SettingsError(f"{path} is one table: it has no split {split!r}")
        return _load(path)
    held: dict[str, Path] | dict[str, Any] = (
        _dataset_dict(path) if (path / "dataset_dict.json").is_file() else _files(path)
    )
    if not held:
        raise SettingsError(
            f"{path}: not a folder saved by Hugging Face datasets, nor one of files {', '.join(ENDINGS)}"
        )
    if split is None and len(held) > 1:
        raise SettingsError(f"{path} holds several tables ({', '.join(sorted(held))}); name one")
    name = split if split is not None else next(iter(held))
    if name not in held:
        raise SettingsError(f"{path}: no split {name!r}; allowed: {', '.join(sorted(held))}")
    return held[name]


def _is_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _dataset_dict(path: Path) -> dict[str, Any]:
    return dict(_load(path))


def _files(path: Path) -> dict[str, Path]:
    """Name without its ending -> file, of the tables that lie in a folder."""
    found: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if ending := next((end for end in ENDINGS if file.name.endswith(end)), None):
            name = file.name.removesuffix(ending)
            if name in found:
                raise SettingsError(f"{path}: two tables are called {name!r}: {found[name].name} and {file.name}")
            found[name] = file
    return found


def _load(path: Path) -> Any:
    with library() as datasets:
        try:
            return datasets.load_from_disk(str(path))
        except Exception as error:  # the library raises whatever its parts do
            raise SettingsError(f"{path} cannot be read as a saved data set: {error}") from None


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """Hugging Face's `datasets` without telemetry, its warnings and use of Python's global generator kept to itself."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    state = random.getstate()  # importing it draws from it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import datasets  # slow to import

            yield datasets
        finally:
            random.setstate(state)
