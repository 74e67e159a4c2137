"""pFedAFM: a round by hand, rounds against plain torch, what leaves a client, and the models that it needs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common import tasks
from common.data.examples import ClientData, Examples
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.model import FlatModel, build, matrix_slots
from common.models.mixture import PRIVATE, Mixture, of_sequences
from common.tasks.base import Task
from common.vector import sha256
from server.rounds.prepare import prepare
from strategies.protocol.members import sample
from strategies.registry import settled
from tests.strategies.test_personal import Groups, close, own_part
from tests.support.faults import FaultyGrid, ran, toy
from tests.support.helpers import Simulation

LR, ALPHA_LR = 0.25, 0.5


class Line(nn.Linear):
    """One number times another."""

    def __init__(self, weight: float) -> None:
        super().__init__(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.weight, weight)


class Lines(Task):
    """Two clients, one example each (3 copies of it at B): (b - (x -> y))^2/2 with (1, 2) at A and (2, -1) at B."""

    dtype = torch.float64

    def model(self) -> nn.Module:
        return Mixture(Line(0.5), Line(1.0), Line(1.0), 1, torch.float64)

    def names(self) -> list[str]:
        return ["A", "B"]

    def client(self, name: str, file: str | None = None) -> ClientData:
        x, y, count = {"A": (1.0, 2.0, 1), "B": (2.0, -1.0, 3)}[name]
        examples = Examples(*(torch.full((count, 1), value, dtype=torch.float64) for value in (x, y)))
        return ClientData(examples, examples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1]) / 2

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": self.loss(model, batch).item() * len(batch[0])}


def experiment(task: str, local: dict[str, Any], **given: Any) -> Experiment:
    tables = {key: given.pop(key) for key in list(given) if key in Experiment.model_fields}
    values = {"task": {"name": task}, "strategy": {"name": "pfedafm", **given}, "local": local, **tables}
    return Experiment.model_validate(values)


def test_one_round_of_pfedafm() -> None:
    """F = p x, G = s x, H = h z; p = 1/2, s = h = alpha = 1; lr 1/4, alpha_lr 1/2.
    A, (a): H F = 1/2, e = -3/2: dp = -3/2, dh = -3/4, dalpha = e h (p - s) x = 3/4: p = 0.875, h = 1.1875,
    alpha = 0.625. (b): H G = 1.1875, e = -0.8125: ds = e h, s = 1.2412109375.
    B, (a): H F = 1, e = 2: dp = 4, dh = 2, dalpha = -2: p = -1/2, h = 1/2, alpha = 2 -> 1. (b): H G = 1, e = 2:
    ds = 2, s = 1/2. s = 0.2412109375/4 - 3/8 + 1 = 0.685302734375."""
    local = {"lr": LR, "steps": 1}
    driver = Simulation(experiment("task", local, alpha_lr=ALPHA_LR), task=Lines())
    own = {name: [0.5, 1.0, 1.0] for name in "AB"}
    s = 1.0
    for _ in range(3):
        moved = {}
        for name, x, y in (("A", 1.0, 2.0), ("B", 2.0, -1.0)):
            p, h, alpha = own[name]
            e = h * (alpha * p + (1 - alpha) * s) * x - y
            gradients = e * h * alpha * x, e * (alpha * p + (1 - alpha) * s) * x, e * h * (p - s) * x
            p, h = p - LR * gradients[0], h - LR * gradients[1]
            alpha = min(1.0, max(0.0, alpha - ALPHA_LR * gradients[2]))
            own[name] = [p, h, alpha]
            moved[name] = -LR * (h * s * x - y) * h * x
        s += moved["A"] / 4 + 3 * moved["B"] / 4
        driver.step()
        assert driver.x.item() == pytest.approx(s, rel=1e-14)
        for name in "AB":
            mine = own_part(driver.model, driver.memory(name))
            got = [mine[key].item() for key in ("private.weight", "head.weight", "alpha")]
            assert got == pytest.approx(own[name], rel=1e-13)
        if driver.coordinator.round == 1:
            assert (own["A"], own["B"], s) == ([0.875, 1.1875, 0.625], [-0.5, 0.5, 1.0], 0.685302734375)


# --- against plain torch


class Mixed(Groups):
    """The data of tests/strategies/test_personal.py, with two extractors that have BatchNorm."""

    def model(self) -> nn.Module:
        def extractor(width: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))

        return Mixture(extractor(6), extractor(2), nn.Linear(4, 3), 4, torch.float32).double()

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        return model.get_submodule("head")


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`[task] name = "tests.strategies.test_pfedafm:task"`."""
    return Mixed()


