"""Shakespeare by role: windows and their targets, holdouts that share no character, plans, files, learning."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client.app import app
from common import tasks
from common.data.speeches import LETTERS, Windows, encode, roles, windows
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.flower import ROOT
from common.partition import file as plan_files
from common.tasks.base import evaluate
from common.tasks.shakespeare import NextCharacter, Shakespeare, ShakespeareSettings
from server.app import run
from server.engines.grid import grid
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.common.test_tables import jsonl

PLAY = [
    {"play": "p", "role": "A", "speeches": ["To be, or not", "to be: that"]},
    {"play": "p", "role": "B", "speeches": ["is"]},
    {"play": "q", "role": "A", "speeches": [string.ascii_lowercase * 2]},
]


def create(folder: Path, partition: dict[str, Any] | None = None, rows: Any = PLAY, **options: Any) -> Shakespeare:
    """The task on a file of few roles, with windows of 4 characters."""
    file = folder / "roles.jsonl"
    if rows is not None:
        jsonl(file, rows)
    settings = PartitionSettings.model_validate({"kind": "natural", **(partition or {})})
    given = {"length": 4, "file": str(file), "width": 8, **options}
    task = tasks.create(TaskSettings(name="shakespeare", **given), settings, 0)
    assert isinstance(task, Shakespeare)
    return task


def said(codes: torch.Tensor) -> str:
    return "".join(LETTERS[code] for code in codes)


def pieces(examples: Any) -> list[str]:
    """What the windows of a client read."""
    return [said(window) for window in examples.batch(torch.arange(len(examples)))[0]]


def test_the_vocabulary_is_leafs() -> None:
    """80 characters, each once; others become spaces, never another letter."""
    assert len(set(LETTERS)) == len(LETTERS) == 80
    assert said(torch.from_numpy(encode("Ay,\nme$é\u4e00!"))) == "Ay,\nme   !"[:6] + "  ?!"


def test_every_character_of_a_role_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    """ "To be, or not\\nto be: that" has 25 characters: 25 - 4 = 21 windows of 4 and the next; role B's 2 give none."""
    task = create(tmp_path, {"holdout": 0.0})
    data = task.client("0").train
    text = "To be, or not\nto be: that"
    assert len(text) == 25
    assert pieces(data) == [text[i : i + 5] for i in range(21)]
    assert [LETTERS[int(target)] for target in data.targets] == list(text[4:])
    assert [role.name for role in task.roles] == ["p/A", "q/A"]
    assert task.names() == ["0", "1"]
    assert len(task.client("1").train) == 52 - 4


def test_training_and_evaluation_share_no_character(tmp_path: Path) -> None:
    """48 windows: floor(48 * 0.25) = 12 for evaluation, from place 36 on; training windows, 5 characters long, end
    before it: they start at 0 to 31."""
    data = create(tmp_path, {"holdout": 0.25}).client("1")
    letters = string.ascii_lowercase * 2
    assert pieces(data.evaluate) == [letters[i : i + 5] for i in range(36, 48)]
    assert pieces(data.train) == [letters[i : i + 5] for i in range(32)]
    assert isinstance(data.train, Windows)
    assert len(data.train.text) == 36


def test_a_short_role_trains_on_all_it_has(tmp_path: Path) -> None:
    """12 windows, 3 of them for evaluation from place 9 on, leave training windows 0 to 4; 6 windows, one from place 5
    on, leave 0 alone; 5 windows from 9 characters, one from place 4 on, none."""
    rows = [{"role": str(n), "speeches": ["x" * (n + 4)]} for n in (12, 6, 5)]
    task = create(tmp_path, {"holdout": 0.25}, rows, min_samples=5)
    held = [task.client(name) for name in task.names()]
    assert [(len(data.train), len(data.evaluate)) for data in held] == [(5, 3), (1, 1), (5, 0)]


def test_windows_keep_their_own_characters_only() -> None:
    """Windows of 2 + 1 at 1, 2 and 7 of "abcdefghijk" hold "bcde" and "hij"."""
    text = encode("abcdefghijk")
    held = windows(text, np.array([1, 2, 7]), 2)
    assert said(held.text) == "bcdehij"
    assert pieces(held) == ["bcd", "cde", "hij"]
    assert said(held.targets) == "dej"
    assert held.text.dtype == torch.uint8
    moved = held.to(torch.device("cpu"))
    assert pieces(moved) == pieces(held)
    assert len(windows(text, np.zeros(0, np.int64), 2)) == 0


