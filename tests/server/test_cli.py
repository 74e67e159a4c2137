"""The command line: what cannot work ends before round 1 with one message and exit code 2; help, check, report."""

from __future__ import annotations

import fcntl
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import click
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.main import get_command
from typer.testing import CliRunner

from client.__main__ import cli as client_cli
from common.experiment import Experiment
from common.flower import ROOT
from server.__main__ import cli
from server.rounds.folder import RunFolder
from server.rounds.prepare import prepare
from strategies.registry import written_out

SMALL = """
name = "small"
rounds = 2
task.hidden = 4
partition.clients = 3
local.batch_size = 128
"""
MODULE = """
from common.tasks.digits import Digits
class Odd(Digits):
    def model(self): return "a model"
class Worse(Digits):
    def model(self): raise KeyError("layer")
number = 5
def raises(options, partition, seed): raise ZeroDivisionError("by zero")
def returns(options, partition, seed): return "a task"
def odd(options, partition, seed): return Odd(options, partition, seed)
def worse(options, partition, seed): return Worse(options, partition, seed)
class Nobody(Digits):
    def names(self): return []
def nobody(options, partition, seed): return Nobody(options, partition, seed)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("odd_tasks.py").write_text(MODULE, "utf-8")
    monkeypatch.setattr("sys.dont_write_bytecode", True)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def simulate(text: str, *words: str) -> Result:
    Path("a.toml").write_text(text, "utf-8")
    return invoke("simulate", "a.toml", *words)


def refused(result: Result, *words: str) -> None:
    """One message, exit code 2, no stack trace, and no run folder."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.output.strip().splitlines()
    assert [line.startswith("error: ") for line in lines] == [True] + [False] * (len(lines) - 1), result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output
    assert not list(Path().glob("runs/*"))


