"""Empty clients, clients of one example, of one class and without evaluation examples, from the plan to the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client.session import _ram
from common import tasks, vector
from common.errors import SettingsError
from common.experiment import Experiment
from server.deploy.clients import start_clients
from server.deploy.superlink import SuperLink
from server.engines.worker_grid import WorkerGrid
from strategies.registry import REGISTRY
from tests.strategies.test_table import over_grpc, under_vce
from tests.support.faults import FaultyGrid, Ran, ran, run
from tests.support.helpers import MIXED, NORMED, POOLED
from tests.support.today import cells

SIZES = {"0": (0, 0), "1": (1, 0), "2": (33, 3), "3": (65, 14), "4": (0, 4), "5": (2, 0)}
"""Client -> training and evaluation examples. Client 2 holds one class alone, and a last batch of one."""

TRAINERS = ["1", "2", "3", "5"]
EVALUATORS = ["2", "3", "4"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of that plan on digits with seed 0."""
    labels = tasks.create(Experiment().task, Experiment().partition, 0).pool().targets.numpy()  # type: ignore[attr-defined]
    threes, others = (iter(np.flatnonzero(labels == 3).tolist()), iter(np.flatnonzero(labels != 3).tolist()))
    held = []
    for name, (train, evaluate) in SIZES.items():
        rows = threes if name == "2" else others
        held.append({"train": [next(rows) for _ in range(train)], "evaluate": [next(rows) for _ in range(evaluate)]})
    file = tmp_path_factory.mktemp("plan") / "small.json"
    content = {"format": "fedkeel-plan-1", "data": {"examples": len(labels)}, "clients": held}
    file.write_text(json.dumps(content))
    return file


def experiment(plan: Path, algorithm: str = "fedavg", model: str = "mlp", **tables: Any) -> Experiment:
    task: dict[str, Any] = {"name": "digits"} | ({"hidden": 8} if model == "mlp" else {"model": "cnn", "width": 2})
    values: dict[str, Any] = {
        "name": f"small-{algorithm}",
        "rounds": 3,
        "task": task | ({"extractor": 4} if algorithm in MIXED else {}),
        "partition": {"kind": "file", "file": str(plan)},
        "strategy": {"name": algorithm},
        "evaluate": {"clients": "all"},
    }
    if algorithm in NORMED and model == "mlp":
        values["personal"] = {"parts": ["0.*"]}  # a model without BatchNorm
    return Experiment.model_validate(values | tables)


def finite(value: Any) -> bool:
    """Whether every number in a record is."""
    if isinstance(value, Mapping):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def members(result: Ran) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in json.loads((result.folder.path / "roll.json").read_text())}


FEDERATED = [name for name in REGISTRY if name not in POOLED]
CELLS = [(name, model) for name in FEDERATED for model in ("cnn", "mlp") if model == "mlp" or name not in MIXED]


def survives(algorithm: str, model: str, plan: Path, folder: Path) -> None:
    """Three rounds: all who can train do, nobody is dropped, all who can evaluate do, and every number is finite."""
    result = ran(folder, experiment(plan, algorithm, model))
    assert len(result.history) == 3
    for record in result.history:
        assert record["sampled"] == record["accepted"] == TRAINERS
        assert not record["dropped"]
        assert not record["void"]
        assert finite({key: value for key, value in record.items() if key != "seconds"}), record
        assert record["examples"] == {name: SIZES[name][0] for name in TRAINERS}
        assert all(record["steps"][name] >= 1 for name in TRAINERS)
        assert list(record["each"]["loss"]) == EVALUATORS
    state = result.checkpoint
    assert all(bool(torch.isfinite(v).all()) for v in (*state.state.values(), *state.buffers.values()))


@pytest.mark.parametrize("cell", cells(CELLS, 16, len(CELLS), "small clients", name="-".join))
def test_every_algorithm_trains_on_small_clients(cell: tuple[str, str], plan: Path, tmp_path: Path) -> None:
    survives(*cell, plan, tmp_path)


def test_the_roll_holds_those_who_hold_nothing(plan: Path, tmp_path: Path) -> None:
    """Everybody is on the roll, with what they hold; the class counts of an empty client are none."""
    roll = members(ran(tmp_path, experiment(plan, rounds=1)))
    assert {name: (member["examples"], member["evaluation"]) for name, member in roll.items()} == SIZES
    assert roll["0"]["labels"] == ""
    assert json.loads(roll["2"]["labels"]) == [0, 0, 0, 33]