LOCAL = {"lr": 0.05, "steps": 3, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.7, "batch_size": 64}


def phases(module: Mixture, data: Examples) -> None:
    """(a) and (b) on one client's own copy, with optimizers of its own. Weight decay moves alpha at rate lr."""
    lr, decay = LOCAL["lr"], LOCAL["weight_decay"]
    extractors = [*module.private.parameters(), *module.head.parameters()]
    groups = [
        {"params": extractors, "lr": lr, "weight_decay": decay},
        {"params": [module.alpha], "lr": 0.3, "weight_decay": decay * lr / 0.3},
    ]
    module.train()
    for frozen, moving, mixing in (("shared", groups, True), ("", [{"params": module.shared.parameters()}], False)):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("shared") if frozen else name.startswith("shared"))
        optimizer = torch.optim.SGD(moving, lr=lr, momentum=LOCAL["momentum"], weight_decay=decay)
        for _ in range(int(LOCAL["steps"])):
            optimizer.zero_grad()
            z = module.shared(data.inputs)
            if mixing:
                z = module.alpha * module.private(data.inputs) + (1 - module.alpha) * z
            functional.cross_entropy(module.head(z), data.targets).backward()
            every = [p for p in module.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(every, LOCAL["clip_norm"])
            optimizer.step()
            if mixing:
                with torch.no_grad():
                    module.alpha.clamp_(0, 1)


def test_rounds_are_what_plain_torch_makes(tmp_path: Path) -> None:
    """Every client with a network, an alpha and momentum buffers of its own; 2 of 5 a round; evaluated with its own
    part and the new G, those that were never sampled with the initial part. BatchNorm's statistics of F stay, those of
    G are averaged."""
    settings = experiment(
        "tests.strategies.test_pfedafm:task", LOCAL, alpha_lr=0.3, rounds=4, round={"sample": 2}, seed=1
    )
    result, driver, groups = ran(tmp_path, settings), Simulation(settings), Mixed()
    start = build(groups, settings.seed).module
    shared = {key: value.clone() for key, value in start.state_dict().items() if key.startswith("shared.")}
    own: dict[str, dict[str, Tensor]] = {}
    initial = {key: value.clone() for key, value in start.state_dict().items() if not key.startswith("shared.")}

    def module_of(name: str) -> Mixture:
        module = groups.model()
        module.load_state_dict(copy.deepcopy(shared | own.get(name, initial)))
        assert isinstance(module, Mixture)
        return module

    below = 0
    for number in range(1, 5):
        chosen, states, total = sample(settings.seed, number, 0, groups.names(), 2), {}, 0
        for name in chosen:
            data, module = groups.client(name).train, module_of(name)
            phases(module, data)
            states[name] = len(data), {key: value.detach().clone() for key, value in module.state_dict().items()}
            total += len(data)
        for key, value in shared.items():
            parts = [state[key] * count for count, state in states.values()]
            shared[key] = sum(parts) / total if value.is_floating_point() else states[chosen[0]][1][key]
        own |= {name: {key: state[key] for key in initial} for name, (_, state) in states.items()}
        driver.step()
        assert all(close(slot.view(driver.x), shared[name]) for name, slot in driver.model.layout.items())
        for name, expected in own.items():
            mine = own_part(driver.model, driver.memory(name))
            assert mine.keys() == expected.keys()
            assert all(close(value, expected[key]) for key, value in mine.items())
            below += int(((mine["alpha"] > 0) & (mine["alpha"] < 1)).sum())
        losses = []
        for name in groups.names():
            module, data = module_of(name).eval(), groups.client(name).evaluate
            losses.append(groups.metrics(module, (data.inputs, data.targets))["loss"] / len(data))
        found = result.history[number - 1]["personal"]["loss"]
        assert found["mean"] == pytest.approx(sum(losses) / 5, abs=1e-10)
        assert found["worst"] == pytest.approx(max(losses), abs=1e-10)
        assert result.history[number - 1]["central"] == {}
    assert below > 5, "alpha moved off its bounds"
    assert result.history[-1]["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})


def test_only_the_shared_extractor_leaves_a_client(tmp_path: Path) -> None:
    grid = FaultyGrid()
    ran(tmp_path, toy("pfedafm", rounds=1), grid)
    extractor = 3 + 3 + 3 * 4 + 4
    assert {len(delta) for delta in grid.true.values()} == {extractor}


def test_alphas_rate_is_its_own(tmp_path: Path) -> None:
    """Absolute, whatever the schedule makes of lr: with lr halved in round 2 the first step of alpha is as long."""
    local = {"lr": LR, "steps": 1, "schedule": "exponential", "decay": 0.5}
    driver = Simulation(experiment("task", local, alpha_lr=0.125), task=Lines())
    driver.step()
    mine = own_part(driver.model, driver.memory("A"))
    p, h, alpha = (mine[key].item() for key in ("private.weight", "head.weight", "alpha"))
    s = driver.x.item()
    e = h * (alpha * p + (1 - alpha) * s) - 2
    driver.step()
    after = own_part(driver.model, driver.memory("A"))
    assert after["alpha"].item() == pytest.approx(alpha - 0.125 * e * h * (p - s), rel=1e-13)
    assert after["private.weight"].item() == pytest.approx(p - LR / 2 * e * h * alpha, rel=1e-13)


# --- the model


def test_mixture() -> None:
    """alpha = 1 is H(F), alpha = 0 and `unmixed` are H(G); in between each feature by its own alpha. An error inside
    `unmixed` leaves the model mixing."""
    private, shared, head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
    model, x = Mixture(private, shared, head, 4, torch.float32), torch.randn(5, 3)
    assert torch.equal(model(x), head(private(x)))
    with model.unmixed():
        assert torch.equal(model(x), head(shared(x)))
    with torch.no_grad():
        model.alpha.copy_(torch.tensor([0.0, 0.25, 0.5, 2.0]))
    model.clamp()
    alpha = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert torch.equal(model.alpha, alpha)
    assert torch.allclose(model(x), head(alpha * private(x) + (1 - alpha) * shared(x)))
    with torch.no_grad():
        model.alpha.zero_()
    mixed = model(x)
    with pytest.raises(ZeroDivisionError), model.unmixed():
        raise ZeroDivisionError
    assert torch.allclose(mixed, head(shared(x)))
    assert torch.equal(model(x), mixed)


def test_a_private_extractor_may_differ_from_process_to_process() -> None:
    """The layout that server and clients must have in common counts G alone."""

    def flat(width: int) -> FlatModel:
        private = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 4))
        model = Mixture(private, nn.Linear(3, 4), nn.Linear(4, 2), 4, torch.float32)
        own = {name for name, _ in (*model.named_parameters(), *model.named_buffers()) if "shared" not in name}
        return FlatModel(model, personal=own)

    small, large = flat(2), flat(50)
    assert small.layout_hash == large.layout_hash
    assert len(small.vector) == len(large.vector) == 16
    assert len(small.whole) < len(large.whole)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """24 images of 8x8 in 3 classes."""
    path, source = tmp_path / "images.npz", np.random.default_rng(0)
    np.savez(path, x=source.integers(0, 255, (24, 8, 8), dtype=np.uint8), y=np.arange(24) % 3)
    return path


