"""HaFedHo: what its rectified objective is, what it equals and what makes its variants differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.data.examples import ClientData, Examples
from common.tasks.base import Task
from tests.strategies.test_reductions import EQUAL, LR, STEPS, apart, models
from tests.support.helpers import Simulation, experiment, problem


def hafedho(folder: Path, rounds: int = 12, **given: Any) -> Tensor:
    return models(folder, "hafedho", rounds, **{"arrays": EQUAL, "mu": 0.1, **given})


@pytest.mark.parametrize("strength", [0.1, 0.5, 0.9])
def test_it_is_fedcm(tmp_path: Path, strength: float) -> None:
    """g^t = sum_k grad f + lambda mu g^{t-1} = lambda (dbar + mu g^{t-1}). With D = (1 - mu lambda) g / lambda and
    eta' = eta/(1 - mu lambda) a local step eta (grad f + mu g) is eta' ((1 - mu lambda) grad f + mu lambda D):
    FedCM with alpha = 1 - mu lambda, m = D."""
    alpha = 1 - strength
    run = hafedho(tmp_path, 40, mu=strength / STEPS, own_share="none", local={"lr": 0.01})
    same = models(tmp_path, "fedcm", 40, alpha=alpha, arrays=EQUAL, local={"lr": 0.01 / alpha})
    assert apart(run, same) < 1e-12
    assert apart(run, models(tmp_path, "fedavg", 40, weights="uniform", arrays=EQUAL, local={"lr": 0.01})) > 0.01


@pytest.mark.parametrize("upload", ["phi", "displacement", "raw"])
def test_objective_and_gradient_rectification_are_one(tmp_path: Path, upload: str) -> None:
    """grad (f + mu h^T w) = grad f + mu h: without clipping the same bits, also with momentum and weight decay."""
    for local in ({"lr": LR}, {"lr": LR, "momentum": 0.5, "weight_decay": 0.1}):
        given = {"upload": upload, "local": local}
        run = hafedho(tmp_path, **given)
        assert torch.equal(run, hafedho(tmp_path, rectification="gradient", **given))


@pytest.mark.parametrize("upload", ["phi", "displacement"])
def test_clipping_tells_them_apart(tmp_path: Path, upload: str) -> None:
    """Objective: |grad f + mu h| <= c. Gradient: |grad f| <= c, then + mu h. A bound above all gradients does not."""
    for bound, lowest, highest in ((3.0, 1e-2, 10.0), (1e3, 0.0, 0.0)):
        given = {"upload": upload, "local": {"lr": LR, "clip_norm": bound}}
        difference = apart(hafedho(tmp_path, **given), hafedho(tmp_path, rectification="gradient", **given))
        assert lowest <= difference <= highest


def test_phi_is_the_displacement_for_plain_sgd_only(tmp_path: Path) -> None:
    """w - w_i = eta sum grad phi under plain SGD, clipped or not; weight decay, momentum, a proximal term and
    decayed rates move the client but are no part of grad phi."""

    def difference(**local: float) -> float:
        runs = [hafedho(tmp_path, upload=upload, local={"lr": LR, **local}) for upload in ("phi", "displacement")]
        return apart(*runs)

    for bound in (1e3, 3.0, 0.1):
        assert difference(clip_norm=bound) < 1e-12
    assert difference() < 1e-12
    for local in ({"weight_decay": 0.1}, {"momentum": 0.5}, {"proximal_mu": 0.5}):
        assert difference(**local) > 1e-3
    assert difference(step_decay=0.9) > 1e-3


def test_raw_follows_fedavg_to_second_order(tmp_path: Path) -> None:
    """In round 2 phi moves the server by eta mu lambda g: first order in eta. raw only shifts the points at which
    gradients are taken, by -k eta mu g, so its server moves by about eta^2 a mu lambda (lambda - 1)/2 g: halving eta
    divides the distance to FedAvg by 4 where phi's is divided by 2; doubling mu doubles both."""

    def distance(upload: str, lr: float, mu: float = 0.1) -> float:
        local = {"lr": lr}
        run = hafedho(tmp_path, 2, upload=upload, mu=mu, own_share="none", local=local)
        return apart(run, models(tmp_path, "fedavg", 2, weights="uniform", arrays=EQUAL, local=local))

    assert distance("raw", 1e-3) / distance("raw", 5e-4) == pytest.approx(4, rel=0.02)
    assert distance("phi", 1e-3) / distance("phi", 5e-4) == pytest.approx(2, rel=0.02)
    assert distance("raw", 1e-3, 0.2) / distance("raw", 1e-3) == pytest.approx(2, rel=1e-6)
    assert distance("raw", 1e-3) < 0.01 * distance("phi", 1e-3)


