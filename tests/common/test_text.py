"""Classification of texts: tokens, one's own tables, named data sets, sites, and what the bag of words learns."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from client.app import app
from common import tasks
from common.data.examples import Examples
from common.data.tokens import PADDING, utf8, words
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.flower import ROOT
from common.tasks.base import Task
from common.tasks.text import Text
from server.app import run
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.common.test_tables import jsonl, saved

MAIL = [
    {"text": f"{word} {i}", "label": label} for i in range(10) for label, word in enumerate(("hello", "buy", "win"))
]
NAMES = ["sport", "art"]


def create(name: str = "text", partition: dict[str, Any] | None = None, seed: int = 0, **options: Any) -> Text:
    """A text task on short texts, by default split iid."""
    settings = PartitionSettings.model_validate(partition or {"clients": 2})
    task = tasks.create(TaskSettings(name=name, **({"length": 8, "vocabulary": 50} | options)), settings, seed)
    assert isinstance(task, Text)
    return task


def bucket(word: str, buckets: int = 50) -> int:
    return zlib.crc32(word.encode()) % buckets


def known(tokens: Tensor) -> list[int]:
    return [token for token in tokens.tolist() if token != PADDING]


# --- tokens


def test_words_are_hashed_whatever_the_case() -> None:
    """A sign is a word of its own; -1 fills the end; 50 buckets fit int16."""
    tokens = words(50)(["Don't buy", "BUY buy!", ""], None, 5)
    assert tokens.dtype == torch.int16
    assert tokens.tolist() == [
        [bucket("don"), bucket("'"), bucket("t"), bucket("buy"), -1],
        [bucket("buy"), bucket("buy"), bucket("!"), -1, -1],
        [50, -1, -1, -1, -1],
    ]
    assert words(40000)(["buy"], None, 1).dtype == torch.int32
    assert words(40000)(["buy"], None, 1).item() == bucket("buy", 40000)


def test_the_hash_does_not_change() -> None:
    """CRC-32 of "123456789" is 0xCBF43926, its check value: Python's own hash differs in each process."""
    assert words(2**31)(["123456789"], None, 1).item() == 0xCBF43926 % 2**31


def test_bytes() -> None:
    tokens = utf8()(["é!", "", "abcdef"], None, 4)
    assert tokens.tolist() == [[0xC3, 0xA9, 0x21, -1], [256, -1, -1, -1], [97, 98, 99, 100]]
    assert utf8().vocabulary == 257


@pytest.mark.parametrize(
    ("first", "second", "length", "want"),
    [
        ("ab", "cd", 6, "ab|cd"),
        ("abcdef", "gh", 6, "abc|gh"),
        ("ab", "cdefgh", 6, "ab|cde"),
        ("abcdef", "ghijkl", 6, "abc|gh"),
        ("abcdef", "ghijkl", 7, "abc|ghi"),
        ("", "", 4, "|"),
        ("ab", "c", 1, "|"),
        ("ab", "", 2, "a|"),
    ],
)
def test_of_a_pair_the_longer_text_is_cut(first: str, second: str, length: int, want: str) -> None:
    tokens = utf8()([first], [second], length)[0]
    assert tokens.shape == (length,)
    assert "".join("|" if token == 256 else chr(token) for token in known(tokens)) == want


# --- one's own tables


