"""MOON: rounds in plain floats, its loss against autograd of the literal formula, and whose last model counts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common import tasks
from common.data.examples import ClientData, Examples
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.model import build
from common.tasks.base import Task
from common.vector import sha256
from strategies.registry import settled
from tests.support.helpers import Simulation, experiment
from tests.support.tiny import Tiny

MU, T, LR = 2.0, 0.5, 0.25


class TwoLayers(Task):
    """z = W x, output V z, loss 1/2 (V z - t)^2; clients "0" and "1" hold one example each and take two steps."""

    dtype = torch.float64
    held = {"0": ((1.0, 0.5), 1.0), "1": ((-0.5, 1.0), -1.0)}

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
        model[0].weight.data = torch.tensor([[1.0, 0.5], [-0.5, 0.75]], dtype=torch.float64)
        model[1].weight.data = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
        return model

    def names(self) -> list[str]:
        return ["0", "1"]

    def client(self, name: str, file: str | None = None) -> ClientData:
        x, t = self.held[name]
        data = Examples(torch.tensor([x], dtype=torch.float64), torch.tensor([t], dtype=torch.float64))
        return ClientData(data, data, 2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean() / 2

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": self.loss(model, batch).item() * len(batch[1])}

    def output_layer(self, model: nn.Module) -> nn.Module:
        return model[1]


# --- in plain floats; a model is ((w11, w12, w21, w22), (v1, v2))


def represent(w: list[float], x: tuple[float, float]) -> tuple[float, float]:
    return w[0] * x[0] + w[1] * x[1], w[2] * x[0] + w[3] * x[1]


def cosine(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (a[0] * b[0] + a[1] * b[1]) / (math.hypot(*a) * math.hypot(*b))


def walk(name: str, start: list[float], last: list[float] | None) -> list[float]:
    """The client's model after two steps from `start`; with `last`, under the contrastive term.

    -log(e^p/(e^p + e^n)) with p = cos(z, g)/T, n = cos(z, l)/T has the slope -1/(1 + e^(p - n)) in p - n, and
    d cos(z, a)/dz = (a/|a| - cos z/|z|)/|z|.
    """
    (x, t), m = TwoLayers.held[name], list(start)
    for _ in range(2):
        z = represent(m, x)
        error = m[4] * z[0] + m[5] * z[1] - t
        slope = [error * m[4], error * m[5]]
        if last is not None:
            g, prev = represent(start, x), represent(last, x)
            away = -MU / T / (1 + math.exp((cosine(z, g) - cosine(z, prev)) / T))
            size = math.hypot(*z)
            for i in (0, 1):
                near = (g[i] / math.hypot(*g) - cosine(z, g) * z[i] / size) / size
                far = (prev[i] / math.hypot(*prev) - cosine(z, prev) * z[i] / size) / size
                slope[i] += away * (near - far)
        gradient = [slope[0] * x[0], slope[0] * x[1], slope[1] * x[0], slope[1] * x[1], error * z[0], error * z[1]]
        m = [value - LR * part for value, part in zip(m, gradient, strict=True)]
    return m


def settings(**given: Any) -> Experiment:
    strategy = {"name": "moon", "mu": MU, "temperature": T} | given.pop("strategy", {})
    return Experiment.model_validate({"strategy": strategy, "local": {"lr": LR}, **given})


def test_moon() -> None:
    """Round 1 has no last model: plain steps. Rounds 2 and 3 push away from one's own, which no average is."""
    simulation = Simulation(settings(), task=TwoLayers())
    x, last = simulation.x.tolist(), {}
    for round in (1, 2, 3):
        ended = {name: walk(name, x, last.get(name)) for name in "01"}
        simulation.step()
        for name in "01":
            assert simulation.memory(name)["previous"].tolist() == pytest.approx(ended[name], abs=1e-13)
        if round > 1:
            plain = walk("0", x, None)
            assert max(abs(a - b) for a, b in zip(ended["0"], plain, strict=True)) > 0.001
        x, last = [(a + b) / 2 for a, b in zip(ended["0"], ended["1"], strict=True)], ended
        assert simulation.x.tolist() == pytest.approx(x, abs=1e-13)


# --- against autograd of the formula as it is written


class Seen(Tiny):
    """Tiny, with its last layer as the output layer: z (b, 8) behind BatchNorm, ReLU and dropout."""

    def output_layer(self, model: nn.Module) -> nn.Module:
        return model[-1]


class Recorder:
    """A client's work that also records the model before each step and the gradient that it yields."""

    def __init__(self, work: Any) -> None:
        self.work, self.seen = work, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def steps(self, **given: Any) -> Iterator[Tensor]:
        for gradient in self.work.steps(**given):
            self.seen.append((self.work.vector.clone(), gradient.clone()))
            yield gradient


