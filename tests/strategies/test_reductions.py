"""Algorithms that must coincide, to 1e-12 in float64, on quadratics and on a small network.

`path` compares the server models of whole runs; all runs of one test share seed and clients, so they share samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from client.training.optimizers import LocalOptimizer
from common.experiment import LocalSettings
from strategies.fednova import unit_response
from tests.support.helpers import Simulation, experiment

LR, STEPS = 0.03, 5
EQUAL = {"steps": np.full(6, STEPS)}


def models(folder: Path, strategy: str, rounds: int = 12, **given: Any) -> Tensor:
    """The server models of a run with 3 of 6 clients a round (rounds, d)."""
    given = {"local": {"lr": LR}, "round": {"sample": 3}} | given
    return Simulation(experiment(folder, strategy, **given)).path(rounds)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- FedAvg as a special case


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}, {"proximal_mu": 0.5, "step_decay": 0.9}])
def test_fednova_with_equal_steps_is_fedavg(tmp_path: Path, local: dict[str, float]) -> None:
    """Equal a_i cancel: tau_eff sum p Delta/a = sum p Delta."""
    given = {"arrays": EQUAL, "local": {"lr": LR, **local}}
    assert apart(models(tmp_path, "fednova", **given), models(tmp_path, "fedavg", **given)) < 1e-12


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize(
    ("strategy", "given"),
    [
        ("fedprox", {"mu": 0.0}),
        ("hafedho", {"mu": 0.0}),
        ("hafedho", {"mu": 0.0, "upload": "displacement"}),
        ("hafedho", {"mu": 0.0, "upload": "raw"}),
        ("fedcm", {"alpha": 1.0}),
        ("fedavgm", {"server": {"momentum": 0.0}}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(map(str, value)),
)
def test_a_strength_of_zero_is_fedavg(tmp_path: Path, strategy: str, given: dict[str, Any], weights: str) -> None:
    """mu = 0, alpha = 1 or beta = 0 leave FedAvg of the same weighting; w - eta mean(sum g_i) is the mean model."""
    same = models(tmp_path, "fedavg", weights=weights)
    assert apart(models(tmp_path, strategy, weights=weights, **given), same) < 1e-12


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("strategy", ["scaffold", "hafedho"])
def test_round_one_is_fedavg(tmp_path: Path, strategy: str, weights: str) -> None:
    """All trackers and g start at zero; round 2 differs."""
    reference = models(tmp_path, "fedavg", 2, weights=weights)
    run = models(tmp_path, strategy, 2, weights=weights)
    assert apart(run[0], reference[0]) < 1e-12
    assert apart(run[1], reference[1]) > 1e-4


def test_fedprox_is_the_local_proximal_term(tmp_path: Path) -> None:
    """strategy.mu and local.proximal_mu are one thing."""
    local = models(tmp_path, "fedavg", local={"lr": LR, "proximal_mu": 0.7})
    assert torch.equal(models(tmp_path, "fedprox", mu=0.7), local)


def test_scaffolds_control_is_option_two(tmp_path: Path) -> None:
    """Plain SGD: x - y = eta sum (g_k - c_i + c), so c_i - c + (x - y)/(K eta) = mean g_k."""
    simulation = Simulation(experiment(tmp_path, "scaffold", local={"lr": LR}, round={"sample": 3}))
    for _ in range(8):
        before = {name: simulation.memory(name).get("control", 0) for name in simulation.members}
        control = simulation.coordinator.state["control"]
        for upload in simulation.step():
            option = before[upload.name] - control - upload.vectors["delta"] / (upload.steps * LR)
            assert apart(simulation.memory(upload.name)["control"], option) < 1e-12
            assert apart(before[upload.name] + upload.vectors["control"], option) < 1e-12


# --- FedNova's a_i


def response(steps: int, lr: float = LR, mu: float = 0.0, **local: Any) -> float:
    return unit_response(LocalSettings(lr=lr, proximal_mu=mu, **local), lr, steps)


@pytest.mark.parametrize("tau", [1, 2, 7, 50])
def test_closed_forms_of_the_response(tau: int) -> None:
    """SGD tau; momentum rho (tau - rho (1 - rho^tau)/(1 - rho))/(1 - rho); proximal with alpha = eta mu
    (1 - (1 - alpha)^tau)/alpha; decay gamma (1 - gamma^tau)/(1 - gamma)."""
    rho, gamma, mu, alpha = 0.9, 0.7, 2.0, 2.0 * LR
    assert response(tau) == pytest.approx(tau, rel=1e-13)
    momentum = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert response(tau, momentum=rho) == pytest.approx(momentum, rel=1e-13)
    assert response(tau, mu=mu) == pytest.approx((1 - (1 - alpha) ** tau) / alpha, rel=1e-13)
    assert response(tau, step_decay=gamma) == pytest.approx((1 - gamma**tau) / (1 - gamma), rel=1e-13)
    assert response(tau, weight_decay=0.5) == pytest.approx(tau, rel=1e-13)


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.5}])
@pytest.mark.parametrize(
    "more", [{}, {"proximal_mu": 1.5}, {"step_decay": 0.9}, {"proximal_mu": 1.5, "step_decay": 0.9}]
)
def test_the_server_computes_what_the_clients_optimizer_does(local: dict[str, Any], more: dict[str, float]) -> None:
    """The same bits as the optimizer of local training, on gradients of 1."""
    settings = LocalSettings(lr=LR, **local, **more)
    vector, gradient = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    optimizer = LocalOptimizer(settings.model_copy(update={"weight_decay": 0.0}), vector, gradient, LR)
    for steps in range(1, 40):
        gradient.fill_(1.0).add_(vector, alpha=settings.proximal_mu)
        optimizer.step()
        optimizer.decay(settings.step_decay)
        assert unit_response(settings, LR, steps) == -float(vector) / LR


@pytest.mark.parametrize("nesterov", [False, True])
def test_coupled_response_is_the_sum_of_impulse_responses(nesterov: bool) -> None:
    """The recursion v <- rho v + g_k + mu y, y <- y - eta_k v (Nesterov: y - eta_k (g_k + mu y + rho v)) is linear in
    the gradients g_k, so y_K = -eta sum_k a_k g_k; a_k is the answer to an impulse at k, and a = sum |a_k|."""
    rho, mu, gamma, tau = 0.8, 1.5, 0.9, 12

    def impulse(at: int) -> float:
        y, v, eta = 0.0, 0.0, LR
        for k in range(tau):
            g = (1.0 if k == at else 0.0) + mu * y
            v = rho * v + g
            y -= eta * (g + rho * v if nesterov else v)
            eta *= gamma
        return -y / LR

    parts = [impulse(k) for k in range(tau)]
    assert min(parts) > 0
    assert response(tau, mu=mu, momentum=rho, step_decay=gamma, nesterov=nesterov) == pytest.approx(
        sum(parts), rel=1e-13
    )
