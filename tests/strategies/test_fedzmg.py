"""FedZMG: rounds by hand, the projection, and the means that training must not move."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import Layout, layout_of
from strategies.fedzmg import project
from strategies.registry import settled
from tests.support.helpers import Simulation, experiment

CENTERS, CURVATURES = [[2.0, -1.0], [-1.0, 0.5]], [[1.0, 2.0], [2.0, 4.0]]
ARRAYS = {"centers": CENTERS, "curvatures": CURVATURES, "steps": [1, 2], "examples": [1, 3], "start": [1.0, 1.0]}


def walk(i: int, x: list[float], clip: float, momentum: float) -> list[float]:
    """y - x after the client's steps of rate 1/4 along g less its mean, bounded, through momentum."""
    y, v = list(x), [0.0, 0.0]
    for _ in range(ARRAYS["steps"][i]):
        g = [a * (w - e) for a, w, e in zip(CURVATURES[i], y, CENTERS[i], strict=True)]
        g = [part - sum(g) / 2 for part in g]
        bound = min(1.0, clip / (math.hypot(*g) + 1e-6))
        v = [momentum * old + bound * part for old, part in zip(v, g, strict=True)]
        y = [w - part / 4 for w, part in zip(y, v, strict=True)]
    return [w - start for w, start in zip(y, x, strict=True)]


@pytest.mark.parametrize(("clip", "momentum"), [(math.inf, 0.0), (math.inf, 0.5), (1.0, 0.5)])
def test_fedzmg(tmp_path: Path, clip: float, momentum: float) -> None:
    """Scope "global", two coordinates. A: g = (-1, 4), less 1.5: (-2.5, 2.5). B: g = (4, 2), less 3: (1, -1);
    y = (0.75, 1.25), g = (3.5, 3), (0.25, -0.25). D by data (1/4, 3/4); the sum of the model stays 2."""
    local = {"lr": 0.25, "momentum": momentum, **({"clip_norm": clip} if clip < math.inf else {})}
    simulation = Simulation(experiment(tmp_path, "fedzmg", arrays=ARRAYS, scope="global", local=local))
    x = [1.0, 1.0]
    for _ in range(3):
        a, b = (walk(i, x, clip, momentum) for i in (0, 1))
        x = [w + p / 4 + 3 * q / 4 for w, p, q in zip(x, a, b, strict=True)]
        assert simulation.run(1).tolist() == pytest.approx(x, abs=1e-12)
        assert sum(simulation.x.tolist()) == pytest.approx(2, abs=1e-14)
    if clip == math.inf and not momentum:
        simulation.coordinator.state["model"] = torch.ones(2, dtype=torch.float64)
        assert simulation.run(1).tolist() == [1 + 0.625 / 4 - 3 * 0.3125 / 4, 1 - 0.625 / 4 + 3 * 0.3125 / 4]


# --- the projection