def table(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    """A file or folder of that kind with these rows."""
    if kind == "saved":
        return saved(folder / "saved", {key: [row[key] for row in rows] for key in rows[0]})
    if kind == "jsonl":
        return jsonl(folder / "own.jsonl", rows)
    file = folder / "own.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


@pytest.mark.parametrize("kind", ["csv", "jsonl", "saved"])
def test_every_kind_of_table_gives_the_same_task(tmp_path: Path, kind: str) -> None:
    """30 texts in 3 classes over 2 clients: 15 each, floor(1.5) = 1 of them for evaluation."""
    task = create(file=str(table(tmp_path, kind, MAIL)))
    assert task.class_names == ["0", "1", "2"]
    pool = task.pool()
    assert pool.inputs.shape == (30, 8)
    assert known(pool.inputs[4]) == [bucket("buy"), bucket("1")]
    assert pool.targets.tolist() == [0, 1, 2] * 10
    assert [(len(task.client(n).train), len(task.client(n).evaluate)) for n in task.names()] == [(14, 1), (14, 1)]
    assert task.central() is None


def test_a_folder_with_a_test_part_has_a_central_test_set(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", MAIL)
    jsonl(tmp_path / "validation.jsonl", MAIL[:4])
    held = create(file=str(tmp_path)).central()
    assert held is not None
    assert held.targets.tolist() == [0, 1, 2, 0]
    other = jsonl(tmp_path / "other.jsonl", MAIL[:2])
    held = create(file=str(tmp_path), test_file=str(other)).central()
    assert held is not None
    assert len(held) == 2


def test_labels_as_text_are_sorted_or_named(tmp_path: Path) -> None:
    rows = [{"text": "x", "label": name} for name in (*NAMES, "sport")]
    file = str(jsonl(tmp_path / "a.jsonl", rows))
    assert create(file=file).class_names == ["art", "sport"]
    assert create(file=file).pool().targets.tolist() == [1, 0, 1]
    assert create(file=file, classes=[*NAMES, "war"]).pool().targets.tolist() == [0, 1, 0]


def test_columns_by_name_pairs_and_groups(tmp_path: Path) -> None:
    rows = [{"q": "a", "r": "b c", "y": i % 2, "user": f"u{i % 3}"} for i in range(9)]
    file = str(jsonl(tmp_path / "a.jsonl", rows))
    natural = {"kind": "natural", "holdout": 0.0}
    task = create(partition=natural, file=file, text="q", pair="r", label="y")
    assert known(task.pool().inputs[0]) == [bucket("a"), 50, bucket("b"), bucket("c")]
    assert task.names() == ["0", "1", "2"]
    assert all(len(task.client(name).train) == 3 for name in task.names())
    with pytest.raises(SettingsError, match=r"partition.kind = 'natural' needs a group for each example"):
        create(partition=natural, file=str(jsonl(tmp_path / "b.jsonl", MAIL))).names()


def test_a_limit_draws_by_the_seed(tmp_path: Path) -> None:
    file = str(jsonl(tmp_path / "a.jsonl", MAIL))
    one, again, other = (create(file=file, limit=7, seed=seed).pool() for seed in (0, 0, 1))
    assert len(one) == 7
    assert one.inputs.tolist() == again.inputs.tolist() != other.inputs.tolist()


def test_a_sites_own_table(tmp_path: Path) -> None:
    """Without a pooled file: no simulated clients, no central test set, every site its own rows."""
    task = create(classes=3, partition={"holdout": 0.5})
    assert task.names() == []
    assert task.plan_hash() == ""
    assert task.central() is None
    data = task.client("site-1", str(jsonl(tmp_path / "site.jsonl", MAIL[:8])))
    assert (len(data.train), len(data.evaluate)) == (4, 4)
    parts = saved(tmp_path / "parts", {"text": ["a", "b"], "label": [0, 2]}, None, "train", "test")
    data = task.client("site-2", str(parts))
    assert sorted([*data.train.targets.tolist(), *data.evaluate.targets.tolist()]) == [0, 2]
    (tmp_path / "none.csv").write_text("text,label\n")
    assert len(task.client("site-3", str(tmp_path / "none.csv")).train) == 0
    (tmp_path / "wrong.csv").write_text("text,label\na,3\n")
    with pytest.raises(SettingsError, match=r"wrong.csv: labels from 3 to 3; allowed: 0 to 2"):
        task.client("site-4", str(tmp_path / "wrong.csv"))
    with pytest.raises(SettingsError, match=r"file of client 'site-5' = 'absent': no such file or folder"):
        task.client("site-5", "absent")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"words": "x", "label": 0}], {}, r"none of its columns \(words, label\) is one of text, sentence, content"),
        ([{"text": "x", "label": 0}], {"text": "q"}, r"task.text = 'q': .*has no such column; allowed: text, label"),
        ([{"text": "x", "label": 0}], {"pair": "q"}, r"task.pair = 'q': .*has no such column; allowed: text, label"),
        ([{"text": "x", "label": -1}], {}, r"labels from -1 to -1; allowed: 0 to -1"),
        ([{"text": "x", "label": 5}], {"classes": 2}, r"a.jsonl: labels from 5 to 5; allowed: 0 to 1"),
        ([{"text": "x", "label": "c"}], {"classes": NAMES}, r"a.jsonl: label 'c'; allowed: sport, art"),
        ([{"text": "x", "label": 0.5}], {}, r"labels are float64 \(1,\); allowed: integers or text"),
        ([{"text": "x", "label": 0}], {"heads": 2}, r"heads belongs to model 'gpt2', not to 'bag'"),
        ([{"text": "x", "label": 0}], {"layers": 2}, r"layers belongs to model 'lstm' and 'gpt2', not to 'bag'"),
        ([{"text": "x", "label": 0}], {"modell": "bag"}, r"\[task\]: modell = 'bag': unknown key; allowed here: model"),
        (None, {}, r"task.file is required: a table of texts and labels; without one, task.classes is"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, rows: Any, options: dict[str, Any], message: str) -> None:
    given = {} if rows is None else {"file": str(jsonl(tmp_path / "a.jsonl", rows))}
    with pytest.raises(SettingsError, match=message):
        create(**given, **options).names()


