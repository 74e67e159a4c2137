"""FedLWS: one round by hand, groups of parameters against plain Python, and what must not shrink.

The two clients of tests/strategies/test_one_round.py from x = 1: Delta = 0.25 (one example) and -1.5 (three).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import SettingsError
from common.experiment import ServerSettings
from common.model import build
from common.vector import Slot, layout_of
from strategies.base import Upload
from strategies.fedlws import FedLWS, group_sizes
from strategies.registry import settled
from tests.support.helpers import Simulation, experiment
from tests.support.tiny import Tiny, simulate

ARRAYS = {"centers": [[2.0], [-1.0]], "curvatures": [[1.0], [2.0]], "steps": [1, 2], "examples": [1, 3], "start": [1.0]}


@pytest.mark.parametrize(
    ("given", "tau", "change"),
    [
        ({"beta": 0.5, "tau_min": 0.0, "tau_max": 1.0}, 0.4375, -1.0625),
        ({"beta": 0.5, "tau_min": 0.0, "tau_max": 0.25}, 0.25, -1.0625),
        ({"beta": 0.5, "tau_min": 0.5, "tau_max": 1.0}, 0.5, -1.0625),
        ({"beta": 0.5, "tau_min": 0.0, "tau_max": 1.0, "weights": "uniform"}, 0.4375, -0.625),
        ({}, 0.02625, -1.0625),
    ],
)
def test_fedlws(tmp_path: Path, given: dict[str, Any], tau: float, change: float) -> None:
    """D = -1.0625 by data (1/4, 3/4), -0.625 uniform. The plain mean of Delta is -0.625 in either case, both clients
    are 0.875 away from it: spread 0.875, times beta 1/2 (default 0.03) 0.4375 (0.02625). x = (1 + D)/(1 + tau |D|)."""
    simulation = Simulation(experiment(tmp_path, "fedlws", arrays=ARRAYS, local={"lr": 0.25}, **given))
    assert simulation.run(1).item() == pytest.approx((1 + change) / (1 + tau * -change), abs=1e-15)


def test_the_change_goes_through_the_server_optimizer(tmp_path: Path) -> None:
    """x + eta (gamma avg - x), momentum m <- m/2 + (gamma avg - x): here two rounds of it in plain floats."""
    given = {"beta": 0.5, "tau_max": 1.0, "server": {"optimizer": "momentum", "momentum": 0.5, "lr": 0.5}}
    simulation = Simulation(experiment(tmp_path, "fedlws", arrays=ARRAYS, local={"lr": 0.25}, **given))
    x, m = 1.0, 0.0
    for _ in range(2):
        a = 0.25 * (2 - x)
        y = x - 0.25 * 2 * (x + 1)
        b = y - 0.25 * 2 * (y + 1) - x
        change = a / 4 + 3 * b / 4
        tau = min(max(0.5 * abs(a - b) / 2, 0.01), 1.0)
        m = m / 2 + (x + change) * abs(x) / (abs(x) + tau * abs(change)) - x
        x += m / 2
        assert simulation.run(1).item() == pytest.approx(x, abs=1e-15)


# --- groups

NAMES = {"conv.weight": 2, "norm.weight": 1, "norm.bias": 1, "fc.weight": 3, "fc.bias": 1, "out.weight": 2}
LAYOUT = layout_of((name, torch.zeros(size)) for name, size in NAMES.items())
GROUPS = {"module": [2, 2, 4, 2], "bias": [4, 4, 2]}


def test_groups_of_a_layout() -> None:
    """By module; or a group ends with each bias, and what is left is the last one."""
    assert {grouping: group_sizes(LAYOUT, grouping) for grouping in GROUPS} == GROUPS
    whole = {name: slot for name, slot in LAYOUT.items() if name != "out.weight"}
    assert group_sizes(whole, "bias") == [4, 4]
    assert group_sizes({"w": Slot(0, 5, (5,))}, "module") == group_sizes({"w": Slot(0, 5, (5,))}, "bias") == [5]
    nested = layout_of((name, torch.zeros(2)) for name in ("a.0.weight", "a.0.bias", "a.1.weight", "b.0.weight"))
    assert group_sizes(nested, "module") == [4, 2, 2]


def test_groups_of_a_network() -> None:
    """Norm before, frozen layers left out: Tiny has BatchNorm(8) and Linear(8, 3)."""
    layout = build(Tiny(), 0).layout
    assert group_sizes(layout, "module") == group_sizes(layout, "bias") == [16, 27]


def plain(x: list[float], deltas: list[list[float]], weights: list[float], sizes: list[int]) -> list[float]:
    """The next model in plain floats, with the default hyperparameters but for beta = 0.05."""
    result, start = [], 0
    for size in sizes:
        span, start = range(start, start + size), start + size
        avg = [x[j] + sum(w * d[j] for w, d in zip(weights, deltas, strict=True)) for j in span]
        mean = [sum(d[j] for d in deltas) / len(deltas) for j in span]
        away = [math.dist([d[j] for j in span], mean) for d in deltas]
        tau = min(max(0.05 * sum(away) / len(away), 0.01), 0.2)
        size_x = math.hypot(*(x[j] for j in span))
        gamma = size_x / (size_x + tau * math.dist(avg, [x[j] for j in span]))
        result += [gamma * value for value in avg]
    return result


@pytest.mark.parametrize("grouping", ["module", "bias"])
def test_each_group_shrinks_by_its_own_factor(grouping: Any) -> None:
    """Three clients whose changes differ in scale between groups, so that both clamps and the middle occur."""
    source = torch.Generator().manual_seed(3)
    scale = torch.tensor([0.01, 0.01, 3, 3, 2, 2, 2, 2, 20, 20], dtype=torch.float64)
    x = torch.randn(10, generator=source, dtype=torch.float64)
    deltas, weights = scale * torch.randn(3, 10, generator=source, dtype=torch.float64), [0.5, 0.2, 0.3]
    uploads = [Upload({"delta": d}, weight=w, layout=LAYOUT) for d, w in zip(deltas, weights, strict=True)]
    state = {"model": x.clone()}
    result = FedLWS(beta=0.05, grouping=grouping, server=ServerSettings()).aggregate(state, uploads)["model"]
    expected = plain(x.tolist(), deltas.tolist(), weights, GROUPS[grouping])
    assert result.tolist() == pytest.approx(expected, rel=1e-13)
    assert torch.equal(state["model"], x)
    assert plain(x.tolist(), deltas.tolist(), weights, GROUPS["module"]) != pytest.approx(
        plain(x.tolist(), deltas.tolist(), weights, GROUPS["bias"]), rel=1e-3
    )


def test_a_group_of_zeros_does_not_shrink() -> None:
    """gamma = 0/(0 + tau G) would hold it at zero for ever; so would 0/0 give no number."""
    delta = torch.ones(10, dtype=torch.float64)
    for still in (delta, torch.zeros(10, dtype=torch.float64)):
        uploads = [Upload({"delta": sign * still}, weight=w, layout=LAYOUT) for sign, w in ((1, 0.75), (-1, 0.25))]
        x = torch.tensor([0.0] * 4 + [1.0] * 6, dtype=torch.float64)
        result = FedLWS(server=ServerSettings()).aggregate({"model": x}, uploads)["model"]
        assert torch.equal(result[:4], still[:4] / 2)
        assert bool((result[4:] < 1.5).all() if still.any() else (result[4:] == 1).all())


def test_a_cohort_of_one_shrinks_by_the_least(tmp_path: Path) -> None:
    """It agrees with itself: tau = tau_min = 0.01."""
    given = {"arrays": ARRAYS, "local": {"lr": 0.25}, "round": {"sample": 1}}
    simulation = Simulation(experiment(tmp_path, "fedlws", **given))
    (upload,) = simulation.step()
    change = upload.vectors["delta"].item()
    assert simulation.x.item() == pytest.approx((1 + change) / (1 + 0.01 * abs(change)), abs=1e-15)


# --- reductions and refusals


@pytest.mark.parametrize("grouping", ["module", "bias"])
def test_without_shrinking_it_is_fedavg_bit_for_bit(tmp_path: Path, grouping: str) -> None:
    """tau_min = tau_max = 0, on quadratics with a sample and on a network."""
    off = {"tau_min": 0.0, "tau_max": 0.0, "grouping": grouping}
    for given in ({"weights": "uniform"}, {"weights": "data", "server": {"optimizer": "momentum", "lr": 0.7}}):
        both = given | {"local": {"lr": 0.1}, "round": {"sample": 3}}
        fedavg = Simulation(experiment(tmp_path, "fedavg", **both)).path(5)
        assert torch.equal(Simulation(experiment(tmp_path, "fedlws", **both, **off)).path(5), fedavg)
    shrunk, fedavg = (simulate(Tiny((5, 8), dropout=0.3)) for _ in range(2))
    shrunk.strategy = shrunk.coordinator.strategy = FedLWS(**off, server=ServerSettings())
    assert torch.equal(shrunk.path(4), fedavg.path(4))


def test_buffers_are_averaged_and_not_shrunk() -> None:
    """Round 1: the same running statistics as FedAvg, another model."""
    shrunk, fedavg = simulate(strategy="fedlws"), simulate()
    assert not torch.equal(shrunk.run(1), fedavg.run(1))
    assert float(shrunk.x.norm()) < float(fedavg.x.norm())
    for group, value in fedavg.coordinator.buffers.items():
        assert torch.equal(shrunk.coordinator.buffers[group], value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tau_min": 0.3}, r"strategy.tau_min = 0.3 above strategy.tau_max = 0.2: allowed: tau_min <= tau_max"),
        ({"tau_max": 0.0}, r"strategy.tau_min = 0.01 above strategy.tau_max = 0.*both 0 is FedAvg"),
        ({"beta": -1.0}, "strategy.beta = -1.0: .*greater than or equal to 0"),
        ({"grouping": "layer"}, "strategy.grouping = 'layer': .*'module' or 'bias'"),
    ],
)
def test_refusals(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settled(experiment(tmp_path, "fedlws", **given))[0]
