"""The documents say what is true."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import click
import pytest
import typer

from benchmarks.algorithms import payload
from common.errors import SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from strategies.registry import REGISTRY, Entry, create, hyperparameter_names
from tests.server.rounds.test_resume import digits
from tests.strategies import test_one_round
from tests.support.faults import ran
from tests.support.helpers import Simulation
from tests.support.helpers import experiment as quadratic

README = (ROOT / "README.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the README."""
    section = README.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_algorithm_table_is_the_registry() -> None:
    """Names, papers and files."""
    table = {cells[0]: cells[1:3] for cells in rows("Algorithms")}
    own = {name: [entry.paper, entry.cls.__module__.replace(".", "/") + ".py"] for name, entry in REGISTRY.items()}
    assert table == own
    assert list(table) == list(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
def test_algorithm_table_counts_what_is_sent(name: str) -> None:
    """The vectors of a round of ten clients are those in real messages."""
    told = {cells[0]: cells[5] for cells in rows("Algorithms")}[name]
    down, up = payload(name)
    assert told == f"{round(down, 1):g} + {round(up, 1):g}"


def test_dependency_table_is_the_project_file() -> None:
    """Every dependency has its reason, and no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.split(r"[>=<]", line)[0] for line in declared if not line.startswith("fedkeel[")}
    assert {name.strip() for cells in rows("Dependencies") for name in cells[0].split(",")} == names


def test_five_line_experiment_is_valid() -> None:
    """The README's example, as written."""
    text = README.split("## An experiment\n", 1)[1].split("Everything else", 1)[0]
    experiment = Experiment.parse("\n".join(line.strip() for line in text.splitlines()))
    assert create(experiment)
    assert len([line for line in text.splitlines() if line.strip()]) == 5


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda path: path.name)
def test_ready_experiments_are_valid(path: object) -> None:
    """Every file in experiments/."""
    assert create(Experiment.load(str(path)))


@pytest.mark.parametrize("name", REGISTRY)
def test_docstrings_explain_every_hyperparameter(name: str) -> None:
    """Each hyperparameter of an algorithm's own stands in its docstring."""
    cls = REGISTRY[name].cls
    assert cls.__doc__
    for hyperparameter in set(hyperparameter_names(cls)) - {"weights"}:
        assert hyperparameter in cls.__doc__, hyperparameter


def commands() -> list[str]:
    """Every `python -m server|client ...` that a document tells to type."""
    documents = [ROOT / "README.md", ROOT / "docker" / "README.md", *(ROOT / "docs").glob("*.md")]
    found = [
        line.strip().split("#")[0]
        for document in documents
        for line in document.read_text("utf-8").replace("\\\n", " ").splitlines()
        if re.match(r"    +python -m (server|client) ", line)
    ]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_documents_exist_with_these_options(command: str) -> None:
    _, _, module, *words = shlex.split(command)
    current = typer.main.get_command(import_module(f"{module}.__main__").cli)
    context = click.Context(current)
    while isinstance(current, click.Group):
        current = current.commands[words.pop(0)]
        context = click.Context(current, parent=context)
    options, rest, _ = current.make_parser(context).parse_args(list(words))
    assert not rest
    assert options


def test_every_row_of_reliability_names_a_test_that_exists() -> None:
    """A file, or a file and a function or the start of its name; "::name" is of the file before it."""
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    file = ""
    found = re.findall(r"`(test_\w+\.py)?(?:::(test_\w+)(\*?))?`", text)
    assert len(found) > 40
    for name, function, prefix in found:
        file = name or file
        if file:
            code = (ROOT / "tests" / file).read_text("utf-8")
            assert not function or re.search(rf"def {function}{'' if prefix else r'[(]'}", code), (file, function)


def test_contributing_leads_to_an_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of "Add an algorithm", followed: its code is FedCM, its line registers it, its numbers are right."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Add an algorithm\n")[1].split("\n## ")[0]
    assert len(text.splitlines()) < 60
    (tmp_path / "yours.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    names = {"Entry": Entry, "Yours": import_module("yours").Yours}
    line = re.search(r'`"yours": (Entry\(.*?\))`', text)
    assert line
    monkeypatch.setitem(REGISTRY, "yours", eval(line.group(1), names))

    two = {"alpha": 0.5, "arrays": test_one_round.ARRAYS, "local": {"lr": test_one_round.LR}}
    run = Simulation(quadratic(tmp_path, "yours", **two))
    moved = {upload.name: float(upload.vectors["delta"]) for upload in run.step()}
    state = {"x": float(run.x), "m": float(run.coordinator.state["momentum"])}
    told = re.search(r"moves A by (\S+) and B by (\S+), so x = (\S+) and m = (\d)\.", text)
    assert told
    assert [moved["0"], moved["1"], *state.values()] == [float(number) for number in told.groups()]

    weights = [ran(tmp_path / name, digits(name, 3)).history[-1]["sha256"] for name in ("yours", "fedcm")]
    assert weights[0] == weights[1]
    with pytest.raises(SettingsError, match=r"'yours' has no meaning with local.optimizer = 'adam'"):
        create(Experiment.parse('strategy.name = "yours"\nlocal.optimizer = "adam"'))


def test_contributing_leads_to_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of "Add a task", followed: its code learns what it says, under the name that it says."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Add a task\n")[1].split("\n## ")[0]
    (tmp_path / "moons.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    given = re.search(r'`(task.name = "moons:task")`, `(task.noise = 0.2)`', text)
    assert given
    local = "local.lr = 0.5\nlocal.epochs = 5\nrounds = 20\npartition.clients = 4"
    result = ran(tmp_path / "run", Experiment.parse("\n".join([*given.groups(), local])))
    assert result.history[-1]["clients"]["accuracy"]["weighted"] > 0.9
    with pytest.raises(SettingsError, match=r"noises = 1: unknown key; allowed here: examples, noise"):
        ran(tmp_path / "b", Experiment.parse('task.name = "moons:task"\ntask.noises = 1'))
