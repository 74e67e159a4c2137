"""FedDyn: two rounds by hand, the invariant h = sum_i q_i lambda_i, and where it rests.

The two clients of test_one_round.py: F_i(w) = a/2 (w - e)^2, rate 1/4, start x = 1, all numbers short binary
fractions: A has a = 1, e = 2, one step and one example; B has a = 2, e = -1, two steps and three examples.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import SettingsError
from strategies.registry import settled
from tests.support.helpers import Simulation, experiment, problem

ARRAYS = {"centers": [[2.0], [-1.0]], "curvatures": [[1.0], [2.0]], "steps": [1, 2], "examples": [1, 3], "start": [1.0]}
LR, ALPHA = 0.25, 0.5
DATA = problem()


def simulate(folder: Path, **given: Any) -> Simulation:
    local = {"lr": LR} | given.pop("local", {})
    return Simulation(experiment(folder, "feddyn", arrays=ARRAYS, alpha=ALPHA, local=local, **given))


def walk(client: str, x: float, dual: float, clip: float = float("inf")) -> float:
    """y - x after the client's steps along g - lambda + alpha (y - x), whose size is at most `clip`."""
    a, e, steps = {"0": (1.0, 2.0, 1), "1": (2.0, -1.0, 2)}[client]
    y = x
    for _ in range(steps):
        gradient = a * (y - e) - dual + ALPHA * (y - x)
        y -= LR * gradient * min(1.0, clip / (abs(gradient) + 1e-6))
    return y - x


@pytest.mark.parametrize(
    ("weights", "share", "models"), [("uniform", 0.5, [-0.125, -0.552734375]), ("data", 0.25, [-0.9375, None])]
)
def test_feddyn(tmp_path: Path, weights: str, share: float, models: list[float]) -> None:
    """Round 1, all duals 0. A: g = -1, Delta = 0.25. B: g = 4, y = 0; 2 - 1/2, y = -0.375, Delta = -1.375.
    lambda = -0.125, 0.6875. Uniform: h = 0.28125, x = 1 - 0.5625 - 0.5625. Data (1/4, 3/4): the mean Delta is
    -0.96875, h = 0.484375, x = 1 - 2 * 0.96875.
    Round 2, uniform. A: -2.125 + 0.125, Delta = 0.5. B: 1.75 - 0.6875 = 1.0625, y = -0.390625;
    1.21875 - 0.6875 - 0.1328125, y = -0.490234375, Delta = -0.365234375. lambda = -0.375, 0.8701171875;
    h = 0.24755859375, x = -0.125 + 0.0673828125 - 0.4951171875."""
    simulation = simulate(tmp_path, weights=weights)
    x, duals = 1.0, {"0": 0.0, "1": 0.0}
    for model in models:
        moved = {name: walk(name, x, duals[name]) for name in "01"}
        duals = {name: duals[name] - ALPHA * moved[name] for name in "01"}
        h = share * duals["0"] + (1 - share) * duals["1"]
        x += share * moved["0"] + (1 - share) * moved["1"] - h / ALPHA
        uploads = simulation.step()
        assert [upload.vectors["delta"].item() for upload in uploads] == list(moved.values())
        assert (simulation.x.item(), simulation.coordinator.state["dual"].item()) == (x, h)
        assert [simulation.memory(name)["dual"].item() for name in "01"] == list(duals.values())
        assert model in (x, None)


def test_a_cohort_of_one_moves_by_its_mean_and_counts_by_its_share(tmp_path: Path) -> None:
    """One of two. A: h = -0.125/2, x = 1 + 0.25 + 0.125. B: h = 0.6875/2, x = 1 - 1.375 - 0.6875."""
    simulation = simulate(tmp_path, round={"sample": 1})
    (upload,) = simulation.step()
    expected = {"0": (1.375, -0.0625), "1": (-1.0625, 0.34375)}[upload.name]
    assert (simulation.x.item(), simulation.coordinator.state["dual"].item()) == expected


@pytest.mark.parametrize("clip", [0.75, 1.5])
def test_clipping_is_of_the_whole_gradient(tmp_path: Path, clip: float) -> None:
    """The bound holds g - lambda + alpha (y - x) as one."""
    simulation, x, duals = simulate(tmp_path, local={"clip_norm": clip}), 1.0, {"0": 0.0, "1": 0.0}
    for _ in range(4):
        moved = {name: walk(name, x, duals[name], clip) for name in "01"}
        duals = {name: duals[name] - ALPHA * moved[name] for name in "01"}
        x += sum(moved.values()) / 2 - sum(duals.values()) / 2 / ALPHA
        assert simulation.run(1).item() == pytest.approx(x, abs=1e-12)


