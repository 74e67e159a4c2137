"""Where each algorithm stops on quadratics, F_i(w) = 1/2 sum_j a_ij (w_j - e_ij)^2, with unequal steps and curvatures.

From x, k steps of rate eta on F_i lead to y_k - e = (1 - eta a)^k (x - e): the sum of the k gradients is s (x - e)
with s = (1 - (1 - eta a)^k)/eta = k a + O(eta). Coordinates do not meet, so a round without memory is an affine map
x -> m x + b of each coordinate, and three models give its fixed point exactly (Aitken).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.helpers import Simulation, experiment, problem

FAST, SLOW = 2e-4, 1e-4
DATA = problem()
SHARES = {"uniform": np.full(6, 1 / 6), "data": DATA["examples"] / DATA["examples"].sum()}


def settle(simulation: Simulation) -> NDArray[np.float64]:
    """The point at which an algorithm without memory rests under full participation; checked by one more round."""
    for _ in range(2):
        x0, x1, x2 = simulation.x, simulation.run(1), simulation.run(1)
        moved = x1 - x0
        factor = torch.where(moved.abs() > 1e-14, (x2 - x1) / moved, 0.0)
        simulation.coordinator.state["model"] = x1 + (x2 - x1) / (1 - factor)
    fixed = simulation.x
    assert torch.allclose(simulation.run(1), fixed, rtol=0, atol=1e-13)
    return fixed.numpy()


def path_sums(lr: float) -> NDArray[np.float64]:
    """s (n, d): the sum of client i's gradients is s (x - e)."""
    return (1 - (1 - lr * DATA["curvatures"]) ** DATA["steps"][:, None]) / lr


def center(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """sum_i weights_i e_i / sum_i weights_i by coordinate; weights (n, d)."""
    total: NDArray[np.float64] = (weights * DATA["centers"]).sum(0) / weights.sum(0)
    return total


def gap(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(x - y))


def test_the_minimizers_are_what_the_task_says(tmp_path: Path) -> None:
    """grad sum p F_i = sum p a (w - e) = 0."""
    task = Simulation(experiment(tmp_path)).task
    for weights in ("uniform", "data"):
        assert np.allclose(task.minimizer(weights), center(SHARES[weights][:, None] * DATA["curvatures"]), atol=1e-14)


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_fedavg_rests_where_the_sums_of_gradients_cancel(tmp_path: Path, weights: str) -> None:
    """sum p Delta = -eta sum p s (x - e) = 0 gives x = sum p s e / sum p s, exactly and for any rate.

    s = tau a + O(eta): as eta falls, x goes to sum p tau a e / sum p tau a, half as far at half the rate.
    """
    p, tau = SHARES[weights][:, None], DATA["steps"][:, None]
    limit = center(p * tau * DATA["curvatures"])
    for lr in (0.05, FAST):
        x = settle(Simulation(experiment(tmp_path, weights=weights, local={"lr": lr})))
        assert gap(x, center(p * path_sums(lr))) < 1e-12
    far, near = (
        gap(settle(Simulation(experiment(tmp_path, weights=weights, local={"lr": lr}))), limit) for lr in (FAST, SLOW)
    )
    assert far / near == pytest.approx(2, rel=0.005)
    assert far < 1e-3 < 1 < gap(limit, center(p * DATA["curvatures"]))


def test_fedavg_with_a_sample_never_rests(tmp_path: Path) -> None:
    """At any x the cohorts' pulls differ, so models keep moving; under uniform weights their mean over the cohorts is
    the full mean, so the models' mean over rounds is near full participation's fixed point."""
    given: dict[str, Any] = {"weights": "uniform", "local": {"lr": 0.01}}
    rest = settle(Simulation(experiment(tmp_path, **given)))
    simulation = Simulation(experiment(tmp_path, round={"sample": 3}, **given))
    simulation.coordinator.state["model"] = torch.from_numpy(rest)
    path = simulation.path(400)
    assert float((path[1:] - path[:-1]).norm(dim=1).min()) > 1e-3
    assert gap(path.mean(0).numpy(), rest) < 0.25 * gap(rest, simulation.task.minimizer("uniform"))


MOMENTUM, DECAY = {"momentum": 0.9}, {"step_decay": 0.8}
LOCAL: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": MOMENTUM,
    "nesterov": MOMENTUM | {"nesterov": True},
    "step_decay": DECAY,
    "proximal": {"proximal_mu": 0.5},
    "all": MOMENTUM | DECAY | {"proximal_mu": 0.5},
    "proximal, eta mu fixed": {"eta_mu": 0.1},
    "all, eta mu fixed": MOMENTUM | DECAY | {"eta_mu": 0.1},
}