@pytest.mark.parametrize("weights", ["data", "uniform"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_mean_is_of_those_who_trained(weights: str, model: str, plan: Path, tmp_path: Path) -> None:
    """FedAvg by hand: x + sum n_i delta_i / 101 with n = 1, 33, 65 and 2, or the mean of four; summed in float64."""
    grid = FaultyGrid()
    strategy = {"name": "fedavg", "weights": weights}
    result = ran(tmp_path, experiment(plan, model=model, rounds=2, strategy=strategy), grid)
    shares = {name: SIZES[name][0] / 101 if weights == "data" else 1 / 4 for name in TRAINERS}
    assert sorted(grid.true) == [(name, round) for name in TRAINERS for round in (1, 2)]
    for round in (1, 2):
        before = result.at(round - 1).state["model"].double()
        change = sum(shares[name] * grid.true[name, round].double() for name in TRAINERS)
        torch.testing.assert_close(result.at(round).state["model"].double(), before + change, rtol=0, atol=1e-7)


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("sample", [None, 2])
@pytest.mark.parametrize("algorithm", ["scaffold", "fagc"])
def test_trackers_are_means_over_those_who_can_train(
    algorithm: str, sample: int | None, weights: str, plan: Path, tmp_path: Path
) -> None:
    """The server's c is sum p_i c_i over the last accepted c_i of the four trainers, p_i = 1/4 or n_i/101: neither the
    empty client nor the one that only evaluates dilutes it."""
    strategy = {"name": algorithm, "weights": weights}
    result = ran(tmp_path, experiment(plan, strategy=strategy, round={"sample": sample}, rounds=4))
    last = result.checkpoint
    tracker = next(iter(REGISTRY[algorithm].cls.trackers))
    total = torch.zeros_like(last.state[tracker], dtype=torch.float64)
    for name, round in last.accepted.items():
        held = _ram.load(last.run, name, last.generation, round)
        assert held is not None
        own = held.get(tracker, torch.zeros(()))  # FA-GC: not refreshed yet
        total += own.double() * (1 / 4 if weights == "uniform" else SIZES[name][0] / 101)
    assert last.known == {name: train for name, (train, _) in SIZES.items()}
    assert total.any()
    torch.testing.assert_close(last.state[tracker].double(), total, rtol=1e-5, atol=1e-7)


def test_batchnorm_of_one_example_uses_what_it_has_learned(plan: Path, tmp_path: Path) -> None:
    """A client of one example alone: its batch of one leaves the running statistics as they were, and trains."""
    content = json.loads(plan.read_text())
    content["clients"] = content["clients"][1:2]
    (tmp_path / "one.json").write_text(json.dumps(content))
    result = ran(tmp_path / "run", experiment(tmp_path / "one.json", model="cnn", evaluate={"clients": "none"}))
    first, last = result.at(1), result.at(3)
    assert vector.sha256(first.buffers) == vector.sha256(last.buffers)
    assert not torch.equal(first.state["model"], last.state["model"])
    losses = [record["losses"]["0"] for record in result.history]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(("partition", "least"), [('kind = "dirichlet", alpha = 0.02', 5), ('kind = "quantity"', 1)])
def test_splits_with_empty_clients_run(partition: str, least: int, tmp_path: Path) -> None:
    """40 clients, some of them empty: of six a round, nobody is asked in vain."""
    text = f"partition = {{{partition}, clients = 40, min_examples = 0}}\nrounds = 2\nround.sample = 6\nseed = 1\n"
    result = ran(tmp_path, Experiment.parse(text))
    empty = [name for name, member in members(result).items() if not member["examples"]]
    assert len(empty) >= least
    for record in result.history:
        assert len(record["accepted"]) == 6
        assert not set(record["sampled"]) & set(empty)


def test_more_sampled_than_can_train_is_refused(plan: Path, tmp_path: Path) -> None:
    error = run(tmp_path, experiment(plan, round={"sample": 5})).error
    assert isinstance(error, SettingsError)
    assert str(error) == "round.sample = 5: only 4 clients on the roll hold training examples"


def test_a_plan_without_training_examples_is_refused(plan: Path, tmp_path: Path) -> None:
    content = json.loads(plan.read_text())
    content["clients"] = [{"train": [], "evaluate": [1, 2]}, {"train": []}]
    (tmp_path / "none.json").write_text(json.dumps(content))
    error = run(tmp_path / "run", experiment(tmp_path / "none.json")).error
    assert isinstance(error, SettingsError)
    assert "no client on the roll holds a training example" in str(error)


# --- the other engines


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    """A SuperLink and a resident process for each client, the empty ones, too."""
    folder = tmp_path_factory.mktemp("grpc")
    with (
        SuperLink(folder / "superlink.log") as link,
        start_clients(link.fleet_address, list(SIZES), memory_root=folder / "memory", log_dir=folder),
    ):
        yield link


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.rest
def test_small_clients_in_every_engine(plan: Path, federation: SuperLink, tmp_path: Path) -> None:
    """SCAFFOLD with BatchNorm on a plan file: the same weights in process, in workers, over gRPC and under VCE."""

    class Named(str):
        id = "small"

    settings = experiment(plan, "scaffold", "cnn", partition={"kind": "file", "file": str(plan), "shift": "noise"})
    here = ran(tmp_path / "here", settings).history[-1]["sha256"]
    with WorkerGrid("client.app:app", 2, "cpu", tmp_path / "memory") as grid:
        assert ran(tmp_path / "workers", settings, grid).history[-1]["sha256"] == here
    assert over_grpc(settings, federation, tmp_path / "grpc") == here
    assert under_vce({Named(): settings}, tmp_path / "vce") == {"small": here}  # type: ignore[dict-item]