def test_round_one_is_fedproxs_at_the_clients(tmp_path: Path) -> None:
    """No dual yet: the same changes to the bit; the server then moves by the mean and by alpha sum/alpha again."""
    given = {"local": {"lr": 0.1}, "weights": "uniform"}
    dyn = Simulation(experiment(tmp_path, "feddyn", alpha=0.7, **given))
    prox = Simulation(experiment(tmp_path, "fedprox", mu=0.7, **given))
    for ours, theirs in zip(dyn.step(), prox.step(), strict=True):
        assert torch.equal(ours.vectors["delta"], theirs.vectors["delta"])
    assert float((dyn.x - 2 * prox.x).abs().max()) < 1e-14  # both start at 0


# --- h = sum_i q_i lambda_i, q_i = 1/N or n_i/n over all clients, by induction: h - alpha sum_S q_i Delta_i


def imbalance(simulation: Simulation) -> float:
    """|h - sum_i q_i lambda_i|, from the roll and the accepted versions of the clients' memories."""
    known, uniform = simulation.coordinator.known, simulation.strategy.weights == "uniform"
    total = torch.zeros_like(simulation.x)
    for name, examples in known.items():
        share = 1 / len(known) if uniform else examples / sum(known.values())
        total += share * simulation.memory(name).get("dual", torch.zeros_like(total))
    return float((simulation.coordinator.state["dual"] - total).abs().max())


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_the_server_state_is_the_mean_of_accepted_duals(tmp_path: Path, weights: str) -> None:
    """3 of 6 sampled, replies lost in most rounds, two that join later, a new generation; then the minimizer."""
    given = {"weights": weights, "alpha": 2.0, "local": {"lr": 0.1}, "round": {"sample": 3}}
    simulation, chance, largest = Simulation(experiment(tmp_path, "feddyn", **given), "0123"), random.Random(1), 0.0

    def go_on(rounds: int) -> None:
        nonlocal largest
        for _ in range(rounds):
            simulation.step(lost=chance.sample(sorted(simulation.members), 2))
            assert imbalance(simulation) < 1e-12
            largest = max(largest, float(simulation.coordinator.state["dual"].abs().max()))

    go_on(10)
    for name in "54":
        before, old = simulation.coordinator.state["dual"], simulation.coordinator.known | {}
        simulation.join(name)
        known = simulation.coordinator.known
        ratio = len(old) / len(known) if weights == "uniform" else sum(old.values()) / sum(known.values())
        assert torch.allclose(simulation.coordinator.state["dual"], before * ratio, rtol=0, atol=1e-15)
        assert imbalance(simulation) < 1e-12
        go_on(10)
    simulation.coordinator.new_generation()
    assert not simulation.coordinator.state["dual"].any()
    go_on(10)
    assert largest > 1
    assert simulation.rest(tolerance=1e-12).distance(simulation.task.minimizer(weights)) < 1e-10


# --- rest


@pytest.mark.parametrize("sampled", [6, 3])
@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_feddyn_rests_at_the_minimizer_of_its_objective(tmp_path: Path, weights: str, sampled: int) -> None:
    """Unequal steps (1 to 8) and curvatures. Nobody moves: lambda_i = grad f_i(x), and h = 0."""
    given = {"weights": weights, "alpha": 2.0, "local": {"lr": 0.1}, "round": {"sample": sampled}}
    run = Simulation(experiment(tmp_path, "feddyn", **given)).rest(tolerance=1e-12)
    assert run.distance(run.task.minimizer(weights)) < 1e-10
    assert run.distance(run.task.minimizer("data" if weights == "uniform" else "uniform")) > 0.1
    assert float(run.coordinator.state["dual"].abs().max()) < 1e-10
    for i in range(6):
        gradient = torch.from_numpy(DATA["curvatures"][i]) * (run.x - torch.from_numpy(DATA["centers"][i]))
        assert float((run.memory(str(i))["dual"] - gradient).abs().max()) < 1e-10


SMALL = problem(3, 2) | {"steps": np.array([1, 2, 4])}


def minimizer(data: dict[str, Any], decay: float = 0.0) -> Tensor:
    """Of the plain mean of F_i + decay/2 |w|^2: sum a e / sum (a + decay)."""
    a, e = data["curvatures"], data["centers"]
    return torch.from_numpy((a * e).sum(0) / (a + decay).sum(0))


