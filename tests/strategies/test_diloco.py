"""DiLoCo and MuLoCo: inner optimizers whose state stays with each client, Nesterov momentum outside."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.nn import functional

from client.memory.versions import DiskMemory
from common.compression.feedback import Codec
from common.errors import SettingsError
from common.model import FlatModel, build, matrix_slots
from strategies.registry import settled
from tests.server.rounds.test_resume import alike, digits, stopped
from tests.server.rounds.test_resume import grid as on_disk
from tests.strategies.test_one_round import ARRAYS
from tests.strategies.test_personal import Groups, settings
from tests.strategies.test_reductions import EQUAL, apart, models
from tests.support.faults import FaultyGrid, ran
from tests.support.helpers import Simulation, experiment

CLIENTS = {"0": (1.0, 2.0, 1), "1": (2.0, -1.0, 2)}  # curvature, center, steps, as in test_one_round
OUTER = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}


class Adam:
    """One client's AdamW on one number, in plain floats: it lives as long as the client."""

    def __init__(self, lr: float, betas: tuple[float, float], decay: float) -> None:
        self.lr, self.betas, self.decay = lr, betas, decay
        self.m = self.v = 0.0
        self.steps = 0

    def step(self, w: float, g: float) -> float:
        (b1, b2), self.steps = self.betas, self.steps + 1
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        w -= self.lr * self.decay * w
        root = math.sqrt(self.v / (1 - b2**self.steps)) + 1e-8
        return w - self.lr * self.m / (1 - b1**self.steps) / root


@pytest.mark.parametrize("sample", [2, 1])
def test_one_round_of_diloco(sample: int, tmp_path: Path) -> None:
    """D = mean_S(theta_i - theta), m <- b m + D, theta <- theta + gamma (b m + D) with gamma = 0.7, b = 0.9; each
    client's AdamW goes on where its last round ended, its step counter too; an absent client's stays as it is. Round 1
    with all: a first step is lr in size, less the decay lr wd x: A moves by 0.25 - 0.025."""
    given = {"arrays": ARRAYS, "local": {"lr": 0.25}, "round": {"sample": sample}, "seed": 3}
    driver = Simulation(experiment(tmp_path, "diloco", **given))
    inner = {name: Adam(0.25, (0.9, 0.99), 0.1) for name in CLIENTS}
    x, m = 1.0, 0.0
    for t in range(1, 7):
        driver.step()
        moved = []
        for name in driver.sampled:
            a, e, steps = CLIENTS[name]
            y = x
            for _ in range(steps):
                y = inner[name].step(y, a * (y - e))
            moved.append(y - x)
        change = sum(moved) / len(moved)
        m = 0.9 * m + change
        x += 0.7 * (0.9 * m + change)
        assert driver.x.item() == pytest.approx(x, rel=1e-12)
        assert driver.coordinator.state["server.m"].item() == pytest.approx(m, rel=1e-12)
        for name, adam in inner.items():
            memory = driver.memory(name)
            if adam.steps:
                assert memory["optimizer.all.vector.0.step"].item() == adam.steps
                assert memory["optimizer.all.vector.0.exp_avg"].item() == pytest.approx(adam.m, rel=1e-12)
                assert memory["optimizer.all.vector.0.exp_avg_sq"].item() == pytest.approx(adam.v, rel=1e-12)
            else:
                assert memory == {}
        if (t, sample) == (1, 2):
            assert moved[0] == pytest.approx(0.225, rel=1e-7)
    counts = {name: adam.steps for name, adam in inner.items()}
    assert sum(counts[name] / CLIENTS[name][2] for name in CLIENTS) == 6 * sample


def test_a_lost_reply_takes_the_inner_state_back(tmp_path: Path) -> None:
    """What a client trained in a round that was not accepted is not part of its state."""
    one, two = (Simulation(experiment(tmp_path, "diloco", local={"lr": 0.05})) for _ in range(2))
    one.run(2)
    two.step()
    before = {key: value.clone() for key, value in two.memory("3").items()}
    two.step(lost="3")
    assert all(torch.equal(value, before[key]) for key, value in two.memory("3").items())
    steps = [each.memory("3")["optimizer.all.vector.0.step"].item() for each in (one, two)]
    assert steps[0] == 2 * steps[1]


