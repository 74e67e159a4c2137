"""FedProx with any tracker: `[local] proximal_mu` is a part of the step and of no tracker.

The two clients of tests/strategies/test_one_round.py: F_i(w) = a/2 (w - e)^2, rate 1/4, start x = 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.helpers import Simulation, experiment, problem

ARRAYS = {"centers": [[2.0], [-1.0]], "curvatures": [[1.0], [2.0]], "steps": [1, 3], "examples": [1, 3], "start": [1.0]}
LR, MU = 0.25, 1.0
DATA = problem()


def walk(i: int, x: float, shift: float) -> tuple[float, list[float]]:
    """y - x after the client's steps along g + shift + mu (y - x), and the raw gradients g."""
    a, e, y, gradients = ARRAYS["curvatures"][i][0], ARRAYS["centers"][i][0], x, []
    for _ in range(ARRAYS["steps"][i]):
        gradients.append(a * (y - e))
        y -= LR * (gradients[-1] + shift + MU * (y - x))
    return y - x, gradients


def test_scaffold_with_a_proximal_term(tmp_path: Path) -> None:
    """Round 1, c = c_i = 0. A: g = -1, Delta = 0.25. B: 4, y = 0; 2 - 1, y = -0.25; 1.5 - 1.25, y = -0.3125.
    c_A = -1 and c_B = (4 + 2 + 1.5)/3 = 2.5 are of raw gradients: those of the steps would be (4 + 1 + 0.25)/3."""
    simulation = Simulation(experiment(tmp_path, "scaffold", arrays=ARRAYS, local={"lr": LR, "proximal_mu": MU}))
    x, own = 1.0, [0.0, 0.0]
    for round in (1, 2, 3):
        control = sum(own) / 2
        done = [walk(i, x, control - own[i]) for i in (0, 1)]
        x, own = x + (done[0][0] + done[1][0]) / 2, [sum(g) / len(g) for _, g in done]
        simulation.step()
        assert simulation.x.item() == pytest.approx(x, abs=1e-14)
        assert [simulation.memory(name)["control"].item() for name in "01"] == pytest.approx(own, abs=1e-14)
        if round == 1:
            assert (x, own) == (1 + (0.25 - 1.3125) / 2, [-1.0, 2.5])


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("sampled", [6, 3])
@pytest.mark.parametrize(("strategy", "tracker"), [("scaffold", "control"), ("fagc", "tracker")])
def test_trackers_keep_their_fixed_point(
    tmp_path: Path, strategy: str, tracker: str, weights: str, sampled: int
) -> None:
    """Who does not move has y = x, where mu (y - x) = 0: g_i(x) - c_i + c = 0 with c_i = g_i(x), so
    c = sum q_i g_i = 0, for any mu; unequal steps (1 to 8), sampled or not."""
    local = {"optimizer": "sgd", "lr": 0.12, "proximal_mu": 0.8}
    given = {"weights": weights, "local": local, "round": {"sample": sampled}}
    run = Simulation(experiment(tmp_path, strategy, **given)).rest(tolerance=1e-13)
    assert run.distance(run.task.minimizer(weights)) < 1e-11
    assert float(run.coordinator.state[tracker].abs().max()) < 1e-11
    for i in range(6):
        gradient = torch.from_numpy(DATA["curvatures"][i]) * (run.x - torch.from_numpy(DATA["centers"][i]))
        assert float((run.memory(str(i))[tracker] - gradient).abs().max()) < 1e-11


def test_the_term_alone_leaves_fedavgs_bias(tmp_path: Path) -> None:
    """FedProx rests elsewhere: the tracker is what takes the bias away."""
    run = Simulation(experiment(tmp_path, "fedprox", mu=0.8, weights="uniform", local={"lr": 0.12})).rest(
        tolerance=1e-12
    )
    assert run.distance(run.task.minimizer("uniform")) > 0.1
