"""Who is sampled, how uploads become one, and what server optimizers leave."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from common.experiment import ServerSettings
from common.vector import sha256, weighted_sum
from strategies import server_optimizers
from strategies.base import Upload
from strategies.protocol.coordinator import mean_buffers
from strategies.protocol.members import sample
from tests.support.helpers import ALGORITHMS, Simulation, experiment, headed

LOCAL = {"lr": 0.05}


def test_sampling_depends_on_seed_round_try_and_names_only(tmp_path: Path) -> None:
    """Neither the order of arrival nor torch's, numpy's or Python's own generators matter."""
    names = [f"site-{i}" for i in range(9)]
    chosen = sample(7, 3, 0, names, 4)
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 4
    for order in (names[::-1], random.Random(0).sample(names, 9), set(names)):
        random.seed(len(order))
        torch.rand(1)
        assert sample(7, 3, 0, order, 4) == chosen
    others = [sample(*key, names, 4) for key in ((8, 3, 0), (7, 4, 0), (7, 3, 1))]
    assert all(other != chosen for other in [*others, sample(7, 3, 0, names[1:], 4)])
    assert sample(7, 3, 0, names, 20) == names
    counts = dict.fromkeys(names, 0)
    for round in range(1800):
        for name in sample(0, round, 0, names, 3):
            counts[name] += 1
    # 600 each, standard deviation 20.
    assert all(500 < count < 700 for count in counts.values())


def test_all_algorithms_see_the_same_cohorts(tmp_path: Path) -> None:
    """The algorithm is no part of what sampling depends on."""
    cohorts = []
    for strategy in ALGORITHMS:
        simulation = Simulation(headed(tmp_path, strategy, local=LOCAL, round={"sample": 3}, seed=5))
        cohorts.append([[u.name for u in simulation.step()] for _ in range(4)])
    assert all(cohort == cohorts[0] for cohort in cohorts)


def test_a_mean_does_not_depend_on_order() -> None:
    """float32 sums of 1e8, 1, -1e8 give 0 or 1 by order; in float64 all orders round to 1/3 in float32."""
    values = [1e8, 1.0, -1e8]
    results = {
        weighted_sum([torch.tensor([v, 1.0], dtype=torch.float32) for v in order], [1 / 3] * 3)[0].item()
        for order in itertools.permutations(values)
    }
    assert results == {torch.tensor(1 / 3, dtype=torch.float32).item()}
    naive = {sum(torch.tensor(order, dtype=torch.float32)).item() for order in itertools.permutations(values)}
    assert naive == {0.0, 1.0}


def test_uploads_are_summed_in_name_order(tmp_path: Path) -> None:
    """Whatever the order of arrival, to the bit: in float64 too, 1e16, 1, -1e16 add up to 0 or 1 by order."""
    values, results = {"0": 1e16, "1": 1.0, "2": -1e16}, set()
    for order in itertools.permutations("012"):
        simulation = Simulation(experiment(tmp_path), names="012")
        uploads = [Upload({"delta": torch.full((5,), values[name]).double()}, name, 10) for name in order]
        simulation.coordinator.advance(1, uploads)
        results.add(sha256(simulation.coordinator.state))
    assert len(results) == 1


def test_buffers_average_and_counters_do_not() -> None:
    """Floats by weight; integers and booleans take the largest value and keep their dtype."""
    own = {"buffers.float32": torch.zeros(2), "buffers.int64": torch.zeros(1, dtype=torch.int64)}
    own["buffers.bool"] = torch.zeros(2, dtype=torch.bool)
    uploads = [
        Upload({}, str(i), weight=weight, buffers={
            "buffers.float32": torch.tensor([float(i), 1.0]),
            "buffers.int64": torch.tensor([2**53 + i]),
            "buffers.bool": torch.tensor([bool(i), False]),
        })
        for i, weight in ((0, 0.25), (1, 0.75))
    ]  # fmt: skip
    mean = mean_buffers(own, uploads)
    assert all(mean[name].dtype == value.dtype for name, value in own.items())
    assert mean["buffers.float32"].tolist() == [0.75, 1.0]
    assert mean["buffers.int64"].tolist() == [2**53 + 1]
    assert mean["buffers.bool"].tolist() == [True, False]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adagrad", "adam", "yogi", "ams"])
def test_server_optimizers_keep_dtype_and_shape(optimizer: str) -> None:
    """A float32 model has float32 moments of its shape, and `step` returns exactly what `start` made."""
    settings = ServerSettings(optimizer=optimizer)
    state = {"model": torch.randn(7)}
    moments = server_optimizers.start(settings, state["model"])
    following = server_optimizers.step(settings, state | moments, torch.randn(7))
    assert following.keys() == {"model"} | moments.keys()
    assert all(value.dtype == torch.float32 and value.shape == (7,) for value in following.values())
    assert all(value.dtype == torch.float32 and value.shape == (7,) for value in moments.values())


@pytest.mark.parametrize("strategy", ALGORITHMS)
def test_a_float32_model_stays_float32(tmp_path: Path, strategy: str) -> None:
    """float64 scalars beside it (losses, responses, cohort sizes) do not widen it."""
    given = {"local": LOCAL, "round": {"sample": 3}, "task": {"dtype": "float32"}}
    simulation = Simulation(headed(tmp_path, strategy, **given))
    kinds = {name: (value.dtype, value.shape) for name, value in simulation.coordinator.state.items()}
    simulation.run(3)
    assert {name: (value.dtype, value.shape) for name, value in simulation.coordinator.state.items()} == kinds
    vectors = [value for value in simulation.coordinator.state.values() if value.ndim]
    assert all(value.dtype == torch.float32 for value in vectors)
    for name in simulation.members:
        assert all(value.dtype == torch.float32 for value in simulation.memory(name).values() if value.ndim)
