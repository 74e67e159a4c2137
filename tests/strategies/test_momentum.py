"""SCAFFOLD-M, PAdaMFed and FedCM: client-level momentum, alone and under a server's.

By hand: the clients A and B of test_one_round.py, one or two dimensions (a complex number is a plane vector, its
abs the norm), rate 1/4, start x = 1. The plain Python below shares no code with the project.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment
from strategies.padamfed import free_rates
from strategies.registry import settled
from tests.strategies.test_one_round import ARRAYS
from tests.support.helpers import Simulation, experiment, problem

LR = 0.25
CLIENTS = {"A": (1.0, 2.0, 1), "B": (2.0, -1.0, 2)}
PLANE = ARRAYS | {
    "centers": [[2.0, 4.0], [-1.0, 1.5]],
    "curvatures": [[1.0, 1.0], [2.0, 2.0]],
    "start": [1.0, 0.0],
}
SHARES = {"uniform": {"A": 0.5, "B": 0.5}, "data": {"A": 0.25, "B": 0.75}}
SERVERS = ["sgd", "momentum", "nesterov"]
BETAS = [0.5, 0.25]
"""The first for round numbers, the second to tell beta from 1 - beta."""

# Three clients that pull apart, with unequal curvatures and steps.
SMALL = problem(3, 2) | {"steps": np.array([1, 2, 5])}

COHORTS = [("uniform", 2), ("data", 3), ("data", 2)]
"""Weights, and how many of the three are sampled."""

Number = complex


class Server:
    """sgd with rate 1, or momentum 1/2 with rate 1/2."""

    def __init__(self, optimizer: str) -> None:
        self.optimizer, self.m = optimizer, 0.0
        self.settings = {"optimizer": optimizer} | ({} if optimizer == "sgd" else {"momentum": 0.5, "lr": 0.5})

    def step(self, x: Number, change: Number) -> Number:
        if self.optimizer == "sgd":
            return x + change
        self.m = self.m / 2 + change
        return x + (self.m if self.optimizer == "momentum" else self.m / 2 + change) / 2


def walk(client: str, x: Number, scale: float, shift: Number, lr: float = LR) -> tuple[Number, Number]:
    """y - x after the client's steps y <- y - lr (scale g + shift), and the mean raw gradient g."""
    a, e, steps = CLIENTS[client]
    y, seen = x, 0.0
    for _ in range(steps):
        g = a * (y - e)
        seen += g
        y -= lr * (scale * g + shift)
    return y - x, seen / steps


def simulate(folder: Path, strategy: str, arrays: Any = ARRAYS, **given: Any) -> Simulation:
    given.setdefault("local", {"lr": LR})
    return Simulation(experiment(folder, strategy, arrays=arrays, **given))


def small(folder: Path, strategy: str, **given: Any) -> Simulation:
    return simulate(folder, strategy, SMALL, **given)