@pytest.mark.parametrize(
    ("options", "width", "shared"),
    [
        ({"name": "digits", "hidden": 16, "extractor": 4}, 16, 64 * 4 + 4 + 4 * 16 + 16),
        ({"name": "npz", "model": "mlp", "width": 16, "extractor": 4}, 128, 64 * 4 + 4 + 4 * 128 + 128),
        ({"name": "npz", "width": 8, "extractor": 2}, 128, 18 + 4 + 72 + 8 + 16 * 128 + 128),
    ],
    ids=["digits", "mlp", "cnn"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tasks_with_a_shared_extractor(
    options: dict[str, Any], width: int, shared: int, dtype: str, images: Path, tmp_path: Path
) -> None:
    """task.extractor = its width: a federation with it runs, sends G alone and evaluates every client."""
    chosen = options | {"dtype": dtype} | ({"file": str(images)} if options["name"] == "npz" else {})
    settings = Experiment.model_validate(
        {
            "rounds": 2,
            "task": chosen,
            "strategy": {"name": "pfedafm"},
            "partition": {"clients": 3, "holdout": 0.2},
            "local": {"lr": 0.05, "batch_size": 16},
        }
    )
    grid = FaultyGrid()
    result = ran(tmp_path / "run", settings, grid)
    assert {len(delta) for delta in grid.true.values()} == {shared}
    assert [line["personal"]["loss"]["n"] for line in result.history] == [3, 3]
    task = tasks.create(settings.task, settings.partition, 0)
    module = task.model()
    assert isinstance(module, Mixture)
    assert module.alpha.shape == (width,)
    assert {p.dtype for p in module.parameters()} == {getattr(torch, dtype)}
    assert task.output_layer(module) is module.head
    model = build(task, 0, personal=PRIVATE)
    matrices = sum(p.ndim > 1 for p in module.private.parameters())
    assert len(matrix_slots(task, model, "personal")) == matrices, "the head is none"


def test_without_the_option_models_are_as_they_were() -> None:
    plain = tasks.create(TaskSettings(name="digits"), PartitionSettings(), 0)
    assert [type(layer) for layer in plain.model()] == [nn.Linear, nn.ReLU, nn.Linear]


def test_of_sequences() -> None:
    """F is all but the last layer, H that layer, G the small network with ReLU."""
    full = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    small = nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 4))
    mixture, x = of_sequences(full, small), torch.randn(5, 3)
    assert torch.equal(mixture(x), full(x))
    with mixture.unmixed():
        assert torch.equal(mixture(x), full[-1](small(x).relu()))