# --- models


def test_the_bag_is_the_mean_of_its_words(tmp_path: Path) -> None:
    """51 rows of width 3 and 3 classes: 51 * 3 + 3 * 3 + 3 = 165 parameters; padding counts for nothing."""
    task = create(file=str(jsonl(tmp_path / "a.jsonl", MAIL)), width=3)
    model: Any = task.model()
    assert sum(p.numel() for p in model.parameters()) == 165
    tokens = torch.tensor([[4, 7, -1, -1], [7, 4, 4, 7]])
    mean = (model.embedding.weight[4] + model.embedding.weight[7]) / 2
    torch.testing.assert_close(model(tokens)[0], model.score(mean))
    torch.testing.assert_close(model(tokens)[1], model.score(mean))
    assert task.output_layer(model) is model.score


def test_the_lstm_reads_to_the_last_word(tmp_path: Path) -> None:
    """Padding changes nothing, and a batch is cut to its longest text, in blocks of 8 tokens."""
    task = create(file=str(jsonl(tmp_path / "a.jsonl", MAIL)), model="lstm", width=4, length=30)
    model = task.model()
    short = torch.tensor([[3, 1, 4]])
    padded = torch.cat([short, torch.full((1, 5), PADDING)], 1)
    torch.testing.assert_close(model(short), model(padded))
    assert task.features(task.pool().inputs[:2]).shape == (2, 8)
    assert task.features(torch.arange(30).view(1, 30)).shape == (1, 30)
    torch.testing.assert_close(model(task.features(task.pool().inputs)), model(task.pool().inputs.int()))


def test_metrics_are_sums(tmp_path: Path) -> None:
    """With a zero output layer every class has probability 1/3 and class 0 is guessed."""
    task = create(file=str(jsonl(tmp_path / "a.jsonl", MAIL)))
    model: Any = task.model()
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    found = task.metrics(model, task.pool().batch(torch.arange(6)))
    assert found == {"loss": pytest.approx(6 * math.log(3), rel=1e-6), "accuracy": 2.0}


def test_a_federation_on_ones_own_table(tmp_path: Path) -> None:
    """Three words tell the classes apart."""
    file = str(jsonl(tmp_path / "train.jsonl", MAIL * 5))
    settings = Experiment.model_validate(
        {
            "name": "mail",
            "rounds": 5,
            "task": {"name": "text", "file": file, "vocabulary": 100, "length": 8},
            "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.5},
            "local": {"optimizer": "adam", "lr": 0.1, "batch_size": 8},
        }
    )
    record = run(InProcessGrid(app), settings, RunFolder(tmp_path / "run"))
    assert record["clients"]["accuracy"]["weighted"] > 0.9
    assert record["dropped"] == {}


# --- named data sets

COLUMNS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "agnews": ("test", ("text",), 4),
    "20news": ("test", ("text",), 20),
    "sst2": ("validation", ("sentence",), 2),
    "qnli": ("validation", ("question", "sentence"), 2),
    "qqp": ("validation", ("question1", "question2"), 2),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_named_data_sets_are_read_from_the_data_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files with the columns of the real ones, of pairs both texts."""
    part, columns, classes = COLUMNS[name]
    rows = [{**{key: f"{key} {i}" for key in columns}, "label": i % classes, "idx": i} for i in range(40)]
    (tmp_path / name).mkdir()
    jsonl(tmp_path / name / "train.jsonl.gz", rows)
    jsonl(tmp_path / name / f"{part}.jsonl", rows[:3])
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    task = create(name)
    assert len(task.pool()) == 40
    want = [bucket(word) for key in columns for word in (key, "5", "|")][:-1]
    want = [50 if i == 2 and len(columns) > 1 else token for i, token in enumerate(want)]
    assert known(task.pool().inputs[5]) == want
    held = task.central()
    assert held is not None
    assert held.targets.tolist() == [0, 1, 2 % classes]
    assert task.model()(task.features(task.pool().inputs[:2])).shape == (2, classes)
    with pytest.raises(SettingsError, match=r"\[task\]: file = 'x': unknown key"):
        create(name, file="x")


def test_a_local_folder_without_a_training_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sst2").mkdir()
    jsonl(tmp_path / "sst2" / "validation.jsonl", [{"sentence": "x", "label": 0}])
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    with pytest.raises(SettingsError, match=r"sst2: none of the tables train, dev; it has validation"):
        create("sst2").names()


OFFLINE = """
import sys
from common import tasks
from common.errors import SettingsError
from common.experiment import PartitionSettings, TaskSettings
try:
    tasks.create(TaskSettings(name=sys.argv[1]), PartitionSettings(), 0).names()