# --- one round by hand


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("beta", BETAS)
def test_scaffoldm(tmp_path: Path, beta: float, weights: str, server: str) -> None:
    """beta = 1/2, uniform, sgd. Round 1, c = g = 0: A: g = -1, y = 1.125. B: g = 4, y = 0.5; g = 3, y = 0.125.
    Delta = 0.125, -0.875; x = 0.625; c_A = -1, c_B = 3.5, c = 1.25; mean K = 1.5: g = 0.375/(1.5/4) = 1.
    Round 2: mix = 0.625 + 0.5 = 1.125. A: drift 1.125 + 0.5; -0.6875 + 1.625, Delta = -0.234375.
    B: drift 1.125 - 1.75; 1.625 - 0.625, y = 0.375; 1.375 - 0.625, Delta = -0.4375. x = 0.625 - 0.3359375 = 0.2890625;
    c_A = -1.375, c_B = (3.25 + 2.75)/2 = 3, c = 0.8125. A server's momentum never enters g."""
    x, g, c, own, p, outer = 1.0, 0.0, 0.0, {"A": 0.0, "B": 0.0}, SHARES[weights], Server(server)
    simulation = simulate(tmp_path, "scaffoldm", beta=beta, weights=weights, server=outer.settings)
    path: list[Number] = []
    for _ in range(3):
        mix = beta * c + (1 - beta) * g
        done = {n: walk(n, x, beta, mix - beta * own[n]) for n in "AB"}
        change = sum(p[n] * done[n][0] for n in "AB")
        x, g = outer.step(x, change), -change / (LR * sum(p[n] * CLIENTS[n][2] for n in "AB"))
        own = {n: done[n][1] for n in "AB"}
        c = sum(p[n] * own[n] for n in "AB")
        simulation.step()
        state = simulation.coordinator.state
        assert state["model"].item() == pytest.approx(x, abs=1e-15)
        assert state["momentum"].item() == pytest.approx(g, abs=1e-15)
        assert state["control"].item() == pytest.approx(c, abs=1e-15)
        assert [simulation.memory(name)["control"].item() for name in "01"] == pytest.approx(list(own.values()))
        path.append(x)
    if (beta, weights, server) == (0.5, "uniform", "sgd"):
        assert path[:2] == [0.625, 0.2890625]


def test_scaffoldms_momentum_is_in_units_of_its_own_round(tmp_path: Path) -> None:
    """At rates 1/4, then 1/8: round 2 halves what it moves, and g = 0.16796875/(1.5/8) is that of the constant rate."""
    falling = {"lr": LR, "schedule": "exponential", "decay": 0.5}
    simulation = simulate(tmp_path, "scaffoldm", beta=0.5, local=falling)
    simulation.step()
    assert simulation.coordinator.state["momentum"].item() == 1
    a, b = walk("A", 0.625, 0.5, 1.625, LR / 2)[0], walk("B", 0.625, 0.5, -0.625, LR / 2)[0]
    assert simulation.run(1).item() == 0.625 + (a + b) / 2
    assert simulation.coordinator.state["momentum"].item() == pytest.approx(-(a + b) / 2 / (1.5 / 8), rel=1e-15)


def plain_padamfed(
    folder: Path,
    arrays: Any,
    centers: dict[str, Number],
    start: Number,
    server: str = "sgd",
    beta: float = 0.5,
    **given: Any,
) -> tuple[list[tuple[Number, Number, Number]], Simulation]:
    """(x, c, g) after each of three rounds in plain numbers, compared with a run.

    g is the cohort's mean of q, but for vr with "controls"; so its recursion is checked too.
    """
    weights, vr, storm = given.get("weights", "uniform"), given.get("vr", False), given.get("momentum") == "storm"
    outer, p = Server(server), SHARES[weights]
    simulation = simulate(folder, "padamfed", arrays, beta=beta, server=outer.settings, **given)
    x = previous = start
    g, c, own, path = 0.0, 0.0, {"A": 0.0, "B": 0.0}, []
    for _ in range(3):
        change = latest = mean_q = 0.0
        after = dict(own)
        for n, (a, _, steps) in CLIENTS.items():
            y, seen, qs = x, 0.0, 0.0
            for _ in range(steps):
                raw = a * (y - centers[n])
                reference = a * (previous - centers[n])
                q = raw - (1 - beta) * reference if vr else beta * raw
                q += beta * (c - own[n]) + (1 - beta) * g
                seen, qs = seen + raw, qs + q
                y -= LR * q / abs(q)
            change += p[n] * (y - x)
            latest += p[n] * (seen / steps - own[n])
            mean_q += p[n] * qs / steps
            after[n] = seen / steps
        g = mean_q if storm or not vr else beta * (latest + c) + (1 - beta) * g
        own, c, previous = after, sum(p[n] * after[n] for n in "AB"), x
        x = outer.step(x, change)
        path.append((x, c, g))
        simulation.step()
        state = simulation.coordinator.state
        for key, value in (("model", x), ("control", c), ("momentum", g)):
            parts = [complex(value).real, complex(value).imag][: len(arrays["start"])]
            assert state[key].tolist() == pytest.approx(parts, abs=1e-14), key
    return path, simulation