# --- the rectified objective, literally, on a network


class Regression(Task):
    """Two clients of 6 examples each, a network 3-4-1 with tanh and mean squared error, in float64."""

    dtype = torch.float64

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def names(self) -> list[str]:
        return ["0", "1"]

    def client(self, name: str, file: str | None = None) -> ClientData:
        source = torch.Generator().manual_seed(int(name))
        inputs = torch.randn(6, 3, dtype=torch.float64, generator=source)
        examples = Examples(inputs, inputs.sin().sum(1) + int(name))
        return ClientData(examples, examples, STEPS)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return ((model(batch[0]).squeeze(1) - batch[1]) ** 2).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": self.loss(model, batch).item() * len(batch[1])}


def test_the_correction_is_autograds_gradient_of_the_rectified_objective(tmp_path: Path) -> None:
    """phi(w) = f(w) + mu (fhat + h^T (w - w_t)), written out with torch alone, gives the same local model, and its
    summed gradients are the upload; fhat never matters."""
    mu, task = 0.2, Regression()
    simulation = Simulation(experiment(tmp_path, "hafedho", mu=mu, local={"lr": LR, "batch_size": 6}), task=task)
    simulation.step()
    g, start = simulation.coordinator.state["gradient"], simulation.x
    fhat = float(simulation.coordinator.state["loss"])
    own = {name: simulation.memory(name) for name in task.names()}
    uploads = {upload.name: upload for upload in simulation.step()}
    for name in task.names():
        h = g - 0.5 * own[name]["gradient"]
        f_other = fhat - 0.5 * float(own[name]["loss"])
        module, total = task.model(), torch.zeros_like(g)
        nn.utils.vector_to_parameters(start.clone(), module.parameters())
        data = task.client(name).train
        for _ in range(STEPS):
            module.zero_grad()
            w = nn.utils.parameters_to_vector(module.parameters())
            objective = task.loss(module, (data.inputs, data.targets)) + mu * (f_other + h @ (w - start))
            objective.backward()
            total += torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= LR * parameter.grad
        end = nn.utils.parameters_to_vector(module.parameters()).detach()
        assert apart(total, uploads[name].vectors["gradient"]) < 1e-12
        assert apart((start - end) / LR, uploads[name].vectors["gradient"]) < 1e-12
        assert float((mu * h).abs().max()) > 0.01  # the correction is not nothing


def test_the_caution_names_the_stable_range(tmp_path: Path) -> None:
    """Along a flat direction (a -> 0) the velocity grows by mu lambda a round."""
    for mu, grows in ((0.19, False), (0.21, True)):
        flat = {**EQUAL, "curvatures": np.full((6, 5), 1e-6)}
        run = Simulation(experiment(tmp_path, "hafedho", mu=mu, own_share="none", arrays=flat, local={"lr": LR}))
        assert (run.strategy.caution(run.experiment, STEPS) is not None) == grows
        run.run(5)
        speed = float(run.coordinator.state["gradient"].norm())
        run.run(20)
        later = float(run.coordinator.state["gradient"].norm())
        # Driven by a nearly constant sum G: g = G (1 - beta^t)/(1 - beta).
        beta = mu * STEPS
        assert later / speed == pytest.approx((1 - beta**25) / (1 - beta**5), rel=1e-3)