WRONG = {
    # keys and types
    "seeed = 1": ("a.toml: seeed = 1: unknown key; allowed here: name, seed, rounds, task,",),
    "local.lrr = 1": ("a.toml: local.lrr = 1: unknown key; allowed here: optimizer, lr, momentum",),
    'rounds = "many"': ("a.toml: rounds = 'many': Input should be a valid integer",),
    "rounds = 0": ("a.toml: rounds = 0: Input should be greater than or equal to 1",),
    "local = 3": ("a.toml: local = 3: Input should be a valid dictionary",),
    'local.lr = "fast"': ("local.lr = 'fast': Input should be a valid number",),
    "local.lr = nan": ("local.lr = nan: Input should be",),
    'name = "../up"': ("a.toml: name = '../up': a name has 1 to 100 of",),
    "seeed = 1\nlocal.lr = -1": ("seeed = 1: unknown key", "local.lr = -1: Input should be greater than 0"),
    # names
    'strategy.name = "fedavgg"': ("strategy.name: 'fedavgg' is unknown; allowed: ",),
    "strategy.muu = 1": ("strategy.muu = 1: 'fedavg' has no such hyperparameter; allowed: weights",),
    'strategy = {name = "fedprox", mu = -1}': ("strategy.mu = -1: Input should be greater than or equal to 0",),
    'local.optimizer = "rmsprop"': (
        "local.optimizer = 'rmsprop': Input should be 'sgd', 'adam', 'adamw', 'amsgrad', 'normalized', "
        "'soap' or 'muon'",
    ),
    'server.optimizer = "sdg"': ("server.optimizer = 'sdg': Input should be 'sgd', 'momentum'",),
    'task.name = "digit"': (
        "task.name: 'digit' is unknown; allowed: 20news, agnews, causal-lm, cifar10, ",
        "package.module:function",
    ),
    'compression.up = "zip"': ("compression.up = 'zip': Input should be 'none'",),
    # pairs without meaning
    'strategy.name = "fednova"\nlocal.optimizer = "adam"': ("'fednova'", "local.optimizer = 'adam'", "allowed: 'sgd'"),
    'strategy.name = "hafedho"\nlocal.optimizer = "adamw"': ("'hafedho'", "local.optimizer = 'adamw'"),
    'strategy.name = "fedcm"\nlocal.optimizer = "amsgrad"': ("'fedcm'", "local.optimizer = 'amsgrad'"),
    'strategy.name = "fedprox"\nlocal.proximal_mu = 0.1': ("local.proximal_mu = 0.1", "'fedprox'"),
    'strategy.name = "fedadam"\nserver.optimizer = "yogi"': ("server.optimizer = 'yogi'", "'fedadam'", "'adam'"),
    'local.optimizer = "adam"\nlocal.momentum = 0.9': (
        "momentum belongs to optimizer 'sgd', not to 'adam', whose beta1 is betas[0]",
    ),
    # numbers of clients
    "round.sample = 4": ("round.sample = 4 is more than the 3 clients of the partition",),
    "round.wait_for = 4": ("round.wait_for = 4 is more than the 3 clients of the partition",),
    "round.quorum = 4": ("round.quorum = 4 is more than the 3 clients of a round",),
    "round = {sample = 2, quorum = 3}": ("round.quorum = 3 is more than the 2 clients of a round",),
    # data and tasks
    'task = {name = "quadratic", file = "no.npz"}': ("no.npz",),
    'task = {name = "npz", file = "no.npz"}': ("no.npz",),
    'task = {name = "digits", file = "a"}': ("[task]: file = 'a': unknown key; allowed here: dtype,",),
    'task = {name = "no_module:f"}': ("task.name = 'no_module:f' cannot be imported: ModuleNotFoundError",),
    'task = {name = "odd_tasks:f"}': ("task.name = 'odd_tasks:f' cannot be imported: AttributeError",),
    'task = {name = "odd_tasks:number"}': ("task.name = 'odd_tasks:number' is not a function but int: 5",),
    'task = {name = "odd_tasks:raises"}': (
        "task.name = 'odd_tasks:raises' with {} failed: ZeroDivisionError: by zero",
    ),
    'task = {name = "odd_tasks:returns"}': ("must return a common.tasks.base.Task; it returned str: 'a task'",),
    'task = {name = "odd_tasks:odd"}': ("Odd.model() returned a str, not a torch.nn.Module",),
    'task = {name = "odd_tasks:worse"}': ("Worse.model() raised KeyError: 'layer'",),
    # not TOML
    "rounds = ": ("a.toml is not valid TOML: ",),
    "rounds = 3": ("a.toml is not valid TOML: Cannot overwrite a value",),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_the_file_is_told_before_round_1(text: str) -> None:
    """Each message names the thing, its value and what is allowed."""
    base = SMALL
    for key in re.findall(r"^(\w+)", text, re.MULTILINE):
        if text != "rounds = 3":
            base = re.sub(rf"^{key}\b.*\n", "", base, flags=re.MULTILINE)
    refused(simulate(base + text), *WRONG[text])


def test_what_is_wrong_with_the_file_is_told(tmp_path: Path) -> None:
    """Missing, a folder, or no text."""
    refused(invoke("simulate", "none.toml"), "error: experiment file 'none.toml' cannot be read: ", "No such file")
    refused(invoke("simulate", str(tmp_path)), "cannot be read")
    Path("b.toml").write_bytes(b"\xff\xfe")
    for command in ("simulate", "local", "run", "check"):
        refused(invoke(command, "b.toml"), "experiment file 'b.toml' cannot be read: 'utf-8'")


@pytest.mark.parametrize("command", ["local", "run", "check"])
def test_the_other_commands_check_as_early(command: str) -> None:
    """Before any server is started."""
    Path("a.toml").write_text(SMALL + "round.sample = 4", "utf-8")
    refused(invoke(command, "a.toml"), "round.sample = 4 is more than the 3 clients")


@pytest.mark.parametrize("words", [["simulate"], ["simulate", "--engine", "flower"], ["local"]])
def test_a_task_without_clients_is_told_by_all_that_start_some(words: list[str]) -> None:
    """Nobody is waited for."""
    Path("a.toml").write_text(SMALL.replace("task.hidden = 4", 'task = {name = "odd_tasks:nobody"}'), "utf-8")
    refused(invoke(*words, "a.toml"), "the task has no clients of its own", "client join --name NAME --data PATH")


@pytest.mark.parametrize("name", ["Zürich", "a b", "../x", "-a", "x" * 5000])
def test_a_site_joins_under_a_name_that_a_folder_can_have(name: str) -> None:
    """A sentence says which those are; a long one is not echoed whole."""
    result = CliRunner().invoke(client_cli, ["join", "--server", "127.0.0.1:1", f"--name={name}"])
    assert result.exit_code == 2
    assert "is no name: a name has 1 to 100 of" in " ".join(result.output.replace("│", " ").split())
    assert len(result.output) < 1500
    again = CliRunner().invoke(client_cli, ["join", "--server", "127.0.0.1:1", "--name", "a", "--name", "a"])
    assert "'a' is given twice" in again.output


@pytest.mark.parametrize("device", ["tpu", "cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_told(device: str) -> None:
    """The clients find out; nothing has run and nothing stays behind."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    refused(simulate(SMALL, "--device", device), f"device {device!r}")


# --- the run folder


def done(*words: str, text: str = SMALL) -> Result:
    result = simulate(text, *words)
    assert result.exit_code == 0, result.output
    return result


def test_a_run_leaves_its_folder_and_the_next_one_takes_another() -> None:
    """`runs/small`, then `runs/small-2`; the model loads into the plain torch model."""
    assert "accuracy" in done().output
    done("--seed", "3")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["small", "small-2"]
    left = {path.name for path in Path("runs/small").iterdir()}
    assert {"history.jsonl", "experiment.toml", "model.safetensors", "checkpoints", "curves.png", "run.json"} <= left
    settings = Experiment.load("runs/small-2/experiment.toml")
    assert settings.seed == 3
    module = prepare(settings).task.model()
    module.load_state_dict(load_file("runs/small-2/model.safetensors"), strict=True)
    statuses = [RunFolder(path).status() for path in ("runs/small", "runs/small-2")]
    assert [status["status"] for status in statuses] == ["finished"] * 2
    assert statuses[0]["sha256"] != statuses[1]["sha256"]


def kept(result: Result, *words: str) -> None:
    """Refused as above, and the run that is there stays as it was."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output


@contextmanager
def unchanged(folder: str) -> Iterator[None]:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

    before = content()
    yield
    assert content() == before


def test_what_does_not_fit_the_folder_is_told() -> None:
    """Nothing to resume, a run that is there already, another experiment's checkpoint, a folder in use, no folder."""
    refused(simulate(SMALL, "--resume"), "nothing to resume: there is no run 'small' in ")
    refused(simulate(SMALL, "--resume", "--run-dir", "x"), "nothing to resume: ", "/x' holds no run")
    done()
    with unchanged("runs/small"):
        kept(simulate(SMALL, "--run-dir", "runs/small"), "holds a run already: add --resume")
        with Path("runs/small/.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept(simulate(SMALL, "--resume"), "is in use by process ")
            for command in ("local", "run"):
                kept(invoke(command, "a.toml", "--resume"), "is in use by process ")
    before = Path("runs/small/experiment.toml").read_bytes()
    other = SMALL + "seed = 9\n"
    foreign = simulate(other, "--resume")
    kept(foreign, "is of another experiment: its settings have hash", prepared(SMALL), prepared(other))
    assert Path("runs/small/experiment.toml").read_bytes() == before
    Path("file").touch()
    kept(simulate(SMALL, "--run-dir", "file/run"), "run folder", "/file/run' cannot be written: ", "Not a directory")
    assert done("--resume", text=SMALL.replace("rounds = 2", "rounds = 4")).output.startswith("resuming after round 2")


def prepared(text: str) -> str:
    found = prepare(Experiment.parse(text))
    return written_out(found.strategy, found.experiment).identity


@pytest.mark.parametrize("option", ["--fleet-port", "--control-port"])
def test_a_port_in_use_is_told(option: str) -> None:
    """By its option and number, before anything is started."""
    Path("a.toml").write_text(SMALL, "utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(invoke("run", "a.toml", option, str(port)), f"{option} = {port}: this port of 127.0.0.1 is in use")


def test_a_real_process_says_it_on_standard_error() -> None:
    """Exit code 2, one line, nothing on standard output."""
    Path("a.toml").write_text('strategy.name = "fedavgg"', "utf-8")
    command = [sys.executable, "-m", "server", "simulate", str(Path("a.toml").resolve())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: strategy.name: 'fedavgg' is unknown; allowed: .*\n", ended.stderr)


# --- help, check, report


def test_help_of_every_command_has_an_example() -> None:
    """A line that can be typed as it stands."""
    names = [str(c.name or c.callback.__name__) for c in cli.registered_commands if c.callback]
    assert {"simulate", "local", "run", "check", "report"} <= set(names)
    for name in names:
        result = invoke(name, "--help")
        assert result.exit_code == 0
        assert f"Example: python -m server {name} " in result.output
    assert "Example: python -m server local experiments/digits.toml" in invoke("--help").output
    for words in ([], ["join"]):
        result = CliRunner().invoke(client_cli, [*words, "--help"])
        assert result.exit_code == 0
        assert "Example: python -m client join " in result.output


def test_check_prints_the_resolved_settings() -> None:
    """Valid TOML with every default, also those that the algorithm's name implies; it leaves nothing behind."""
    Path("a.toml").write_text(SMALL + 'strategy.name = "fedadam"\nserver.beta2 = 0.9', "utf-8")
    result = invoke("check", "a.toml")
    assert result.exit_code == 0, result.output
    tables = tomllib.loads(result.output)
    assert tables["server"] == {
        "optimizer": "adam",
        "lr": 0.01,
        "momentum": 0.9,
        "beta1": 0.9,
        "beta2": 0.9,
        "tau": 0.001,
        "schedule": "constant",
        "decay": 0.998,
        "drop_factor": 0.1,
        "factors": [],
        "warm_up": 0,
    }
    assert tables["local"]["epochs"] == 1
    assert tables["strategy"] == {"name": "fedadam", "weights": "data"}
    assert "# 3 clients, a model of 310 parameters, FedAvg(" in result.output
    assert Experiment.parse(result.output).rounds == 2
    assert not Path("runs").exists()


def test_report_compares_runs_on_one_page() -> None:
    """A target that was not reached is "not reached in N rounds"; the page loads nothing from elsewhere."""
    done()
    done("--run-dir", "other/small", text=SMALL.replace("rounds = 2", "rounds = 3"))
    result = invoke("report", "runs/small", "other/small", "--target", "1.1", "--out", "page.html")
    assert result.exit_code == 0, result.output
    rows = [line.split(" | ") for line in result.output.splitlines() if " | 1.1 | " in line]
    assert [row[0] for row in rows] == [f"| fedavg: small ({run})" for run in ("runs/small", "other/small")]
    assert [row[3] for row in rows] == ["not reached in 2 rounds", "not reached in 3 rounds"]
    page = Path("page.html").read_text("utf-8")
    assert "not reached in 2 rounds" in page
    assert all(link.startswith("data:") for link in re.findall(r'(?:src|href)="([^#"]+)', page))
    assert "http" not in re.sub('base64,[^"]*', "", page).replace("http-equiv", "")
    reached = invoke("report", "runs/small", "--target", "0.01")
    assert "| fedavg: small | 0.01 | 1 of 1 | 1.0 |" in reached.output
    assert Path("report.html").exists()


def test_report_tells_what_it_cannot_do() -> None:
    """No run in a folder; a page in a folder that is not there."""
    Path("empty").mkdir()
    refused(invoke("report", "empty"), "'empty' holds no run: no line in history.jsonl")
    done("--run-dir", "one")
    refused(invoke("report", "one", "--out", "no/page.html"), "page 'no/page.html' cannot be written: ")


def numbers() -> list[tuple[str, list[str], str]]:
    """Every option of a number with a fraction, of all commands of both command lines."""
    found = []
    for name, app in (("server", cli), ("client", client_cli)):
        pending = [([], get_command(app))]
        while pending:
            path, command = pending.pop()
            pending += [([*path, each], sub) for each, sub in getattr(command, "commands", {}).items()]
            found += [
                (name, path, option.opts[0])
                for option in command.params
                if isinstance(option.type, click.types.FloatParamType)
            ]
    return found


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("side", "path", "option"), numbers())
def test_no_option_takes_what_is_no_number(side: str, path: list[str], option: str, value: str) -> None:
    """`--grace nan` would pass every range, and no clock ever reaches it."""
    app = get_command(cli if side == "server" else client_cli)
    command = reduce(lambda group, name: group.commands[name], path, app)  # type: ignore[attr-defined]
    parameter = next(each for each in command.params if option in each.opts)
    with pytest.raises(click.BadParameter, match=f"{value} is no finite number|not in the range"):
        parameter.process_value(click.Context(command), [value] if parameter.multiple else value)


def test_options_of_numbers_are_found() -> None:
    """The walk sees them all."""
    assert {"--grace", "--max-wait", "--far", "--gpus"} <= {option for _, _, option in numbers()}
