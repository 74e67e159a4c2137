"""Algorithms whose clients have a whole model of their own: local-only, Ditto, pFedMe, APFL, Per-FedAvg and FedALA.

On quadratics F_i(w) = 1/2 sum_j a_ij (w_j - e_ij)^2, unequal steps, three of six clients a round and replies that are
lost: the server's model and what every client evaluates are those of the plain numpy below, after each round; what that
numpy rests at is derived in the docstrings. On a network with BatchNorm they are those of plain torch.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from client.training.work import LocalWork
from common.errors import SettingsError
from common.experiment import Experiment
from common.model import build
from common.vector import sha256
from server.rounds.records import personal
from strategies.protocol.members import sample
from strategies.protocol.messages import TrainHead
from strategies.registry import REGISTRY, cautions, settled
from tests.strategies.test_personal import SIZES, Groups, Residual, settings
from tests.support.faults import FaultyGrid, ran, toy
from tests.support.helpers import Simulation, copies, experiment, headed, problem
from tests.support.tiny import Tiny, simulate

Vector = NDArray[np.float64]
OWNERS = sorted(name for name, entry in REGISTRY.items() if entry.cls.personal)
LR, ROUNDS, EXACT = 0.05, 8, 3e-14
DATA = problem()
A, E, STEPS, COUNTS = DATA["curvatures"], DATA["centers"], DATA["steps"], DATA["examples"]


def own(simulation: Simulation, name: str) -> Tensor:
    """What a client evaluates now (d,), as `client/evaluate.py` makes it."""
    model, coordinator, memory = simulation.model, simulation.coordinator, simulation.memory(name)
    model.load(simulation.x, coordinator.buffers)
    head = TrainHead("", "run", name, 1, coordinator.round, 0, [], 0.0, simulation.experiment.local.lr, "")
    received = {"model": simulation.x}
    simulation.strategy.personalize(LocalWork(simulation, head, simulation.data[name], received, memory))
    return model.vector.clone()


# --- plain numpy


def gradient(i: int, w: Vector) -> Vector:
    result: Vector = A[i] * (w - E[i])
    return result


def path(i: int, w: Vector, step: Callable[[Vector], Vector] | None = None, lr: float = LR) -> Vector:
    """w after client i's steps along a direction, by default its gradient."""
    for _ in range(int(STEPS[i])):
        w = w - lr * (gradient(i, w) if step is None else step(w))
    return w


class Plain:
    """One algorithm in numpy: `train` gives client i's model to be averaged and what it keeps, `evaluated` its own."""

    uniform = True

    def __init__(self) -> None:
        self.x: Vector = DATA["start"].copy()
        self.kept: dict[int, Any] = {}

    def train(self, i: int) -> tuple[Vector, Any]:
        raise NotImplementedError

    def evaluated(self, i: int) -> Vector:
        result: Vector = self.kept.get(i, self.x)
        return result

    def round(self, sampled: list[int], lost: list[int]) -> None:
        done = {i: self.train(i) for i in sampled if i not in lost}
        mass = {i: 1 if self.uniform else COUNTS[i] for i in done}
        self.x = self.x + sum(mass[i] * (w - self.x) for i, (w, _) in done.items()) / sum(mass.values())
        self.kept |= {i: kept for i, (_, kept) in done.items()}


class LocalOnly(Plain):
    def train(self, i: int) -> tuple[Vector, Any]:
        return self.x, path(i, self.kept.get(i, self.x))


class Ditto(Plain):
    lam = 0.7

    def train(self, i: int) -> tuple[Vector, Any]:
        x = self.x
        return path(i, x), path(i, self.kept.get(i, x), lambda v: gradient(i, v) + self.lam * (v - x))


class PFedMe(Plain):
    lam, inner, eta = 3.0, 4, 0.2

    def train(self, i: int) -> tuple[Vector, Any]:
        w, theta = self.x, self.x
        for _ in range(int(STEPS[i])):
            for _ in range(self.inner):
                theta = theta - LR * (gradient(i, theta) + self.lam * (theta - w))
            w = w - self.eta * self.lam * (w - theta)
        return w, theta