@pytest.mark.parametrize("server", SERVERS)
def test_padamfed(tmp_path: Path, server: str) -> None:
    """beta = 1/2; in one dimension every step is 1/4 against the sign of q. Round 1: A: g = -1, y = 1.25.
    B: g = 4, 3.5, y = 0.5. x = 1 + (0.25 - 0.5)/2 = 0.875; c_A = -1, c_B = 3.75, c = 1.375; g = (-1 + 3.75)/4 = 0.6875.
    Round 2, mix = 1.03125. A: q = -0.5625 + 1.53125 > 0, Delta = -0.25. B: 1.875 - 0.84375 > 0, then
    1.625 - 0.84375 > 0, Delta = -0.5. x = 0.5; dc = -0.125, -0.25; c = 1.1875;
    g = (-0.1875 + 1.375)/2 + 0.6875/2 = 0.9375, with the old c."""
    path, _ = plain_padamfed(tmp_path, ARRAYS, {"A": 2.0, "B": -1.0}, 1.0, server)
    assert path[0][1:] == (1.375, 0.6875)
    if server == "sgd":
        assert path[:2] == [(0.875, 1.375, 0.6875), (0.5, 1.1875, 0.9375)]


@pytest.mark.parametrize("server", ["sgd", "momentum"])
@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("given", [{}, {"vr": True}, {"vr": True, "momentum": "storm"}], ids=["plain", "vr", "storm"])
def test_padamfed_in_the_plane(tmp_path: Path, given: dict[str, Any], beta: float, weights: str, server: str) -> None:
    """One norm over both coordinates: client B's first gradient is 2 (2, -1.5), of length 5."""
    centers = {"A": 2 + 4j, "B": -1 + 1.5j}
    plain_padamfed(tmp_path, PLANE, centers, 1 + 0j, server, beta, weights=weights, **given)


def test_storm_by_hand(tmp_path: Path) -> None:
    """Round 1 as above, x_prev = x: mean_k (g_k - g(x)) = 0 and 3.75 - 4; g = 0.6875 - 0.125/2 = 0.625."""
    path, _ = plain_padamfed(tmp_path, ARRAYS, {"A": 2.0, "B": -1.0}, 1.0, vr=True, momentum="storm")
    assert path[0] == (0.875, 1.375, 0.625)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("alpha", BETAS)
def test_fedcm_under_server_momentum(tmp_path: Path, alpha: float, server: str) -> None:
    """m is the mean direction of the cohort, not what the server made of it."""
    x, m, outer = 1.0, 0.0, Server(server)
    simulation = simulate(tmp_path, "fedcm", alpha=alpha, server=outer.settings)
    for _ in range(3):
        change = sum(walk(n, x, alpha, (1 - alpha) * m)[0] for n in "AB") / 2
        x, m = outer.step(x, change), -change / (LR * 1.5)
        simulation.step()
        assert simulation.x.item() == pytest.approx(x, abs=1e-15)
        assert simulation.coordinator.state["momentum"].item() == pytest.approx(m, abs=1e-15)


# --- what must hold after every round


def imbalance(simulation: Simulation, key: str = "control") -> float:
    """|server tracker - sum_i q_i (accepted tracker of i)| over all known clients."""
    known, uniform = simulation.coordinator.known, simulation.strategy.weights == "uniform"
    total = torch.zeros_like(simulation.x)
    for name, examples in known.items():
        share = 1 / len(known) if uniform else examples / sum(known.values())
        total += share * simulation.memory(name).get(key, torch.zeros_like(total))
    return float((simulation.coordinator.state[key] - total).abs().max())


