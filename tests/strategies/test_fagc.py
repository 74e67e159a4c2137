"""FA-GC and FA-NT: rounds by hand, y = sum_i q_i y_i, what they reduce to, where they rest, what crosses the wire.

The two clients of test_one_round.py: F_i(w) = a/2 (w - e)^2, rate 1/4, start x = 1: "0" has a = 1, e = 2, one
step and one example; "1" has a = 2, e = -1, two steps and three examples.
"""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn

from client.training.optimizers import LocalOptimizer
from common.compression.feedback import Kind
from common.data.examples import ClientData, Examples
from common.errors import SettingsError
from common.experiment import Experiment, PersonalSettings
from common.model import build, matrix_slots
from common.tasks.base import Task
from strategies.protocol import wire
from strategies.protocol.messages import STATE
from strategies.registry import REGISTRY, settled
from tests.server.rounds.test_resume import alike, digits, stopped
from tests.server.rounds.test_resume import grid as on_disk
from tests.support.faults import FaultyGrid, ran, toy
from tests.support.helpers import Simulation, experiment, problem
from tests.support.tiny import Tiny, settings

ARRAYS = {"centers": [[2.0], [-1.0]], "curvatures": [[1.0], [2.0]], "steps": [1, 2], "examples": [1, 3], "start": [1.0]}
LR, B1, B2 = 0.25, 0.5, 0.75
# An eps that no sqrt(v) notices.
ADAM = {"lr": LR, "betas": [B1, B2], "eps": 1e-300}
SGD = {"optimizer": "sgd"}
BOTH = ["fagc", "fant"]
DATA = problem()
CURVATURES, CENTERS = torch.from_numpy(DATA["curvatures"]), torch.from_numpy(DATA["centers"])
SHARES = {"uniform": torch.full((6,), 1 / 6, dtype=torch.float64), "data": torch.from_numpy(DATA["examples"] / 210)}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As clients train; more threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tracker(simulation: Simulation, name: str) -> Tensor:
    """y_i as of the client's last accepted upload."""
    return simulation.memory(name).get("tracker", torch.zeros_like(simulation.x))


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- by hand


def adam(client: str, x: float, before: float = 0.0, after: float = 0.0) -> tuple[float, float, float]:
    """y - x, the mean raw gradient and the mean direction over a client's steps y <- y - lr (d + after), d = m/sqrt(v)
    from zero moments of g + before."""
    a, e, steps = {"0": (1.0, 2.0, 1), "1": (2.0, -1.0, 2)}[client]
    y, m, v, gradients, directions = x, 0.0, 0.0, [], []
    for _ in range(steps):
        gradients.append(a * (y - e))
        m = B1 * m + (1 - B1) * (gradients[-1] + before)
        v = B2 * v + (1 - B2) * (gradients[-1] + before) ** 2
        directions.append(m / math.sqrt(v))
        y -= LR * (directions[-1] + after)
    return y - x, sum(gradients) / steps, sum(directions) / steps


def compare(
    folder: Path, strategy: str, weights: str, refreshed: str, models: list[float], trackers: list[float]
) -> None:
    """Compare some rounds, in the i-th of which client refreshed[i] refreshes, with the numbers of the docstrings and,
    to the last digits, with plain floats."""
    seed = next(
        seed
        for seed in range(100)
        if [*map(drawn(strategy, seed), range(1, len(refreshed) + 1))] == [[each] for each in refreshed]
    )
    given: dict[str, Any] = {"local": ADAM, "weights": weights, "seed": seed}
    simulation = Simulation(experiment(folder, strategy, arrays=ARRAYS, **given))
    shares = {"uniform": (0.5, 0.5), "data": (0.25, 0.75)}[weights]
    x, y, own = 1.0, 0.0, {"0": 0.0, "1": 0.0}
    for name, model, total in zip(refreshed, models, trackers, strict=True):
        where = "before" if strategy == "fagc" else "after"
        done = {each: adam(each, x, **{where: y - own[each]}) for each in "01"}
        own[name] = done[name][1 if strategy == "fagc" else 2]
        x += shares[0] * done["0"][0] + shares[1] * done["1"][0]
        y = shares[0] * own["0"] + shares[1] * own["1"]
        simulation.step()
        assert simulation.x.item() == pytest.approx(x, rel=1e-13)
        assert simulation.coordinator.state["tracker"].item() == pytest.approx(y, rel=1e-13)
        assert [tracker(simulation, each).item() for each in "01"] == pytest.approx([*own.values()], rel=1e-13)
        assert (x, y) == pytest.approx((model, total), abs=1e-5)


def drawn(strategy: str, seed: int, names: str = "01", share: float = 0.5) -> Any:
    """Round -> who refreshes."""
    each = REGISTRY[strategy].cls(refresh=share)
    return lambda round: sorted(each.assign({}, list(names), round, seed))