def test_all_positions_or_the_last(tmp_path: Path) -> None:
    """The sequence model gives 4 predictions a window; its accuracy is their mean, and its last is the other's."""
    last, everywhere = create(tmp_path), create(tmp_path, predict="all", stride=1)
    torch.manual_seed(0)
    model = last.model()
    twin = everywhere.model()
    twin.load_state_dict(model.state_dict())
    batch = last.client("1").train.batch(torch.arange(6))
    one, all_ = last.outputs(model, batch), everywhere.outputs(twin, batch)
    assert one[0].shape == (6, 80)
    assert all_[0].shape == (24, 80)
    torch.testing.assert_close(all_[0].view(6, 4, 80)[:, -1], one[0])
    assert all_[1].view(6, 4)[:, -1].tolist() == one[1].tolist() == batch[1].tolist()
    right = (all_[0].argmax(1) == all_[1]).double().mean().item()
    assert everywhere.metrics(twin, batch)["accuracy"] / 6 == pytest.approx(right)
    assert everywhere.metrics(twin, batch)["loss"] / 6 == pytest.approx(everywhere.loss(twin, batch).item(), rel=1e-5)
    assert everywhere.output_layer(twin) is None
    assert last.output_layer(model) is model.head
    assert create(tmp_path, predict="all").stride == 4


def test_leafs_model() -> None:
    """80*8 + 4*256*(8 + 256 + 2) + 4*256*(256 + 256 + 2) + 256*80 + 80 = 819,920 parameters."""
    model = NextCharacter(ShakespeareSettings())
    assert sum(p.numel() for p in model.parameters()) == 640 + 272384 + 526336 + 20480 + 80


def test_samples_of_leaf_are_merged_again(tmp_path: Path) -> None:
    """Rows of x and y that follow one another make one text, and the same windows; a gap begins anew."""
    text, other = "abcdefgh", "uvwxyz"
    pairs = [(text[i : i + 4], text[i + 4], "r1") for i in range(4)] + [(other[:4], other[4], "r1")]
    rows = [{"x": x, "y": y, "character_id": name} for x, y, name in [*pairs, ("aaaa", "b", "r2")]]
    held = roles({key: [row[key] for row in rows] for key in rows[0]}, "f")
    assert [(role.name, said(torch.from_numpy(role.text))) for role in held] == [
        ("r1", "abcdefghuvwxy"),
        ("r2", "aaaab"),
    ]
    assert roles({"x": [], "y": []}, "f") == []
    with pytest.raises(SettingsError, match=r"f, row 1: x has 2 characters and y 1; allowed: 1 as in the first"):
        roles({"x": ["a", "bc"], "y": ["b", "d"]}, "f")


def test_natural_roles_chosen_by_the_seed_and_other_splits(tmp_path: Path) -> None:
    """With clients = 1 the seed takes one role; an iid split deals all windows: 21 + 48 = 69."""
    one = create(tmp_path, {"clients": 1, "holdout": 0.0})
    assert len(one.assignment.clients) == 1
    assert len(one.client("0").train) in (21, 48)
    iid = create(tmp_path, {"kind": "iid", "clients": 3, "holdout": 0.0})
    assert sum(len(iid.client(name).train) for name in iid.names()) == 69
    assert iid.assignment.hash != create(tmp_path, {"kind": "iid", "clients": 3, "holdout": 0.3}).assignment.hash
    texts = [piece for name in iid.names() for piece in pieces(iid.client(name).train)]
    whole = create(tmp_path, {"holdout": 0.0})
    assert sorted(texts) == sorted(p for name in whole.names() for p in pieces(whole.client(name).train))


def test_a_plan_file_is_taken_as_it_is(tmp_path: Path) -> None:
    """The plan that the task made, and one of one's own."""
    made = create(tmp_path, {"holdout": 0.25})
    file, labels = tmp_path / "plan.json", made.pool().targets.numpy()
    file.write_text(plan_files.text(made.assignment, labels, made.partition, "shakespeare"))
    again = create(tmp_path, {"kind": "file", "file": str(file)})
    assert again.assignment.hash == made.assignment.hash
    rows = [{"train": [0, 1], "evaluate": [2]}, {"train": [30]}]
    own = {"format": plan_files.FORMAT, "data": {"examples": len(labels)}, "clients": rows}
    file.write_text(json.dumps(own))
    data = create(tmp_path, {"kind": "file", "file": str(file)}).client("0")
    assert pieces(data.train) == ["To be", "o be,"]
    assert pieces(data.evaluate) == [" be, "]