LAYOUT = layout_of(
    [
        ("conv.weight", torch.zeros(2, 2, 1)),
        ("conv.bias", torch.zeros(2)),
        ("one.weight", torch.zeros(1, 1)),
        ("column.weight", torch.zeros(2, 1)),
    ]
)
GRADIENT = [1.0, 2.0, 3.0, 6.0, 10.0, 20.0, 5.0, 8.0, 4.0]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        # conv less 3; bias and the single number stay; column less 6.
        ("tensor", [-2.0, -1.0, 0.0, 3.0, 10.0, 20.0, 5.0, 2.0, -2.0]),
        # conv's units less 1.5 and 4.5; the column's units are single numbers.
        ("filter", [-0.5, 0.5, -1.5, 1.5, 10.0, 20.0, 5.0, 8.0, 4.0]),
        # the sum is 59.
        ("global", [value - 59 / 9 for value in GRADIENT]),
    ],
)
def test_each_scope_takes_its_means(scope: Any, expected: list[float]) -> None:
    """By hand; twice is once; it is linear; in place."""
    gradient = torch.tensor(GRADIENT, dtype=torch.float64)
    once = projected(gradient, scope)
    assert torch.allclose(once, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.allclose(projected(once, scope), once, rtol=0, atol=1e-14)
    other = torch.linspace(-1, 3, 9, dtype=torch.float64)
    both = projected(gradient - 2 * other, scope)
    assert torch.allclose(both, once - 2 * projected(other, scope), rtol=0, atol=1e-14)


def projected(gradient: Tensor, scope: Any) -> Tensor:
    result = gradient.clone()
    project(result, LAYOUT, scope)
    return result


# --- training


def network(local: dict[str, Any], **given: Any) -> Simulation:
    """A perceptron 64-8-10 on digits in float64, 2 of 3 clients a round."""
    values = {
        "task": {"name": "digits", "dtype": "float64", "hidden": 8},
        "partition": {"clients": 3},
        "local": {"lr": 0.2, "steps": 3} | local,
        "round": {"sample": 2},
        "strategy": {"name": "fedzmg"} | given.pop("strategy", {}),
    }
    return Simulation(Experiment.model_validate(values | given))


def means(x: Tensor, layout: Layout, scope: str) -> Tensor:
    """Of each weight tensor, of each of their rows, or of all numbers."""
    weights = [slot.view(x) for slot in layout.values() if len(slot.shape) > 1]
    if scope == "global":
        return x.mean().view(1)
    return torch.cat([w.mean().view(1) if scope == "tensor" else w.mean(1) for w in weights])


@pytest.mark.parametrize(
    "local",
    [{"momentum": 0.9, "nesterov": True}, {"clip_norm": 0.5, "proximal_mu": 0.5, "step_decay": 0.9}, {"sam_rho": 0.1}],
    ids=["momentum", "clipping", "sam"],
)
@pytest.mark.parametrize("scope", ["tensor", "filter", "global"])
def test_training_never_moves_the_means(scope: str, local: dict[str, Any]) -> None:
    """Steps and averages are linear in gradients of mean zero; so is the server's momentum."""
    server = {"optimizer": "momentum", "lr": 0.5, "momentum": 0.5}
    simulation = network(local, strategy={"scope": scope}, server=server)
    layout, first = simulation.model.layout, simulation.x
    start = means(first, layout, scope)
    for x in simulation.path(4):
        assert float((means(x, layout, scope) - start).abs().max()) < 1e-15
    moved = x - first
    finer = {"tensor": "filter", "filter": None, "global": "tensor"}[scope]
    if finer:  # what has no mean of its own to keep did move
        assert float((means(x, layout, finer) - means(first, layout, finer)).abs().max()) > 1e-5
    biases = torch.cat([slot.view(moved) for slot in layout.values() if len(slot.shape) == 1])
    assert abs(float(biases.mean())) > 1e-6
    assert float(moved.norm()) > 0.1


@pytest.mark.parametrize("local", [{"weight_decay": 0.1}, {"optimizer": "adam", "lr": 0.01}], ids=["decay", "adam"])
def test_weight_decay_and_adam_move_the_means(local: dict[str, Any]) -> None:
    """As the docstring says; the projection alone does not hold them."""
    simulation = network(local)
    layout, start = simulation.model.layout, means(simulation.x, simulation.model.layout, "tensor")
    assert float((means(simulation.run(2), layout, "tensor") - start).abs().max()) > 1e-5


@pytest.mark.parametrize("scope", ["tensor", "filter"])
def test_a_model_of_vectors_is_fedavgs(tmp_path: Path, scope: str) -> None:
    """Nothing to project in the quadratics' one-dimensional tensor."""
    given = {"local": {"lr": 0.1}, "round": {"sample": 3}}
    ours = Simulation(experiment(tmp_path, "fedzmg", scope=scope, **given)).path(4)
    assert torch.equal(ours, Simulation(experiment(tmp_path, "fedavg", **given)).path(4))


def test_an_unknown_scope_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"strategy.scope = 'layer': .*'tensor', 'filter' or 'global'"):
        settled(experiment(tmp_path, "fedzmg", scope="layer"))[0]