except SettingsError as error:
    print(error)
"""


REFUSED = {"HF_ENDPOINT": "http://127.0.0.1:9"}


def test_without_the_hub_the_places_looked_at_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    monkeypatch.setattr("common.data.hub.reachable", lambda: False)
    where = rf"data set 'qqp': no folder {tmp_path}/qqp, and nyu-mll/glue \(qqp\) cannot be had .* or its cache /"
    with pytest.raises(SettingsError, match=where):
        create("qqp").names()


@pytest.mark.processes
@pytest.mark.parametrize("network", [{"HF_HUB_OFFLINE": "1"}, REFUSED], ids=["offline", "refused"])
def test_offline_ends_soon_and_says_where_it_looked(tmp_path: Path, network: dict[str, str]) -> None:
    given = {k: v for k, v in os.environ.items() if k != "FEDKEEL_DATA"}
    given |= {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **network}
    command = [sys.executable, "-W", "error", "-c", OFFLINE, "qnli"]
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("data set 'qnli': FEDKEEL_DATA names no folder, and nyu-mll/glue (qnli) cannot be")
    assert f"its cache {tmp_path}" in done.stdout
    assert "Put it into FEDKEEL_DATA as qnli/train.jsonl" in done.stdout
    assert done.stderr == ""


def test_a_download_is_read_like_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's parts by their names there; its test part of GLUE has no labels and is not looked at."""
    import datasets

    asked: list[tuple[str, str | None]] = []
    rows = {"sentence": ["good", "bad"], "label": [1, 0]}
    parts = {"train": rows, "validation": rows, "test": {"sentence": ["?"], "label": [-1]}}

    def load(name: str, config: str | None) -> datasets.DatasetDict:
        asked.append((name, config))
        return datasets.DatasetDict({part: datasets.Dataset.from_dict(table) for part, table in parts.items()})

    monkeypatch.delenv("FEDKEEL_DATA", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("common.data.hub.reachable", lambda: True)
    task = create("sst2")
    assert task.pool().targets.tolist() == [1, 0]
    assert counts(task.central()) == [1, 1]
    assert set(asked) == {("nyu-mll/glue", "sst2")}
    parts.pop("validation")
    with pytest.raises(SettingsError, match=r"nyu-mll/glue: none of the parts validation; it has train, test"):
        create("sst2").central()


def counts(examples: Examples | None) -> list[int]:
    assert examples is not None
    return torch.bincount(examples.targets).tolist()


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("agnews", [2509, 2458, 2496, 2538], [1900] * 4), ("sst2", [29780, 37569], [428, 444])],
)
def test_the_real_files(name: str, train: list[int], test: list[int]) -> None:
    """SST-2's two training files are together GLUE's 67,349."""
    task = create(name, length=64)
    assert counts(task.pool()) == train
    assert counts(task.central()) == test
    assert int((task.pool().inputs >= 0).sum(1).min()) >= 1


@pytest.mark.data
@pytest.mark.parametrize(("name", "least"), [("agnews", 0.7), ("sst2", 0.6)])
def test_the_bag_learns_real_texts(name: str, least: float, tmp_path: Path) -> None:
    """The most frequent class has 25 and 51 % of the central test."""
    settings = Experiment.model_validate(
        {
            "name": name,
            "rounds": 4,
            "task": {"name": name, "length": 48, "limit": 6000, "vocabulary": 4096},
            "partition": {"kind": "dirichlet", "alpha": 1.0, "clients": 8},
            "local": {"optimizer": "adam", "lr": 0.03},
            "evaluate": {"every": 4},
        }
    )
    record = run(InProcessGrid(app), settings, RunFolder(tmp_path / "run"))
    assert record["central"]["accuracy"] > least
    assert record["dropped"] == {}


@pytest.mark.slow
def test_tasks_are_functions_of_the_settings_and_the_seed(tmp_path: Path) -> None:
    """Another process with another hash seed finds the same tokens, plan and test set."""
    jsonl(tmp_path / "train.jsonl", MAIL)
    code = (
        "import json, sys; from common import tasks; from common.experiment import PartitionSettings, TaskSettings;"
        "given = TaskSettings(name='text', file=sys.argv[1], length=8, vocabulary=50);"
        "t = tasks.create(given, PartitionSettings(clients=2), 0);"
        "print(json.dumps([t.pool().inputs.tolist(), t.plan_hash()]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    task = create(file=str(tmp_path))
    assert json.loads(done.stdout) == [task.pool().inputs.tolist(), task.plan_hash()]


def test_every_text_task_is_registered() -> None:
    assert {"text", "shakespeare", *COLUMNS} <= set(tasks.TASKS)
    assert issubclass(Text, Task)
    assert np.iinfo(np.int16).max == 32767