def assert_balance(simulation: Simulation, key: str, newcomers: str) -> None:
    """Through partial participation, lost replies, clients that join and a new generation."""
    chance, largest = random.Random(1), 0.0
    for part in range(3):
        for _ in range(8):
            simulation.step(lost=chance.sample(sorted(simulation.members), 2))
            assert imbalance(simulation, key) < 1e-12
            largest = max(largest, float(simulation.coordinator.state[key].abs().max()))
        if part == 0:
            simulation.join(newcomers)
            assert imbalance(simulation, key) < 1e-12
        if part == 1:
            simulation.coordinator.new_generation()
            assert not simulation.coordinator.state[key].any()
    assert largest > 1


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize(
    ("strategy", "given"), [("scaffoldm", {}), ("padamfed", {}), ("padamfed", {"vr": True, "momentum": "storm"})]
)
def test_the_control_is_the_mean_of_accepted_controls(
    tmp_path: Path, strategy: str, given: dict[str, Any], weights: str
) -> None:
    settings = experiment(tmp_path, strategy, weights=weights, local={"lr": 0.05}, round={"sample": 3}, **given)
    assert_balance(Simulation(settings, list("0123")), "control", "54")


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_padamfeds_momentum_is_the_cohorts(tmp_path: Path, weights: str) -> None:
    """Its dc_i count by their weight in the cohort, where those in c count by that among all clients."""
    run = small(tmp_path, "padamfed", weights=weights, beta=0.25, local={"lr": 0.1}, round={"sample": 2})
    for _ in range(6):
        before = run.coordinator.state
        uploads = run.step()
        mass = [1 if weights == "uniform" else upload.examples for upload in uploads]
        change = sum(m / sum(mass) * upload.vectors["control"] for m, upload in zip(mass, uploads, strict=True))
        expected = 0.25 * (change + before["control"]) + 0.75 * before["momentum"]
        assert apart(run.coordinator.state["momentum"], expected) < 1e-14


def test_a_new_generation_keeps_the_model_and_forgets_momentum(tmp_path: Path) -> None:
    """c, g and c_i are zero, and x_prev is x: as in round 1."""
    run = small(tmp_path, "padamfed", vr=True)
    run.run(4)
    x = run.x
    run.coordinator.new_generation()
    state = run.coordinator.state
    assert torch.equal(state["model"], x)
    assert torch.equal(state["previous"], x)
    assert not state["momentum"].any()
    assert not state["control"].any()


@pytest.mark.parametrize(
    ("strategy", "given", "down", "up"),
    [
        ("scaffoldm", {}, 2, 2),
        ("padamfed", {}, 2, 2),
        ("padamfed", {"vr": True}, 3, 2),
        ("padamfed", {"vr": True, "momentum": "storm"}, 3, 3),
    ],
)
def test_vectors_on_the_wire(tmp_path: Path, strategy: str, given: dict[str, Any], down: int, up: int) -> None:
    """c and g never go apart: 40, 40, 50 and 60 vectors in a round of ten clients."""
    run = small(tmp_path, strategy, **given)
    uploads = run.step()
    assert len(run.strategy.broadcast(run.coordinator.state)) == down
    assert [len(upload.vectors) for upload in uploads] == [up] * 3


# --- reductions


def path(folder: Path, strategy: str, **given: Any) -> Tensor:
    given = {"local": {"lr": 0.03}, "round": {"sample": 2}, "arrays": SMALL} | given
    return Simulation(experiment(folder, strategy, **given)).path(10)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("local", [{"lr": 0.03}, {"lr": 0.03, "clip_norm": 2.0, "weight_decay": 0.1}])