@pytest.mark.parametrize("case", LOCAL)
def test_fednovas_distance_halves_with_the_rate(tmp_path: Path, case: str) -> None:
    """Delta_i = -eta sum_k a_ik g_i(y_k) and g_i(y_k) = g_i(x) + O(eta), so Delta_i / a_i = -eta (g_i(x) + O(eta)):
    the rest is O(eta) away from sum p g_i = 0.

    A wrong a_i would leave a distance that stays; the proximal part of a_i is O(eta mu) and shows at first order
    only with eta mu held fixed.
    """
    distances = []
    for lr in (FAST, SLOW):
        local = {"lr": lr, **LOCAL[case]}
        if "eta_mu" in local:
            local["proximal_mu"] = local.pop("eta_mu") / lr
        simulation = Simulation(experiment(tmp_path, "fednova", local=local))
        distances.append(gap(settle(simulation), simulation.task.minimizer("data")))
    assert distances[0] / distances[1] == pytest.approx(2, rel=0.02)
    assert distances[0] < 0.02


def test_fednova_counts_weight_decay_as_gradient(tmp_path: Path) -> None:
    """With decay delta the clients minimize F_i + delta/2 |w|^2, so sum p (a (w - e) + delta w) = 0."""
    p, a = SHARES["data"][:, None], DATA["curvatures"]
    minimizer = (p * a * DATA["centers"]).sum(0) / (p * (a + 0.3)).sum(0)
    far, near = (
        gap(settle(Simulation(experiment(tmp_path, "fednova", local={"lr": lr, "weight_decay": 0.3}))), minimizer)
        for lr in (FAST, SLOW)
    )
    assert far / near == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("sampled", [6, 3])
@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_scaffold_reaches_the_minimizer(tmp_path: Path, weights: str, sampled: int) -> None:
    """At w* with c_i = g_i(w*) and c = sum q g_i(w*) = 0 every corrected gradient g_i - c_i + c is zero: no client
    moves, whatever its steps and whoever is sampled. Nothing else rests: unmoved clients have c_i = g_i(x), and no
    move means g_i - c_i + c = c = 0."""
    given = {"weights": weights, "local": {"lr": 0.12}, "round": {"sample": sampled}}
    run = Simulation(experiment(tmp_path, "scaffold", **given)).rest()
    assert run.distance(run.task.minimizer(weights)) < 1e-12
    assert run.distance(run.task.minimizer("data" if weights == "uniform" else "uniform")) > 0.1
    assert float(run.coordinator.state["control"].abs().max()) < 1e-12


@pytest.mark.parametrize("local", [{"lr": 0.05, "momentum": 0.5, "step_decay": 0.9}, {"lr": 0.1, "clip_norm": 5.0}])
def test_scaffold_is_exact_under_momentum_decay_and_clipping(tmp_path: Path, local: dict[str, float]) -> None:
    """Its controls are means of raw gradients; option II's displacements would be inflated, or clipped."""
    run = Simulation(experiment(tmp_path, "scaffold", local=local)).rest()
    assert run.distance(run.task.minimizer("uniform")) < 1e-12


def hafedho(folder: Path, **given: Any) -> Simulation:
    return Simulation(experiment(folder, "hafedho", local={"lr": 0.15}, **given)).rest()


@pytest.mark.parametrize("upload", ["phi", "displacement", "raw"])
def test_hafedho_keeps_fedavgs_bias(tmp_path: Path, upload: str) -> None:
    """At rest g = 0, so without the own share h = 0 and the clients walk FedAvg's paths: sum_i s_i (x - e_i) = 0."""
    run = hafedho(tmp_path, own_share="none", mu=0.05, upload=upload)
    fedavg = settle(Simulation(experiment(tmp_path, weights="uniform", local={"lr": 0.15})))
    assert run.distance(fedavg) < 1e-12
    assert run.distance(center(path_sums(0.15))) < 1e-12
    assert run.distance(run.task.minimizer("uniform")) > 0.5


@pytest.mark.parametrize("share", ["data", "cohort"])
def test_the_own_share_shifts_hafedhos_rest_a_little(tmp_path: Path, share: str) -> None:
    """At rest g = 0 but h = -q g_i: g_i = s (x - e - mu q g_i / a), so g_i = s (x - e) / (1 + mu q s / a).

    A client of many steps counts s / (1 + mu q s / a) where FedAvg counts s: an effect of order mu q tau.
    """
    q = SHARES["data" if share == "data" else "uniform"][:, None]
    run, sums = hafedho(tmp_path, own_share=share, mu=0.05), path_sums(0.15)
    assert run.distance(center(sums / (1 + 0.05 * q * sums / DATA["curvatures"]))) < 1e-12
    assert 1e-3 < run.distance(center(sums)) < 0.1
