"""The documents say what is true."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import import_module

import click
import pytest
import typer

from common.experiment import Experiment
from server.control import ROOT
from strategies import REGISTRY, create, hyperparameter_names

README = (ROOT / "README.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the README."""
    section = README.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_algorithm_table_is_the_registry() -> None:
    """Names, papers, files and the number of vectors on the wire."""
    table = {cells[0]: cells[1:] for cells in rows("Algorithms")}
    assert list(table) == list(REGISTRY)
    for name, (paper, file, *_, vectors) in table.items():
        entry = REGISTRY[name]
        strategy = create(Experiment.parse(f'strategy.name = "{name}"'))
        model = __import__("torch").zeros(3)
        down = sum(v.ndim for v in strategy.broadcast(strategy.init(model)).values())
        up = sum(kind != "scalar" for kind in strategy.payload.values())
        assert (paper, file) == (entry.paper, entry.cls.__module__.replace(".", "/") + ".py")
        assert vectors == f"{down} + {up}", name


def test_dependency_table_is_the_project_file() -> None:
    """Every dependency has its reason, and no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[>=<]", line)[0] for line in declared}
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