def test_scaffoldm_with_beta_one_is_scaffold(tmp_path: Path, local: dict[str, float], weights: str) -> None:
    """g falls out of the mix."""
    given: dict[str, Any] = {"local": local, "weights": weights}
    scaffold = path(tmp_path, "scaffold", **given)
    assert apart(path(tmp_path, "scaffoldm", beta=1.0, **given), scaffold) < 1e-12
    assert apart(path(tmp_path, "scaffoldm", beta=0.5, **given), scaffold) > 1e-2


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_scaffoldm_with_identical_clients_is_fedcm(tmp_path: Path, weights: str) -> None:
    """All c_i are the same and so are c. Their numbers of examples play no part; sampled clients alone would differ,
    c_i of the others being older."""
    alike = {key: np.repeat(value[:1], 3, axis=0) for key, value in SMALL.items() if key not in ("start", "examples")}
    given: dict[str, Any] = {"arrays": SMALL | alike, "weights": weights, "round": {"sample": 3}}
    assert apart(path(tmp_path, "scaffoldm", beta=0.3, **given), path(tmp_path, "fedcm", alpha=0.3, **given)) < 1e-12


def test_scaffoldm_starts_as_fedcm(tmp_path: Path) -> None:
    """c = g = 0 in round 1 for both, whatever the clients; round 2 is corrected."""
    momentum, fedcm = path(tmp_path, "scaffoldm", beta=0.3), path(tmp_path, "fedcm", alpha=0.3)
    assert apart(momentum[0], fedcm[0]) < 1e-12
    assert apart(momentum[1], fedcm[1]) > 1e-3


@pytest.mark.parametrize("momentum", ["controls", "storm"])
def test_variance_reduction_without_momentum_is_none(tmp_path: Path, momentum: str) -> None:
    """beta = 1 leaves q = g_i - c_i + c."""
    given: dict[str, Any] = {"beta": 1.0}
    reduced = path(tmp_path, "padamfed", vr=True, momentum=momentum, **given)
    assert apart(reduced, path(tmp_path, "padamfed", **given)) < 1e-12


def test_variance_reduction_starts_as_none(tmp_path: Path) -> None:
    """Round 1: x_prev = x and c = g = 0, so the first step has q = g_i(x) - (1 - beta) g_i(x) = beta g_i(x) in both.
    Clients of one step so agree in round 1, and go apart in round 2, where x_prev is another point."""
    single: dict[str, Any] = {"arrays": SMALL | {"steps": np.array([1, 1, 1])}, "local": {"lr": 0.3}}
    plain, reduced = path(tmp_path, "padamfed", **single), path(tmp_path, "padamfed", vr=True, **single)
    assert apart(plain[0], reduced[0]) < 1e-15
    assert apart(plain[1], reduced[1]) > 1e-3
    assert (
        apart(
            path(tmp_path, "padamfed", local={"lr": 0.3})[0], path(tmp_path, "padamfed", vr=True, local={"lr": 0.3})[0]
        )
        > 1e-3
    )


# --- normalized steps


class Spy:
    """A client's work that also records its model before each step and after the last."""

    def __init__(self, work: Any) -> None:
        self.work, self.path = work, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def steps(self, **given: Any) -> Iterator[Tensor]:
        for gradient in self.work.steps(**given):
            self.path.append(self.work.vector.clone())
            yield gradient
        self.path.append(self.work.vector.clone())


@pytest.mark.parametrize("vr", [False, True])
def test_every_step_has_the_length_of_the_rate(tmp_path: Path, vr: bool) -> None:
    """||y_{k+1} - y_k|| = eta, in every round of a falling rate and whatever the gradient's size."""
    local = {"lr": 0.3, "schedule": "exponential", "decay": 0.5}
    run = Simulation(experiment(tmp_path, "padamfed", vr=vr, local=local, server={"optimizer": "momentum"}))
    for round in range(3):
        for name in run.members:
            spy = Spy(run.work(name))
            run.strategy.local(spy)
            taken = [float((b - a).norm()) for a, b in zip(spy.path, spy.path[1:], strict=False)]
            assert len(taken) == spy.steps_taken
            assert taken == pytest.approx([0.3 * 0.5**round] * len(taken), rel=1e-13)
        run.step()