def tiny(mu: float = MU, task: Task | None = None, sample: int | None = None, **local: Any) -> Simulation:
    local = {"lr": 0.3, "batch_size": 4, "epochs": 2} | local
    given = {"strategy": {"mu": mu}, "local": local, "round": {"sample": sample}}
    return Simulation(settings(**given), task=task or Seen((9, 5, 8)))


def written(layers: nn.Module, z: Tensor, current: nn.Module, previous: nn.Module, inputs: Tensor) -> Tensor:
    cos = nn.CosineSimilarity(dim=-1)
    with torch.no_grad():
        near, far = current[:-1](inputs), previous[:-1](inputs)
    positive, negative = torch.exp(cos(z, near) / T), torch.exp(cos(z, far) / T)
    return -torch.log(positive / (positive + negative)).mean()


def test_the_gradient_is_that_of_the_literal_formula() -> None:
    """Both frozen models are in evaluation mode with buffers of their own: the server's, and the client's last."""
    simulation = tiny()
    simulation.run(2)
    memory, coordinator = simulation.memory("0"), simulation.coordinator

    def frozen(vector: Tensor, buffers: dict[str, Tensor]) -> nn.Module:
        simulation.model.load(vector, buffers)
        return copy.deepcopy(simulation.model.module).eval()

    current = frozen(simulation.x, coordinator.buffers)
    previous = frozen(memory["previous"], {name: memory[name] for name in coordinator.buffers})
    assert not torch.equal(current[1].running_mean, previous[1].running_mean)
    task, data = simulation.task, simulation.data["0"].train
    work = Recorder(simulation.work("0"))
    live = copy.deepcopy(simulation.model.module)
    task.batches.clear()
    simulation.strategy.local(work)
    assert len(work.seen) == work.steps_taken == len(task.batches) == 4
    for (vector, gradient), numbers in zip(work.seen, list(task.batches), strict=True):
        inputs, targets = data.batch(torch.tensor(numbers))
        trained = [p for p in live.parameters() if p.requires_grad]
        nn.utils.vector_to_parameters(vector, trained)
        z = live[:-1](inputs)
        loss = nn.functional.cross_entropy(live[-1](z), targets) + MU * written(live, z, current, previous, inputs)
        expected = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, trained)])
        assert torch.allclose(gradient, expected, atol=2e-6)
    plain = torch.autograd.grad(nn.functional.cross_entropy(live(inputs), targets), trained)
    plain = torch.cat([part.reshape(-1) for part in plain])
    assert float((plain - work.seen[-1][1]).norm()) > 0.05


def test_the_recorded_loss_is_the_tasks() -> None:
    """Without the term, so that losses stay comparable between algorithms: one step from the same model."""
    moon, plain = tiny(steps=1), tiny(mu=0.0, steps=1)
    moon.run(2)
    plain.coordinator.round, plain.coordinator.state["model"], plain.coordinator.buffers = (
        2,
        moon.x,
        moon.coordinator.buffers,
    )
    for ours, theirs in zip(moon.step(), plain.step(), strict=True):
        assert ours.metrics["loss"] == theirs.metrics["loss"]
        assert not torch.equal(ours.vectors["delta"], theirs.vectors["delta"])


def test_half_precision_representations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under bfloat16 cosines are taken in float32; the round is near float32's."""
    dtypes, plain = set(), nn.functional.cosine_similarity

    def cosine_similarity(a: Tensor, b: Tensor, dim: int) -> Tensor:
        dtypes.update((a.dtype, b.dtype))
        return plain(a, b, dim=dim)

    monkeypatch.setattr(nn.functional, "cosine_similarity", cosine_similarity)
    runs = [tiny(precision=precision) for precision in ("float32", "bfloat16")]
    exact, rounded = (run.run(3) for run in runs)
    assert dtypes == {torch.float32}
    assert 0 < float((rounded - exact).norm()) < 0.1 * float(exact.norm())


def test_a_representation_of_zeros_has_a_gradient() -> None:
    """Dead ReLUs: cos(0, .) = 0 and no NaN."""

    class Dead(Seen):
        def model(self) -> nn.Module:
            model = super().model()
            model[1].bias.data.fill_(-100.0)
            return model

    assert bool(tiny(task=Dead((9, 5, 8))).run(3).isfinite().all())


# --- reductions, and whose last model


def test_a_strength_of_zero_is_fedavg_bit_for_bit() -> None:
    """With BatchNorm and dropout; nothing is kept."""
    task = Seen((9, 5, 8), dropout=0.3)
    moon, fedavg = tiny(mu=0.0, task=task), tiny(task=task)
    fedavg.strategy = fedavg.coordinator.strategy = settled(
        Experiment.model_validate({"strategy": {"name": "fedavg"}})
    )[0]
    assert torch.equal(moon.path(4), fedavg.path(4))
    assert sha256(moon.coordinator.buffers) == sha256(fedavg.coordinator.buffers)
    assert all(moon.memory(name) == {} for name in moon.members)
    assert moon.x.abs().sum() > 0