class APFL(Plain):
    alpha, adaptive = 0.4, True

    def train(self, i: int) -> tuple[Vector, Any]:
        w = self.x
        v, alpha = self.kept.get(i, (w, self.alpha))
        for k in range(int(STEPS[i])):
            there = gradient(i, alpha * v + (1 - alpha) * w)
            new = min(max(alpha - LR * float((v - w) @ there), 0.0), 1.0) if self.adaptive and k == 0 else alpha
            w, v, alpha = w - LR * gradient(i, w), v - LR * alpha * there, new
        return w, (v, alpha)

    def evaluated(self, i: int) -> Vector:
        v, alpha = self.kept.get(i, (self.x, self.alpha))
        result: Vector = alpha * v + (1 - alpha) * self.x
        return result


class PerFedAvg(Plain):
    alpha, curved = 0.3, False

    def train(self, i: int) -> tuple[Vector, Any]:
        def meta(w: Vector) -> Vector:
            there = gradient(i, w - self.alpha * gradient(i, w))
            return there - self.alpha * A[i] * there if self.curved else there

        return path(i, self.x, meta), None

    def evaluated(self, i: int) -> Vector:
        w = self.x
        for _ in range(2):
            w = w - self.alpha * gradient(i, w)
        return w


class FedALA(Plain):
    """Batches of 32: ceil(0.5 ceil(n_i/32)) of them a pass; only the last coordinate, the head, is mixed."""

    uniform, eta, epochs, first = False, 0.02, 3, 4

    def begin(self, i: int) -> tuple[Vector, Vector | None]:
        if i not in self.kept:
            return self.x, None
        v, mix = self.kept[i]
        passes = math.ceil(0.5 * math.ceil(COUNTS[i] / 32)) * (self.epochs if mix is None else 1)
        mix, w = np.ones(len(v)) if mix is None else mix, self.x.copy()
        for _ in range(passes):
            w[self.first :] = v + (self.x[self.first :] - v) * mix
            slope = gradient(i, w)[self.first :] * (self.x[self.first :] - v)
            mix = np.clip(mix - self.eta * slope, 0, 1)
        w[self.first :] = v + (self.x[self.first :] - v) * mix
        return w, mix

    def train(self, i: int) -> tuple[Vector, Any]:
        start, mix = self.begin(i)
        w = path(i, start)
        return w, (w[self.first :], mix)

    def evaluated(self, i: int) -> Vector:
        return self.begin(i)[0]


class FixedAlpha(APFL):
    adaptive = False


class Curved(PerFedAvg):
    curved = True


CASES: dict[str, tuple[str, type[Plain], dict[str, Any]]] = {
    "local-only": ("local-only", LocalOnly, {}),
    "ditto": ("ditto", Ditto, {"lam": 0.7}),
    "pfedme": ("pfedme", PFedMe, {"lam": 3.0, "inner_steps": 4, "eta": 0.2}),
    "apfl": ("apfl", APFL, {"alpha": 0.4}),
    "apfl, fixed": ("apfl", FixedAlpha, {"alpha": 0.4, "adaptive": False}),
    "perfedavg": ("perfedavg", PerFedAvg, {"alpha": 0.3, "adapt_steps": 2}),
    "perfedavg, hf": ("perfedavg", Curved, {"alpha": 0.3, "adapt_steps": 2, "variant": "hf", "delta": 0.5}),
    "fedala": ("fedala", FedALA, {"share": 0.5, "eta": 0.02, "start_epochs": 3}),
}


def test_all_of_them_are_here() -> None:
    assert sorted({name for name, _, _ in CASES.values()}) == OWNERS


@pytest.mark.parametrize("case", CASES)
def test_each_is_what_numpy_makes(case: str, tmp_path: Path) -> None:
    """The server's model and each client's own, in every round; a lost reply leaves no trace, and who was never sampled
    evaluates what the algorithm makes of the server's model."""
    name, kind, given = CASES[case]
    run, plain = Simulation(headed(tmp_path, name, local={"lr": LR}, round={"sample": 3}, **given)), kind()
    heard: set[int] = set()
    for round in range(ROUNDS):
        chosen = [int(n) for n in sample(run.experiment.seed, round + 1, 0, list(run.members), 3)]
        lost = chosen[:1] if round % 3 == 1 else []
        run.step(lost=[str(i) for i in lost])
        plain.round(chosen, lost)
        heard |= set(chosen) - set(lost)
        np.testing.assert_allclose(run.x.numpy(), plain.x, rtol=0, atol=EXACT)
        for i in range(6):
            np.testing.assert_allclose(own(run, str(i)).numpy(), plain.evaluated(i), rtol=0, atol=EXACT)
        assert {int(n) for n in run.members if run.memory(n)} == (heard if name != "perfedavg" else set())
    assert len(heard) > 4


