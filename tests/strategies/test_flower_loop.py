"""Flower's own loop, `strategy.start(grid, arrays, ...)`: the weights of `rounds/loop.py`, and as hard to break."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import Result

from client.app import app
from client.memory.versions import DiskMemory
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.vector import sha256
from server.engines.inprocess import InProcessGrid
from server.rounds.prepare import prepare
from strategies.protocol import wire
from strategies.protocol.messages import METRICS
from strategies.registry import REGISTRY, config_of, settled
from tests.server.rounds.test_resume import digits
from tests.support.faults import FaultyGrid, fail, head, lies, put, ran, toy


def arrays(settings: Experiment) -> ArrayRecord:
    """The run's initial weights and buffers."""
    model = prepare(settings).model
    return wire.to_records({"model": model.vector, **model.buffers})


def start(settings: Experiment, grid: InProcessGrid | None = None, rounds: int = 3) -> Result:
    """As a user of Flower would call it."""
    strategy, config = settled(settings)[0], config_of(settings)
    return strategy.start(grid or InProcessGrid(app), arrays(settings), num_rounds=rounds, train_config=config)


def weights(result: Result) -> str:
    """As the history's sha256."""
    return sha256(wire.from_records(result.arrays))


def silent(reply: Message) -> None:
    del reply.content[METRICS]


@pytest.mark.parametrize("sampled", [None, 3], ids=["all", "sampled"])
@pytest.mark.parametrize("algorithm", REGISTRY)
def test_the_weights_are_those_of_our_loop(algorithm: str, sampled: int | None, tmp_path: Path) -> None:
    """Every algorithm, with BatchNorm, a counter and a mask; all five clients a round, and three of them."""
    settings = toy(algorithm, round={"sample": sampled} if sampled else {})
    assert weights(start(settings)) == ran(tmp_path, settings).history[-1]["sha256"]


