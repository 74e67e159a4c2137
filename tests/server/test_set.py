"""`--set KEY=VALUE` on every command that reads an experiment file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client.__main__ import cli as client_cli
from common.errors import SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from common.settings import given
from server.__main__ import cli
from server.rounds.folder import RunFolder

FILE = 'name = "small"\nrounds = 2\ntask.hidden = 4\npartition.clients = 3\n[local]\nlr = 0.3\nbatch_size = 128\n'


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("a.toml").write_text(FILE, "utf-8")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rounds=3", 3),
        ("rounds = 3", 3),
        ("local.lr=1e-2", 0.01),
        ("local.nesterov=true", True),
        ("strategy.name=scaffold", "scaffold"),
        ('strategy.name="scaffold"', "scaffold"),
        ("strategy.name='scaffold'", "scaffold"),
        ("stop.target='f1 = 0.8'", "f1 = 0.8"),
        ("personal.parts=['head', 'batch-norm']", ["head", "batch-norm"]),
        ("task.file=/data/a.csv", "/data/a.csv"),
        ("task.name=package.module:function", "package.module:function"),
        ("speed.epochs=[1, 4]", [1, 4]),
        ("task.options={a = 1}", {"a": 1}),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert given([text]) == {text.partition("=")[0].strip(): value}


def test_the_last_of_a_key_counts() -> None:
    assert given(["local.lr=1", "rounds=2", "local.lr=3"]) == {"local.lr": 3, "rounds": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds", "--set 'rounds': allowed: KEY=VALUE, KEY a name or names with dots"),
        ("=3", "allowed: KEY=VALUE"),
        ("local..lr=3", "allowed: KEY=VALUE"),
        ("local lr=3", "allowed: KEY=VALUE"),
        ("local.lr=", "--set local.lr = '': no TOML value"),
        ("local.lr=[1", r"--set local.lr = '\[1': no TOML value"),
        ("local.lr=1\nrounds=7", "no TOML value .more than one value"),
        ("rounds=3 4", "--set rounds = '3 4': no TOML value"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Experiment.load("a.toml", [text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "local.lrr=1",
            "a.toml with --set local.lrr: local.lrr = 1: unknown key; allowed here: optimizer, lr",
        ),
        ("locale.lr=1", "unknown key; allowed here: name, seed, rounds"),
        ("local.lr=-1", "local.lr = -1: Input should be greater than 0"),
        ("local.lr=fast", "local.lr = 'fast': Input should be a valid number"),
        ("rounds.x=1", "rounds = {'x': 1}: Input should be a valid integer"),
        ("strategy.mu=1", "strategy.mu = 1: 'fedavg' has no such hyperparameter; allowed: weights"),
        ("strategy.name=fedavgg", "strategy.name: 'fedavgg' is unknown; allowed: apfl"),
    ],
)
def test_what_means_nothing_is_told_with_key_value_and_what_is_allowed(text: str, message: str) -> None:
    result = CliRunner().invoke(cli, ["check", "a.toml", "--set", text])
    assert result.exit_code == 2
    assert message in result.output


def test_it_is_as_if_the_file_said_so() -> None:
    Path("b.toml").write_text(FILE.replace("0.3", "0.2") + '[strategy]\nname = "fedprox"\nmu = 0.5\n', "utf-8")
    sets = ["local.lr=0.2", "strategy.name=fedprox", "strategy.mu=0.5"]
    assert Experiment.load("a.toml", sets) == Experiment.load("b.toml")
    assert Experiment.load("a.toml", sets).json() == Experiment.load("b.toml").json()


def test_a_run_resumes_with_the_same_and_not_with_another() -> None:
    words = ["simulate", "a.toml", "--run-dir", "run", "--set", "local.lr=0.2"]
    result = CliRunner().invoke(cli, [*words, "--set", "rounds=1"])
    assert result.exit_code == 0, result.output
    kept = tomllib.loads(Path("run/experiment.toml").read_text("utf-8"))
    assert (kept["rounds"], kept["local"]["lr"]) == (1, 0.2)
    refused = CliRunner().invoke(cli, ["simulate", "a.toml", "--run-dir", "run", "--resume"])
    assert refused.exit_code == 2
    assert "local.lr was 0.2 and is 0.3" in refused.output
    assert CliRunner().invoke(cli, [*words, "--resume"]).exit_code == 0
    assert len(RunFolder("run").history()) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "a.toml"],
        ["local", "a.toml"],
        ["run", "a.toml"],
        ["check", "a.toml"],
        ["partition", "a.toml"],
        ["statistics", "a.toml"],
        ["runs", "queue", "a.toml"],
        ["runs", "resume", "small", "--experiment", "a.toml"],
    ],
)
def test_every_command_takes_it(words: list[str]) -> None:
    """Each reads it before anything is started or asked."""
    result = CliRunner().invoke(cli, [*words, "--set", "local.lr=-7"])
    assert result.exit_code == 2
    assert "local.lr = -7: Input should be greater than 0" in result.output


def test_both_doctors_take_it() -> None:
    result = CliRunner().invoke(cli, ["doctor", "a.toml", "--set", "local.lr=-7"])
    assert "local.lr = -7: Input should be greater than 0" in " ".join(result.output.split())
    result = CliRunner().invoke(client_cli, ["doctor", "--experiment", "a.toml", "--set", "local.lr=-7"])
    assert "local.lr = -7: Input should be greater than 0" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("side", "words"), [(cli, ["runs", "resume", "a"]), (cli, ["doctor"]), (client_cli, ["doctor", "--server", "a:1"])]
)
def test_without_a_file_there_is_nothing_to_set(side: Any, words: list[str]) -> None:
    result = CliRunner().invoke(side, [*words, "--set", "local.lr=1"])
    assert result.exit_code == 2
    assert "--set local.lr=1 changes a file's settings" in result.output