# --- what they reduce to


def x_of(folder: Path, name: str, rounds: int = 6, **given: Any) -> Tensor:
    tables = {"local": {"lr": LR}, "round": {"sample": 3}} | given
    return Simulation(experiment(folder, name, **tables)).path(rounds)


@pytest.mark.parametrize(
    ("name", "given", "tolerance"),
    [
        ("ditto", {}, 0.0),
        ("apfl", {}, 0.0),
        ("pfedme", {"lam": 4.0, "eta": 0.25, "inner_steps": 1}, 1e-14),
        ("perfedavg", {"alpha": 0.0}, 0.0),
        ("perfedavg", {"alpha": 0.0, "variant": "hf"}, 0.0),
        ("fedala", {"weights": "uniform", "layers": 0}, 0.0),
        ("fedala", {"weights": "uniform", "eta": 0.0}, 1e-14),
    ],
)
def test_the_servers_model_is_fedavgs(name: str, given: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    """Ditto and APFL average what FedAvg averages; the others where a hyperparameter takes their part away."""
    same = x_of(tmp_path, "fedavg", weights="uniform")
    assert float((x_of(tmp_path, name, **given) - same).abs().max()) <= tolerance


@pytest.mark.parametrize(
    ("name", "given"), [("ditto", {"lam": 0.0}), ("apfl", {"alpha": 1.0, "adaptive": False})], ids=str
)
def test_without_the_shared_part_they_train_alone(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    """All clients from round 1 on, so that all begin at the start: local-only's models, to the bit."""
    both = [Simulation(experiment(tmp_path, n, local={"lr": LR}, **g)) for n, g in ((name, given), ("local-only", {}))]
    for _ in range(5):
        for run in both:
            run.step()
        for client in both[0].members:
            assert torch.equal(own(both[0], client), own(both[1], client))


def test_a_federation_of_one_that_trains_alone_is_fedavg() -> None:
    """Also on a network with BatchNorm, dropout and batches, with its statistics: to the rounding of x + (y - x)."""
    alone, fedavg = (simulate(Tiny(sizes=(9,), dropout=0.3), name, momentum=0.9) for name in ("local-only", "fedavg"))
    before = copies({"model": alone.x, **alone.coordinator.buffers})
    for _ in range(3):
        alone.step()
        fedavg.step()
        memory = alone.memory("0")
        for name, value in {"own": fedavg.x, **fedavg.coordinator.buffers}.items():
            torch.testing.assert_close(memory[name], value, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[name], value) for name, value in alone.coordinator.buffers.items())
    assert torch.equal(before["model"], alone.x)


# --- where they rest


FAST = 0.4


def all_clients(folder: Path, name: str, rounds: int, **given: Any) -> Simulation:
    run = Simulation(experiment(folder, name, local={"lr": FAST}, **given))
    run.run(rounds)
    return run


def test_ditto(tmp_path: Path) -> None:
    """A step does not move v_i where a (v - e) + lam (v - w) = 0: v_i = (a e + lam w)/(a + lam), however many steps."""
    run = all_clients(tmp_path, "ditto", 120, lam=0.7)
    w = run.x.numpy()
    for i in range(6):
        expected = (A[i] * E[i] + 0.7 * w) / (A[i] + 0.7)
        np.testing.assert_allclose(own(run, str(i)).numpy(), expected, rtol=0, atol=1e-12)


def test_local_only(tmp_path: Path) -> None:
    """Each client at its own minimizer; the server at the start."""
    run = all_clients(tmp_path, "local-only", 150)
    for i in range(6):
        np.testing.assert_allclose(own(run, str(i)).numpy(), E[i], rtol=0, atol=1e-12)
    assert torch.equal(run.x, torch.zeros_like(run.x))


def test_pfedme(tmp_path: Path) -> None:
    """Inner steps to the end: theta - w = a (e - w)/(a + lam). One batch a round each: w moves by eta lam of it, so
    sum_i c_i (e_i - x) = 0 with c = a/(a + lam), and theta_i is of x."""
    lam, arrays = 2.0, {"steps": np.ones(6, dtype=int)}
    run = all_clients(tmp_path, "pfedme", 80, arrays=arrays, lam=lam, eta=0.5, inner_steps=60)
    c = A / (A + lam)
    x = (c * E).sum(0) / c.sum(0)
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-12)
    for i in range(6):
        np.testing.assert_allclose(own(run, str(i)).numpy(), x + c[i] * (E[i] - x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_perfedavg(variant: str, tmp_path: Path) -> None:
    """One step a round: the meta-gradients cancel. g(w - alpha g(w)) = a (1 - alpha a)(w - e), times 1 - alpha a for
    "hf", whose difference quotient is exact."""
    arrays, alpha = {"steps": np.ones(6, dtype=int)}, 0.3
    run = all_clients(tmp_path, "perfedavg", 160, arrays=arrays, alpha=alpha, variant=variant, delta=0.5)
    c = A * (1 - alpha * A) ** (1 if variant == "fo" else 2)
    np.testing.assert_allclose(run.x.numpy(), (c * E).sum(0) / c.sum(0), rtol=0, atol=1e-12)


def test_apfl(tmp_path: Path) -> None:
    """At FedAvg's rest alpha v + (1 - alpha) w has no gradient: it is the client's own minimizer, for any alpha > 0."""
    run = all_clients(tmp_path, "apfl", 250, alpha=0.9, adaptive=False)
    for i in range(6):
        # v is of the w that moves within a round: the mixture's mean over a round's steps is e.
        w, mixed = run.x.numpy(), []
        v = run.memory(str(i))["own"].numpy()
        for _ in range(int(STEPS[i])):
            mixed.append(0.9 * v + 0.1 * w)
            w, v = w - FAST * gradient(i, w), v - FAST * 0.9 * gradient(i, mixed[-1])
        np.testing.assert_allclose(np.mean(mixed, 0), E[i], rtol=0, atol=1e-11)


def test_apfls_alpha_is_learnt_and_stays_within_its_bounds(tmp_path: Path) -> None:
    """A client that pulls away leaves the shared model; one rate too large ends at a bound."""
    for lr, bounds in ((0.01, (0.0, 1.0)), (0.4, (0.0, 1.0))):
        run = Simulation(experiment(tmp_path, "apfl", local={"lr": lr}))
        run.run(20)
        found = [float(run.memory(name)["alpha"]) for name in run.members]
        assert all(bounds[0] <= value <= bounds[1] for value in found)
        assert max(found) > 0.5


def test_fedala(tmp_path: Path) -> None:
    """With one client's v and x fixed, W converges to where v + (x - v) W is the minimizer, clamped to [0, 1]."""
    run = Simulation(headed(tmp_path, "fedala", local={"lr": LR}, layers=2, eta=0.1, start_epochs=400))
    run.step()
    x = run.x.numpy()
    for i in range(6):
        v = run.memory(str(i))["own"].numpy()
        w = np.clip((E[i] - v) / (x - v), 0, 1)
        np.testing.assert_allclose(own(run, str(i)).numpy(), v + (x - v) * w, rtol=0, atol=1e-9)


# --- on a network, against plain torch

NET = {"lr": 0.1, "steps": 3, "batch_size": 64}


def loss_of(module: nn.Module, data: Any) -> Tensor:
    return functional.cross_entropy(module(data.inputs), data.targets)


def descend(module: nn.Module, data: Any, steps: int, anchor: nn.Module | None = None, lam: float = 0.0) -> None:
    """Full-batch SGD in place, with a pull towards another model."""
    module.train()
    for _ in range(steps):
        module.zero_grad()
        loss_of(module, data).backward()
        with torch.no_grad():
            for p, q in zip(module.parameters(), (anchor or module).parameters(), strict=True):
                assert p.grad is not None
                p -= 0.1 * (p.grad + lam * (p - q))


class Net:
    """Ditto, pFedMe, APFL and local-only on modules; integer counters take the largest value, as the server does."""

    def __init__(self, name: str, experiment: Experiment) -> None:
        self.name, self.task, self.experiment = name, Groups(), experiment
        self.shared = Residual().double()
        self.shared.load_state_dict(build(self.task, experiment.seed).module.state_dict())
        self.own: dict[str, nn.Module] = {}
        self.alpha: dict[str, float] = {}

    def train(self, client: str) -> nn.Module:
        data, w = self.task.client(client).train, copy.deepcopy(self.shared)
        own = self.own[client] = copy.deepcopy(self.own.get(client, self.shared))
        if self.name == "local-only":
            descend(own, data, 3)
            return self.shared
        if self.name == "ditto":
            descend(w, data, 3)
            descend(own, data, 3, self.shared, 0.5)
        if self.name == "pfedme":
            own.load_state_dict(self.shared.state_dict())
            for _ in range(3):
                descend(own, data, 2, copy.deepcopy(w), 2.0)
                with torch.no_grad():
                    for p, q in zip(w.parameters(), own.parameters(), strict=True):
                        p += 2.0 * 0.25 * (q - p)
            for key, buffer in own.named_buffers():
                w.get_buffer(key).copy_(buffer)
        if self.name == "apfl":
            self.apfl(client, w, own, data)
        return w

    def apfl(self, client: str, w: nn.Module, own: nn.Module, data: Any) -> None:
        """`own` holds v and the statistics of the mixture."""
        mixture = copy.deepcopy(own)
        for k in range(3):
            self.mix(client, w, own, mixture)
            mixture.train()
            mixture.zero_grad()
            loss_of(mixture, data).backward()
            alpha, slope = self.alpha.get(client, 0.5), 0.0
            w_before = [p.detach().clone() for p in w.parameters()]
            descend(w, data, 1)
            with torch.no_grad():
                for v, q, m in zip(own.parameters(), w_before, mixture.parameters(), strict=True):
                    assert m.grad is not None
                    slope += float(((v - q) * m.grad).sum())
                    v -= 0.1 * alpha * m.grad
            self.alpha[client] = min(max(alpha - 0.1 * slope, 0), 1) if k == 0 else alpha
        for key, buffer in mixture.named_buffers():
            own.get_buffer(key).copy_(buffer)

    def mix(self, client: str, w: nn.Module, own: nn.Module, mixture: nn.Module) -> None:
        alpha = self.alpha.get(client, 0.5)
        with torch.no_grad():
            for m, v, p in zip(mixture.parameters(), own.parameters(), w.parameters(), strict=True):
                m.copy_(alpha * v + (1 - alpha) * p)

    def round(self, number: int) -> None:
        chosen = sample(self.experiment.seed, number, 0, self.task.names(), 2)
        states = [self.train(client).state_dict() for client in chosen]
        self.shared.load_state_dict(
            {
                key: sum(s[key] for s in states) / len(states)
                if states[0][key].is_floating_point()
                else torch.stack([s[key] for s in states]).amax(0)
                for key in states[0]
            }
        )

    def evaluated(self, client: str) -> dict[str, float]:
        module = copy.deepcopy(self.own.get(client, self.shared))
        if self.name == "apfl" and client in self.own:
            self.mix(client, self.shared, self.own[client], module)
        module.eval()
        data = self.task.client(client).evaluate
        with torch.no_grad():
            return {k: v / len(data) for k, v in self.task.metrics(module, (data.inputs, data.targets)).items()}


NETS: dict[str, dict[str, Any]] = {
    "local-only": {"weights": "uniform"},
    "ditto": {"lam": 0.5},
    "pfedme": {"lam": 2.0, "eta": 0.25, "inner_steps": 2},
    "apfl": {},
}


@pytest.mark.parametrize("name", NETS)
def test_with_batchnorm_each_is_what_plain_torch_makes(name: str, tmp_path: Path) -> None:
    """Through messages: the shared model with its statistics, and every client's metrics of its own model with its own
    statistics, after each of four rounds with two of five clients; the server's model alone is not evaluated."""
    given = settings(name, seed=1, local=NET, options=NETS[name])
    plain, driver = Net(name, given), Simulation(given)
    result = ran(tmp_path, given, FaultyGrid())
    for number in range(1, 5):
        plain.round(number)
        driver.step()
        driver.model.load(driver.x, driver.coordinator.buffers)
        for key, value in plain.shared.state_dict().items():
            torch.testing.assert_close(
                driver.model.module.state_dict()[key].double(), value.double(), rtol=0, atol=1e-12
            )
        record = result.history[number - 1]
        assert record["central"] == {}
        assert personal(record)
        for client in plain.task.names():
            for key, value in plain.evaluated(client).items():
                assert record["each"][key][client] == pytest.approx(value, abs=1e-12)
        assert record["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})
    assert len(plain.own) == 3 < len(SIZES)


# --- what is sent, and refused


def test_nothing_of_a_model_leaves_a_client_that_trains_alone(tmp_path: Path) -> None:
    """Neither weights nor statistics: what is sent back is the server's own buffers."""
    run = Simulation(settings("local-only", local=NET))
    start = copies(run.coordinator.buffers)
    for upload in run.step():
        assert upload.vectors == {}
        assert all(torch.equal(upload.buffers[name], value) for name, value in start.items())
    record = ran(tmp_path, settings("local-only", local=NET, evaluate={"clients": "none"}), FaultyGrid()).history[0]
    assert record["drift"] is None
    assert set(record["norms"].values()) == {0.0}


@pytest.mark.parametrize("name", OWNERS)
def test_a_client_that_lost_its_model_begins_anew(name: str, tmp_path: Path) -> None:
    """Its own affair: nobody is dropped, no generation ends, and the others' models, with the server's where that knows
    nothing of the clients' own, are those of a run without it."""
    memory = tmp_path / "memory"

    def lie(client: str, round: int, reply: Message) -> Message:
        if (client, round) == ("4", 2) and (folder := next(memory.glob("*/4"), None)):
            shutil.rmtree(folder)
        return reply

    given = toy(name, rounds=4, evaluate={"clients": "all"})
    lossy = ran(tmp_path / "lossy", given, FaultyGrid(lie, memory=str(memory)))
    plain = ran(tmp_path / "plain", given, FaultyGrid(memory=str(tmp_path / "other")))
    for line, other in zip(lossy.history, plain.history, strict=True):
        assert line["accepted"] == ["0", "1", "2", "3", "4"]
        assert (line["generation"], line["dropped"]) == (1, {})
        assert len(line["each"]["loss"]) == 5
        if name != "fedala":  # whose start is the client's own
            assert line["sha256"] == other["sha256"]
            for client in "0123":
                assert line["each"]["loss"][client] == other["each"]["loss"][client]
    lost = [run.history[-1]["each"]["loss"]["4"] for run in (lossy, plain)]
    assert (lost[0] == lost[1]) == (name in ("perfedavg", "pfedme"))  # nothing kept, or nothing read of it in a round


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("personal", [{"parts": ["head"]}, {"finetune_steps": 2}], ids=str)
def test_personal_parts_beside_whole_models_are_refused(name: str, personal: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=rf"\[personal\] beside strategy.name = '{name}'"):
        settled(settings(name, personal=personal))


def refusals() -> Iterator[tuple[str, dict[str, Any], str]]:
    for name in ("ditto", "apfl"):
        yield name, {"local": {"momentum": 0.5, "moments": "keep"}}, "local.moments = 'keep' beside strategy.name"
    for name in ("apfl", "perfedavg"):
        yield name, {"local": {"sam_rho": 0.1}}, "local.sam_rho = 0.1 has no meaning"
    yield "local-only", {"server": {"lr": 0.5}}, "[server] beside strategy.name = 'local-only'"
    yield "pfedme", {"options": {"lam": 10.0, "eta": 0.2}}, "strategy.eta = 0.2 with strategy.lam = 10"
    yield "pfedme", {"local": {"proximal_mu": 0.5}}, "local.proximal_mu = 0.5 beside"
    yield "apfl", {"options": {"alpha": 1.5}}, "strategy.alpha = 1.5"
    yield "fedala", {"options": {"share": 0.0}}, "strategy.share = 0.0"


@pytest.mark.parametrize(("name", "tables", "words"), list(refusals()))
def test_refusals_before_round_1(name: str, tables: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        settled(settings(name, **tables))
    assert str(error.value).startswith(words)


def test_a_rate_at_which_theta_runs_away_is_warned_of() -> None:
    """And no other; an adaptive step has another length."""
    for local, told in (
        ({"lr": 0.2}, True),
        ({"lr": 0.1}, False),
        ({"lr": 0.2, "optimizer": "adam"}, False),
    ):
        strategy, whole = settled(settings("pfedme", local=local, options={"lam": 10.0, "eta": 0.1}))
        assert (
            any("local.lr = 0.2 with strategy.lam = 10 overshoots" in c for c in cautions(strategy, whole, 3)) == told
        )