def test_the_order_of_arrival_changes_no_bit() -> None:
    """1e30 + 1 - 1e30 is 0 or 1 even in float64, by the order; Flower's own strategies sum as replies arrive."""
    values = {"0": 1e30, "1": 1.0, "2": -1e30}

    def lie(name: str, round: int, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            put(lambda v: torch.full_like(v, values[name]))(reply)
        return reply

    settings = toy(task={"sizes": [4, 4, 4]})
    orders: list[Callable[[list[Message]], list[Message]]] = [list, lambda replies: replies[::-1]]
    orders.append(lambda replies: replies[1:] + replies[:1])
    # Flower's `send_and_receive` of this grid answers one by one: the order is that of the messages.
    found = set()
    for order in orders:

        class Shuffled(FaultyGrid):
            def send_and_receive(self, messages: Any, *, timeout: float | None = None, order: Any = order) -> Any:
                return order(list(super().send_and_receive(messages, timeout=timeout)))

        found.add(weights(start(settings, Shuffled(lie), rounds=1)))
    assert len(found) == 1


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_on_digits_and_with_metrics(algorithm: str, tmp_path: Path) -> None:
    """Training loss and the clients' metrics, weighted by examples, are those of our history."""
    settings = digits(algorithm, 3, evaluate={"clients": "all"})
    result, ours = start(settings), ran(tmp_path, settings).history
    assert weights(result) == ours[-1]["sha256"]
    for number, line in enumerate(ours, 1):
        assert result.train_metrics_clientapp[number]["clients"] == 3
        assert result.train_metrics_clientapp[number]["loss"] == pytest.approx(line["train"]["loss"]["weighted"])
        for key in ("loss", "accuracy"):
            got = result.evaluate_metrics_clientapp[number][key]
            assert got == pytest.approx(line["clients"][key]["weighted"])


@pytest.mark.parametrize(
    "change",
    [
        fail,
        head(examples=0),
        head(client="nobody"),
        head(client="0"),
        put(lambda v: v * math.nan),
        silent,
        lambda reply: Message(content=RecordDict(), metadata=reply.metadata),
    ],
    ids=["lost", "no examples", "unknown name", "another's name", "NaN", "no metrics", "nothing"],
)
def test_a_bad_reply_is_dropped(change: Callable[[Message], Any], tmp_path: Path) -> None:
    """As in our loop: the round is made of the other four, and the run goes on."""
    settings = toy("scaffold")
    lost = ran(tmp_path, settings, FaultyGrid(lies("4", fail)))
    assert weights(start(settings, FaultyGrid(lies("4", change)))) == lost.history[-1]["sha256"]


def test_a_doubled_reply_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flower's loop passes on whatever the grid returns."""
    settings = toy("scaffold")
    assert weights(start(settings, FaultyGrid(copies=2))) == ran(tmp_path, settings).history[-1]["sha256"]
    assert "dropped: mismatch: a reply to no message of this round, or a second one" in capsys.readouterr().out


@pytest.mark.parametrize("change", [fail, put(lambda v: torch.full_like(v, 3e38))], ids=["lost", "overflow"])
def test_a_round_without_a_valid_aggregate_leaves_the_model(change: Callable[[Message], Any]) -> None:
    """Flower goes on with the arrays it has; the next round moves again."""
    settings = toy("scaffold", server={"lr": 3.0})

    def lie(name: str, round: int, reply: Message) -> Message:
        return change(reply) or reply if round == 2 and reply.metadata.message_type == "train" else reply

    before, after = start(settings, rounds=1), start(settings, FaultyGrid(lie), rounds=2)
    assert sorted(after.train_metrics_clientapp) == [1]
    assert weights(before) == weights(after)
    assert sorted(start(settings, FaultyGrid(lie)).train_metrics_clientapp) == [1, 3]


def test_lost_memory_starts_a_new_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SCAFFOLD: the round of the loss changes nothing, the next one starts with all controls at zero."""
    memory = tmp_path / "memory"

    def lie(name: str, round: int, reply: Message) -> Message:
        if name == "4" and round == 2 and reply.metadata.message_type == "evaluate":
            shutil.rmtree(next(memory.glob("*/4")))
        return reply

    result = start(toy("scaffold"), FaultyGrid(lie, memory=str(memory)), rounds=4)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 4]
    assert "dropped: memory-lost" in capsys.readouterr().out


def test_clients_keep_no_more_than_they_need(tmp_path: Path) -> None:
    """Without checkpoints of the server, the accepted version and the new one."""
    start(toy("scaffold"), FaultyGrid(memory=str(tmp_path)), rounds=8)
    for place in tmp_path.glob("*/*/1"):
        assert sorted(path.stem for path in place.iterdir()) == ["000000007", "000000008"]
    assert DiskMemory(tmp_path).load("experiment", "4", 1, 8) is not None


@pytest.mark.parametrize("examples", [0, -2, 3])
def test_evaluation_counts_only_what_was_asked(examples: int) -> None:
    """A client that claims other numbers of examples is left out; if all do, there are no metrics."""

    def lie(name: str, round: int, reply: Message) -> Message:
        if name in names and reply.metadata.message_type == "evaluate":
            head(examples=examples)(reply)
        return reply

    names = {"1"}
    assert "loss" in start(toy(), FaultyGrid(lie), rounds=1).evaluate_metrics_clientapp[1]
    names = set("01234")
    assert start(toy(), FaultyGrid(lie), rounds=1).evaluate_metrics_clientapp == {}


def test_what_start_needs_is_told() -> None:
    """The experiment in `train_config`, nodes that fit and have names of their own, and at least one of them."""
    settings = toy()
    with pytest.raises(RunError, match=r"start\(...\) needs train_config=config_of\(experiment\)"):
        settled(settings)[0].start(InProcessGrid(app), arrays(settings), num_rounds=1)
    with pytest.raises(SettingsError, match="holds a model with layout 0000"):
        start(settings, FaultyGrid(lies("", head(layout="0000"), round=0)))
    grid = FaultyGrid()
    grid.nodes = lambda: [2, 7]
    with pytest.raises(SettingsError, match="client '0' is here twice, on nodes 2 and 7"):
        start(settings, grid)
    grid.nodes = list
    with pytest.raises(RunError, match="no client answered the roll call"):
        start(settings, grid)
