"""Rounds computed by hand, for every algorithm and every server optimizer.

Two clients in one dimension, F_i(w) = a/2 (w - e)^2, rate 1/4, start x = 1:

    client  a   e   steps  examples
    A       1   2     1       1
    B       2  -1     2       3

All numbers are short binary fractions, so nearly all comparisons are exact. The plain Python below shares no code
with the project; the numbers in the docstrings were worked out by hand.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from common.experiment import ServerSettings
from strategies import server_optimizers
from strategies.fedavg import FedAvg
from strategies.registry import REGISTRY
from tests.support.helpers import Simulation, experiment

ARRAYS = {"centers": [[2.0], [-1.0]], "curvatures": [[1.0], [2.0]], "steps": [1, 2], "examples": [1, 3], "start": [1.0]}
LR = 0.25


def simulate(folder: Path, strategy: str, **given: Any) -> Simulation:
    return Simulation(experiment(folder, strategy, arrays=ARRAYS, local={"lr": LR}, **given))


def walk(client: str, x: float, scale: float = 1.0, shift: float = 0.0, mu: float = 0.0) -> tuple[float, list[float]]:
    """y - x after the client's steps y <- y - lr (scale g + shift + mu (y - x)), and the raw gradients g."""
    a, e, steps = {"A": (1.0, 2.0, 1), "B": (2.0, -1.0, 2)}[client]
    y, gradients = x, []
    for _ in range(steps):
        gradients.append(a * (y - e))
        y -= LR * (scale * gradients[-1] + shift + mu * (y - x))
    return y - x, gradients


def loss(client: str, gradients: list[float]) -> float:
    """Mean of a/2 (y - e)^2 = g^2 / (2 a) over the path."""
    a = {"A": 1.0, "B": 2.0}[client]
    return sum(g * g for g in gradients) / (2 * a * len(gradients))


def test_fedavg(tmp_path: Path) -> None:
    """A: g = -1, y = 1.25. B: g = 4, y = 0; g = 2, y = -0.5. Delta = 0.25, -1.5.
    Data (1/4, 3/4): D = -1.0625, x = -0.0625. Uniform: D = -0.625, x = 0.375."""
    (a, _), (b, _) = walk("A", 1), walk("B", 1)
    assert (a, b) == (0.25, -1.5)
    assert simulate(tmp_path, "fedavg").run(1).item() == 1 + a / 4 + 3 * b / 4 == -0.0625
    assert simulate(tmp_path, "fedavg", weights="uniform").run(1).item() == 1 + (a + b) / 2 == 0.375


def test_fedprox(tmp_path: Path) -> None:
    """mu = 1. A's only step starts at x: Delta = 0.25. B: y = 0; g + mu (y - x) = 2 - 1, y = -0.25; Delta = -1.25.
    D = 0.0625 - 0.9375 = -0.875, x = 0.125."""
    (a, _), (b, _) = walk("A", 1, mu=1), walk("B", 1, mu=1)
    assert simulate(tmp_path, "fedprox", mu=1.0).run(1).item() == 1 + a / 4 + 3 * b / 4 == 0.125


def test_fednova(tmp_path: Path) -> None:
    """a = tau = 1, 2; tau_eff = 1/4 + 6/4 = 1.75; sum p Delta/a = 0.0625 - 0.5625 = -0.5; D = -0.875, x = 0.125."""
    (a, _), (b, _) = walk("A", 1), walk("B", 1)
    expected = 1 + (1 / 4 * 1 + 3 / 4 * 2) * (a / 4 / 1 + 3 * b / 4 / 2)
    assert simulate(tmp_path, "fednova").run(1).item() == expected == 0.125


def test_scaffold(tmp_path: Path) -> None:
    """Round 1 is FedAvg: x = 0.375; c_A = -1, c_B = 3, c = 1.
    Round 2. A: g = -1.625, + c - c_A = 0.375; Delta = -0.09375. B: c - c_B = -2: g = 2.75, then 2.375;
    Delta = -(0.75 + 0.375)/4 = -0.28125. x = 0.1875; c_A = -1.625, c_B = 2.5625, c = 0.46875."""
    x, own, control = 1.0, {"A": 0.0, "B": 0.0}, 0.0
    simulation = simulate(tmp_path, "scaffold")
    for _ in range(2):
        done = {name: walk(name, x, shift=control - own[name]) for name in "AB"}
        x += (done["A"][0] + done["B"][0]) / 2
        own = {name: sum(gradients) / len(gradients) for name, (_, gradients) in done.items()}
        control = (own["A"] + own["B"]) / 2
        simulation.step()
        assert simulation.x.item() == x
        assert simulation.coordinator.state["control"].item() == control
        assert [simulation.memory(name)["control"].item() for name in "01"] == [own["A"], own["B"]]
    assert (x, own, control) == (0.1875, {"A": -1.625, "B": 2.5625}, 0.46875)