def deltas(simulation: Simulation) -> dict[str, Tensor]:
    return {upload.name: upload.vectors["delta"] for upload in simulation.step()}


def test_the_term_needs_an_accepted_round() -> None:
    """Round 1 is FedAvg's. In round 2 so is that of a client whose upload was lost, and only that."""
    moon, plain = tiny(), tiny(mu=0.0)
    moon.step(lost=["1"])
    plain.step(lost=["1"])
    assert torch.equal(moon.x, plain.x)
    ours, theirs = deltas(moon), deltas(plain)
    assert {name: torch.equal(ours[name], theirs[name]) for name in "012"} == {"0": False, "1": True, "2": False}


def test_the_last_model_is_that_of_the_last_accepted_round() -> None:
    """Vector and buffers as training left them; absence and a lost reply leave them as they are."""
    simulation, ended = tiny(sample=2), {}
    for round in range(1, 9):
        lost = ["0"] if round % 3 == 0 else []
        start = simulation.x
        for upload in simulation.step(lost=lost):
            ended[upload.name] = (start + upload.vectors["delta"], upload.buffers)
        for name, (vector, buffers) in ended.items():
            memory = simulation.memory(name)
            assert torch.allclose(memory["previous"], vector, atol=1e-6)
            assert all(torch.equal(memory[group], value) for group, value in buffers.items())
            assert set(memory) == {"previous", *simulation.coordinator.buffers}
    assert set(ended) == {"0", "1", "2"}


def test_personal_parts_are_frozen_in_a_representation() -> None:
    """Elsewhere than in the vector that it was given, the frozen model is what the live one was."""
    values = {"strategy": {"name": "moon"}, "personal": {"parts": ["batch-norm"]}, "local": {"lr": 0.3}}
    simulation = Simulation(Experiment.model_validate(values), task=Seen((9, 5, 8)))
    simulation.run(2)
    work = simulation.work("0")
    batch = simulation.data["0"].train.batch(torch.arange(4))
    expected = copy.deepcopy(work.module).eval()[:-1](batch[0])
    represent = work.representation(work.received["model"], {name: v.clone() for name, v in work.buffers.items()})
    assert torch.equal(represent(batch), expected)
    for _ in work.steps():
        pass
    assert not torch.equal(work.module.eval()[:-1](batch[0]), expected)
    assert torch.equal(represent(batch), expected)
    assert not represent(batch).requires_grad


# --- models without a representation, and with a projection head


def test_a_model_without_an_output_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'moon' needs what the model's output layer reads, and .* Quadratic has"):
        Simulation(experiment(tmp_path, "moon"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mu": -1.0}, "strategy.mu = -1.0: .*greater than or equal to 0"),
        ({"temperature": 0.0}, "strategy.temperature = 0.0: .*greater than 0"),
    ],
)
def test_refusals(given: dict[str, float], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settled(settings(strategy=given))[0]


def task_of(**options: Any) -> Task:
    return tasks.create(TaskSettings.model_validate(options), PartitionSettings(clients=3), 0)


@pytest.fixture(params=["digits", "mlp", "cnn"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "digits":
        return {"name": "digits"}
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.random((30, 8, 8)).astype(np.float32), y=np.arange(30) % 3)
    return {"name": "npz", "file": str(tmp_path / "a.npz"), "model": request.param, "width": 4}


def test_a_projection_head_is_what_the_output_layer_reads(network: dict[str, Any]) -> None:
    """Linear, ReLU and Linear of that width before the last layer; without it the model is as it was."""
    plain, task = task_of(**network), task_of(**network, projection=5)
    before, model = plain.model(), task.model()
    kinds = [type(layer) for layer in before[:-1]] + [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    assert [type(layer) for layer in model] == kinds
    first, second, output = model[-4], model[-2], model[-1]
    assert (first.in_features, first.out_features) == (before[-1].in_features, 5)
    assert (second.in_features, second.out_features, output.in_features) == (5, 5, 5)
    assert output.out_features == before[-1].out_features
    assert task.output_layer(model) is output
    assert plain.output_layer(before) is before[-1]


def test_moon_trains_each_of_them(network: dict[str, Any]) -> None:
    """Three rounds in which the term counts, from the settings alone."""
    values = {"task": network | {"projection": 5}, "partition": {"clients": 3}, "local": {"lr": 0.2, "steps": 3}}
    moon, plain = (
        Simulation(Experiment.model_validate(values | {"strategy": {"name": "moon", "mu": mu}})) for mu in (5.0, 0.0)
    )
    assert torch.equal(moon.run(1), plain.run(1))
    assert not torch.equal(moon.run(2), plain.run(2))
    assert len(moon.x) == len(build(moon.task, 0).vector)


def test_a_projection_head_beside_two_extractors_is_refused(network: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"task.projection = 5 beside task.extractor = 4: allowed: one of them"):
        task_of(**network, projection=5, extractor=4)
