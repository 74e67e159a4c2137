"""FedExP, FedSpeed and FedSplit against plain numpy in every round, and what they rest at.

Quadratics F_i(w) = 1/2 sum_j a_ij (w_j - e_ij)^2 with unequal steps and examples, three of six clients a round, and a
lost reply in every third.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from numpy.typing import NDArray

from common.errors import SettingsError
from strategies.protocol import wire
from strategies.protocol.members import sample
from strategies.protocol.messages import STATE
from strategies.registry import settled
from tests.support.faults import FaultyGrid, lies, ran, toy
from tests.support.helpers import Simulation, experiment, problem

Vector = NDArray[np.float64]
LR, ROUNDS, EXACT = 0.05, 9, 3e-14
DATA = problem()
A, E, STEPS, COUNTS = DATA["curvatures"], DATA["centers"], DATA["steps"], DATA["examples"]


def gradient(i: int, w: Vector) -> Vector:
    result: Vector = A[i] * (w - E[i])
    return result


class Plain:
    """A run in numpy. `train` gives the change that client i sends, and what it keeps."""

    def __init__(self, weights: str) -> None:
        self.mass = np.ones(6) if weights == "uniform" else COUNTS.astype(float)
        self.x: Vector = DATA["start"].copy()
        self.kept: dict[int, Vector] = {}

    def path(self, i: int, direction: Callable[[Vector], Vector]) -> Vector:
        w = self.x
        for _ in range(int(STEPS[i])):
            w = w - LR * direction(w)
        return w

    def train(self, i: int) -> tuple[Vector, Vector]:
        raise NotImplementedError

    def step(self, sent: dict[int, Vector]) -> Vector:
        total: Vector = sum(self.mass[i] * d for i, d in sent.items()) / sum(self.mass[i] for i in sent)
        return total

    def round(self, heard: list[int]) -> None:
        done = {i: self.train(i) for i in heard}
        change = self.step({i: sent for i, (sent, _) in done.items()})
        self.x, self.kept = self.x + change, self.kept | {i: kept for i, (_, kept) in done.items()}


class FedExP(Plain):
    eps = 0.01

    def train(self, i: int) -> tuple[Vector, Vector]:
        return self.path(i, lambda w: gradient(i, w)) - self.x, self.x

    def step(self, sent: dict[int, Vector]) -> Vector:
        mean, mass = super().step(sent), sum(self.mass[i] for i in sent)
        squares = sum(self.mass[i] * float(d @ d) for i, d in sent.items()) / mass
        return max(1.0, squares / 2 / (float(mean @ mean) + self.eps)) * mean


class FedSpeed(Plain):
    lam, alpha, rho, normalized = 2.0, 0.7, 0.3, True

    def train(self, i: int) -> tuple[Vector, Vector]:
        own = self.kept.get(i, np.zeros(5))

        def direction(w: Vector) -> Vector:
            g = gradient(i, w)
            ahead = gradient(i, w + self.rho * g / (float(np.sqrt(g @ g)) if self.normalized else 1.0))
            return (1 - self.alpha) * g + self.alpha * ahead - own + (w - self.x) / self.lam

        y = self.path(i, direction)
        own = own - (y - self.x) / self.lam
        return y - self.lam * own - self.x, own


class Raw(FedSpeed):
    normalized = False


class FedSplit(Plain):
    scale = 0.8

    def train(self, i: int) -> tuple[Vector, Vector]:
        z = self.kept.get(i, self.x)
        target = 2 * self.x - z
        v = self.path(i, lambda w: gradient(i, w) + (w - target) / self.scale)
        return 2 * (v - self.x), z + 2 * (v - self.x)

    def round(self, heard: list[int]) -> None:
        super().round(heard)
        parts = [self.mass[i] * z for i, z in self.kept.items()]
        self.x = sum(parts) / sum(self.mass[i] for i in self.kept)


CASES: dict[str, tuple[str, type[Plain], dict[str, Any]]] = {
    "fedexp": ("fedexp", FedExP, {"eps": 0.01}),
    "fedspeed": ("fedspeed", FedSpeed, {"lam": 2.0, "alpha": 0.7, "rho": 0.3}),
    "fedspeed, raw": ("fedspeed", Raw, {"lam": 2.0, "alpha": 0.7, "rho": 0.3, "perturbation": "raw"}),
    "fedsplit": ("fedsplit", FedSplit, {"step": 0.8}),
}


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("case", CASES)
def test_each_is_what_numpy_makes(case: str, weights: str, tmp_path: Path) -> None:
    """FedSplit's x is the mean of the z_i of all that were heard, recomputed from them."""
    name, kind, given = CASES[case]
    settings = experiment(tmp_path, name, weights=weights, local={"lr": LR}, round={"sample": 3}, **given)
    run, plain = Simulation(settings), kind(weights)
    for round in range(ROUNDS):
        chosen = [int(n) for n in sample(run.experiment.seed, round + 1, 0, list(run.members), 3)]
        lost = chosen[:1] if round % 3 == 1 else []
        run.step(lost=[str(i) for i in lost])
        plain.round([i for i in chosen if i not in lost])
        np.testing.assert_allclose(run.x.numpy(), plain.x, rtol=0, atol=EXACT)
        for i, kept in plain.kept.items():
            for name, value in run.memory(str(i)).items():
                np.testing.assert_allclose(value.numpy(), kept, rtol=0, atol=EXACT, err_msg=name)


