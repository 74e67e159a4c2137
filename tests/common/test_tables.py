"""Tables in files: what every kind gives, and that what is wrong names file, line and column."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.data.tables import column, read_table, splits
from common.errors import SettingsError

ROWS = [{"text": "a, b", "label": 0, "score": 0.5}, {"text": "it's\nü", "label": 2, "score": -1.0}]


def write(path: Path, text: str) -> Path:
    """A text file, compressed if its name ends so."""
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def jsonl(path: Path, rows: list[Any]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def check_rows(table: dict[str, Any]) -> None:
    """The two rows above, whatever the file."""
    assert list(table) == ["text", "label", "score"]
    assert table["text"] == ["a, b", "it's\nü"]
    assert table["label"].dtype == np.int64
    assert table["label"].tolist() == [0, 2]
    assert table["score"].tolist() == [0.5, -1.0]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_csv(tmp_path: Path, name: str) -> None:
    text = '\ufefftext,label,score\n"a, b",0,0.5\n\n"it\'s\nü",2,-1\n'
    check_rows(read_table(write(tmp_path / name, text)))


def test_tsv(tmp_path: Path) -> None:
    check_rows(read_table(write(tmp_path / "a.tsv", 'text\tlabel\tscore\na, b\t0\t0.5\n"it\'s\nü"\t2\t-1\n')))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    check_rows(read_table(jsonl(tmp_path / name, ROWS)))


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=1)
    check_rows(read_table(tmp_path / "a.parquet"))


def test_lists_of_numbers_become_one_array(tmp_path: Path) -> None:
    rows = [{"x": [[1, 2], [3, 4]], "words": ["a"]}, {"x": [[5, 6], [7, 8]], "words": []}]
    table = read_table(jsonl(tmp_path / "a.jsonl", rows))
    assert isinstance(table["x"], np.ndarray)
    assert table["x"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert table["words"] == [["a"], []]


def test_a_header_alone_is_an_empty_table(tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "a.csv", "text,label\n")) == {"text": [], "label": []}


def test_a_column_of_numbers_and_words_is_text(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", "a,b,c\n1,1_000,\nx,2,3\n"))
    assert table == {"a": ["1", "x"], "b": ["1_000", "2"], "c": ["", "3"]}


def picture(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    return Image.fromarray(np.full((size[1], size[0]), 7, np.uint8)).convert(mode)


def saved(folder: Path, columns: dict[str, Any], features: Any = None, *names: str) -> Path:
    """A Dataset, or a DatasetDict with splits of those names, saved to disk."""
    import datasets

    one = datasets.Dataset.from_dict(columns, features)
    (datasets.DatasetDict(dict.fromkeys(names, one)) if names else one).save_to_disk(str(folder))
    return folder


def test_a_saved_data_set(tmp_path: Path) -> None:
    """A selection is saved as its rows; images and class labels are decoded, arrays of two dimensions stacked."""
    import datasets

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "grid": datasets.Array2D((1, 2), "float32"),
            "text": datasets.Value("string"),
        }
    )
    images = [picture((3, 2)), picture((3, 2), "L")]
    columns = {"image": images, "label": [1, 0], "grid": [[[1, 2]], [[3, 4]]], "text": ["a", "b"]}
    table = read_table(saved(tmp_path / "one", columns, features))
    assert isinstance(table["image"], np.ndarray)
    assert table["image"].dtype == np.uint8
    assert table["image"].shape == (2, 2, 3, 3)
    assert (table["image"] == 7).all()
    assert np.asarray(table["label"]).tolist() == [1, 0]
    assert np.asarray(table["grid"]).tolist() == [[[1, 2]], [[3, 4]]]
    assert table["text"] == ["a", "b"]
    assert splits(tmp_path / "one") == []


def test_grey_images_have_no_channels(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image()})
    table = read_table(saved(tmp_path / "grey", {"image": [picture((3, 2), "L")] * 2}, features))
    assert np.shape(table["image"]) == (2, 2, 3)


def test_splits_of_a_saved_dict(tmp_path: Path) -> None:
    folder = saved(tmp_path / "both", {"label": [1, 2]}, None, "train", "test")
    assert splits(folder) == ["test", "train"]
    assert np.asarray(read_table(folder, "train")["label"]).tolist() == [1, 2]
    with pytest.raises(SettingsError, match=r"both holds several tables \(test, train\); name one"):
        read_table(folder)
    with pytest.raises(SettingsError, match=r"both: no split 'dev'; allowed: test, train"):
        read_table(folder, "dev")


def test_splits_of_a_folder_of_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl.gz", ROWS)
    write(tmp_path / "README.md", "no table")
    check_rows(read_table(tmp_path))
    write(tmp_path / "test.csv", "label\n1\n")
    assert splits(tmp_path) == ["test", "train"]
    assert np.asarray(read_table(tmp_path, "test")["label"]).tolist() == [1]
    write(tmp_path / "test.tsv", "label\n1\n")
    with pytest.raises(SettingsError, match=r"two tables are called 'test': test.csv and test.tsv"):
        splits(tmp_path)


def encoded(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    picture(size).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "a,b\n1,2\n3\n", "a.csv, line 3: 1 cells; the first line names 2 columns"),
        ("a.csv", "a,a\n1,2\n", r"its first line must name the columns, each once; it is \['a', 'a'\]"),
        ("a.csv", "", r"its first line must name the columns, each once; it is \[\]"),
        ("a.csv", 'a\n"b" c\n', "a.csv, line 2: no CSV: "),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl, line 2: no JSON: Expecting value"),
        ("a.jsonl", '{"a": 1}\n\n[1]\n', "a.jsonl, line 3: list; every line must be an object"),
        ("a.jsonl", '{"a": 1, "b": 2}\n{"b": 1}\n', "a.jsonl, line 2: column 'a' is missing; it has b"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "c": 1}\n', "line 2: column 'c' is not in the lines before; they have a"),
        ("a.jsonl", '{"a": 1}\n{"a": "x"}\n', r"line 2: column 'a' is text \('x'\); before it is a number"),
        ("a.jsonl", '{"a": "x"}\n{"a": null}\n', r"line 2: column 'a' is NoneType \(None\); before it is text"),
        ("a.jsonl", '{"a": null}\n', "line 1: column 'a' is null; allowed: text, numbers and lists"),
        ("a.jsonl", '{"a": [1, 2]}\n{"a": [1]}\n', "column 'a': lists of unequal length or other than numbers"),
        ("a.jsonl", '{"a": [1, 2]}\n{"a": [1, "x"]}\n', "column 'a': not only numbers"),
        ("a.jsonl", f'{{"a": {2**70}}}\n', "column 'a': not only numbers, or numbers beyond 64 bits"),
        ("a.jsonl", "", "a.jsonl is empty: without a line its columns are unknown"),
        ("a.parquet", "no parquet", "a.parquet cannot be read as parquet"),
        ("a.xlsx", "", "a.xlsx: no table; allowed: .csv, .csv.gz, .tsv"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read_table(write(tmp_path / name, text))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "absent"])
def test_an_absent_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: no such file or folder"):
        read_table(tmp_path / name)


def test_broken_compression_and_encoding_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 100)
    for broken in (whole[:-10], b"plain", whole[:20] + b"xxx" + whole[23:]):
        (tmp_path / "a.jsonl.gz").write_bytes(broken)
        with pytest.raises(SettingsError, match=r"a.jsonl.gz cannot be read: "):
            read_table(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.csv").write_bytes(b"a\n\xff\n")
    with pytest.raises(SettingsError, match=r"a.csv cannot be read: .utf-8. codec"):
        read_table(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, None], "column 'x', row 1: no value"),
        ([[1], [1, 2]], "column 'x': lists of unequal length"),
        ([[1], [None]], "column 'x': a list misses a value"),
        ([{"bytes": b"xx", "path": ""}], "column 'x', row 0: no image"),
        ([{"bytes": None, "path": "a.png"}], "column 'x', row 0: an image that lies elsewhere"),
        (
            [{"bytes": encoded((2, 2)), "path": ""}, {"bytes": encoded((2, 3)), "path": ""}],
            r"column 'x', row 1: an image of \(3, 2\); row 0 has \(2, 2\)",
        ),
    ],
)
def test_faulty_columns_of_arrow_are_named(tmp_path: Path, values: list[Any], words: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    with pytest.raises(SettingsError, match=f"a.parquet, {words}"):
        read_table(tmp_path / "a.parquet")


def test_a_table_has_no_splits_and_a_folder_must_hold_tables(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    assert splits(file) == []
    with pytest.raises(SettingsError, match=r"a.jsonl is one table: it has no split 'train'"):
        read_table(file, "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"not a folder saved by Hugging Face datasets, nor one of files .csv"):
        read_table(tmp_path / "empty")
    broken = saved(tmp_path / "broken", {"a": [1]})
    next(broken.glob("*.arrow")).write_bytes(b"none")
    with pytest.raises(SettingsError, match=r"broken cannot be read as a saved data set"):
        read_table(broken)


def test_a_column_by_its_setting_or_a_known_name() -> None:
    table: dict[str, Any] = {"review": ["a"], "label": [1]}
    assert column(table, None, ("label", "y"), "task.label", "f.csv") == [1]
    assert column(table, "review", ("text",), "task.text", "f.csv") == ["a"]
    with pytest.raises(SettingsError, match=r"f.csv: none of its columns \(review, label\) is one of text, sentence"):
        column(table, None, ("text", "sentence"), "task.text", "f.csv")
    with pytest.raises(SettingsError, match=r"task.text = 'x': f.csv has no such column; allowed: review, label"):
        column(table, "x", ("text",), "task.text", "f.csv")