def test_scaffold_with_data_weights(tmp_path: Path) -> None:
    """x = -0.0625 as FedAvg; c = c_A/4 + 3 c_B/4 = -0.25 + 2.25 = 2."""
    simulation = simulate(tmp_path, "scaffold", weights="data")
    assert (simulation.run(1).item(), simulation.coordinator.state["control"].item()) == (-0.0625, 2.0)


def test_hafedho(tmp_path: Path) -> None:
    """mu = 1/4, p = 1/4, 3/4. Round 1: g_A = -1, g_B = 6, g = 2.5, x = 1 - 2.5/4 = 0.375; fhat = (0.5 + 2.5)/2 = 1.5.
    Round 2: h_A = 2.5 + 0.25 = 2.75, h_B = 2.5 - 4.5 = -2; mu h = 0.6875, -0.5.
    A: -1.625 + 0.6875 = -0.9375 = g_A. B: 2.75 - 0.5 = 2.25, y = -0.1875; 1.625 - 0.5 = 1.125; g_B = 3.375.
    g = 1.21875, x = 0.375 - 0.3046875 = 0.0703125."""
    x, mu, g, own = 1.0, 0.25, 0.0, {"A": 0.0, "B": 0.0}
    simulation = simulate(tmp_path, "hafedho", mu=mu)
    for _ in range(2):
        shift = {name: mu * (g - p * own[name]) for name, p in (("A", 0.25), ("B", 0.75))}
        done = {name: walk(name, x, shift=shift[name])[1] for name in "AB"}
        own = {name: sum(g + shift[name] for g in gradients) for name, gradients in done.items()}
        g = (own["A"] + own["B"]) / 2
        x -= LR * g
        simulation.step()
        state = simulation.coordinator.state
        assert (state["model"].item(), state["gradient"].item(), state["cohort"].item()) == (x, g, 2)
        assert state["loss"].item() == (loss("A", done["A"]) + loss("B", done["B"])) / 2
    assert (x, g, own) == (0.0703125, 1.21875, {"A": -0.9375, "B": 3.375})


def test_hafedhos_schedule(tmp_path: Path) -> None:
    """ "inverse" uses mu/t: round 2 with mu = 1/2 is round 2 with the constant 1/4."""
    inverse = simulate(tmp_path, "hafedho", mu=0.5, mu_schedule="inverse")
    assert inverse.run(2).item() == simulate(tmp_path, "hafedho", mu=0.25).run(2).item() == 0.0703125


def test_fedcm(tmp_path: Path) -> None:
    """alpha = 1/2. Round 1, m = 0: A: y = 1.125. B: y = 0.5, then 0.125. Delta = 0.125, -0.875; x = 0.625;
    mean steps 1.5: m = 0.375/(1.5/4) = 1.
    Round 2, shift 1/2: A: -0.6875 + 0.5, Delta = 0.046875. B: 1.625 + 0.5, y = 0.09375; 1.09375 + 0.5;
    Delta = -0.9296875. x = 0.625 - 0.44140625 = 0.18359375."""
    x, m = 1.0, 0.0
    simulation = simulate(tmp_path, "fedcm", alpha=0.5)
    for _ in range(2):
        change = sum(walk(name, x, scale=0.5, shift=0.5 * m)[0] for name in "AB") / 2
        x, m = x + change, -change / (LR * 1.5)
        simulation.step()
        assert simulation.x.item() == x
        assert simulation.coordinator.state["momentum"].item() == pytest.approx(m, abs=1e-15)
    assert x == 0.18359375


