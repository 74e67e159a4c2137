"""Mime and MimeLite: rounds by hand, what they reduce to, and a round of two exchanges under faults."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment, StrategySettings
from common.vector import sha256
from server.engines.grid import grid
from server.rounds.exchange import Exchange
from server.rounds.roster import Roster
from strategies.mime import Mime
from strategies.protocol import acceptance
from strategies.protocol.messages import METRICS, STATE
from strategies.registry import settled
from tests.server.rounds.test_resume import alike, digits, stopped
from tests.server.rounds.test_resume import grid as on_disk
from tests.strategies.test_flower_loop import start, weights
from tests.strategies.test_one_round import ARRAYS
from tests.strategies.test_reductions import EQUAL, LR, apart, models
from tests.support.faults import FaultyGrid, Lie, Ran, fail, head, put, ran, run, toy
from tests.support.helpers import Simulation, experiment
from tests.support.tiny import Tiny, simulate

CLIENTS = {"A": (1.0, 2.0, 1), "B": (2.0, -1.0, 2)}  # curvature, center, steps, as in test_one_round
BASES: list[dict[str, Any]] = [
    {},
    {"damped": False},
    {"base": "adam"},
    {"base": "adam", "bias_correction": True},
    {"base": "adam", "denominator": "frozen", "eps": 1.0},
]


def gradient(client: str, y: float) -> float:
    a, e, _ = CLIENTS[client]
    return a * (y - e)


def mime(options: dict[str, Any], **tables: Any) -> Experiment:
    """Five clients with BatchNorm, with hyperparameters."""
    return toy("mime", **tables).model_copy(update={"strategy": StrategySettings(name="mime", **options)})


# --- rounds by hand


def test_one_round_of_mime(tmp_path: Path) -> None:
    """beta1 = 1/2, uniform. Round 1, x = 1: G = -1, 4, c = 1.5, m = 0: U = (h + c)/2 with h = g(y) - g(x).
    A: 0.75, Delta = -0.1875. B: h = 0: y = 1 - 0.1875; h = -0.375: 0.5625, Delta = -0.328125. x = 0.7421875,
    m = 0.75. MimeLite: A: -0.5, Delta = 0.125; B: 2, y = 0.5; g = 3: 1.5, Delta = -0.875; x = 0.625, m = 0.75."""
    local = {"lr": 0.25}
    mime = Simulation(experiment(tmp_path, "mime", arrays=ARRAYS, local=local, beta1=0.5))
    lite = Simulation(experiment(tmp_path, "mimelite", arrays=ARRAYS, local=local, beta1=0.5))
    x = {"mime": 1.0, "lite": 1.0}
    m = {"mime": 0.0, "lite": 0.0}
    for _ in range(3):
        for name, simulation in (("mime", mime), ("lite", lite)):
            start_, s = x[name], m[name]
            c = (gradient("A", start_) + gradient("B", start_)) / 2
            moved = 0.0
            for client, (_, _, steps) in CLIENTS.items():
                y = start_
                for _ in range(steps):
                    g = gradient(client, y)
                    if name == "mime":
                        g += c - gradient(client, start_)
                    y -= 0.25 * (s / 2 + g / 2)
                moved += (y - start_) / 2
            x[name], m[name] = start_ + moved, s / 2 + c / 2
            simulation.step()
            assert simulation.x.item() == x[name]
            assert simulation.coordinator.state["momentum"].item() == m[name]
        if mime.coordinator.round == 1:
            assert (x, m) == ({"mime": 0.7421875, "lite": 0.625}, {"mime": 0.75, "lite": 0.75})


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("strategy", ["mime", "mimelite"])
def test_three_rounds_of_every_base(tmp_path: Path, strategy: str, base: dict[str, Any]) -> None:
    """Against the equations in plain floats, data-weighted (1/4, 3/4): s is frozen in a round, V takes the mean G at
    the old x, and Adam's counter counts rounds."""
    b1, b2, eps = 0.75, 0.5, base.get("eps", 1e-8)
    new = 1.0 if base.get("damped") is False else 1 - b1
    x, m, v = 1.0, 0.0, 0.0
    given = {"arrays": ARRAYS, "local": {"lr": 0.25}, "weights": "data", "beta1": b1, "beta2": b2}
    simulation = Simulation(experiment(tmp_path, strategy, **given, **base))

    def direction(g: float, t: int) -> float:
        first = b1 * m + new * g
        if "base" not in base:
            return first
        second = v if "denominator" in base else b2 * v + (1 - b2) * g * g
        if "bias_correction" in base:
            first, second = first / (1 - b1**t), second / (1 - b2**t)
        return first / (math.sqrt(second) + eps)

    for t in (1, 2, 3):
        share = {"A": 0.25, "B": 0.75}
        c = sum(share[client] * gradient(client, x) for client in CLIENTS)
        moved = 0.0
        for client, (_, _, steps) in CLIENTS.items():
            y = x
            for _ in range(steps):
                g = gradient(client, y) + (c - gradient(client, x) if strategy == "mime" else 0.0)
                y -= 0.25 * direction(g, t)
            moved += share[client] * (y - x)
        x, m, v = x + moved, b1 * m + new * c, b2 * v + (1 - b2) * c * c
        simulation.step()
        state = simulation.coordinator.state
        assert simulation.x.item() == pytest.approx(x, rel=1e-14)
        assert state["momentum"].item() == pytest.approx(m, rel=1e-14)
        if "base" in base:
            assert state["square"].item() == pytest.approx(v, rel=1e-14)
            assert state["rounds"].item() == t
        else:
            assert set(state) == {"model", "momentum"}