@pytest.mark.parametrize("rectification", ["objective", "gradient"])
def test_a_clipped_server_goes_no_further_than_its_clients(tmp_path: Path, rectification: str) -> None:
    """Round 1 has no h: five steps of length at most eta c, and the server moves by their mean, as FedAvg does."""
    local = {"lr": LR, "clip_norm": 0.1}
    run = hafedho(tmp_path, 1, rectification=rectification, local=local)
    assert float(run.norm()) <= LR * 0.1 * STEPS
    assert apart(run, models(tmp_path, "fedavg", 1, weights="uniform", arrays=EQUAL, local=local)) < 1e-15


def test_joint_clipping_bounds_the_speed_of_undamped_momentum(tmp_path: Path) -> None:
    """mu lambda = 1.4 with one nearly flat direction: without clipping |w| is 47,000 after 60 rounds, as it was with
    phi taken before clipping; now phi ends where the displacement does, near 1.9."""
    curvatures = problem()["curvatures"]
    curvatures[:, 0] = 0.01
    given: dict[str, Any] = {"arrays": EQUAL | {"curvatures": curvatures}, "mu": 1.4 / STEPS}
    ends = [
        float(hafedho(tmp_path, 60, upload=upload, local={"lr": LR, **clip}, **given)[-1].norm())
        for upload, clip in (("phi", {}), ("phi", {"clip_norm": 3.0}), ("displacement", {"clip_norm": 3.0}))
    ]
    assert ends[0] > 1e4
    assert ends[1] == pytest.approx(ends[2], rel=1e-9)
    assert ends[1] < 3


@pytest.mark.parametrize("upload", ["phi", "raw", "displacement"])
def test_weight_decay_acts_backwards_in_sums_of_gradients(tmp_path: Path, upload: str) -> None:
    """f = (w - 2)^2/2 with decay 1 has its minimum at 1. Clients walk y <- 1 + r (y - 1), r = 1 - 2 eta; sums of
    gradients rest where the mean of y - 2 is zero, at 1 + lambda (1 - r)/(1 - r^lambda) = 2.22."""
    one = {"centers": [[2.0]], "curvatures": [[1.0]], "steps": [5], "examples": [1], "start": [0.0]}
    local = {"lr": 0.05, "weight_decay": 1.0}
    given: dict[str, Any] = {"arrays": one, "own_share": "none", "upload": upload, "local": local}
    rest = float(Simulation(experiment(tmp_path, "hafedho", **given)).run(300))
    expected = 1.0 if upload == "displacement" else 1 + 5 * 0.1 / (1 - 0.9**5)
    assert rest == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("upload", ["phi", "raw", "displacement"])
def test_the_caution_names_what_the_server_never_sees(tmp_path: Path, upload: str) -> None:
    """Each setting by its name and value; none of them with the displacement."""
    moves = {"weight_decay": 0.1, "momentum": 0.5, "proximal_mu": 0.25, "step_decay": 0.75}

    def caution(**local: float) -> str:
        run = Simulation(experiment(tmp_path, "hafedho", mu=0.01, upload=upload, local={"lr": LR, **local}))
        return run.strategy.caution(run.experiment, STEPS) or ""

    assert caution() == ""
    for key, value in moves.items():
        said = caution(**{key: value})
        assert (f"local.{key} = {value:g}" in said) == (upload != "displacement")
    every = caution(**moves)
    assert all(f"local.{key} = {value:g}" in every for key, value in moves.items()) == (upload != "displacement")
    assert ("local.clip_norm" in caution(clip_norm=1.0)) == (upload == "raw")


@pytest.mark.parametrize(
    ("local", "rectification", "words"),
    [
        ({}, "objective", "diverges along flat directions;"),
        ({"clip_norm": 1.0}, "gradient", "diverges along flat directions;"),
        ({"clip_norm": 1.0}, "objective", "at the speed that clipping allows;"),
    ],
)
def test_the_caution_of_mu_lambda_knows_which_clipping_helps(
    tmp_path: Path, local: dict[str, float], rectification: str, words: str
) -> None:
    """Joint clipping bounds a step with mu h in it; clipping before mu h is added bounds nothing of it."""
    given: dict[str, Any] = {"mu": 0.5, "rectification": rectification, "local": {"lr": LR, **local}}
    run = Simulation(experiment(tmp_path, "hafedho", **given))
    assert words in (run.strategy.caution(run.experiment, STEPS) or "")