@pytest.mark.parametrize("vr", [False, True])
def test_no_gradient_is_no_step(tmp_path: Path, vr: bool) -> None:
    """0/0 is 0: a client at its own minimizer stays in round 1; where all are, nothing ever moves."""
    still = SMALL | {"start": SMALL["centers"][0]}
    run = simulate(tmp_path, "padamfed", still, vr=vr)
    lengths = [float(upload.vectors["delta"].norm()) for upload in run.step()]
    assert lengths[0] == 0 < min(lengths[1:])
    run = simulate(tmp_path, "padamfed", still | {"centers": np.repeat(still["start"][None], 3, axis=0)}, vr=vr)
    assert torch.equal(run.run(3), torch.from_numpy(still["start"]))


# --- fixed points


@pytest.mark.parametrize(("weights", "sampled"), COHORTS)
@pytest.mark.parametrize(
    "local", [{"lr": 0.3}, {"lr": 0.3, "clip_norm": 2.0, "proximal_mu": 0.2}], ids=["sgd", "clipped and proximal"]
)
def test_scaffoldm_reaches_the_minimizer(tmp_path: Path, local: dict[str, float], weights: str, sampled: int) -> None:
    """No move means g = 0 and g_i(x) = c_i - c for all i, so c = 0 and sum q_i g_i(x) = 0, as SCAFFOLD."""
    given: dict[str, Any] = {"weights": weights, "local": local, "round": {"sample": sampled}}
    run = small(tmp_path, "scaffoldm", beta=0.4, **given).rest()
    assert run.distance(run.task.minimizer(weights)) < 1e-12
    assert float(run.coordinator.state["momentum"].abs().max()) < 1e-12


def test_fedcm_keeps_fedavgs_bias(tmp_path: Path) -> None:
    """At rest m = 0, and the clients' paths of rate alpha eta cancel: a point that depends on their steps."""
    run = small(tmp_path, "fedcm", alpha=0.4, local={"lr": 0.3}).rest()
    fedavg = small(tmp_path, "fedavg", weights="uniform", local={"lr": 0.3 * 0.4}).rest()
    assert run.distance(fedavg.x) < 1e-12
    assert run.distance(run.task.minimizer("uniform")) > 0.1


def test_fedcm_magnifies_weight_decay(tmp_path: Path) -> None:
    """As SCAFFOLD-M. Clients of one step have no drift, so its rest is exact: alpha mean g_i + lambda x = 0."""
    given = {"arrays": SMALL | {"steps": [1, 1, 1]}, "local": {"lr": 0.2, "weight_decay": 0.1}}
    run = Simulation(experiment(tmp_path, "fedcm", alpha=0.25, **given))
    a, e = SMALL["curvatures"], SMALL["centers"]
    assert run.rest().distance((a * e).mean(0) / (a.mean(0) + 0.1 / 0.25)) < 1e-12
    assert "it acts as a decay of 0.4" in str(run.strategy.caution(run.experiment, 1))
    plain = Simulation(experiment(tmp_path, "fedcm", alpha=1.0, **given))
    assert plain.strategy.caution(plain.experiment, 1) is None


def test_scaffoldm_magnifies_weight_decay(tmp_path: Path) -> None:
    """At rest g = 0 and beta sum q_i g_i(x) + lambda x = 0: the minimizer of F + lambda/(2 beta) |w|^2."""
    run = small(tmp_path, "scaffoldm", beta=0.25, local={"lr": 0.2, "weight_decay": 0.1})
    a, e = SMALL["curvatures"], SMALL["centers"]
    assert run.rest().distance((a * e).mean(0) / (a.mean(0) + 0.1 / 0.25)) < 1e-12
    assert run.strategy.caution(run.experiment, 1) == (
        "scaffoldm: local.weight_decay = 0.1 is not scaled by strategy.beta = 0.25 as gradients are: it acts as a "
        "decay of 0.4; 0.025 acts as 0.1"
    )
    for quiet in ({"beta": 1.0, "local": {"weight_decay": 0.1}}, {"local": {"lr": 0.2}}):
        silent = small(tmp_path, "scaffoldm", **quiet)
        assert silent.strategy.caution(silent.experiment, 1) is None


