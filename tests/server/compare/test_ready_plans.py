"""The ready plans in experiments/plans: each one expands to runs that can begin, and the small ones are small."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from common.experiment import Experiment
from common.flower import ROOT
from server.compare.plan import Cell, Plan, final_cells, rows, tune_cells
from strategies.registry import settled

EVERY = sorted((ROOT / "experiments" / "plans").glob("*.toml"))
PLANS = [path for path in EVERY if path.stem.endswith(("_small", "_full"))]
"""Those of a paper's table."""
SMALL = [path for path in PLANS if path.stem.endswith("_small")]
RESULTS = (ROOT / "docs" / "results" / "README.md").read_text("utf-8")


def cells(plan: Plan) -> list[Cell]:
    """Every run of a plan; the final ones with the first candidate in the winner's place."""
    found = []
    for row in rows(plan):
        found += tune_cells(plan, row) + final_cells(plan, row, row.candidates[0])
    return found


def steps(experiment: Experiment) -> int:
    """Local steps of a run, all clients together, where they are counted in steps."""
    return experiment.rounds * (experiment.local.steps or 0) * (experiment.round.sample or 0)


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_cell_can_begin(path: Path) -> None:
    """Its experiment is valid and its strategy takes all of its settings."""
    _, plan = Plan.read(path)
    for cell in cells(plan):
        settled(cell.experiment)[0]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_its_head_says_how_and_how_long(path: Path) -> None:
    """The command, and the number of runs that it names, are right; docs/results has its section."""
    text = path.read_text("utf-8")
    command = f"python -m server compare experiments/plans/{path.name}"
    assert command in text
    assert f'name = "{path.stem.replace("_", "-")}"' in text
    assert path.stem in RESULTS
    _, plan = Plan.read(path)
    told = re.search(r"^# (\d+) runs, ", text, re.MULTILINE)
    assert (told is not None) == (path in SMALL)
    if told:
        assert int(told[1]) == len(cells(plan))
        assert "What differs from the paper, and why" in text
    else:
        assert "Not known" in text


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_small_plans_stay_small(path: Path) -> None:
    """At most 80 runs, and of those counted in steps 250,000 of a few milliseconds: under 20 minutes on two cores."""
    _, plan = Plan.read(path)
    runs = [cell.experiment for cell in cells(plan)]
    assert len(runs) <= 80
    assert sum(map(steps, runs)) <= 250_000
    assert all(run.task.options.get("width", 0) <= 32 for run in runs)
    assert len(plan.seeds) >= 2


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_variants_of_a_point_differ(path: Path) -> None:
    """No row is run twice under two names."""
    _, plan = Plan.read(path)
    seen: dict[str, str] = {}
    for row in rows(plan):
        cell = final_cells(plan, row, row.candidates[0])[0]
        settings = settled(cell.experiment)[1].model_dump(mode="json", exclude={"name"})
        key = json.dumps([settings, row.variant.tune], sort_keys=True)
        assert key not in seen, f"{cell.about()} is {seen[key]}"
        seen[key] = cell.about()


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_small_plans_have_their_data(path: Path) -> None:
    """Task, partition and model of the first cell exist on the files of FEDKEEL_DATA."""
    from server.rounds.prepare import prepare

    _, plan = Plan.read(path)
    prepared = prepare(cells(plan)[0].experiment)
    assert len(prepared.task.names()) >= 16
