"""What a site's data look like, as a short hash: whether two sites hold the same kind of data, without a name told.

Hashed are: of a table its columns' names with the kind of each, in any order; of an .npz archive its arrays' names,
kinds and the shape of one entry, and the names of classes that it declares; of a data set saved by Hugging Face's
`datasets` the same from its description; and of the examples as the task holds them the shape and kind of one. Of
values none: which labels occur, how many rows there are, how long texts are does not count.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from common.data.examples import Examples
from common.data.rows import SAVED, holds_tables
from common.data.tables import CSV, ENDINGS, JSONL, TSV, splits

LETTERS = 12
SAMPLED = 1000
"""Rows of a text table by which a column is one of numbers."""
BLANK = ("", "na", "n/a", "nan", "null", "none", "?", "-")

Schema = list[Any]


def schema_hash(path: Path | None, examples: Examples, run: str = "") -> str:
    """The first letters of the SHA-256 of the schema of a site's own file or folder, and of its examples; another one
    in each run.

    Reads the head of files, not the data. Raises whatever unreadable data raise.
    """
    text = json.dumps([run, sorted(_of_path(path)) if path else [], _of_examples(examples)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LETTERS]


def _of_path(path: Path) -> Schema:
    if path.is_dir():
        if not holds_tables(path):
            return [["images"]]
        held = splits(path)
        split = None if not held else "train" if "train" in held else held[0]
        folder = path / split if split and (path / SAVED[0]).is_file() else path
        if (folder / "dataset_info.json").is_file():
            return _of_saved(folder / "dataset_info.json")
        path = next(each for each in path.iterdir() if each.name in {f"{split}{ending}" for ending in ENDINGS})
    if path.name.endswith((*CSV, *TSV)):
        return _of_csv(path)
    if path.name.endswith(JSONL):
        with _opened(path) as file:
            row = json.loads(next(line for line in file if line.strip()))
        return [[name, _kind(value)] for name, value in row.items()]
    if path.name.endswith(ENDINGS):
        return _of_parquet(path)
    return _of_npz(path)


def _of_csv(path: Path) -> Schema:
    with _opened(path) as file:
        reader = csv.reader(file, delimiter="\t" if path.name.endswith(TSV) else ",")
        names = next(reader, [])
        rows = [row for row in itertools.islice(reader, SAMPLED) if len(row) == len(names)]
    return [[name, "number" if _all_numbers([row[i] for row in rows]) else "text"] for i, name in enumerate(names)]


def _opened(path: Path) -> IO[str]:
    return io.TextIOWrapper(gzip.open(path) if path.suffix == ".gz" else path.open("rb"), "utf-8-sig", newline="")


def _all_numbers(cells: Sequence[str]) -> bool:
    try:
        return all(float(cell) is not None for cell in cells if cell.strip().lower() not in BLANK)
    except ValueError:
        return False


def _of_parquet(path: Path) -> Schema:
    from pyarrow import parquet  # 30 ms that only tables need

    return [[field.name, _arrow_kind(str(field.type))] for field in parquet.read_schema(path)]


def _arrow_kind(kind: str) -> str:
    if kind.startswith(("int", "uint", "float", "double", "halffloat", "bool", "decimal")):
        return "number"
    return kind.replace("large_", "") if kind.startswith(("string", "large_string")) else kind.partition("<")[0]


def _of_saved(info: Path) -> Schema:
    """Names, kinds and, of labels, the names of the classes that the data set declares."""
    features = json.loads(info.read_text("utf-8")).get("features") or {}
    return [
        [name, _arrow_kind(str(f.get("dtype") or f.get("_type"))), f.get("names") or []] for name, f in features.items()
    ]


def _of_npz(path: Path) -> Schema:
    found: Schema = []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("train_jpeg_"):
                return [["mosaics"]]
            with archive.open(name) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
            if name == "classes.npy":
                with np.load(path, allow_pickle=False) as whole:
                    found.append(["classes", whole["classes"].tolist()])
            else:
                found.append([name.removesuffix(".npy"), _array_kind(dtype), list(shape[1:])])
    return found


def _of_examples(examples: Examples) -> Schema:
    """Of a task of one's own, whose examples are of another kind, nothing."""
    inputs, targets = getattr(examples, "inputs", None), getattr(examples, "targets", None)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return []
    kind = _array_kind(np.dtype(str(inputs.dtype).removeprefix("torch.")))
    if kind == "integer" and inputs.ndim == 2:  # tokens: as long as the longest text
        return [[kind], [_array_kind(np.dtype(str(targets.dtype).removeprefix("torch.")))]]
    return [[kind, list(inputs.shape[1:])], [_array_kind(np.dtype(str(targets.dtype).removeprefix("torch.")))]]


def _array_kind(dtype: np.dtype[Any]) -> str:
    """uint8 stands apart: such images are scaled. How many bits a number has does not matter."""
    if dtype == np.uint8:
        return "uint8"
    return {"f": "float", "i": "integer", "u": "integer", "b": "boolean", "U": "text", "S": "text"}.get(
        dtype.kind, "other"
    )


def _kind(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return "number"
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else "other"