@pytest.mark.parametrize(("weights", "sampled"), COHORTS)
@pytest.mark.parametrize("given", [{}, {"vr": True}, {"vr": True, "momentum": "storm"}], ids=["plain", "vr", "storm"])
def test_padamfed_reaches_the_minimizer_as_the_rate_falls(
    tmp_path: Path, given: dict[str, Any], weights: str, sampled: int
) -> None:
    """Near x* with c_i = g_i(x*) and c = g = 0 all that is left in q is O(eta): clients stay within O(eta) of it, and
    x with them, whatever their steps. So the distance falls with the rate, here to 1e-6."""
    given = given | {"beta": 0.4, "weights": weights, "round": {"sample": sampled}}
    run = small(tmp_path, "padamfed", local={"lr": 1.0, "schedule": "exponential", "decay": 0.87}, **given)
    for rounds in (60, 40):
        run.run(rounds)
        assert run.distance(run.task.minimizer(weights)) < 30 * run.coordinator.lr(run.coordinator.round)
    assert run.coordinator.lr(100) < 1.1e-6


def test_padamfed_never_rests_at_a_constant_rate(tmp_path: Path) -> None:
    """Each client always moves; the server model circles the minimizer at a distance of the order of the rate."""
    for lr in (0.1, 0.01):
        run = small(tmp_path, "padamfed", local={"lr": lr})
        run.coordinator.state["model"] = torch.from_numpy(run.task.minimizer("uniform"))
        models = run.path(60)[-20:]
        assert lr / 10 < float((models[1:] - models[:-1]).norm(dim=1).max())
        assert run.distance(run.task.minimizer("uniform")) < 20 * lr


# --- PAdaMFed's rates


def free(folder: Path, rounds: int, sampled: int, steps: int, **given: Any) -> Experiment:
    tables = {"rounds": rounds, "round": {"sample": sampled}, "local": {"steps": steps}}
    return experiment(folder, "padamfed", rates="free", arrays=SMALL, **(tables | given))


def test_free_rates(tmp_path: Path) -> None:
    """SK = 16, T = 256: beta = sqrt(16/256) = 1/4, eta = 1/(4 * 16), gamma = 2/64, eta_g = gamma/(eta K) = 1/2.
    vr, SK = 8, T = 64: beta = gamma = 2/16, eta = 1/(4 * 64), eta_g = (2/16) * 64. beta is at most 1, gamma is not."""
    assert free_rates(256, 4, 4, False) == (1 / 64, 0.5, 0.25)
    assert free_rates(64, 2, 4, True) == pytest.approx((1 / 256, 8.0, 0.125), rel=1e-15)
    assert free_rates(4, 4, 16, False) == pytest.approx((1 / 32, 2.0, 1.0))  # beta = sqrt(64/4), eta_g = 16^(1/4)
    assert free_rates(8, 4, 16, True) == pytest.approx((1 / 128, 8.0, 1.0))  # beta = gamma = 4/4
    assert free_rates(1, 4, 16, True) == pytest.approx((1 / 16, 4.0, 1.0))  # beta = gamma = 4


