"""FedSAM (`[local] sam_rho`): each gradient g is replaced by the one at w + rho g/|g|.

The two clients of test_one_round.py: F_i(w) = a/2 (w - e)^2, rate 1/4, start x = 1. In one dimension g/|g| is
the sign of g.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.experiment import Experiment
from common.vector import sha256
from strategies.registry import settled
from tests.support.helpers import Simulation, experiment
from tests.support.tiny import Tiny, settings, simulate, trained

ARRAYS = {"centers": [[2.0], [-1.0]], "curvatures": [[1.0], [2.0]], "steps": [1, 2], "examples": [1, 3], "start": [1.0]}
LR, RHO = 0.25, 0.5


def walk(i: int, x: float, shift: float = 0.0) -> tuple[float, list[float]]:
    """y - x after the client's steps, and the gradients at y + rho sign(g)."""
    a, e, y, gradients = ARRAYS["curvatures"][i][0], ARRAYS["centers"][i][0], x, []
    for _ in range(ARRAYS["steps"][i]):
        ahead = y + RHO * math.copysign(1.0, a * (y - e))
        gradients.append(a * (ahead - e))
        y -= LR * (gradients[-1] + shift)
    return y - x, gradients


def test_fedsam(tmp_path: Path) -> None:
    """A: g = -1, at 0.5: -1.5; Delta = 0.375. B: g = 4, at 1.5: 5, y = -0.25; g = 1.5, at 0.25: 2.5, y = -0.875;
    Delta = -1.875. By data (1/4, 3/4): x = 1 + 0.09375 - 1.40625 = -0.3125."""
    (a, _), (b, _) = walk(0, 1), walk(1, 1)
    assert (a, b) == (0.375, -1.875)
    simulation = Simulation(experiment(tmp_path, "fedsam", arrays=ARRAYS, local={"lr": LR, "sam_rho": RHO}))
    assert simulation.run(1).item() == 1 + a / 4 + 3 * b / 4 == -0.3125


def test_the_named_composition(tmp_path: Path) -> None:
    """FedAvg with rho = 0.05, which a file may override; rho = 0 is FedAvg."""
    named = Simulation(experiment(tmp_path, "fedsam", local={"lr": 0.1})).path(3)
    written = Simulation(experiment(tmp_path, "fedavg", local={"lr": 0.1, "sam_rho": 0.05})).path(3)
    assert torch.equal(named, written)
    off = Simulation(experiment(tmp_path, "fedsam", local={"lr": 0.1, "sam_rho": 0.0})).path(3)
    assert torch.equal(off, Simulation(experiment(tmp_path, "fedavg", local={"lr": 0.1})).path(3))
    assert not torch.equal(named, off)


def test_the_norm_is_of_the_whole_gradient(tmp_path: Path) -> None:
    """g = (-3, 4) has norm 5: the gradient at w + rho (-0.6, 0.8) with curvatures 1 and 2 is (-3 - 0.3, 4 + 0.8)."""
    arrays = {"centers": [[3.0, -2.0]], "curvatures": [[1.0, 2.0]], "steps": [1], "examples": [1], "start": [0.0, 0.0]}
    simulation = Simulation(experiment(tmp_path, "fedsam", arrays=arrays, local={"lr": LR, "sam_rho": RHO}))
    assert simulation.run(1).tolist() == pytest.approx([3.3 / 4, -4.8 / 4], abs=1e-15)


def test_scaffold_tracks_the_gradients_that_are_applied(tmp_path: Path) -> None:
    """Its controls are means of the gradients at w + rho g/|g|; the correction does not turn that direction."""
    simulation = Simulation(experiment(tmp_path, "scaffold", arrays=ARRAYS, local={"lr": LR, "sam_rho": RHO}))
    x, own = 1.0, [0.0, 0.0]
    for _ in range(3):
        control = sum(own) / 2
        done = [walk(i, x, control - own[i]) for i in (0, 1)]
        x, own = x + (done[0][0] + done[1][0]) / 2, [sum(g) / len(g) for _, g in done]
        simulation.step()
        assert simulation.x.item() == x
        assert [simulation.memory(name)["control"].item() for name in "01"] == own