@pytest.mark.parametrize(
    ("weights", "models", "trackers"),
    [("uniform", [0.86039, 0.47468], [1.875, 1.30519]), ("data", [0.66558, 0.20920], [2.8125, 2.47890])],
)
def test_one_round_of_fagc(tmp_path: Path, weights: str, models: list[float], trackers: list[float]) -> None:
    """Adam with beta = 1/2, 3/4 and no bias correction: the first direction is m/sqrt(v) = (g/2)/(|g|/2) = sign g.
    Round 1, no correction; "1" refreshes. "0": g = -1, y = 1.25. "1": g = 4, y = 0.75; g = 3.5, m = 2.75,
    v = 3 + 3.0625, d = 1.11688, y = 0.47078. y_1 = (4 + 3.5)/2 = 3.75. Uniform: x = 1 + (0.25 - 0.52922)/2, y = 1.875.
    Round 2; "0" refreshes. "0": g = -1.13961, ghat = g + 1.875 > 0, so y = x - 0.25; y_0 = g, not ghat.
    "1", corrected by 1.875 - 3.75: 3.72078 - 1.875 = 1.84578, y = x - 0.25; 3.22078 - 1.875 = 1.34578, m = 1.13433,
    v = 1.09153, d = 1.08571. x = 0.86039 - (0.25 + 0.25 + 0.27143)/2, y = (3.75 - 1.13961)/2."""
    compare(tmp_path, "fagc", weights, "10", models, trackers)


@pytest.mark.parametrize(
    ("weights", "models", "trackers"),
    [("uniform", [0.86039, 0.78577], [0.52922, 0.02922]), ("data", [0.66558, 0.38034], [0.79383, 0.54383])],
)
def test_one_round_of_fant(tmp_path: Path, weights: str, models: list[float], trackers: list[float]) -> None:
    """Round 1 is FA-GC's, but y_1 = (1 + 1.11688)/2 = 1.05844 is a direction; uniform: y = 0.52922.
    Round 2; "0" refreshes. "0": d = sign(-1.13961) = -1, moves by -(0.52922 - 1)/4 = 0.11769; y_0 = -1, not -0.47078.
    "1", corrected by 0.52922 - 1.05844: d = 1, moves by -0.11769; g = 3.48539, m = 2.67289, v = 5.63252, d = 1.12621,
    moves by -(1.12621 - 0.52922)/4 = -0.14925. x = 0.86039 - 0.14925/2, y = (1.05844 - 1)/2."""
    compare(tmp_path, "fant", weights, "10", models, trackers)


@pytest.mark.parametrize(("weights", "models"), [("uniform", [0.375, 0.21875]), ("data", [-0.0625, None])])
def test_a_tracker_may_be_the_gradient_at_the_start(tmp_path: Path, weights: str, models: list[float]) -> None:
    """Plain SGD, all refresh. Round 1 is FedAvg; y_0 = -1, y_1 = 4 (the path's mean is 3). Uniform: y = 1.5.
    Round 2. "0": -1.625 + 2.5 = 0.875. "1": 2.75 - 2.5 = 0.25, then 2.625 - 2.5 = 0.125.
    x = 0.375 - (0.875 + 0.375)/8 = 0.21875; y_0 = -1.625, y_1 = 2.75, y = 0.5625."""
    given: dict[str, Any] = {"weights": weights, "tracker": "start", "refresh": 1.0, "local": SGD | {"lr": LR}}
    simulation = Simulation(experiment(tmp_path, "fagc", arrays=ARRAYS, **given))
    q = {"uniform": (0.5, 0.5), "data": (0.25, 0.75)}[weights]
    x, y, own = 1.0, 0.0, [0.0, 0.0]
    for model in models:
        moved = []
        for (a, e, steps), mine in zip(((1.0, 2.0, 1), (2.0, -1.0, 2)), own, strict=True):
            w = x
            for _ in range(steps):
                w -= LR * (a * (w - e) + y - mine)
            moved.append(w - x)
        own = [x - 2, 2 * (x + 1)]
        x, y = x + q[0] * moved[0] + q[1] * moved[1], q[0] * own[0] + q[1] * own[1]
        simulation.step()
        assert (simulation.x.item(), simulation.coordinator.state["tracker"].item()) == (x, y)
        assert [tracker(simulation, name).item() for name in "01"] == own
        assert model in (None, x)