@pytest.mark.parametrize(
    ("given", "decay"),
    [
        ({"local": {"momentum": 0.5, "step_decay": 0.9}}, 0.0),
        ({"local": {"clip_norm": 5.0}}, 0.0),
        ({"local": {"weight_decay": 0.5}}, 0.5),
        ({"server": {"lr": 0.5}}, 0.0),
        ({"local": {"schedule": "exponential", "decay": 0.999}}, 0.0),
        ({"compression": {"up": "top-k", "ratio": 0.4, "decay": 0.5}}, 0.0),
        ({"compression": {"up": "top-k", "ratio": 0.4, "feedback": "ef21"}}, 0.0),
    ],
    ids=["momentum", "clipping", "decay", "server", "schedule", "ef14", "ef21"],
)
def test_what_composes_rests_there_too(tmp_path: Path, given: dict[str, Any], decay: float) -> None:
    """Without movement there is no momentum, nothing to clip and nothing owed."""
    given = {"alpha": 2.0, **given, "local": {"lr": 0.1} | given.get("local", {})}
    run = Simulation(experiment(tmp_path, "feddyn", arrays=SMALL, **given)).rest(tolerance=1e-12)
    assert run.distance(minimizer(SMALL, decay)) < 1e-10


def test_compression_with_feedback_owes_h_what_it_owes_x(tmp_path: Path) -> None:
    """sum sent = sum Delta - e_i, so h = sum q_i (lambda_i + alpha e_i)."""
    given = {"alpha": 2.0, "local": {"lr": 0.1}, "compression": {"up": "top-k", "ratio": 0.4}}
    run = Simulation(experiment(tmp_path, "feddyn", **given))
    run.run(5)
    memories = [run.memory(name) for name in run.members]
    owed = sum(memory["dual"] + 2.0 * memory["residual.delta"] for memory in memories) / 6
    assert float((run.coordinator.state["dual"] - owed).abs().max()) < 1e-12
    assert float(sum(memory["residual.delta"].abs() for memory in memories).max()) > 0.01


def test_exact_solutions_approach_by_alpha_over_a_plus_alpha(tmp_path: Path) -> None:
    """One client, e = 0: y = (lambda + alpha x)/(a + alpha), lambda = a y, x <- y (alpha - a)/alpha, so the next y is
    (a y + (alpha - a) y)/(a + alpha). 400 steps at rate 0.1 are exact; a = 1, 2 and alpha = 0.5 give 1/3, 1/5."""
    one = {"centers": [[0.0, 0.0]], "curvatures": [[1.0, 2.0]], "steps": [400], "examples": [1], "start": [1.0, 1.0]}
    run = Simulation(experiment(tmp_path, "feddyn", arrays=one, alpha=ALPHA, local={"lr": 0.1}))
    run.run(2)
    for _ in range(4):
        before = run.x
        assert torch.allclose(run.run(1) / before, torch.tensor([1 / 3, 1 / 5], dtype=torch.float64), atol=1e-12)


# --- what travels, and what is refused


def test_one_vector_down_and_one_up(tmp_path: Path) -> None:
    strategy = settled(experiment(tmp_path, "feddyn"))[0]
    assert set(strategy.broadcast(strategy.init(torch.zeros(3)))) == {"model"}
    assert dict(strategy.payload) == {"delta": "increment"}
    assert (strategy.memory, strategy.trackers) == ("bound", ("dual",))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpha": 0.0}, "strategy.alpha = 0.0: .*greater than 0"),
        ({"local": {"proximal_mu": 0.1}}, "local.proximal_mu = 0.1 beside strategy.name = 'feddyn'.*strategy.alpha"),
        (
            {"server": {"optimizer": "momentum", "lr": 1.0}},
            "server.optimizer = 'momentum' with server.lr = 1 has no meaning with strategy.name = 'feddyn'.*'sgd'",
        ),
        ({"server": {"optimizer": "adam"}}, "server.optimizer = 'adam' .*strategy.name = 'feddyn'"),
        ({"server": {"lr": 1.5}}, "server.optimizer = 'sgd' with server.lr = 1.5 .*allowed: 'sgd' with lr <= 1"),
        (
            {"compression": {"up": "sign", "feedback": "none"}},
            "compression.up = 'sign' with compression.feedback = 'none' .*strategy.name = 'feddyn'",
        ),
    ],
)
def test_refusals(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settled(experiment(tmp_path, "feddyn", **given))[0]


def test_lossless_compression_may_do_without_feedback(tmp_path: Path) -> None:
    assert settled(experiment(tmp_path, "feddyn", compression={"up": "identity", "feedback": "none"}))[0]


def test_the_data_of_these_tests_tell_the_weightings_apart() -> None:
    """Else a wrong q_i would go unseen."""
    p = (DATA["examples"] / DATA["examples"].sum())[:, None]
    a, e = DATA["curvatures"], DATA["centers"]
    assert np.abs((p * a * e).sum(0) / (p * a).sum(0) - minimizer(DATA).numpy()).max() > 0.1