class Persistent:
    """Federated training in plain torch: a network and optimizers for each client, which live as long as it does."""

    def __init__(self, model: FlatModel, slots: set[str], lr: float, decay: float) -> None:
        self.names = [name for name, _ in model.module.named_parameters()]
        self.clients = {}
        for name in Groups().names():
            module = Groups().model()
            module.load_state_dict(model.module.state_dict())
            given = dict(module.named_parameters())
            matrices, rest = [given[n] for n in given if n in slots], [given[n] for n in given if n not in slots]
            muon = torch.optim.Muon(
                matrices, lr=lr, momentum=0.9, nesterov=False, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            )
            self.clients[name] = module, muon, torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.99), weight_decay=decay)
        self.buffers = {k: v.clone() for k, v in model.module.state_dict().items() if k not in self.names}

    def round(self, name: str, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """All of a client's tensors after three full-batch steps from `x` and the server's buffers."""
        module, *optimizers = self.clients[name]
        module.load_state_dict({**x, **self.buffers})
        data = Groups().client(name).train
        module.train()
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            functional.cross_entropy(module(data.inputs), data.targets).backward()
            for optimizer in optimizers:
                optimizer.step()
        return {key: value.detach().clone() for key, value in module.state_dict().items()}


def test_rounds_of_muloco_are_what_plain_torch_makes() -> None:
    """torch.optim.Muon on the matrices, AdamW on embeddings, head and vectors, both kept for each client; outside in
    muloco-1's form u <- mu u + eta D, theta <- theta + mu u + eta D. 3 of 5 clients a round."""
    local = {"lr": 0.02, "steps": 3, "batch_size": 64}
    driver = Simulation(settings("muloco", local=local, round={"sample": 3}))
    model = build(Groups(), 0)
    x = {name: slot.view(model.vector).clone() for name, slot in model.layout.items()}
    starts = {slot.start for slot in matrix_slots(Groups(), model, "shared")}
    matrices = {name for name, slot in model.layout.items() if slot.start in starts}
    assert matrices == {"layers.0.weight", "downsample.0.weight"}
    plain = Persistent(model, matrices, 0.02, 1e-4)
    u = {name: torch.zeros_like(value) for name, value in x.items()}
    for _ in range(4):
        driver.step()
        done = [plain.round(name, x) for name in driver.sampled]
        for name in x:
            step = 0.7 * (sum(each[name] for each in done) / 3 - x[name])
            u[name] = 0.9 * u[name] + step
            x[name] = x[name] + 0.9 * u[name] + step
        for name in plain.buffers:
            mean = sum(each[name] for each in done) / 3
            plain.buffers[name] = mean if mean.is_floating_point() and "tracked" not in name else done[0][name]
        for name, slot in driver.model.layout.items():
            # A bias before BatchNorm has gradient 0, of which Adam makes up to 1e-9 by its eps.
            assert torch.allclose(slot.view(driver.x), x[name], rtol=0, atol=1e-8), name
    assert float((driver.x - model.vector).abs().max()) > 0.05


# --- what they reduce to


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_plain_inside_and_no_momentum_outside_is_fedavg(tmp_path: Path, weights: str) -> None:
    """gamma = 1, b = 0 and SGD inside: the same bits."""
    outer = {"optimizer": "nesterov", "lr": 1.0, "momentum": 0.0}
    run = models(tmp_path, "fedavg", weights=weights, server=outer)
    assert torch.equal(run, models(tmp_path, "fedavg", weights=weights))


def test_the_named_composition_is_its_tables(tmp_path: Path) -> None:
    """FedAvg with the tables written out: the same bits; without kept moments another run."""
    inner = {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.1}
    same = models(tmp_path, "fedavg", weights="uniform", server=OUTER, local={**inner, "moments": "keep"})
    assert torch.equal(models(tmp_path, "diloco", local={"lr": 0.02}), same)
    reset = models(tmp_path, "diloco", local={"lr": 0.02, "moments": "reset"})
    assert torch.equal(reset, models(tmp_path, "fedavg", weights="uniform", server=OUTER, local=inner))
    assert apart(reset, same) > 1e-3


def test_one_sgd_step_inside_is_centralized_nesterov(tmp_path: Path) -> None:
    """D = -lr grad F, so theta follows torch's SGD with Nesterov momentum on the mean at rate 0.7 lr."""
    arrays = {"steps": np.ones(6, dtype=int)}
    run = Simulation(experiment(tmp_path, weights="uniform", server=OUTER, arrays=arrays, local={"lr": 0.1}))
    a, e = run.task.arrays["curvatures"], run.task.arrays["centers"]
    w = nn.Parameter(run.x.clone())
    optimizer = torch.optim.SGD([w], lr=0.07, momentum=0.9, nesterov=True)
    for x in run.path(25):
        w.grad = torch.from_numpy((a * (w.detach().numpy() - e)).mean(0))
        optimizer.step()
        assert torch.allclose(x, w.detach(), rtol=0, atol=1e-12)


def test_registered_settings() -> None:
    """As the papers have them; a file may change all but the optimizers."""
    diloco, muloco = (settled(settings(name, local={}))[1] for name in ("diloco", "muloco"))
    for each in (diloco, muloco):
        assert each.server.model_dump(include=set(OUTER)) == OUTER
        assert (each.local.lr, each.local.moments) == (4e-4, "keep")
        assert settled(each)[0].weights == "uniform"
        assert settled(each)[0].memory_kind(each) == "own"
    assert (diloco.local.optimizer, diloco.local.weight_decay) == ("adamw", 0.1)
    kept = {"optimizer": "muon", "betas": (0.9, 0.99), "nesterov": False, "muon_scale": "rms", "weight_decay": 1e-4}
    assert muloco.local.model_dump(include=set(kept)) == kept
    changed = settled(settings("muloco", local={"lr": 0.1}, server={"momentum": 0.6}))[1]
    assert (changed.local.lr, changed.server.momentum, changed.server.lr) == (0.1, 0.6, 0.7)
    for table, name in (("local", "sgd"), ("server", "momentum")):
        with pytest.raises(SettingsError, match=f"{table}.optimizer = '{name}' contradicts strategy.name = 'diloco'"):
            settled(settings("diloco", **{table: {"optimizer": name}}))[1]


# --- inner state through messages, memory and checkpoints


@pytest.mark.parametrize("strategy", ["diloco", "muloco"])
def test_inner_state_survives_a_resume_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    """Weights, outer momentum and what lies in every client's memory."""
    given = digits(strategy, 6, local={"lr": 0.002, "batch_size": 64})
    straight = ran(tmp_path / "straight", given, on_disk(tmp_path / "straight"))
    stopped(tmp_path / "run", given, 3)
    alike(ran(tmp_path / "run", given, on_disk(tmp_path / "run"), resume=True), straight)
    found = []
    for name in ("straight", "run"):
        memory = DiskMemory(tmp_path / name / "memory")
        run = next(path.name for path in (tmp_path / name / "memory").iterdir() if path.is_dir())
        accepted = straight.checkpoint.accepted
        found.append({client: memory.load(run, client, 1, version) for client, version in accepted.items()})
    for client, state in found[0].items():
        other = found[1][client]
        assert state is not None
        assert other is not None
        assert state.keys() == other.keys()
        assert any(key.startswith("optimizer.all.") for key in state)
        assert all(torch.equal(value, other[key]) for key, value in state.items())


def test_a_wiped_disk_starts_the_inner_optimizer_anew(tmp_path: Path) -> None:
    """It is the client's own affair: no new generation, no dropped client; its counter begins again."""
    memory = tmp_path / "memory"

    def wipe(name: str, round: int, reply: Message) -> Message:
        if (name, round) == ("4", 2):
            shutil.rmtree(next(memory.glob("*/3")))
        return reply

    given = settings("diloco", round={"sample": 5}, local={"lr": 0.01, "steps": 3, "batch_size": 64}, rounds=3)
    result = ran(tmp_path / "run", given, FaultyGrid(wipe, memory=str(memory)))
    assert [(line["generation"], line["dropped"]) for line in result.history] == [(1, {})] * 3
    for name, steps in (("2", 9), ("3", 3)):
        state = DiskMemory(memory).load(next(memory.glob("*/3")).parent.name, name, 1, 3)
        assert state is not None
        assert state["optimizer.all.vector.0.step"].item() == steps


# --- compression with decay


def test_compression_with_a_decaying_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MuLoCo's error buffer: u = 0.9 e + Delta, sends C(u), e <- u - C(u). The outer rate is applied once, to the mean
    of what arrives; MuLoCo's published code applies it in the buffer too."""
    squeeze = {"up": "top-k", "ratio": 0.4, "decay": 0.9}
    driver = Simulation(experiment(tmp_path, "muloco", arrays=EQUAL, local={"lr": 0.05}, compression=squeeze))
    true: dict[str, Tensor] = {}
    encode = Codec.encode

    def spy(self: Codec, vectors: dict[str, Tensor], *more: Any) -> Any:
        true[str(len(true))] = vectors["delta"].clone()
        return encode(self, vectors, *more)

    monkeypatch.setattr(Codec, "encode", spy)
    residual = {name: torch.zeros(5, dtype=torch.float64) for name in "012345"}
    x, m = driver.x.clone(), torch.zeros(5, dtype=torch.float64)
    for _ in range(4):
        true.clear()
        uploads = driver.step()
        for upload in uploads:
            owed = 0.9 * residual[upload.name] + true[upload.name]
            largest = owed.abs().argsort(descending=True)[:2]
            sent = torch.zeros_like(owed).index_copy_(0, largest, owed[largest])
            assert torch.allclose(upload.vectors["delta"], sent, rtol=0, atol=1e-14)
            residual[upload.name] = owed - sent
            kept = driver.memory(upload.name)["residual.delta"]
            assert torch.allclose(kept, residual[upload.name], rtol=0, atol=1e-14)
        change = sum(upload.vectors["delta"] for upload in uploads) / 6
        m = 0.9 * m + change
        x = x + 0.7 * (0.9 * m + change)
        assert torch.allclose(driver.x, x, rtol=0, atol=1e-13)
    assert max(float(each.abs().max()) for each in residual.values()) > 0.01