# --- reductions and fixed points

ONE = {"arrays": {"steps": np.ones(6, dtype=int)}}


def test_one_local_step_is_centralized_momentum(tmp_path: Path) -> None:
    """x - eta U(c, m): undamped FedAvgM's v <- beta v + D with D = -eta c; damped with eta (1 - beta) in place of eta.
    MimeLite too: its U is affine in g."""
    same = models(tmp_path, "fedavgm", **ONE, weights="uniform")
    for strategy in ("mime", "mimelite"):
        assert apart(models(tmp_path, strategy, **ONE, damped=False), same) < 1e-12
        damped = models(tmp_path, strategy, **ONE, local={"lr": LR / (1 - 0.9)})
        assert apart(damped, same) < 1e-12
    assert apart(same, models(tmp_path, "fedavg", **ONE, weights="uniform")) > 0.1


@pytest.mark.parametrize("correct", [True, False])
def test_one_local_step_is_centralized_adam(tmp_path: Path, correct: bool) -> None:
    """One client that holds the mean of all quadratics and keeps its local Adam from round to round; MimeLite's mean
    of U(g_i) is another thing."""
    plain = Simulation(experiment(tmp_path, "fedavg"))
    a, e = plain.task.arrays["curvatures"], plain.task.arrays["centers"]
    mean = {"curvatures": a.mean(0, keepdims=True), "centers": (a * e).mean(0, keepdims=True) / a.mean(0)}
    alone = {**mean, "steps": np.ones(1, dtype=int), "examples": np.ones(1, dtype=int)}
    adam = {"optimizer": "adam", "lr": LR, "moments": "keep", "bias_correction": correct}
    central = Simulation(experiment(tmp_path, "fedavg", arrays=alone, local=adam)).path(20)
    given = {**ONE, "base": "adam", "bias_correction": correct, "local": {"lr": LR}}
    assert apart(Simulation(experiment(tmp_path, "mime", **given)).path(20), central) < 1e-12
    assert apart(Simulation(experiment(tmp_path, "mimelite", **given)).path(20), central) > 1e-3


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_without_momentum(tmp_path: Path, weights: str) -> None:
    """beta1 = 0: MimeLite is FedAvg. Mime is SVRG, which on equal curvatures is gradient descent on the mean, whatever
    the client: h = a (y - x) with the same a for all."""
    same = models(tmp_path, "fedavg", weights=weights)
    assert apart(models(tmp_path, "mimelite", weights=weights, beta1=0.0), same) < 1e-12
    alike = {"curvatures": np.full((6, 5), 1.25), **EQUAL}
    run = Simulation(experiment(tmp_path, "mime", weights=weights, beta1=0.0, arrays=alike, local={"lr": LR}))
    minimizer = torch.from_numpy(run.task.minimizer(weights))
    for t, x in enumerate(run.path(6), start=1):
        assert torch.allclose(x, minimizer * (1 - (1 - 1.25 * LR) ** (5 * t)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_mime_rests_at_the_minimizer(tmp_path: Path, weights: str) -> None:
    """There c = 0 and m -> 0, and the corrected gradient g_i(y) - g_i(x) + c is 0 at y = x: no client moves, however
    many steps it takes. MimeLite rests elsewhere."""
    given = {"weights": weights, "local": {"lr": 0.05}, "beta1": 0.5}
    run = Simulation(experiment(tmp_path, "mime", **given))
    run.run(110)
    assert run.distance(run.task.minimizer(weights)) < 1e-12
    assert float(run.coordinator.state["momentum"].abs().max()) < 1e-12
    lite = Simulation(experiment(tmp_path, "mimelite", **given))
    lite.run(40)
    assert float((lite.x - lite.run(1)).abs().max()) < 1e-6
    assert lite.distance(lite.task.minimizer(weights)) > 0.1


# --- what a client does


def test_gradients_are_taken_at_the_server_model_on_all_examples_in_evaluation_mode() -> None:
    """G_i over unequal batches is that of one batch of all; BatchNorm neither moves nor depends on the batch; it is
    uploaded as it was before training."""
    uploads = {}
    for size in (2, 8):
        lite = simulate(Tiny(dropout=0.5), "mimelite", batch_size=size)
        work = lite.work("2")
        before = {name: value.clone() for name, value in work.buffers.items()}
        uploads[size] = work.upload(gradient=work.full_gradient())
        assert all(torch.equal(value, before[name]) for name, value in work.buffers.items())
    assert torch.allclose(uploads[2].vectors["gradient"], uploads[8].vectors["gradient"], rtol=1e-5, atol=1e-7)
    module, batch = lite.model.module.eval(), lite.data["2"].train.batch(torch.arange(8))
    loss = lite.task.loss(module, batch)
    own = torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])
    sent = simulate(Tiny(dropout=0.5), "mimelite").train("2").vectors["gradient"]
    assert torch.allclose(torch.cat([part.reshape(-1) for part in own]), sent, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("base", BASES, ids=str)
def test_at_the_server_model_the_corrected_gradient_is_c(base: dict[str, Any]) -> None:
    """The first step of every client is U(c, s), to the bit, although batches, dropout masks and clipping differ: both
    gradients are taken on the same ones."""
    run = Simulation(mime(base, local={"lr": 0.5, "steps": 1, "clip_norm": 0.1}))
    run.run(2)
    first = [upload.vectors["delta"] for upload in run.step()]
    assert all(torch.allclose(delta, first[0], rtol=1e-6, atol=1e-8) for delta in first)
    tiny = simulate(Tiny(sizes=(5, 7), dropout=0.5), "mime", steps=1, clip_norm=0.01)
    assert torch.equal(*(upload.vectors["delta"] for upload in tiny.step()))


def test_clipping_bounds_raw_gradients_only(tmp_path: Path) -> None:
    """beta1 = 1/2: A: g = -1 -> -1/2; U = -1/4 + m/2. G_i and m are not clipped. Mime: both gradients of B are 1/2 in
    size as long as they are above it, so h = 0 and U = c."""
    arrays, local = ARRAYS | {"steps": [1, 1]}, {"lr": 0.25, "clip_norm": 0.5}
    lite = Simulation(experiment(tmp_path, "mimelite", arrays=arrays, local=local, beta1=0.5))
    deltas = [upload.vectors["delta"].item() for upload in lite.step()]
    assert deltas == pytest.approx([1 / 16, -1 / 16], abs=1e-6)  # the bound is reached up to 1e-6
    assert lite.coordinator.state["momentum"].item() == 0.75
    arrays = ARRAYS | {"steps": [2, 2]}
    mime = Simulation(experiment(tmp_path, "mime", arrays=arrays, local=local, beta1=0.0))
    deltas = [upload.vectors["delta"].item() for upload in mime.step()]
    assert deltas == pytest.approx([-0.75, -0.75], abs=1e-6)


def test_vectors_on_the_wire(tmp_path: Path) -> None:
    """MimeLite: 2 + 2. Mime: 1 + 1 and 2 + 1, with Adam 4 + 1; d = 5."""
    for strategy, base, down, up in (
        ("mimelite", "sgdm", 2, 2),
        ("mimelite", "adam", 3, 2),
        ("mime", "sgdm", 3, 2),
        ("mime", "adam", 5, 2),
    ):
        run = Simulation(experiment(tmp_path, strategy, base=base))
        sent = [run.received("0")]
        if run.strategy.survey:
            first = [run.train(name, "survey") for name in run.members]
            assert {key for upload in first for key in upload.vectors} == {"gradient"}
            run.informed = run.coordinator.inform(1, first)
            sent.append(run.received("0"))
        assert sum(value.ndim for each in sent for value in each.values()) == down
        assert len(run.strategy.survey) + len(run.strategy.payload) == up
    assert set(run.step() and run.coordinator.state) == {"model", "momentum", "square", "rounds"}


ADAMS = "strategy.bias_correction and strategy.denominator belong to base 'adam', not to 'sgdm'"


@pytest.mark.parametrize(
    ("options", "local", "words"),
    [
        ({}, {"optimizer": "adam", "lr": 0.01}, "strategy.name = 'mime' has no meaning with local.optimizer = 'adam'"),
        ({}, {"momentum": 0.9}, "'mime' has no meaning with local.momentum = 0.9: .*; set strategy.beta1"),
        ({}, {"sam_rho": 0.1}, "'mime' has no meaning with local.sam_rho = 0.1: .*; use 'mimelite'"),
        ({"base": "adam", "damped": False}, {}, "strategy.damped = false belongs to base 'sgdm', not to 'adam'"),
        (
            {"bias_correction": True},
            {},
            "strategy.bias_correction and strategy.denominator belong to base 'adam', not to 'sgdm'",
        ),
        (
            {"denominator": "frozen"},
            {},
            "strategy.bias_correction and strategy.denominator belong to base 'adam', not to 'sgdm'",
        ),
        (
            {"base": "adam", "bias_correction": True, "denominator": "frozen"},
            {},
            "bias_correction has no meaning with denominator 'frozen'",
        ),
    ],
)
def test_refusals(options: dict[str, Any], local: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settled(mime(options, local=local))[0]
    assert settled(toy("mimelite", local={"sam_rho": 0.1}))[0]


# --- two exchanges in one round, through messages


def in_exchange(number: int, client: str, change: Callable[[Message], Any], round: int = 2) -> Lie:
    """Change a client's reply to the first or second exchange of a round."""
    seen: dict[tuple[str, int], int] = {}

    def lie(name: str, now: int, reply: Message) -> Message:
        if reply.metadata.message_type != "train":
            return reply
        seen[name, now] = seen.get((name, now), 0) + 1
        return change(reply) or reply if (name, now, seen[name, now]) == (client, round, number) else reply

    return lie


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return ran(tmp_path_factory.mktemp("clean"), toy("mime")).final


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ran]:
    """Client 2's reply is lost in the first or the second exchange of round 2."""
    folder = tmp_path_factory.mktemp("without")
    return {n: ran(folder / str(n), toy("mime"), FaultyGrid(in_exchange(n, "2", fail))) for n in (1, 2)}


def test_the_loop_is_the_driver_of_these_tests(tmp_path: Path, clean: dict[str, bytes]) -> None:
    settings = toy("mime", round={"sample": 3})
    driver = Simulation(settings)
    driver.run(3)
    expected = sha256({"model": driver.x, **driver.coordinator.buffers})
    assert ran(tmp_path, settings).history[-1]["sha256"] == expected == weights(start(settings))


def test_messages_of_a_round(tmp_path: Path) -> None:
    """Every client is asked twice a round, and the bytes of both exchanges count: 3 vectors down for MimeLite's 2."""
    grid = FaultyGrid()
    one, lite = ran(tmp_path / "a", toy("mime", rounds=1), grid), ran(tmp_path / "b", toy("mimelite", rounds=1))
    assert grid.asked == [(name, 1) for name in "01234"] * 2
    line = one.history[0]
    assert line["steps"] == lite.history[0]["steps"]
    assert line["bytes_down"] > lite.history[0]["bytes_down"] * 1.4
    assert set(line["train"]) == {"loss"}


@pytest.mark.parametrize("number", [1, 2])
def test_a_reply_that_is_lost(number: int, without: dict[int, Ran], clean: dict[str, bytes]) -> None:
    """In the first exchange: that client is not asked again, c is that of the others. In the second: it has its part in
    c and m, and none in the model."""
    result = without[number]
    assert result.dropped(2) == {"2": "offline: gone"}
    assert result.history[1]["sampled"] == list("01234")
    assert result.history[1]["accepted"] == list("0134")
    assert [line["void"] for line in result.history] == [[], [], []]
    assert result.final != clean
    moments = [result.at(2).state["momentum"], without[3 - number].at(2).state["momentum"]]
    assert not torch.equal(*moments)


def silent(reply: Message) -> None:
    del reply.content[METRICS]


def nothing(reply: Message) -> None:
    del reply.content[STATE]


def twice(reply: Message) -> None:
    reply.content[STATE]["delta"] = reply.content[STATE]["gradient"]


FALSE: dict[str, tuple[Callable[[Message], Any], str]] = {
    "NaN": (put(lambda v: v * math.nan, "gradient"), "not finite: gradient holds NaN or Inf"),
    "short": (put(lambda v: v[:-1], "gradient"), "layout: gradient is torch.float32 "),
    "double": (put(lambda v: v.double(), "gradient"), "layout: gradient is torch.float64 "),
    "further group": (twice, "layout: upload ['delta', 'gradient'], expected ['gradient']"),
    "no state": (nothing, "layout: upload [], expected ['gradient']"),
    "no metrics": (silent, "not finite: training loss nan"),
    "too many examples": (head(examples=11), "examples: 11 not in 1..4"),
    "another round": (head(round=1), "mismatch: expected run"),
    "another's name": (head(client="1"), "mismatch: expected run"),
    "another rate": (head(lr=0.5), "mismatch: local rate 0.5, expected 0.2"),
    "an error": (head(status="error", reason="no disk"), "failed: no disk"),
    "empty": (head(status="empty"), "empty"),
}


@pytest.mark.parametrize("what", FALSE)
def test_a_false_reply_in_the_first_exchange_is_as_none(what: str, tmp_path: Path, without: dict[int, Ran]) -> None:
    """With its reason in the history; the rest of the round is made without that client."""
    change, reason = FALSE[what]
    result = ran(tmp_path, toy("mime"), FaultyGrid(in_exchange(1, "2", change)))
    assert result.dropped(2)["2"].startswith(reason)
    assert result.final == without[1].final


def test_a_first_reply_in_the_second_exchange_is_refused(tmp_path: Path, without: dict[int, Ran]) -> None:
    """And the other way round: each exchange has its own payload."""

    def swap(reply: Message) -> None:
        sent = reply.content[STATE]
        sent["gradient"] = sent["delta"]
        del sent["delta"]

    result = ran(tmp_path, toy("mime"), FaultyGrid(in_exchange(2, "2", swap)))
    assert result.dropped(2)["2"] == "layout: upload ['gradient'], expected ['delta']"
    assert result.final == without[2].final


@pytest.mark.parametrize("number", [1, 2])
def test_a_try_below_quorum_is_void_in_either_exchange(number: int, tmp_path: Path, clean: dict[str, bytes]) -> None:
    """The next try starts with its first exchange and ends where a run without the fault does."""
    lies_ = [in_exchange(number, name, fail) for name in "13"]
    grid = FaultyGrid(lambda name, now, reply: lies_[1](name, now, lies_[0](name, now, reply)))
    result = ran(tmp_path, toy("mime", round={"quorum": 4}), grid)
    (void,) = result.history[1]["void"]
    assert void["cause"] == "3 valid uploads, quorum 4 (1: offline: gone; 3: offline: gone)"
    assert result.final == clean
    asked = [name for name, round in grid.asked if round == 2]
    assert len(asked) == 5 + (5 if number == 2 else 0) + 10


def test_an_aggregate_that_is_not_finite_voids_the_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what the first exchange told: statistics neither."""
    monkeypatch.setattr(acceptance, "largest", lambda dtype: math.inf)  # no upload that is taken gets this far
    lies_ = [in_exchange(2, name, put(lambda v: torch.full_like(v, 3e38))) for name in "01234"]

    def lie(name: str, now: int, reply: Message) -> Message:
        for each in lies_:
            reply = each(name, now, reply)
        return reply

    settings = toy("mime", server={"lr": 4.0})
    result = ran(tmp_path / "run", settings, FaultyGrid(lie))
    assert [void["cause"] for void in result.history[1]["void"]] == ["the aggregate of round 2 is not finite"]
    assert result.final == ran(tmp_path / "plain", settings).final


def test_a_first_exchange_that_is_not_finite_voids_the_try(
    tmp_path: Path, clean: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any aggregate: rolled back and tried again."""
    tries: list[int] = []
    inform = Mime.inform

    def broken(self: Mime, state: dict[str, Tensor], uploads: Any) -> dict[str, Tensor]:
        tries.append(len(uploads))
        after = inform(self, state, uploads)
        return after | {"gradient": after["gradient"] / 0} if len(tries) == 2 else after

    monkeypatch.setattr(Mime, "inform", broken)
    result = ran(tmp_path, toy("mime"))
    assert [void["cause"] for void in result.history[1]["void"]] == ["the first exchange of round 2 is not finite"]
    assert result.final == clean


def test_over_selection_and_lateness_in_both_exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five are asked for four: whoever does not answer first is late and not asked again. One that is silent costs half
    of the round's deadline, which is the first exchange's, and leaves the second the rest."""
    grid = FaultyGrid(held=lambda name, round, now: (name, round) == ("1", 2))
    result = ran(tmp_path, toy("mime", round={"sample": 4, "over_select": 1, "deadline_s": 5.0}), grid)
    assert result.dropped(2) == {"1": "late"}
    assert result.history[1]["accepted"] == list("0234")
    assert [name for name, round in grid.asked if round == 2] == list("01234") + list("0234")
    limits: list[float] = []
    exchange = Exchange.run

    def timed(self: Exchange, messages: Any, deadline_s: float, *more: Any) -> Any:
        if any(message.metadata.message_type == "train" for message in messages.values()):
            limits.append(deadline_s)
        return exchange(self, messages, deadline_s, *more)

    monkeypatch.setattr(Exchange, "run", timed)
    slow = FaultyGrid(held=lambda name, round, now: (name, round) == ("1", 2))
    result = ran(tmp_path / "slow", toy("mime", round={"deadline_s": 0.4}), slow)
    assert result.dropped(2) == {"1": "timed out"}
    assert result.history[1]["accepted"] == list("0234")
    assert limits[::2] == [0.2] * 3
    assert all(0 < limit <= 0.4 for limit in limits[1::2])
    assert limits[3] <= 0.2
    assert 0.2 <= result.history[1]["seconds"]["collect"] < 1.5


def test_whoever_misses_the_first_exchange_is_overdue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is free for the node that takes its place, also after a void try."""
    told: list[list[str]] = []
    monkeypatch.setattr(Roster, "overdue", lambda self, names: told.append(list(names)))
    held = {"1", "2", "3"}
    grid = FaultyGrid(held=lambda name, round, now: round == 1 and name in held)
    result = run(tmp_path, toy("mime", round={"deadline_s": 0.3, "max_void": 1}), grid)
    assert "2 valid uploads, quorum 3" in str(result.error)
    assert told == [["1", "2", "3"]]


@pytest.mark.parametrize("strategy", ["mime", "mimelite"])
def test_a_new_generation_keeps_the_statistics(strategy: str, tmp_path: Path) -> None:
    """They are the server's own, as its model is."""
    run = Simulation(experiment(tmp_path, strategy, base="adam"))
    run.run(2)
    before = dict(run.coordinator.state)
    run.coordinator.new_generation()
    assert run.coordinator.state.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in run.coordinator.state.items())


