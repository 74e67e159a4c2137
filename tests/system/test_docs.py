"""The documents say what is true."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
from grimp import build_graph

from benchmarks import house
from benchmarks.algorithms import payload
from common.errors import SettingsError
from common.experiment import CompressionSettings, Experiment, LocalSettings, PartitionSettings, ServerSettings
from common.flower import ROOT
from common.settings import Section
from common.tasks import TASKS
from strategies.registry import REGISTRY, Entry, hyperparameter_names, settled
from tests.server.rounds.test_resume import digits
from tests.strategies import test_one_round
from tests.support.commands import parsed
from tests.support.faults import ran
from tests.support.helpers import Simulation
from tests.support.helpers import experiment as quadratic

README = (ROOT / "README.md").read_text("utf-8")
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), DOCS / "results" / "README.md"])


def rows(path: Path, heading: str = "") -> list[list[str]]:
    """The cells of the first table of a document, or under one of its headings."""
    text = path.read_text("utf-8")
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0] if heading else text
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def words(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_algorithm_table_is_the_registry() -> None:
    """Names, papers and files."""
    table = {words(cells[0])[0]: cells[1:3] for cells in rows(DOCS / "algorithms.md")}
    own = {name: [entry.paper, entry.cls.__module__.replace(".", "/") + ".py"] for name, entry in REGISTRY.items()}
    assert table == own
    assert list(table) == list(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
def test_algorithm_table_counts_what_is_sent(name: str) -> None:
    """The vectors of a round of ten clients are those in real messages."""
    told = {words(cells[0])[0]: cells[5] for cells in rows(DOCS / "algorithms.md")}[name]
    down, up = payload(name)
    assert told == f"{round(down, 1):g} + {round(up, 1):g}"


def test_dependency_table_is_the_project_file() -> None:
    """Every dependency has its reason, and no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.split(r"[>=<]", line)[0] for line in declared if not line.startswith("fedkeel[")}
    assert {name.strip() for cells in rows(DOCS / "dependencies.md") for name in cells[0].split(",")} == names


def test_task_table_is_the_registry() -> None:
    """Every task's name, once."""
    assert sorted(name for cells in rows(DOCS / "tasks.md") for name in words(cells[0])) == sorted(TASKS)


def test_families_of_the_readme_are_all_there_is() -> None:
    """Each algorithm in one family, each kind in its row; and the counts are theirs."""
    table = {cells[0]: (cells[1], words(cells[2])) for cells in rows(ROOT / "README.md", "What is in it")}
    total, _ = table.pop("**algorithms**")
    for count, names in table.values():
        assert int(count) == len(names) == len(set(names))
    kinds = {
        "tasks": TASKS,
        "partitions": choices(PartitionSettings, "kind"),
        "local optimizers": choices(LocalSettings, "optimizer"),
        "server optimizers": choices(ServerSettings, "optimizer"),
        "compressors": choices(CompressionSettings, "up") - {"none"},
    }
    assert {kind: set(table.pop(kind)[1]) for kind in kinds} == {kind: set(known) for kind, known in kinds.items()}
    assert sorted(name for _, names in table.values() for name in names) == sorted(REGISTRY)
    assert int(total) == len(REGISTRY)


def choices(settings: type[Section], key: str) -> set[str]:
    """The values of a setting that is one of some words."""
    return set(get_args(settings.model_fields[key].annotation))


def test_five_line_experiment_is_valid() -> None:
    """The README's example, as written."""
    text = re.search(r"(?:^    .*\n)+", README.split("## Thirty seconds\n", 1)[1], re.MULTILINE)
    assert text
    lines = [line.strip() for line in text[0].splitlines()]
    assert settled(Experiment.parse("\n".join(lines)))[0]
    assert len(lines) == 5


def test_the_readme_stays_short() -> None:
    """About 6 kB; and what it shows is there."""
    assert len(README.encode()) < 7500
    for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", README):
        assert (ROOT / picture).is_file()


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docker" / "README.md", *PAGES], ids=str
)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of a document."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


