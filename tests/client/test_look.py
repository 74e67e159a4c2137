"""`client doctor --experiment`: what a run would refuse at a site is not "all well"."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from PIL import Image
from typer.testing import CliRunner

from client import policy as policies
from client.__main__ import cli
from client.approval.store import Approvals, key_of
from client.commands import look as module
from client.commands.doctor import checks as doctor_checks
from client.commands.look import Look, checks, looked
from common.deploy.checks import Check
from common.experiment import Experiment
from strategies.registry import settled
from tests.support.site import Site

FIRST: dict[str, Any] = {
    "name": "first",
    "rounds": 20,
    "task": {"name": "npz", "shape": [8, 8], "classes": 10},
    "strategy": {"name": "scaffold"},
}
TEXT: dict[str, Any] = {"name": "text", "task": {"name": "text", "classes": 2, "text": "note", "label": "ill"}}
TABLE: dict[str, Any] = {"name": "table", "task": {"name": "images", "shape": [3], "classes": 2}}
FOLDER: dict[str, Any] = {"name": "folder", "task": {"name": "images", "shape": [8, 8], "classes": ["cat", "dog"]}}


def written(folder: Path, values: dict[str, Any], **more: Any) -> str:
    path = folder / "experiment.toml"
    whole = dict(values)
    for key, each in more.items():
        whole[key] = {**values.get(key, {}), **each}
    path.write_text(tomli_w.dumps(whole))
    return str(path)


def arrays(folder: Path, **given: Any) -> str:
    chance = np.random.default_rng(0)
    held = {"x": chance.random((40, 8, 8), dtype=np.float32), "y": np.arange(40) % 10} | given
    path = folder / "site.npz"
    np.savez(path, **{key: value for key, value in held.items() if value is not None})
    return str(path)


def looking(look: Look) -> dict[str, Check]:
    return {check.name: check for check in checks(look)}


def test_what_works_is_told_in_numbers(tmp_path: Path) -> None:
    found = looking(Look(written(tmp_path, FIRST), "site-1", arrays(tmp_path)))
    assert all(check.ok for check in found.values()), found
    assert "2 vectors as long as the shared model (delta, control)" in found["leaves"].detail
    assert "float32[8, 8] and int64" in found["data"].detail
    assert "10 of 10 classes, 0 to 9" in found["data"].detail
    assert "2 steps a round" in found["training"].detail


UNFIT = {
    "shape": ({"x": np.zeros((40, 7, 8), np.float32)}, "one input is (7, 8); this run's are (8, 8)"),
    "vectors": ({"x": np.zeros((40, 64), np.float32)}, "one input is (64,)"),
    "labels above": ({"y": np.arange(40)}, "labels from 0 to 39; allowed: 0 to 9"),
    "labels below": ({"y": np.arange(40) % 10 - 1}, "labels from -1"),
    "labels as floats": ({"y": np.arange(40) / 4}, "labels are float64"),
    "fewer labels": ({"y": np.arange(39) % 10}, "40 inputs and 39 labels"),
    "text": ({"x": np.full((40, 8, 8), "a")}, "inputs are <U1"),
    "objects": ({"x": np.full((40, 8, 8), None, object)}, "Python objects"),
    "nan": ({"x": np.full((40, 8, 8), np.nan, np.float32)}, "NaN"),
    "other names": ({"x": None, "pixels": np.zeros((40, 8, 8), np.float32)}, "name it with task.inputs"),
    "no labels": ({"y": None}, "name it with task.labels"),
    "class names": ({"y": np.array(["a", "b"] * 20)}, "label"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_arrays_that_the_run_would_refuse(case: str, tmp_path: Path) -> None:
    """With what it is and what is allowed; and the run does refuse them."""
    given, told = UNFIT[case]
    experiment, data = written(tmp_path, FIRST), arrays(tmp_path, **given)
    found = looking(Look(experiment, "site-1", data))
    assert found["data"].ok is False
    assert "training" not in found
    if case != "objects":
        assert told in found["data"].detail
    site = Site("ram", Experiment.load(experiment), "site-1", data=data)
    assert site.roll().error


def test_arrays_of_other_names_do_where_the_experiment_names_them(tmp_path: Path) -> None:
    given = {"x": None, "y": None, "pixels": np.zeros((40, 8, 8)), "truth": np.arange(40) % 10}
    named = written(tmp_path, FIRST, task={"inputs": "pixels", "labels": "truth"})
    assert looking(Look(named, "site-1", arrays(tmp_path, **given)))["training"].ok


def test_no_example_is_a_warning_and_no_file_a_failure(tmp_path: Path) -> None:
    empty = arrays(tmp_path, x=np.zeros((0, 8, 8), np.float32), y=np.zeros(0, np.int64))
    found = looking(Look(written(tmp_path, FIRST), "site-1", empty))
    assert found["examples"].word == "warn"
    without = looking(Look(written(tmp_path, FIRST), "site-1"))["data"]
    assert without.ok is False
    assert "--data" in without.advice
    unread = looking(Look(written(tmp_path, {"task": {"name": "digits"}}), "0", empty))["data"]
    assert unread.ok is False
    unknown = looking(Look(written(tmp_path, {"task": {"name": "digits"}}), "site-1"))["data"]
    assert unknown.ok is False
    assert "'site-1'" in unknown.detail


@pytest.mark.parametrize(
    ("columns", "ok", "told"),
    [
        ("note,ill\nwell again,0\nfever,1\n", True, ""),
        ("text,label\nwell again,0\nfever,1\n", False, "note"),
        ("note,ill\nwell again,0\nfever,7\n", False, "allowed: 0 to 1"),
        ("note,ill\nwell again,no\nfever,yes\n", False, "allowed: 0, 1"),
        ("note,ill\n", None, "no training example"),
    ],
)
def test_tables_are_read_as_the_task_does(columns: str, ok: bool | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "site.csv"
    path.write_text(columns)
    found = looking(Look(written(tmp_path, TEXT, partition={"holdout": 0.0}), "site-1", str(path)))
    check = found["training"] if ok else found["examples" if ok is None else "data"]
    assert check.ok is ok, found
    assert told in check.detail


@pytest.mark.parametrize(
    ("classes", "size", "told"),
    [(("cat", "dog"), 8, ""), (("cat", "cow"), 8, "cow"), (("cat", "dog"), 9, "9"), ((), 8, "")],
)
def test_folders_of_images(classes: tuple[str, ...], size: int, told: str, tmp_path: Path) -> None:
    """A class that the experiment does not know, images of another size, none at all."""
    root = tmp_path / "images"
    root.mkdir()
    for name in classes:
        (root / name).mkdir()
        for number in range(4):
            Image.new("L", (size, size), number * 9).save(root / name / f"{number}.png")
    check = looking(Look(written(tmp_path, FOLDER, local={"batch_size": 2}), "site-1", str(root)))
    if classes and not told:
        assert check["training"].ok
    else:
        assert check["data"].ok is False
        assert told in check["data"].detail


# --- what the site lets be asked


def test_a_task_that_is_not_allowed_is_not_imported(tmp_path: Path) -> None:
    experiment = written(tmp_path, {"task": {"name": "tests.client.test_approval_bait:task"}})
    found = looking(Look(experiment, "site-1"))
    last = list(found.values())[-1]
    assert last.ok is False
    assert "--allow-task" in last.advice


def test_the_policy_is_asked(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    look = Look(written(tmp_path, FIRST), "site-1", arrays(tmp_path), str(policy))
    for text, name, told in (
        ("tasks = ['digits']", "experiment", "does not allow task 'npz'"),
        ("strategies = ['fedavg']", "experiment", "does not allow strategy"),
        ("max_steps = 1", "steps", "max_steps = 1"),
    ):
        policy.write_text(text)
        policies._load.cache_clear()
        check = looking(look)[name]
        assert (check.ok, told in check.detail) == (False, True), check


def test_an_experiment_that_is_none_is_told(tmp_path: Path) -> None:
    for values, told in (
        ({"strategy": {"name": "nonsense"}}, "strategy.name"),
        ({"local": {"optimizer": "nonsense"}}, "local.optimizer"),
        ({"task": {"name": "npz", "nonsense": 1}}, "nonsense"),
    ):
        [*_, last] = checks(Look(written(tmp_path, values), "site-1"))
        assert last.ok is False
        assert told in last.detail
    [only] = checks(Look(str(tmp_path / "none.toml"), "site-1"))
    assert (only.name, only.ok) == ("experiment", False)


def test_the_state_of_approval_is_told(tmp_path: Path) -> None:
    experiment, file = written(tmp_path, FIRST), tmp_path / "approvals.json"
    look = Look(experiment, "site-1", arrays(tmp_path), approve="ask", approvals=str(file))
    assert looking(look)["approval"].word == "warn"
    whole = settled(Experiment.load(experiment))[1]
    Approvals(file).ask(key_of(whole), whole, "first-1")
    assert "waits for approval" in looking(look)["approval"].detail
    Approvals(file).decide(key_of(whole), "approved", 20)
    assert looking(look)["approval"].ok
    Approvals(file).decide(key_of(whole), "revoked")
    assert looking(look)["approval"].ok is False


# --- the process of its own


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_the_command_ends_with_1_where_the_run_would_refuse(tmp_path: Path) -> None:
    """Without a server, too; and never "all well" without a policy."""
    base = [
        "doctor",
        "--experiment",
        written(tmp_path, FIRST),
        "--name",
        "site-1",
        "--memory",
        str(tmp_path / "memory"),
    ]
    bad = CliRunner().invoke(cli, [*base, "--data", arrays(tmp_path, y=np.arange(40))])
    assert bad.exit_code == 1
    assert "labels from 0 to 39" in bad.output
    assert "no --policy and no --approve ask" in bad.output
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == 2


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_look_that_hangs_or_dies_is_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that never end, code that ends its process: told within the limit, nothing stays behind."""
    look = Look(written(tmp_path, FIRST), "site-1", arrays(tmp_path))
    started = time.monotonic()
    [*_, last] = looked(look, 0.2)
    assert (last.word, "not done within" in last.detail) == ("warn", True)
    assert time.monotonic() - started < 20
    said = module.MARK + '["data", true, "seen", ""]'
    dies = f"import os; print('[noise'); print({said!r}, flush=True); os._exit(9)"
    monkeypatch.setattr(module, "_PROGRAM", dies)
    [first, last] = looked(look, 30.0)
    assert first == Check("data", True, "seen", "")
    assert last.ok is False
    assert "ended after data: exit code 9" in last.detail


def test_a_join_without_a_policy_is_warned_of(tmp_path: Path) -> None:
    def seen(**more: Any) -> list[str]:
        given = {
            "names": ["a"],
            "memory": tmp_path,
            "experiment": tmp_path / "none",
            "data": str(tmp_path / "none.npz"),
        }
        return [check.word for check in doctor_checks("", **given, **more) if check.name == "policy"]

    assert seen() == ["warn"]
    for more in ({"approve": "ask"}, {"approve": "all"}, {"trusted": True}):
        assert seen(**more) == []
    (tmp_path / "policy.toml").write_text("max_steps = 3\n")
    assert seen(policy=tmp_path / "policy.toml") == ["ok"]