@pytest.mark.parametrize("base", [{}, {"base": "adam", "bias_correction": True}], ids=str)
def test_resumed_is_straight(base: dict[str, Any], tmp_path: Path) -> None:
    """Statistics and counter are in the checkpoint; c is no part of it."""
    settings = mime(base, rounds=6, round={"sample": 3})
    straight = ran(tmp_path / "straight", settings, on_disk(tmp_path / "straight"))
    stopped(tmp_path / "run", settings, 3)
    alike(ran(tmp_path / "run", settings, on_disk(tmp_path / "run"), resume=True), straight)
    assert "gradient" not in straight.checkpoint.state


# --- compression of both exchanges


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
@pytest.mark.parametrize("strategy", ["mime", "mimelite"])
def test_what_compression_remembers_of_both_exchanges(strategy: str, feedback: str, tmp_path: Path) -> None:
    """EF14 keeps e for G_i and Delta_i alike: over the rounds of a client, sent = true - e. EF21 keeps copies on both
    sides. Through messages as in the driver."""
    squeeze = {"up": "top-k", "ratio": 0.3, "feedback": feedback}
    settings = toy(strategy, compression=squeeze, rounds=5, round={"sample": 3})
    driver = Simulation(settings)
    true: dict[str, Tensor] = {}
    sent: dict[str, Tensor] = {}
    look = driver.codec.encode

    def spy(vectors: dict[str, Tensor], kinds: Any, memory: Any, seed: Any) -> Any:
        for group, vector in vectors.items():
            now[group] = vector.clone()
        return look(vectors, kinds, memory, seed)

    driver.codec.encode = spy  # type: ignore[method-assign]
    now: dict[str, Tensor] = {}
    train = driver.train

    def trained(name: str, phase: str = "") -> Any:
        upload = train(name, phase)
        if name == "1":
            for group, vector in upload.vectors.items():
                sent[group] = sent.get(group, 0) + vector
                true[group] = true.get(group, 0) + now[group]
        return upload

    driver.train = trained  # type: ignore[method-assign]
    driver.run(5)
    memory, kind = driver.memory("1"), "residual" if feedback == "ef14" else "copy"
    assert set(memory) == {f"{kind}.delta", f"{kind}.gradient"}
    if feedback == "ef14":
        for group in ("delta", "gradient"):
            assert torch.allclose(sent[group], true[group] - memory[f"residual.{group}"], rtol=1e-5, atol=1e-6)
            assert float(memory[f"residual.{group}"].abs().max()) > 1e-3
    else:
        for name in "01234":
            copies = {
                key.partition("/")[2]: value for key, value in driver.coordinator.copies.items() if key[0] == name
            }
            assert copies.keys() == driver.memory(name).keys()
            assert all(torch.equal(value, driver.memory(name)[key]) for key, value in copies.items())
    result = ran(tmp_path, settings, on_disk(tmp_path))
    assert result.history[-1]["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})
    assert weights(start(settings, rounds=5)) == result.history[-1]["sha256"]


def test_a_residual_counts_once_the_second_reply_is_accepted(tmp_path: Path) -> None:
    """A client whose second reply is lost sends from its old residuals again."""
    settings = toy("mime", compression={"up": "top-k", "ratio": 0.3}, rounds=2)
    driver = Simulation(settings)
    driver.step()
    before = {name: value.clone() for name, value in driver.memory("2").items()}
    driver.step(lost="2")
    assert all(torch.equal(value, before[name]) for name, value in driver.memory("2").items())
    grid = FaultyGrid(in_exchange(2, "2", fail))
    assert ran(tmp_path, settings, grid).history[-1]["sha256"] == sha256(
        {"model": driver.x, **driver.coordinator.buffers}
    )


@pytest.mark.parametrize("down", ["top-k", "int8"])
def test_both_ways_compressed(down: str, tmp_path: Path) -> None:
    """The model that the second exchange builds upon is the one of the first; resumed is straight."""
    squeeze = {"up": "top-k", "down": down, "ratio": 0.3}
    settings = toy("mime", compression=squeeze, rounds=6, round={"sample": 3})
    straight = ran(tmp_path / "straight", settings, on_disk(tmp_path / "straight"))
    assert not any(line["dropped"] for line in straight.history)
    stopped(tmp_path / "run", settings, 3)
    alike(ran(tmp_path / "run", settings, on_disk(tmp_path / "run"), resume=True), straight)
    driver = Simulation(settings)
    driver.run(6)
    assert straight.history[-1]["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})


def test_copies_lost_with_a_disk_start_a_new_generation(tmp_path: Path) -> None:
    """EF21 binds client memory to the server's copies: told in the first exchange, before anyone trains. Statistics
    stay."""

    def wiped(folder: str) -> FaultyGrid:
        memory = tmp_path / folder
        return FaultyGrid(in_exchange(2, "4", lambda r: shutil.rmtree(next(memory.glob("*/2")))), memory=str(memory))

    settings = toy("mime", compression={"up": "top-k", "ratio": 0.3, "feedback": "ef21"}, rounds=4)
    grid = wiped("ours")
    result = ran(tmp_path / "run", settings, grid)
    (void,) = result.history[2]["void"]
    assert void["cause"] == "client memory of 2 is lost: new generation 2"
    assert [line["generation"] for line in result.history] == [1, 1, 2, 2]
    asked = [name for name, round in grid.asked if round == 3]
    assert len(asked) == 5 + 10
    assert float(result.at(3).state["momentum"].abs().max()) > 0
    flower = start(settings, wiped("flower's"), rounds=4)
    assert sorted(flower.train_metrics_clientapp) == [1, 2, 4]


# --- Flower's loop


@pytest.mark.parametrize("number", [1, 2])
def test_flowers_loop_drops_what_ours_drops(number: int, without: dict[int, Ran]) -> None:
    settings = toy("mime")
    result = start(settings, FaultyGrid(in_exchange(number, "2", fail)))
    assert weights(result) == without[number].history[-1]["sha256"]


def test_flowers_loop_without_a_first_reply_leaves_the_model() -> None:
    """Nobody is asked to train; the next round goes on."""
    lies_ = [in_exchange(1, name, fail) for name in "01234"]

    def lie(name: str, now: int, reply: Message) -> Message:
        for each in lies_:
            reply = each(name, now, reply)
        return reply

    grid = FaultyGrid(lie)
    result = start(toy("mime"), grid)
    assert sorted(result.train_metrics_clientapp) == [1, 3]
    assert [name for name, round in grid.asked if round == 2] == list("01234")


@pytest.mark.slow
def test_two_workers(tmp_path: Path) -> None:
    """A client's two exchanges may run in different processes: it keeps nothing in between."""
    settings = digits("mime", 2, compression={"up": "top-k", "ratio": 0.1})
    with grid("client.app:app", 2) as workers:
        assert ran(tmp_path / "two", settings, workers).final == ran(tmp_path / "one", settings).final