def test_free_rates_are_written_out(tmp_path: Path) -> None:
    """Into [local], [server] and [strategy], once and for all: a copy of the resolved file means the same."""
    given = free(tmp_path, 256, 4, 4)
    resolved = settled(given)[1]
    assert (resolved.local.lr, resolved.server.lr, settled(given)[0].beta) == (1 / 64, 0.5, 0.25)
    assert settled(given)[0].server.lr == 0.5
    assert resolved.strategy.options == {"rates": "free", "beta": 0.25}
    again = Experiment.model_validate_json(resolved.json())
    assert settled(again)[1] == resolved == settled(resolved)[1]
    assert settled(again)[1].json() == resolved.json()
    tuned = experiment(tmp_path, "padamfed", arrays=SMALL)
    assert settled(tuned)[1].local.lr == tuned.local.lr
    # Powers may differ in the last bit from machine to machine: what the server wrote out stands.
    near = resolved.model_copy(update={"local": resolved.local.model_copy(update={"lr": 1 / 64 + 2**-58})})
    assert settled(near)[1].local.lr == 1 / 64 + 2**-58 != 1 / 64


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"round": {}}, "derives the rates from rounds, round.sample and local.steps; give round.sample"),
        ({"local": {}}, "derives the rates from rounds, round.sample and local.steps; give local.steps"),
        ({"local": {}, "round": {}}, "give local.steps and round.sample"),
        (
            {"local": {"steps": 4, "lr": 0.1}},
            "local.lr = 0.1 contradicts strategy.rates = 'free', which makes it 0.015625",
        ),
        (
            {"server": {"lr": 1.0}},
            "server.lr = 1.0 contradicts strategy.rates = 'free', which makes it 0.5; leave it out",
        ),
        ({"beta": 0.1}, "strategy.beta = 0.1 contradicts strategy.rates = 'free', which makes it 0.25; leave it out"),
        ({"server": {"optimizer": "adam"}}, "server.optimizer = 'adam' has no meaning with strategy.rates = 'free'"),
    ],
)
def test_free_rates_that_cannot_be(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as error:
        settled(free(tmp_path, 256, 4, 4, **given))[0]
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "given", "text"),
    [
        ("scaffoldm", {"local": {"optimizer": "adam"}}, "'scaffoldm' has no meaning with local.optimizer = 'adam'"),
        (
            "scaffoldm",
            {"local": {"momentum": 0.9}},
            "local.momentum = 0.9 has no meaning with strategy.name = 'scaffoldm'",
        ),
        ("scaffoldm", {"local": {"step_decay": 0.9}}, "local.step_decay = 0.9 has no meaning with"),
        (
            "fedcm",
            {"local": {"step_decay": 0.9}},
            "local.step_decay = 0.9 has no meaning with strategy.name = 'fedcm'",
        ),
        ("scaffoldm", {"beta": 0.0}, "strategy.beta = 0.0: Input should be greater than 0"),
        ("scaffoldm", {"beta": 1.5}, "strategy.beta = 1.5: Input should be less than or equal to 1"),
        ("padamfed", {"local": {"optimizer": "normalized"}}, "its steps are normalized already; allowed: 'sgd'"),
        (
            "padamfed",
            {"local": {"momentum": 0.9}},
            "local.momentum = 0.9 has no meaning with strategy.name = 'padamfed'",
        ),
        ("padamfed", {"local": {"weight_decay": 0.1}}, "local.weight_decay = 0.1 has no meaning with"),
        ("padamfed", {"local": {"proximal_mu": 0.1}}, "local.proximal_mu = 0.1 has no meaning with"),
        ("padamfed", {"local": {"clip_norm": 1.0}}, "local.clip_norm = 1.0 has no meaning with"),
        (
            "padamfed",
            {"vr": True, "local": {"sam_rho": 0.1}},
            "local.sam_rho = 0.1 has no meaning with strategy.vr = true",
        ),
        (
            "padamfed",
            {"momentum": "storm"},
            "strategy.momentum = 'storm' needs the second gradient of strategy.vr = true",
        ),
        ("padamfed", {"beta": 0.0}, "strategy.beta = 0.0: Input should be greater than 0"),
    ],
)
def test_pairs_without_meaning(tmp_path: Path, strategy: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as error:
        settled(experiment(tmp_path, strategy, **given))[0]
    assert text in str(error.value)