def test_a_sites_own_file(tmp_path: Path) -> None:
    """All of its text, cut like any client's; without roles it is one: 25 characters, 21 windows."""
    task = create(tmp_path, {"holdout": 0.0})
    site = jsonl(tmp_path / "site.jsonl", [{"speeches": PLAY[0]["speeches"]}])
    assert pieces(task.client("hall", str(site)).train) == pieces(task.client("0").train)
    both = task.client("hall", str(jsonl(tmp_path / "both.jsonl", PLAY)))
    assert len(both.train) == 21 + 48
    empty = task.client("hall", str(jsonl(tmp_path / "none.jsonl", [{"text": "x"}])))
    assert (len(empty.train), len(empty.evaluate)) == (0, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": [{"role": "A", "words": ["x"]}]}, r"none of its columns \(role, words\) is one of speeches, text"),
        ({"min_samples": 50}, r"task.min_samples = 50: no role in .*roles.jsonl has as many windows of 4 characters"),
        ({"predict": "first"}, r"\[task\]: predict = 'first': .*'last' or 'all'"),
        ({"file": "absent.jsonl"}, r"task.file = 'absent.jsonl': no such file or folder; looked for /"),
        ({"partition": {"shift": "noise"}}, r"partition.shift = 'noise': one input of this task is torch.int64"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        create(tmp_path, **given).names()


def small(file: str | None = None, **given: Any) -> Experiment:
    """A federation of few roles with a small model; `file`: of the roles, default the real ones."""
    return Experiment.model_validate(
        {
            "name": "roles",
            "rounds": 3,
            "task": {"name": "shakespeare", "width": 32, "layers": 1, **({"file": file} if file else {})},
            "partition": {"kind": "natural", "clients": 6},
            "round": {"sample": 3},
            "local": {"optimizer": "adam", "lr": 0.01, "steps": 10},
            **given,
        }
    )


@pytest.mark.slow
def test_workers_find_the_same_weights(tmp_path: Path) -> None:
    rows = [{"role": str(i), "text": "what light through yonder window breaks " * (i + 1)} for i in range(4)]
    file = str(jsonl(tmp_path / "roles.jsonl", rows))
    task = {"name": "shakespeare", "length": 10, "width": 8, "file": file}
    settings = small(task=task, partition={"kind": "natural"}, strategy={"name": "scaffold"}, local={"steps": 3})
    here = run(InProcessGrid(app), settings, RunFolder(tmp_path / "here"))
    with grid("client.app:app", 2) as workers:
        there = run(workers, settings, RunFolder(tmp_path / "there"))
    assert here["sha256"] == there["sha256"]
    assert here["dropped"] == {}


@pytest.mark.data
def test_the_plays() -> None:
    """1,358 roles; 1,147 of them have ten windows of 80 characters and the next."""
    task = tasks.create(TaskSettings(name="shakespeare"), PartitionSettings(kind="natural"), 0)
    assert isinstance(task, Shakespeare)
    assert len(task.roles) == 1147
    assert len(task.pool()) == sum(len(role.text) - 80 for role in task.roles) == 4204445
    assert task.roles[0].name == "alls_well_that_ends_well/COUNTESS"
    assert said(torch.from_numpy(task.roles[0].text[:21])) == "In delivering my son "
    letters = np.bincount(np.concatenate([role.text for role in task.roles]), minlength=80)
    assert LETTERS[int(letters.argmax())] == " "
    assert LETTERS[int(np.argsort(letters)[-2])] == "e"


@pytest.mark.data
def test_the_loss_on_real_roles_falls(tmp_path: Path) -> None:
    """Uniform guesses cost log 80 = 4.38 nats; the letters' frequencies alone 3.1."""
    record = run(InProcessGrid(app), small(), RunFolder(tmp_path / "run"))
    assert record["clients"]["loss"]["weighted"] < 3.3
    assert record["dropped"] == {}


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.rest
def test_the_ready_experiment_learns(tmp_path: Path) -> None:
    """Better than the most frequent character, a space, which is 17 % of all."""
    settings = Experiment.load(ROOT / "experiments" / "shakespeare.toml")
    record = run(InProcessGrid(app), settings, RunFolder(tmp_path / "run"))
    assert record["clients"]["accuracy"]["weighted"] > 0.2


def test_evaluation_counts_windows(tmp_path: Path) -> None:
    """A model that always says "a": of 52 letters twice a to z, two windows of 48 end in "a" - one, the second."""
    task = create(tmp_path, {"holdout": 0.0})
    model = task.model()
    nn.init.zeros_(model.head.weight)  # type: ignore[union-attr, arg-type]
    nn.init.zeros_(model.head.bias)  # type: ignore[union-attr, arg-type]
    model.head.bias.data[LETTERS.index("a")] = 5.0  # type: ignore[union-attr, index]
    assert evaluate(task, model, task.client("1").train, 7)["accuracy"] == pytest.approx(1 / 48)