@pytest.mark.parametrize("clip", ["raw", "corrected"])
def test_clipping(tmp_path: Path, clip: str) -> None:
    """Plain SGD, one step, all refresh, bound 2.5. Round 1: g_0 = -(3, 4) of norm 5, g_1 = (6, 8) of norm 10; halved
    and quartered, they cancel: x stays. The trackers are not clipped: y = (1.5, 2). Round 2: "raw" halves and quarters
    again and adds y - y_i = (4.5, 6) and -(4.5, 6): steps along (3, 4) and -(3, 4), of norm 5. "corrected" bounds
    g - y_i + y = y = (1.5, 2), of norm 2.5, for both. (But for the 1e-6 of the clipping factor.)"""
    arrays = {"centers": [[3, 4], [-6, -8]], "curvatures": np.ones((2, 2)), "steps": [1, 1], "start": np.zeros(2)}
    given: dict[str, Any] = {"arrays": arrays | {"examples": [1, 1]}, "refresh": 1.0, "clip": clip}
    simulation = Simulation(experiment(tmp_path, "fagc", local=SGD | {"lr": LR, "clip_norm": 2.5}, **given))
    assert simulation.run(1).tolist() == pytest.approx([0, 0], abs=1e-6)
    for name, own in (("0", [-3, -4]), ("1", [6, 8])):
        assert tracker(simulation, name).tolist() == own
    assert simulation.coordinator.state["tracker"].tolist() == [1.5, 2]
    expected = {"raw": [[-0.75, -1], [0.75, 1]], "corrected": [[-0.375, -0.5]] * 2}[clip]
    for upload, delta in zip(simulation.step(), expected, strict=True):
        assert upload.vectors["delta"].tolist() == pytest.approx(delta, abs=1e-6)


def test_clipping_where_the_algorithm_says() -> None:
    """`clip()` at the yield is clip="before", for the personal part of the gradient too: no step exceeds the bound."""
    steps: dict[str, list[Tensor]] = {"before": [], "none": []}
    for how, taken in steps.items():
        tables = {"personal": PersonalSettings(parts=["4.*"])}
        simulation = Simulation(settings(optimizer="sgd", clip_norm=0.1).model_copy(update=tables), task=Tiny())
        work, before = simulation.work("2"), simulation.model.whole.clone()
        for _ in work.steps(clip=how, after=lambda: taken.append(simulation.model.whole - before)):  # noqa: B023
            if how == "none":
                work.clip()
    assert all(map(torch.equal, *steps.values()))
    assert float(steps["none"][0].norm()) == pytest.approx(0.1 * 0.1, rel=1e-4)


# --- what the local optimizer gets


class Small(Task):
    """Two square matrices and two biases in float64: SOAP's bases are unique. Each client holds one example, which is
    five inputs at once, so that no order of examples matters; all the same one if they are `alike`."""

    dtype = torch.float64

    def __init__(self, clients: int = 4, alike: bool = False) -> None:
        self.clients, self.alike = clients, alike

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()

    def names(self) -> list[str]:
        return [str(i) for i in range(self.clients)]

    def client(self, name: str, file: str | None = None) -> ClientData:
        source = torch.Generator().manual_seed(0 if self.alike else int(name))
        inputs, targets = torch.randn(2, 1, 5, 3, generator=source, dtype=torch.float64)
        return ClientData(Examples(inputs, targets), Examples(inputs, targets), 3)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": self.loss(model, batch).item() * len(batch[1])}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "adam": {"optimizer": "adam", "bias_correction": False},
    "adamw": {"optimizer": "adamw", "bias_correction": True, "weight_decay": 0.1},
    "amsgrad": {"optimizer": "amsgrad", "bias_correction": True},
    "normalized": {"optimizer": "normalized"},
    "soap": {"optimizer": "soap"},
    "muon": {"optimizer": "muon", "aux_lr": 0.05},
}


def small(strategy: str, optimizer: str, task: Task, **given: Any) -> Simulation:
    """A run on such a task; `keep`: moments are kept. Further keywords are hyperparameters."""
    local = {"lr": 0.02, **OPTIMIZERS[optimizer], "moments": "keep" if given.pop("keep", False) else "reset"}
    values = {"task": {"name": "tests.support.tiny:task"}, "strategy": {"name": strategy, **given}, "local": local}
    return Simulation(Experiment.model_validate(values), task=task)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", BOTH)