# --- refusals


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"local": {"optimizer": "adam", "lr": 0.01}}, "'pfedafm' has no meaning with local.optimizer = 'adam'"),
        ({"personal": {"parts": ["head"]}}, "has its own \\[personal\\]: parts = .*; leave them out"),
        ({"personal": {"head_steps": 2}}, "has its own \\[personal\\]: .* without head_steps and finetune_steps"),
        ({"personal": {"finetune_steps": 2}}, "has its own \\[personal\\]"),
    ],
)
def test_refused_settings(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settled(toy("pfedafm", **tables))[0]


@pytest.mark.parametrize("given", [0, -0.1])
def test_alpha_lr_is_positive(given: float) -> None:
    with pytest.raises(SettingsError, match=f"strategy.alpha_lr = {given}: Input should be greater than 0"):
        settled(experiment("task", {}, alpha_lr=given))[0]


def test_a_model_of_one_extractor_is_refused() -> None:
    """With what makes one of two, not with the names of parts that the user never wrote."""
    with pytest.raises(SettingsError) as error:
        prepare(Experiment.parse('strategy.name = "pfedafm"'))
    assert str(error.value) == (
        "strategy.name = 'pfedafm' needs a model of two extractors, common.models.mixture.Mixture, not Sequential; "
        "'digits' and the tasks on images make one with task.extractor"
    )


def test_kept_momentum_of_both_phases() -> None:
    """Each phase continues from buffers of its own, of each client."""
    local = LOCAL | {"moments": "keep"}
    driver = Simulation(experiment("tests.strategies.test_pfedafm:task", local, round={"sample": 5}))
    driver.run(2)
    memory = driver.memory("3")
    assert memory["optimizer.shared.vector.0.momentum_buffer"].shape == driver.x.shape
    assert memory["optimizer.personal.vector.0.momentum_buffer"].shape == memory["personal.parameters"].shape
    assert settled(driver.experiment)[1].personal.parts == PRIVATE
