"""What a site opens, runs and fetches for a server: what it has allowed, and nothing is even looked at beside it."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from client.policy import Policy
from common.data import grant
from common.data.grant import EVERYTHING, NOTHING, Grant, granting
from common.data.places import find, own
from common.errors import Denied, SettingsError
from common.experiment import Experiment
from common.tasks import TASKS, create
from tests.support.planted import Planted, every_field, experiment_with, found, plant, texts

TEXT = {
    "inputs", "labels", "groups", "test_inputs", "test_labels", "text", "pair", "label", "group", "target",
    "drop", "categories", "standardize",  # columns, arrays
    "classes", "variant", "lora_targets", "parts", "classes_per_client", "name",
    "model", "config", "frozen",  # of a language model: a kind that transformers knows, numbers, names of parameters
    "select",  # read by the server alone, which clients are not even sent
    "metrics", "headline",  # code that `metrics` names is found by the gate: test_own_parts.py
}  # fmt: skip
"""Fields of text that nobody opens: compared with what is there. A new one that names a file is `Opened`."""

FIELDS = every_field()
OPENED = [name for name, (_, kind) in FIELDS.items() if texts(kind)[1]]
OTHERS = [name for name, (_, kind) in FIELDS.items() if texts(kind) == (True, False)]
SERVER_ONLY = ("speed.file", "presence.file")
"""Traces, read by the server alone."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return plant(tmp_path, monkeypatch)


def test_every_field_of_text_is_known() -> None:
    """To name a file, which then is found by the gate, or to be but text."""
    assert {name.rsplit(".")[-1] for name in OTHERS} <= TEXT
    assert {name.split(": ")[-1] for name in OPENED} == {
        "task.file", "task.test_file", "task.pretrained", "task.tokenizer", "partition.file", *SERVER_ONLY
    }  # fmt: skip
    assert {name.split(": ")[0] for name in OPENED if name.endswith("task.file")} >= {"images", "text", "quadratic"}


@pytest.mark.parametrize("name", OPENED)
def test_a_named_path_is_denied_unseen(name: str, site: Planted) -> None:
    """Whatever is there: the same answer, and nothing on the disk is asked, with data of the site's own or without. The
    server's own traces are not read."""
    answers = set()
    for data in (site.config["data"], ""):
        site.config["data"] = data
        for path in (
            site.folder / "arrays.npz",
            site.folder,
            site.folder / "none" / "at.all",
            site.folder / "link.csv",
        ):
            with site.watched() as seen:
                roll = site.roll(json.dumps(experiment_with(name, FIELDS[name][0], str(path))))[1]
            assert seen == []
            answers.add((data, re.sub(r"'/.*?(?=: the site)|[0-9a-f]{6}.$", "", roll.error)))
    assert len(answers) == 2, "one with data, one without"
    if name not in SERVER_ONLY and not name.endswith("task.test_file"):  # which the server alone reads
        assert any("-denied: " in error for _, error in answers)


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_is_but_text_opens_nothing(name: str, site: Planted) -> None:
    """A path in it is a name like any other."""
    for path in (site.folder / "table.csv", site.folder):
        for value in (str(path), [str(path)]):
            with site.watched() as seen:
                site.roll(json.dumps(experiment_with(name, FIELDS[name][0], value)))
            assert seen == []


def test_the_watch_sees_what_is_allowed(site: Planted) -> None:
    """Else the tests above would see nothing at all."""
    policy = site.root / "policy.toml"
    policy.write_text(f"files = [{json.dumps(str(site.folder))}]\n")
    for name in OPENED:
        if name not in SERVER_ONLY:
            planted = Planted(site.root, {**site.config, "data": "", "policy": str(policy)})
            with site.watched() as seen:
                rolled, _ = planted.roll(json.dumps(experiment_with(name, FIELDS[name][0], str(site.folder))))
            assert bool(seen) != name.endswith("task.test_file"), name
            assert not found(rolled, str(site.folder))


# --- the grant itself


def test_what_a_pattern_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a folder with all in it, parts with *; no links out of it, no way around by `..`, `~` or a folder before
    it; a link to the folder itself is as good as the folder."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner / "deep", outer):
        folder.mkdir(parents=True)
    for file in (inner / "a.csv", inner / "b.txt", inner / "deep" / "c.csv", outer / "d.csv"):
        file.touch()
    (inner / "out.csv").symlink_to(outer / "d.csv")
    (inner / "in.csv").symlink_to(inner / "a.csv")
    (tmp_path / "alias").symlink_to(inner)
    monkeypatch.chdir(inner)
    monkeypatch.setenv("HOME", str(inner))
    monkeypatch.setenv("FEDKEEL_DATA", str(inner))

    def allowed(pattern: Path | str) -> set[str]:
        named = [*map(str, sorted(tmp_path.rglob("*.*"))), "a.csv", "deep/c.csv", "~/a.csv", "../outer/d.csv",
                 f"{inner}/../outer/d.csv", f"{outer}/../inner/a.csv", f"{tmp_path}/alias/a.csv", "a.csv\0",
                 f"//{inner}/a.csv"]  # fmt: skip
        with granting(Grant((), (str(pattern),), ())):
            return {name.replace(str(tmp_path), "") for name in named if _finds(name)}

    files = {"/inner/a.csv", "/inner/in.csv", "a.csv", "/outer/../inner/a.csv", "///inner/a.csv"}
    deep = {"/inner/deep/c.csv", "deep/c.csv"}
    assert allowed(inner) == {*files, *deep, "/inner/b.txt"}
    assert "/alias/a.csv" in allowed(tmp_path / "alias")
    assert allowed(inner / "*.csv") >= {"/inner/a.csv", "a.csv", "/inner/in.csv"}
    assert not allowed(inner / "*.csv") & {*deep, "/inner/b.txt", "/inner/out.csv", "../outer/d.csv"}
    assert allowed(inner / "*" / "*.csv") == deep
    assert allowed(inner / "a.csv") == {"/inner/a.csv", "a.csv", "/outer/../inner/a.csv", "///inner/a.csv"}
    assert allowed(tmp_path / "inn") == set()