# --- FedExP


def test_fedexp(tmp_path: Path) -> None:
    """By hand, one coordinate, rate 1/4 from 0, one step: e = 4, -3.5 give Delta = 1, -0.875, D = 1/16. Mean square
    (1 + 49/64)/2; eta = (113/128)/(2 (1/256 + eps)), eps = 1/64: (113/128) * 256/10 = 22.6; x = 22.6/16. And with
    eps = 1 it is below 1: FedAvg's 1/16."""
    arrays = {"centers": [[4.0], [-3.5]], "curvatures": [[1.0], [1.0]], "steps": [1, 1], "examples": [1, 3]}
    for eps, x in ((1 / 64, 22.6 / 16), (1.0, 1 / 16)):
        given = {"arrays": arrays | {"start": [0.0]}, "local": {"lr": 0.25}, "eps": eps}
        assert Simulation(experiment(tmp_path, "fedexp", **given)).run(1).item() == pytest.approx(x, abs=1e-14)


def test_fedexp_of_alike_clients_is_fedavg(tmp_path: Path) -> None:
    """Equal changes: sum |d|^2 / (2 M |d|^2) = 1/2, so the step is 1; to the bit."""
    arrays = {key: np.repeat(DATA[key][:1], 6, axis=0) for key in ("centers", "curvatures", "steps", "examples")}
    runs = [
        Simulation(experiment(tmp_path, name, arrays=arrays, weights="uniform", local={"lr": LR}))
        for name in ("fedexp", "fedavg")
    ]
    assert torch.equal(runs[0].path(5), runs[1].path(5))


# --- FedSpeed


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_fedspeed(weights: str, tmp_path: Path) -> None:
    """Rest: nobody moves, c_i = g~_i(x) and sum w_i c_i = 0. With the raw perturbation g~ = a (1 + alpha rho a)(x - e)
    on quadratics; rho = 0 leaves the minimizer. Unequal steps do not matter."""
    share = (np.ones(6) if weights == "uniform" else COUNTS / COUNTS.sum())[:, None]
    for rho in (0.0, 0.4):
        given = {"lam": 0.5, "alpha": 0.5, "rho": rho, "perturbation": "raw", "weights": weights}
        run = Simulation(experiment(tmp_path, "fedspeed", local={"lr": 0.2}, **given))
        run.run(250)
        c = share * A * (1 + 0.5 * rho * A)
        np.testing.assert_allclose(run.x.numpy(), (c * E).sum(0) / c.sum(0), rtol=0, atol=1e-12)
        if not rho:
            assert run.distance(run.task.minimizer(weights)) < 1e-12  # type: ignore[attr-defined]


def test_fedspeed_of_one_round_without_perturbation_is_twice_a_proximal_step(tmp_path: Path) -> None:
    """c_i = 0 at first: the y are FedProx's with mu = 1/lam, and y - lam c_i = y + (y - x)."""
    speed, prox = (
        Simulation(experiment(tmp_path, name, weights="uniform", local={"lr": LR}, **given)).run(1)
        for name, given in (("fedspeed", {"lam": 0.5, "rho": 0.0}), ("fedprox", {"mu": 2.0}))
    )
    assert torch.allclose(speed, 2 * prox, rtol=0, atol=1e-15)  # from x = 0


# --- FedSplit


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("sampled", [None, 3])
@pytest.mark.parametrize("steps", ["unequal", "one"])
def test_fedsplit(steps: str, sampled: int | None, weights: str, tmp_path: Path) -> None:
    """The minimizer with any number of steps of the inexact prox, with all clients and with a part of them: begun at x,
    the local problem is at rest at x* for z_i = x* - step g_i(x*), whose mean is x*."""
    arrays = {} if steps == "unequal" else {"steps": np.ones(6, dtype=int)}
    given = {"arrays": arrays, "weights": weights, "local": {"lr": 0.2}, "round": {"sample": sampled}}
    run = Simulation(experiment(tmp_path, "fedsplit", step=1.0, **given))
    run.run(450 if sampled else 220)
    assert run.distance(run.task.minimizer(weights)) < 1e-12  # type: ignore[attr-defined]
    x, mass = run.x.numpy(), np.ones(6) if weights == "uniform" else COUNTS
    for i in range(6):
        z = run.memory(str(i))["own"].numpy()
        np.testing.assert_allclose(z, x - gradient(i, x), rtol=0, atol=1e-11)
    assert float(run.coordinator.state["mass"]) == float(mass.sum())