def test_every_algorithm_has_its_round_by_hand() -> None:
    """An algorithm is one file; one of the tests is called `test_<file>` or `test_one_round_of_<file>`."""
    texts = "\n".join(path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    for entry in REGISTRY.values():
        name = entry.cls.__module__.rpartition(".")[2]
        assert re.search(rf"def test_(one_round_of_)?{name}\b", texts), name


def test_every_composition_on_the_server_is_in_the_table_below() -> None:
    assert {
        name
        for name, entry in REGISTRY.items()
        if entry.cls is FedAvg and entry.server and not (entry.local or entry.compression)
    } <= set(COMPOSED)


# beta = beta1 = 1/2, beta2 = 3/4, tau = 1/2, eta = 1, x = 0, D = 2; m = 1 (adaptive) and v_0 = tau^2 = 1/4.
FIRST_STEP = {
    "sgd": 2.0,
    "momentum": 2.0,  # m = 2
    "nesterov": 3.0,  # m = 2, 2/2 + 2
    "adagrad": 1 / (math.sqrt(4.25) + 0.5),
    "adam": 1 / (math.sqrt(1.1875) + 0.5),  # v = 3/16 + 1
    "yogi": 1 / (math.sqrt(1.25) + 0.5),  # v = 1/4 - 1/4 * 4 * sign(1/4 - 4)
    "ams": 1 / math.sqrt(1.1875),  # max(1/4, 1.1875), no tau outside the root
}


def plain(name: str, changes: list[float], s: ServerSettings) -> float:
    """The model after some changes, from 0, in plain floats."""
    x, m, v, largest = 0.0, 0.0, s.tau**2, s.tau**2
    for d in changes:
        if name in ("sgd", "momentum", "nesterov"):
            m = (0 if name == "sgd" else s.momentum) * m + d
            x += s.lr * (s.momentum * m + d if name == "nesterov" else m)
            continue
        m = s.beta1 * m + (1 - s.beta1) * d
        if name == "adagrad":
            v += d * d
        elif name == "yogi":
            v -= (1 - s.beta2) * d * d * ((v > d * d) - (v < d * d))
        else:
            v = s.beta2 * v + (1 - s.beta2) * d * d
        largest = max(largest, v)
        x += s.lr * (m / math.sqrt(largest) if name == "ams" else m / (math.sqrt(v) + s.tau))
    return x


@pytest.mark.parametrize("name", FIRST_STEP)
def test_server_optimizers(name: str) -> None:
    """The first step by hand (table above), then three more, small ones among them, against plain floats."""
    changes = [2.0, -0.5, 0.0, 0.125]
    settings = ServerSettings(optimizer=name, lr=1.0, momentum=0.5, beta1=0.5, beta2=0.75, tau=0.5)
    state = {"model": torch.zeros(2, dtype=torch.float64)}
    state |= server_optimizers.start(settings, state["model"])
    for t, change in enumerate(changes, start=1):
        before = {key: value.clone() for key, value in state.items()}
        following = server_optimizers.step(settings, state, torch.tensor([change, 0.0], dtype=torch.float64))
        assert all(torch.equal(state[key], before[key]) for key in state)
        state = following
        assert state["model"][0].item() == pytest.approx(plain(name, changes[:t], settings), rel=1e-14)
        assert state["model"][1].item() == 0
        if t == 1:
            assert state["model"][0].item() == pytest.approx(FIRST_STEP[name], rel=1e-15)


COMPOSED = {
    "fedavg": "sgd",
    "fedavgm": "momentum",
    "fedadagrad": "adagrad",
    "fedadam": "adam",
    "fedyogi": "yogi",
    "fedams": "ams",
}


@pytest.mark.parametrize("strategy", COMPOSED)
def test_named_compositions(tmp_path: Path, strategy: str) -> None:
    """FedAvg's change through the named server optimizer with that entry's defaults, for three rounds: D is data
    weighted and taken at the model that the optimizer left."""
    simulation, changes = simulate(tmp_path, strategy), []
    settings = simulation.strategy.server
    assert settings.optimizer == COMPOSED[strategy]
    for _ in range(3):
        x = 1 + plain(settings.optimizer, changes, settings)
        changes.append(walk("A", x)[0] / 4 + 3 * walk("B", x)[0] / 4)
        simulation.step()
        assert simulation.x.item() == pytest.approx(1 + plain(settings.optimizer, changes, settings), rel=1e-14)