def test_every_local_optimizer(strategy: str, optimizer: str) -> None:
    """Three steps against autograd and the bare optimizer: FA-GC feeds it g + c and remembers the mean of g; FA-NT
    feeds it g, reads d from its step away from 0, moves by -lr (d + c) and remembers the mean of d. That includes what
    Adam does for the biases beside muon and soap."""
    simulation = small(strategy, optimizer, Small(), refresh=1.0)
    task, local = simulation.task, simulation.experiment.local
    c = torch.randn(simulation.x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    simulation.coordinator.state["tracker"] = c
    simulation.coordinator.assigned = {"0": {"refresh": 1.0}}
    upload = simulation.train("0")

    model = build(task, 0)
    batch, total, moved = task.client("0").train.batch(torch.tensor([0])), 0.0, torch.zeros_like(c)
    target = model.vector if strategy == "fagc" else moved
    bare_settings = local if strategy == "fagc" else local.model_copy(update={"weight_decay": 0.0})
    bare = LocalOptimizer(bare_settings, target, model.gradient, local.lr, matrix_slots(task, model, "all"))
    for _ in range(3):
        model.gradient.zero_()
        task.loss(model.module, batch).backward()
        if strategy == "fagc":
            total = total + model.gradient
            model.gradient.add_(c)
            bare.step()
        else:
            moved.zero_()
            bare.step()
            direction = moved / -local.lr
            total = total + direction
            model.vector.mul_(1 - local.lr * local.weight_decay).add_(direction + c, alpha=-local.lr)
    assert apart(upload.vectors["tracker"], total / 3) < 1e-12
    assert apart(upload.vectors["delta"], model.vector - simulation.x) < 1e-12
    assert torch.equal(simulation.versions["0", 1, 1]["tracker"], upload.vectors["tracker"])


@pytest.mark.parametrize("keep", [False, True], ids=["reset", "keep"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", BOTH)
def test_identical_clients_have_nothing_to_correct(strategy: str, optimizer: str, keep: bool) -> None:
    """y = y_i but for the rounding of y + (y_i^+ - y_i): FedAvg with that local optimizer, so LocalAdam with Adam."""
    if optimizer == "sgd" and keep:
        optimizer = "momentum"
    task = Small(alike=True)
    same = small("fedavg", optimizer, task, keep=keep).path(4)
    run = small(strategy, optimizer, task, keep=keep, refresh=1.0)
    assert apart(run.path(4), same) < 1e-12
    assert run.coordinator.state["tracker"].abs().max() > 1e-3


@pytest.mark.parametrize("moments", ["reset", "keep"])
@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fagc_with_sgd_is_scaffold(tmp_path: Path, weights: str, momentum: float, moments: str) -> None:
    """If all refresh: the same operations, so the same bits, in trackers and uploads too; 3 of 6 clients a round."""
    local = {"optimizer": "sgd", "lr": 0.05, "momentum": momentum, "moments": moments if momentum else "reset"}
    given: dict[str, Any] = {"local": local, "weights": weights, "round": {"sample": 3}}
    scaffold = Simulation(experiment(tmp_path, "scaffold", **given))
    fagc = Simulation(experiment(tmp_path, "fagc", refresh=1.0, **given))
    for _ in range(12):
        controls = {upload.name: upload.vectors["control"] for upload in scaffold.step()}
        trackers = {upload.name: upload.vectors["tracker"] for upload in fagc.step()}
        assert torch.equal(fagc.x, scaffold.x)
        assert torch.equal(fagc.coordinator.state["tracker"], scaffold.coordinator.state["control"])
        assert controls.keys() == trackers.keys()
        assert all(torch.equal(controls[name], trackers[name]) for name in controls)


def test_both_weigh_as_scaffold_does(tmp_path: Path) -> None:
    """Uniformly unless they are told."""
    for strategy in (*BOTH, "scaffold"):
        assert settled(experiment(tmp_path, strategy))[0].weights == "uniform"


@pytest.mark.parametrize("refresh", [0.5, 1.0])
def test_with_sgd_directions_are_gradients(tmp_path: Path, refresh: float) -> None:
    """d = g, so FA-NT is FA-GC."""
    given: dict[str, Any] = {"refresh": refresh, "local": SGD | {"lr": 0.05}, "round": {"sample": 3}}
    runs = [Simulation(experiment(tmp_path, strategy, **given)) for strategy in BOTH]
    assert apart(*[run.path(12) for run in runs]) < 1e-12


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("strategy", BOTH)
def test_one_step_each_is_gradient_descent(tmp_path: Path, strategy: str, weights: str) -> None:
    """All take part, all refresh, plain SGD, one step: the corrections sum to zero, x <- x - eta grad sum_i q_i f_i."""
    given: dict[str, Any] = {"arrays": {"steps": np.ones(6, int)}, "refresh": 1.0, "weights": weights}
    simulation = Simulation(experiment(tmp_path, strategy, local=SGD | {"lr": 0.1}, **given))
    for round in range(20):
        gradients = CURVATURES * (simulation.x - CENTERS)
        expected = simulation.x - 0.1 * (SHARES[weights][:, None] * gradients).sum(0)
        own = torch.stack([tracker(simulation, name) for name in simulation.members])
        assert round == 0 or apart(simulation.coordinator.state["tracker"] - own, torch.zeros(())) > 0.5
        assert apart(simulation.run(1), expected) < 1e-12


# --- y = sum_i q_i y_i


def imbalance(simulation: Simulation, owed: bool = False) -> float:
    """|y - sum_i q_i y_i| over all known clients; `owed`: less what compression has not sent yet."""
    known, uniform = simulation.coordinator.known, simulation.strategy.weights == "uniform"
    total = torch.zeros_like(simulation.x)
    for name, examples in known.items():
        own = tracker(simulation, name)
        if owed:
            own = own - simulation.memory(name).get("residual.tracker", torch.zeros_like(own))
        total += own * (1 / len(known) if uniform else examples / sum(known.values()))
    return apart(simulation.coordinator.state["tracker"], total)


@pytest.mark.parametrize("weights", ["uniform", "data"])
@pytest.mark.parametrize("strategy", BOTH)
def test_y_is_the_mean_of_all_trackers(tmp_path: Path, strategy: str, weights: str) -> None:
    """3 sampled, 2 of them refresh, one reply in three lost, two clients join late: after every round. One who does not
    refresh, or whose reply is lost, has its old y_i to the bit."""
    given: dict[str, Any] = {"weights": weights, "local": {"lr": 0.05}, "round": {"sample": 3}}
    simulation, chance = Simulation(experiment(tmp_path, strategy, **given), list("0123")), random.Random(1)
    seen: Counter[str] = Counter()
    for round in range(60):
        if round in (10, 20):
            simulation.join("5" if round == 10 else "4")
            assert imbalance(simulation) < 1e-12
        before = {name: tracker(simulation, name) for name in "012345"}
        uploads = simulation.step(lost=chance.sample(sorted(simulation.members), 2))
        refreshed = {upload.name for upload in uploads if "tracker" in upload.vectors}
        assert refreshed == simulation.coordinator.assigned.keys() & {upload.name for upload in uploads}
        assert len(simulation.coordinator.assigned) == 2
        for name in "012345":
            assert torch.equal(tracker(simulation, name), before[name]) == (name not in refreshed)
        seen.update(refreshed)
        seen["kept"] += len(uploads) - len(refreshed)
        seen["nobody"] += not refreshed
        assert imbalance(simulation) < 1e-12
        assert simulation.coordinator.state["tracker"].abs().max() > 0.01 or not seen.keys() & set("012345")
    assert min(seen[name] for name in (*"012345", "kept", "nobody")) > 0


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("more", [{}, {"decay": 0.5}, {"feedback": "ef21"}], ids=["ef14", "decay", "ef21"])
def test_compression_owes_y_what_it_has_not_sent(tmp_path: Path, strategy: str, more: dict[str, Any]) -> None:
    """Changes of trackers take ef14 without decay, so y = sum_i q_i (y_i - e_i); e_i also survives the rounds in which
    its client does not refresh."""
    given: dict[str, Any] = {"local": {"lr": 0.05}, "round": {"sample": 3}}
    compression = {"up": "top-k", "ratio": 0.3, **more}
    simulation = Simulation(experiment(tmp_path, strategy, compression=compression, **given))
    largest = 0.0
    for round in range(40):
        simulation.step(lost=[simulation.sampled[0]] if round % 4 == 3 else [])
        assert imbalance(simulation, owed=True) < 1e-12
        largest = max(largest, imbalance(simulation))
    assert largest > 0.01


@pytest.mark.parametrize("optimizer", [SGD | {"weight_decay": 0.5}, {"weight_decay": 0.5}, {"optimizer": "adamw"}])
def test_trackers_hold_neither_decay_nor_proximal_term(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """y_i^+ is the mean of a (w - e) over the models w of the steps, computed from them."""
    local = {"lr": 0.05, "proximal_mu": 0.7, **optimizer}
    simulation = Simulation(experiment(tmp_path, "fagc", local=local, refresh=1.0))
    for _ in range(3):
        seen = {}
        for name in simulation.members:
            work, models = simulation.work(name), []
            work.assigned = {"refresh": 1.0}
            simulation.strategy.local(Spy(work, models))
            gradients = CURVATURES[int(name)] * (torch.stack(models) - CENTERS[int(name)])
            seen[name] = gradients.mean(0)
        simulation.step()
        assert all(apart(tracker(simulation, name), seen[name]) < 1e-12 for name in seen)


class Spy:
    """A client's work that also records the local model before each step."""

    def __init__(self, work: Any, models: list[Tensor]) -> None:
        self.work, self.models = work, models

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def steps(self, **given: Any) -> Iterator[Tensor]:
        for gradient in self.work.steps(**given):
            self.models.append(self.work.vector.clone())
            yield gradient


def test_decoupled_decay_is_outside_fants_directions(tmp_path: Path) -> None:
    """AdamW's first direction without bias correction is sign g = -1 for "0", with any decay."""
    local = {"optimizer": "adamw", "bias_correction": False, "weight_decay": 0.5, **ADAM}
    simulation = Simulation(experiment(tmp_path, "fant", arrays=ARRAYS, refresh=1.0, local=local))
    simulation.run(1)
    assert tracker(simulation, "0").item() == -1


# --- who refreshes


def test_the_draw_depends_on_seed_round_and_names_only(tmp_path: Path) -> None:
    """A uniform half, rounded up: of 4 clients each is drawn in half of the rounds, each pair in a sixth."""
    draw = drawn("fagc", 3, "badc")
    assert [draw(round) for round in range(9)] == [drawn("fant", 3, "dcba")(round) for round in range(9)]
    assert [draw(round) for round in range(9)] != [drawn("fagc", 4, "badc")(round) for round in range(9)]
    pairs = Counter("".join(draw(round)) for round in range(1200))
    assert len(pairs) == 6
    assert all(150 < count < 250 for count in pairs.values())  # 200 each, standard deviation 13


@pytest.mark.parametrize(
    ("share", "clients", "count"),
    [(0.5, 10, 5), (0.5, 3, 2), (0.5, 1, 1), (1.0, 7, 7), (1e-9, 5, 1), (0.07, 100, 7), (0.1, 30, 3)],
)
def test_how_many_refresh(share: float, clients: int, count: int) -> None:
    """The ceiling of the written share: 0.07 * 100 is above 7 in floats."""
    names = [str(i) for i in range(clients)]
    each = REGISTRY["fagc"].cls(refresh=share)
    assert len(each.assign({}, names, 1, 0)) == count


def test_the_draw_is_the_runs(tmp_path: Path) -> None:
    """Nothing is written out for it. A run folder of before 0.4 holds the run's seed as a setting of its own and means
    the same; another seed cannot be had."""
    strategy, whole = settled(experiment(tmp_path, "fagc", seed=8))
    assert "refresh_seed" not in whole.strategy.options
    assert settled(experiment(tmp_path, "fagc", seed=8, refresh_seed=8)) == (strategy, whole)
    for name in BOTH:
        with pytest.raises(SettingsError, match=rf"strategy.refresh_seed = 2: '{name}' has no such hyperparameter"):
            settled(experiment(tmp_path, name, seed=8, refresh_seed=2))


def test_only_who_refreshes_is_expected_to_send_a_tracker() -> None:
    both: dict[str, Kind] = {"delta": "vector", "tracker": "increment"}
    for strategy in BOTH:
        each = REGISTRY[strategy].cls()
        assert (each.expects({"refresh": 1.0}), each.expects({})) == (both, {"delta": "vector"})


# --- where they rest


def distance(folder: Path, strategy: str, rounds: int, sample: int, lr: float) -> float:
    """Mean distance to the minimizer over the last 30 of some rounds with five local steps each."""
    given: dict[str, Any] = {"arrays": {"steps": np.full(6, 5)}, "local": {"lr": lr}, "round": {"sample": sample}}
    simulation = Simulation(experiment(folder, strategy, **given))
    simulation.run(rounds - 30)
    minimizer = torch.from_numpy(simulation.task.minimizer("uniform"))  # type: ignore[attr-defined]
    return float((simulation.path(30) - minimizer).norm(dim=1).mean())


@pytest.mark.parametrize("sample", [6, 3])
def test_fagc_rests_near_the_minimizer(tmp_path: Path, sample: int) -> None:
    """Six heterogeneous quadratics, Adam with rate 0.04, half of the cohort refreshed. Measured: LocalAdam 1.11 (with
    3 clients a round 1.23), FA-NT 1.17 (1.06), FA-GC 0.067 (0.083), which is of the order of its steps."""
    far = [distance(tmp_path, strategy, 130, sample, 0.04) for strategy in ("localadam", "fant")]
    assert min(far) > 0.8
    assert distance(tmp_path, "fagc", 130, sample, 0.04) < 0.15


def test_fagcs_distance_falls_with_the_rate(tmp_path: Path) -> None:
    """Measured: 0.067 at rate 0.04, 0.026 at half of it."""
    assert distance(tmp_path, "fagc", 200, 6, 0.02) < 0.04


# --- what crosses the wire


class Counting(FaultyGrid):
    """Counts the vectors of TRAIN messages and replies, and their bytes, by round."""

    def __init__(self, **given: Any) -> None:
        super().__init__(self._reply, **given)
        self.vectors: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    def _count(self, round: int, message: Message) -> None:
        arrays = message.content.array_records[STATE].values()
        self.vectors[round] += len(arrays)
        self.bytes[round] += sum(len(array.data) for array in arrays)

    def _reply(self, name: str, round: int, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            self._count(round, reply)
        return reply

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "train":
                self._count(int(message.metadata.group_id), message)
        return super().push_messages(messages)


TEN = {"task": {"sizes": [4] * 10}, "evaluate": {"clients": "none"}}


@pytest.mark.parametrize(
    ("strategy", "options", "vectors"),
    [
        ("fagc", {}, 35),
        ("fant", {}, 35),
        ("fagc", {"refresh": 1.0}, 40),
        ("fagc", {"refresh": 0.1}, 31),
        ("localadam", {}, 20),
        ("scaffold", {}, 40),
    ],
)
def test_vectors_a_round(tmp_path: Path, strategy: str, options: dict[str, Any], vectors: int) -> None:
    """3 S + S~ with S = 10, counted in the messages of three rounds; 14 numbers of 4 bytes each."""
    grid, settings = Counting(), hyper(toy(strategy, **TEN), **options)
    run = ran(tmp_path, settings, grid)
    assert grid.vectors == dict.fromkeys([1, 2, 3], vectors)
    assert grid.bytes == dict.fromkeys([1, 2, 3], vectors * 14 * 4)
    assert run.history[-1]["accepted"] == sorted(str(i) for i in range(10))
    simulation = Simulation(experiment(tmp_path, strategy, arrays=problem(10), **options))
    for _ in range(3):
        down = len(simulation.strategy.broadcast(simulation.coordinator.state))
        assert sum(down + len(upload.vectors) for upload in simulation.step()) == vectors


def hyper(settings: Experiment, **options: Any) -> Experiment:
    """The same experiment with hyperparameters."""
    named = {"strategy": {"name": settings.strategy.name, **settings.strategy.options, **options}}
    return Experiment.model_validate({**settings.model_dump(exclude_unset=True), **named})


def test_a_reply_that_is_not_as_assigned_costs_its_client_the_round(tmp_path: Path) -> None:
    """A tracker from one who does not refresh, none from one who does."""
    chosen = drawn("fagc", 0, "01234")(2)
    with_it, without = chosen[0], next(name for name in "01234" if name not in chosen)

    def lie(name: str, round: int, reply: Message) -> Message:
        if (name, round) in ((with_it, 2), (without, 2)):
            arrays = reply.content.array_records[STATE]
            if name == with_it:
                del arrays["tracker"]
            else:
                arrays["tracker"] = wire.to_array(torch.ones(14))
        return reply

    run = ran(tmp_path, toy("fagc"), FaultyGrid(lie))
    assert run.dropped(2) == {
        with_it: "layout: upload ['delta'], expected ['delta', 'tracker']",
        without: "layout: upload ['delta', 'tracker'], expected ['delta']",
    }
    assert run.history[1]["generation"] == run.history[2]["generation"] == 1
    assert run.dropped(3) == {}


def test_every_home_of_memory_holds_a_client_that_never_refreshed(tmp_path: Path) -> None:
    """It keeps nothing, which is not a lost memory: one of five refreshes a round."""
    settings = hyper(toy("fagc", rounds=4), refresh=0.2)
    runs = [
        ran(tmp_path / str(i), settings, FaultyGrid(memory=memory))
        for i, memory in enumerate(("ram", str(tmp_path / "memory"), ""))
    ]
    assert all(run.final == runs[0].final for run in runs)
    assert [(line["generation"], line["dropped"]) for line in runs[0].history] == [(1, {})] * 4


@pytest.mark.parametrize("strategy", BOTH)
def test_a_lost_disk_starts_a_new_generation(strategy: str, tmp_path: Path) -> None:
    """y is made of all y_i: client 4 lost its own after round 2, so round 3 is tried again with y = 0 and no y_i."""
    memory = tmp_path / "memory"

    def lie(name: str, round: int, reply: Message) -> Message:
        if (name, round) == ("4", 2):
            shutil.rmtree(next(memory.glob("*/4")))
        return reply

    run = ran(tmp_path / "run", toy(strategy), FaultyGrid(lie, memory=str(memory)))
    assert [line["generation"] for line in run.history] == [1, 1, 2]
    assert [len(line["void"]) for line in run.history] == [0, 0, 1]


# --- moments


def test_moments_may_be_kept(tmp_path: Path) -> None:
    """Another path than with fresh ones; stopped and resumed it is the same, bit for bit."""
    local = {"optimizer": "adam", "lr": 2e-3, "batch_size": 64}
    settings = digits("fagc", 6, local={**local, "moments": "keep"})
    straight = ran(tmp_path / "straight", settings, on_disk(tmp_path / "straight"))
    stopped(tmp_path / "run", settings, 3)
    alike(ran(tmp_path / "run", settings, on_disk(tmp_path / "run"), resume=True), straight)
    reset = ran(tmp_path / "reset", digits("fagc", 6, local=local))
    assert reset.history[0]["sha256"] == straight.history[0]["sha256"]
    assert reset.history[-1]["sha256"] != straight.history[-1]["sha256"]


# --- LocalAdam, and the defaults


def test_localadam_is_fedavg_with_fagcs_adam(tmp_path: Path) -> None:
    """The same local settings and weighting, so that only the correction differs; no other optimizer."""
    local = {"optimizer": "adam", "lr": 1e-3, "bias_correction": False, "betas": [0.9, 0.99]}
    plain = Simulation(experiment(tmp_path, "fedavg", weights="uniform", local=local, round={"sample": 3}))
    named = Simulation(experiment(tmp_path, "localadam", round={"sample": 3}))
    assert torch.equal(named.path(5), plain.path(5))
    tables = {settled(experiment(tmp_path, name))[1].local.model_dump_json() for name in ("localadam", *BOTH)}
    assert len(tables) == 1
    with pytest.raises(SettingsError, match=r"'sgd' contradicts strategy.name = 'localadam'"):
        settled(experiment(tmp_path, "localadam", local=SGD))[0]


@pytest.mark.parametrize("strategy", BOTH)
def test_other_optimizers_have_their_own_defaults(tmp_path: Path, strategy: str) -> None:
    """Adam's rate and missing bias correction are no defaults for them."""
    local = settled(experiment(tmp_path, strategy, local=SGD))[1].local
    assert (local.lr, local.bias_correction) == (0.1, True)
    local = settled(experiment(tmp_path, strategy, local={"lr": 0.5}))[1].local
    assert (local.optimizer, local.lr, local.bias_correction) == ("adam", 0.5, False)


@pytest.mark.parametrize(
    ("strategy", "given", "text"),
    [
        ("fagc", {"refresh": 0.0}, r"strategy.refresh = 0.0: Input should be greater than 0"),
        ("fant", {"refresh": 1.5}, r"strategy.refresh = 1.5: Input should be less than or equal to 1"),
        ("fagc", {"refresh_seed": 1}, r"strategy.refresh_seed = 1: 'fagc' has no such hyperparameter"),
        ("fagc", {"clip": "before"}, r"strategy.clip = 'before': Input should be 'raw' or 'corrected'"),
        ("fagc", {"tracker": "end"}, r"strategy.tracker = 'end': Input should be 'path' or 'start'"),
        ("fant", {"clip": "raw"}, r"'fant' has no such hyperparameter; allowed: weights, refresh$"),
        ("fant", {"tracker": "start"}, r"'fant' has no such hyperparameter"),
        (
            "fant",
            {"compression": {"up": "top-k", "feedback": "none"}},
            r"compression.up = 'top-k' with compression.feedback = 'none' loses .* strategy.name = 'fant' adds up",
        ),
    ],
)
def test_refusals(tmp_path: Path, strategy: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        settled(experiment(tmp_path, strategy, **given))[0]


def test_lossless_compression_may_do_without_feedback(tmp_path: Path) -> None:
    assert settled(experiment(tmp_path, "fagc", compression={"up": "identity", "feedback": "none"}))[0]


# --- matrices


class LoRA(nn.Module):
    """y = (W + B A) x with frozen W (5, 6), A (2, 6) and B (5, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5, bias=False).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 6) / 2)
        self.up = nn.Parameter(torch.zeros(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return y


class Adapted(Small):
    """Each client's targets are those of another W."""

    dtype = torch.float32

    def model(self) -> nn.Module:
        return LoRA()

    def client(self, name: str, file: str | None = None) -> ClientData:
        source = torch.Generator().manual_seed(int(name))
        inputs, weight = torch.randn(1, 20, 6, generator=source), torch.randn(5, 6, generator=source)
        return ClientData(Examples(inputs, inputs @ weight.T), Examples(inputs, inputs @ weight.T), 3)


def test_lora_factors_are_matrices() -> None:
    """Both, and nothing is left for Adam. B's first step is lr times a matrix of singular values in Muon's band, A's is
    0, as B = 0 lets no gradient through; then both train and the frozen W stays. Clients part with their W."""
    simulation = small("fagc", "muon", Adapted())
    slots = matrix_slots(simulation.task, simulation.model, "all")
    assert [slot.shape for slot in slots] == [(2, 6), (5, 2)]
    module, task = simulation.model.module, simulation.task
    frozen, start = module.base.weight.clone(), simulation.x
    work = simulation.work("0")
    steps = work.steps()
    next(steps)
    next(steps, None)
    moved = [slot.view(work.vector - start) for slot in slots]
    assert not moved[0].any()
    assert all(0.3 < value < 1.6 for value in torch.linalg.svdvals(moved[1]) / work.lr)
    losses = []
    for _ in range(30):
        simulation.step()
        simulation.model.load(simulation.x, {})
        batches = [task.client(name).train.batch(torch.tensor([0])) for name in task.names()]
        losses.append(sum(float(task.loss(module, batch).detach()) for batch in batches))
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(module.base.weight, frozen)
    assert simulation.coordinator.state["tracker"].abs().max() > 1e-3


LEARNS = {
    "muon": {"optimizer": "muon", "lr": 0.02, "aux_lr": 0.005},
    "soap": {"optimizer": "soap", "lr": 0.005},
    "normalized": {"optimizer": "normalized", "lr": 0.05},
    "amsgrad": {"optimizer": "amsgrad", "lr": 0.003, "bias_correction": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", LEARNS)
@pytest.mark.parametrize("strategy", BOTH)
def test_it_learns_digits(tmp_path: Path, strategy: str, optimizer: str) -> None:
    """Ten rounds of six clients with unequal labels, three a round. Measured accuracy (muon, soap, normalized,
    amsgrad): FA-GC 0.94, 0.94, 0.84, 0.88, FA-NT 0.83, 0.78, 0.67, 0.78."""
    local = {"batch_size": 32, "epochs": 2, **LEARNS[optimizer]}
    run = ran(tmp_path, digits(strategy, 10, local=local, task={"hidden": 32}))
    assert run.history[-1]["central"]["accuracy"] > {"fagc": 0.8, "fant": 0.6}[strategy]