def test_the_index_has_every_page_and_for_whom_it_is() -> None:
    """Each page says so in its first sentence, in the index's words."""
    told = {}
    for name, audience, _ in rows(DOCS / "README.md"):
        link = re.search(r"\]\(([^)]+)\)", name)
        assert link
        told[(DOCS / link[1]).resolve()] = audience
    assert set(PAGES) - {DOCS / "README.md"} <= told.keys()
    for path in PAGES:
        first = path.read_text("utf-8").splitlines()[2]
        assert first.startswith(f"For {told.get(path, 'researchers, operators, teachers and contributors')}: "), path


def test_the_house_is_as_drawn() -> None:
    """CONTRIBUTING's picture is what the command draws, no arrow runs upward, and every room has its rule."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## The house\n", 1)[1].split("\n## ", 1)[0]
    graph = build_graph(*house.PACKAGES, cache_dir=None)
    houses = [house.measure(graph, package) for package in house.PACKAGES]
    drawn = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert drawn
    picture = "\n\n".join("\n".join(house.picture(each)) for each in houses)
    assert drawn[1] == picture + "\n", "run python -m benchmarks.house --write"
    assert not [arrow for each in houses for arrow in each.upward]
    ruled = re.findall(r"^\| (\w+)/(.*?) \|", text, re.MULTILINE)
    for each in houses:
        named = {name for package, cell in ruled if package == each.package for name in words(cell)}
        rooms = {room for floor in each.floors for room in floor}
        if each.package == "strategies":  # one row for all algorithms
            rooms -= {entry.cls.__module__.rpartition(".")[2] for entry in REGISTRY.values()}
        assert named == rooms, each.package


def test_every_file_is_in_the_house() -> None:
    """docs/house.md lists what its command lists; sentences may have changed since."""
    listed = re.findall(r"^ *\* `(.+?)`", "\n".join(map("\n".join, map(house.files, house.PACKAGES))), re.MULTILINE)
    told = re.findall(r"^ *\* `(.+?)`", (DOCS / "house.md").read_text("utf-8"), re.MULTILINE)
    assert told == listed, "run python -m benchmarks.house --write"


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda path: path.name)
def test_ready_experiments_are_valid(path: object) -> None:
    """Every file in experiments/."""
    assert settled(Experiment.load(str(path)))[0]


@pytest.mark.parametrize("name", REGISTRY)
def test_docstrings_explain_every_hyperparameter(name: str) -> None:
    """Each hyperparameter of an algorithm's own stands in its docstring."""
    cls = REGISTRY[name].cls
    assert cls.__doc__
    for hyperparameter in set(hyperparameter_names(cls)) - {"weights"}:
        assert hyperparameter in cls.__doc__, hyperparameter


def commands() -> list[str]:
    """Every `python -m server|client ...` that a document tells to type."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docker" / "README.md", *DOCS.glob("*.md")]
    found = [
        line.strip().split("#")[0].rstrip().removesuffix("&")
        for document in documents
        for line in document.read_text("utf-8").replace("\\\n", " ").splitlines()
        if re.match(r"    +python -m (server|client) ", line)
    ]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_documents_exist_with_these_options(command: str) -> None:
    assert parsed(shlex.split(command))


def test_every_row_of_reliability_names_a_test_that_exists() -> None:
    """A file, or a file and a function or the start of its name; "::name" is of the file before it."""
    text = (DOCS / "reliability.md").read_text("utf-8")
    file = ""
    found = re.findall(r"`(test_\w+\.py)?(?:::(test_\w+)(\*?))?`", text)
    assert len(found) > 40
    for name, function, prefix in found:
        file = name or file
        if file:
            (path,) = (ROOT / "tests").rglob(file)
            code = path.read_text("utf-8")
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
        settled(Experiment.parse('strategy.name = "yours"\nlocal.optimizer = "adam"'))[0]


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


EARLIER = {
    "common.experiment": ("Experiment", "PartitionSettings", "Section", "checked"),
    "common.tasks.base": ("ClientData", "Examples", "Task", "evaluate"),
    "common.tasks.classification": ("DTYPES", "Classification", "pick"),
    "strategies.base": (
        "FederatedStrategy",
        "Upload",
        "Work",
        "cohort_mean",
        "hyperparameters",
        "require_sgd",
        "tracker_change",
    ),
}
"""What users' own algorithms and tasks import, from where the documents of 0.1 to 0.4 said."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in EARLIER.items() for name in names])
def test_what_users_import_stays_where_it_was(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)