@pytest.mark.parametrize("rho", [0.05, 5.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gradient_of_zero_stays_zero(tmp_path: Path, rho: float, dtype: str) -> None:
    """0/|0| moves nowhere. rho/tiny would be infinite from rho = 4 on, and 0 times that no number."""
    arrays = {"centers": [[1.0, 2.0]], "curvatures": [[1.0, 2.0]], "steps": [3], "examples": [1], "start": [1.0, 2.0]}
    given = experiment(tmp_path, "fedsam", arrays=arrays, local={"lr": LR, "sam_rho": rho})
    task = {"name": "quadratic", "file": str(tmp_path / "quadratic.npz"), "dtype": dtype}
    given = Experiment.model_validate(given.model_dump(exclude_unset=True) | {"task": task})
    assert Simulation(given).run(3).tolist() == [1.0, 2.0]


def test_a_tiny_gradient_moves_by_rho_all_the_same(tmp_path: Path) -> None:
    """g = 1e-200: w + rho, where the gradient is a rho."""
    arrays = {"centers": [[0.0]], "curvatures": [[1.0]], "steps": [1], "examples": [1], "start": [1e-200]}
    simulation = Simulation(experiment(tmp_path, "fedsam", arrays=arrays, local={"lr": LR, "sam_rho": RHO}))
    assert simulation.run(1).item() == -LR * RHO


# --- what both passes share, on a network


def recorded(task: Tiny, **local: Any) -> list[tuple[Tensor, Tensor]]:
    """The model before each step of client "0" and the gradient that is yielded there."""
    work = simulate(task, **local).work("0")
    return [(work.vector.clone(), gradient.clone()) for gradient in work.steps()]


def test_the_gradient_on_a_network_is_autograds_at_the_point_ahead() -> None:
    """And the weights are back where they were: each step starts where the last one led."""
    task = Tiny((6, 5))
    model = copy.deepcopy(simulate(task).model.module)
    trainable = [p for p in model.parameters() if p.requires_grad]
    data, steps = task.client("0").train, None

    def gradient_at(vector: Tensor, numbers: list[int]) -> Tensor:
        nn.utils.vector_to_parameters(vector, trainable)
        inputs, targets = data.batch(torch.tensor(numbers))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, trainable)])

    task.batches.clear()
    steps = recorded(task, sam_rho=RHO, epochs=2)
    batches = task.batches[::2]
    assert len(steps) == 6
    assert task.batches[1::2] == batches
    for (vector, gradient), numbers in zip(steps, batches, strict=True):
        g = gradient_at(vector, numbers)
        ahead = gradient_at(vector + RHO * g / g.norm(), numbers)
        assert torch.allclose(gradient, ahead, atol=1e-6)
        assert float((ahead - g).norm()) > 1e-3
    for (before, gradient), (after, _) in pairwise(steps):
        assert torch.allclose(after, before - 0.1 * gradient, atol=1e-7)


def test_running_statistics_move_once_a_step() -> None:
    """The layer before BatchNorm is frozen, so its statistics see the same numbers with and without rho."""
    sharp, plain = (trained(Tiny((6, 5)), epochs=3, **local)[0] for local in ({"sam_rho": RHO}, {}))
    assert sharp.steps_taken == plain.steps_taken == 9
    assert sha256(sharp.buffers) == sha256(plain.buffers)
    assert int(sharp.buffers["buffers.int64"]) == 9


class Masks(Tiny):
    """Records each pass's dropout mask."""

    def __init__(self) -> None:
        super().__init__((6, 5), dropout=0.5)
        self.masks: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        ones = torch.ones(len(batch[1]), 8)
        before = torch.get_rng_state()
        self.masks.append(model[-2](ones) > 0)
        torch.set_rng_state(before)
        return super().loss(model, batch)


def masks(**local: Any) -> list[Tensor]:
    task = Masks()
    simulate(task, **local).train("0")
    return task.masks


def test_both_passes_drop_the_same_units() -> None:
    """Those that a run without rho drops, in every step others: the second pass draws nothing of its own."""
    sharp, plain = masks(sam_rho=RHO, epochs=3), masks(epochs=3)
    assert len(sharp) == 2 * len(plain) == 18
    for k, mask in enumerate(plain):
        assert torch.equal(sharp[2 * k], mask)
        assert torch.equal(sharp[2 * k + 1], mask)
    assert not all(torch.equal(mask, plain[0]) for mask in plain)


class Features(Tiny):
    """Its output layer is known; with `weight` the loss holds that times the sum of what enters it."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__((6, 5))
        self.weight = weight

    def output_layer(self, model: nn.Module) -> nn.Module:
        return model[-1]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + (self.weight * model[:-1](batch[0]).sum() if self.weight else 0)


def test_what_joins_the_loss_joins_both_passes() -> None:
    """`extra` (MOON's term) is a part of the loss whose neighbourhood is looked at."""
    inside = recorded(Features(0.3), sam_rho=RHO)
    work = simulate(Features(), sam_rho=RHO).work("0")
    beside = [gradient.clone() for gradient in work.steps(extra=lambda z, batch: 0.3 * z.sum())]
    for (_, expected), gradient in zip(inside, beside, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-6)


def test_only_the_part_in_training_moves_ahead() -> None:
    """With a personal head that does not train in the step, g and w + rho g/|g| are of the shared part alone."""
    values = settings(sam_rho=RHO, steps=1).model_dump(exclude_unset=True) | {"personal": {"parts": ["head"]}}
    simulation = Simulation(Experiment.model_validate(values), task=Features())
    work, task = simulation.work("0"), simulation.task
    model = copy.deepcopy(work.module)
    task.batches.clear()
    (gradient,) = [gradient.clone() for gradient in work.steps(part="shared")]
    inputs, targets = simulation.data["0"].train.batch(torch.tensor(task.batches[0]))
    shared = [model[1].weight, model[1].bias]

    def gradient_here() -> Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        return torch.cat(torch.autograd.grad(loss, shared))

    g = gradient_here()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(shared).detach() + RHO * g / g.norm(), shared)
    assert torch.allclose(gradient, gradient_here(), atol=1e-6)


def test_half_precision(tmp_path: Path) -> None:
    """bfloat16 runs and is near float32."""
    exact, rounded = (simulate(sam_rho=0.05, epochs=3, precision=p).run(2) for p in ("float32", "bfloat16"))
    assert 0 < float((rounded - exact).norm()) < 0.1 * float(exact.norm())


def test_it_composes_with_every_optimizer_of_the_server(tmp_path: Path) -> None:
    """A local step is nothing that a server sees."""
    for optimizer in ("momentum", "adam"):
        assert settled(experiment(tmp_path, "fedsam", server={"optimizer": optimizer}))[0]