def _finds(name: str) -> bool:
    try:
        return find(name, "task.file").is_file()
    except Denied:
        return False


def test_what_a_site_named_itself_needs_no_grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--data; the same path in an experiment does."""
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    (tmp_path / "a.csv").touch()
    with granting(NOTHING):
        assert own("a.csv", "file of client 'a'") == tmp_path / "a.csv"
        with pytest.raises(Denied, match="has not allowed files"):
            find("a.csv", "task.file")
    assert find("a.csv", "task.file") == tmp_path / "a.csv"


def test_downloads_are_by_name() -> None:
    """True is for the data sets of this project; a model of others needs its name."""
    some, own_sets = Grant((), (), ("gpt2",)), Grant((), (), True)
    some.download("gpt2", "task.pretrained")
    own_sets.download("cifar10", "task.download", own=True)
    for given, name, known in ((some, "cifar10", True), (own_sets, "gpt2", False), (NOTHING, "cifar10", True)):
        with pytest.raises(Denied) as refused:
            given.download(name, "task.x", own=known)
        assert refused.value.code == "download-denied"
    EVERYTHING.download("anything", "task.x")


@pytest.mark.parametrize(
    "task",
    [{"name": name, "download": True} for name in ("cifar10", "cifar100", "tinyimagenet", "femnist", "emnist", "mnist")]
    + [{"name": name} for name in ("agnews", "20news", "sst2", "qnli", "qqp", "shakespeare")]
    + [{"name": "text", "classes": 2, "model": "gpt2", "pretrained": "gpt2"}]
    + [{"name": "causal-lm", key: "gpt2"} for key in ("pretrained", "tokenizer")],
)
def test_no_download_unasked(task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every task that knows of one, before a socket is opened."""
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    settings = Experiment.model_validate({"task": task})

    def use() -> None:
        made = create(settings.task, settings.partition, 0)
        made.model()
        made.client("0")

    with granting(NOTHING), pytest.raises(Denied) as refused:
        use()
    assert refused.value.code == "download-denied"


def test_a_closed_process_grants_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """`client join` closes it: a thread that a message starts has no more than the message."""
    monkeypatch.setattr(grant, "_otherwise", EVERYTHING)
    seen: list[Grant] = []
    grant.close()
    with granting(Grant(("a:b",), (), ())):
        thread = threading.Thread(target=lambda: seen.append(grant.granted()))
        thread.start()
        thread.join()
    assert seen == [NOTHING]


def test_what_a_policy_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing by default; everything where the server is the owner's own, but for what the policy bounds."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "policy.toml"
    path.write_text('tasks = ["digits", "a:b"]\nfiles = ["~/data/*.csv"]\ndownloads = ["gpt2"]\n')
    policy = Policy.load(str(path))
    given = Grant(("digits", "a:b"), (str(tmp_path / "data" / "*.csv"),), ("gpt2",))
    assert Policy().grant() == NOTHING
    assert Policy().grant(["c:d"]) == Grant(("c:d",), (), ())
    assert Policy().grant(trusted=True) == EVERYTHING
    assert policy.grant() == policy.grant(trusted=True) == given
    assert policy.grant(["c:d"]).tasks == ("digits", "a:b", "c:d")
    digits = Experiment.model_validate({"task": {"name": "digits"}})
    policy.check(digits, policy.grant())
    with pytest.raises(Denied, match="does not allow task 'mnist'"):
        policy.check(Experiment.model_validate({"task": {"name": "mnist"}}), policy.grant())


@pytest.mark.parametrize("pattern", ["data/*.csv", "/", "", "/data/../etc", "a\0", "~nobody-of-this-name/x"])
def test_a_pattern_without_a_place_is_refused(pattern: str, tmp_path: Path) -> None:
    """Relative to what? Everything? By mistake?"""
    path = tmp_path / "policy.toml"
    path.write_text(f"files = [{json.dumps(pattern)}]\n")
    with pytest.raises(SettingsError, match=r"files\.0"):
        Policy.load(str(path))


def test_all_tasks_have_fields() -> None:
    """The walk finds the settings of each."""
    assert {name.split(": ")[0] for name in FIELDS if ": " in name} == set(TASKS)