def test_with_an_exact_prox_the_rounds_are_peaceman_rachfords(tmp_path: Path) -> None:
    """Local steps to the end against prox(u) = (step a e + u)/(step a + 1) in closed form, round by round. With one
    curvature a everywhere the distance shrinks by exactly |1 - step a|/(1 + step a) a round."""
    arrays = {"curvatures": np.full((6, 5), 2.0), "steps": np.full(6, 60)}
    run = Simulation(experiment(tmp_path, "fedsplit", arrays=arrays, step=0.25, local={"lr": 1 / 8}))
    x, z = np.zeros(5), np.zeros((6, 5))
    distances = []
    for _ in range(12):
        v = (0.25 * 2.0 * E + 2 * x - z) / (0.25 * 2.0 + 1)
        z = z + 2 * (v - x)
        x = z.mean(0)
        np.testing.assert_allclose(run.run(1).numpy(), x, rtol=0, atol=EXACT)
        distances.append(run.distance(E.mean(0)))
    for before, after in pairwise(distances[2:]):
        assert after / before == pytest.approx((1 - 0.5) / (1 + 0.5), abs=1e-6)


def test_a_newcomer_moves_no_mean(tmp_path: Path) -> None:
    """It begins at the x that it receives: x stays the mean of the z_i, and the minimizer is that of all."""
    run = Simulation(experiment(tmp_path, "fedsplit", local={"lr": 0.2}), names="0123")
    run.run(5)
    run.join("45")
    for _ in range(300):
        run.step()
        mean = torch.stack([run.memory(name)["own"] for name in run.members]).mean(0)
        assert torch.allclose(run.x, mean, rtol=0, atol=1e-12)
    assert run.distance(run.task.minimizer("uniform")) < 1e-12  # type: ignore[attr-defined]


def test_after_a_lost_memory_all_begin_anew(tmp_path: Path) -> None:
    """A new generation: the model stays, nobody's z_i is in it, and the rest is the same."""
    run = Simulation(experiment(tmp_path, "fedsplit", local={"lr": 0.2}))
    run.run(20)
    before = run.x.clone()
    run.coordinator.new_generation()
    assert torch.equal(run.x, before)
    assert float(run.coordinator.state["mass"]) == 0
    run.run(300)
    assert run.distance(run.task.minimizer("uniform")) < 1e-12  # type: ignore[attr-defined]


@pytest.mark.parametrize("told", [0.5, -1.0, 2.0])
def test_a_client_is_new_or_not(told: float, tmp_path: Path) -> None:
    """Another word costs it the round; the true words of the others stand."""

    def change(reply: Message) -> None:
        reply.content.array_records[STATE]["new"] = wire.to_array(torch.tensor(told, dtype=torch.float64))

    result = ran(tmp_path, toy("fedsplit"), FaultyGrid(lies("1", change)))
    assert result.dropped(2)["1"].startswith("meaningless: new = ")
    assert result.history[2]["accepted"] == ["0", "1", "2", "3", "4"]


def test_liars_cannot_empty_the_mean(tmp_path: Path) -> None:
    """All say that they are in it already, in round 1: it counts those who came."""

    def lie(name: str, round: int, reply: Message) -> Message:
        if round:
            reply.content.array_records[STATE]["new"] = wire.to_array(torch.tensor(0.0, dtype=torch.float64))
        return reply

    honest = ran(tmp_path / "a", toy("fedsplit", rounds=1))
    lied = ran(tmp_path / "b", toy("fedsplit", rounds=1), FaultyGrid(lie))
    assert lied.final == honest.final


@pytest.mark.parametrize(
    ("name", "tables", "words"),
    [
        ("fedexp", {"server": {"lr": 0.5}}, "server.optimizer = 'sgd' with server.lr = 0.5 beside"),
        ("fedexp", {"strategy": {"eps": 0.0}}, "strategy.eps = 0.0"),
        ("fedsplit", {"server": {"optimizer": "momentum"}}, "server.optimizer = 'momentum' with server.lr = 1 beside"),
        ("fedsplit", {"local": {"proximal_mu": 1.0}}, "local.proximal_mu = 1 beside strategy.name = 'fedsplit'"),
        ("fedspeed", {"local": {"proximal_mu": 1.0}}, "local.proximal_mu = 1 beside strategy.name = 'fedspeed'"),
        ("fedspeed", {"local": {"sam_rho": 0.1}}, "local.sam_rho = 0.1 has no meaning"),
        ("fedspeed", {"strategy": {"lam": 0.0}}, "strategy.lam = 0.0"),
        (
            "fedsplit",
            {"strategy": {"weights": "data"}, "data": {"may_grow": True}},
            "data.may_grow and round.most_share",
        ),
        ("fedsplit", {"strategy": {"weights": "data"}, "round": {"most_share": 0.5}}, "data.may_grow and round.most"),
    ],
)
def test_refusals_before_round_1(name: str, tables: dict[str, Any], words: str) -> None:
    given = {**tables, "strategy": {"name": name, **tables.get("strategy", {})}}
    with pytest.raises(SettingsError) as error:
        settled(toy(name).model_validate(given))
    assert str(error.value).startswith(words)
