"""What a client says of its local steps is bounded, for some algorithms divide by it, and FedNova's a_i is no client's
word at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from common.experiment import Experiment
from strategies.fednova import MOST_STEPS
from strategies.protocol import wire
from strategies.protocol.messages import HEAD, STATE
from strategies.registry import REGISTRY
from tests.support.faults import FaultyGrid, Lie, fail, head, lies, ran, toy
from tests.support.helpers import POOLED

SIZES = [6, 10, 4, 8, 12, 6]
LIAR = "3"
"""Holds 8 examples: two batches of four."""
DIVIDING: dict[str, dict[str, Any]] = {
    "fednova": {},
    "fednovavr": {},
    "literal": {"name": "fednova", "vr": "literal"},
    "fedcm": {},
    "scaffoldm": {},
}
"""Those whose server uses the steps of a reply."""
FALSE = [0, -1, 3, 2**40]


def six(name: str, rounds: int) -> Experiment:
    given = toy(name, rounds=rounds, task={"sizes": SIZES})
    if name not in DIVIDING:
        return given
    return given.model_copy(update={"strategy": type(given.strategy)(**{"name": name, **DIVIDING[name]})})


def each_round(*changes: Any) -> Lie:
    """The liar's lies, from round 2 on."""
    told = {round: lies(LIAR, change, round) for round, change in enumerate(changes, 2)}
    return lambda name, round, reply: told[round](name, round, reply) if round in told else reply


def adding(value: float) -> Any:
    """The reply with a_i as clients once sent it."""

    def changed(reply: Message) -> None:
        arrays = reply.content.array_records[STATE]
        arrays["response"] = wire.to_array(torch.tensor(value, dtype=torch.float64))

    return changed


@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - POOLED))
def test_no_reply_tells_of_more_steps_than_there_were(name: str, tmp_path: Path) -> None:
    """None, a negative number, one too many, numbers without bound: refused with the reason, in every algorithm, and
    the run goes on."""
    planned = REGISTRY[name].local.get("steps", 2) * REGISTRY[name].cls.passes
    false = [planned + 1 if steps == 3 else steps for steps in FALSE]
    result = ran(tmp_path, six(name, 1 + len(false)), FaultyGrid(each_round(*(head(steps=s) for s in false))))
    assert result.history[0]["steps"][LIAR] == planned
    for line, steps in zip(result.history[1:], false, strict=True):
        assert line["dropped"] == {LIAR: f"steps: {steps} local steps, asked for {planned} at most"}


@pytest.mark.parametrize("name", DIVIDING)
def test_a_liar_counts_as_one_who_is_gone(name: str, tmp_path: Path) -> None:
    """To the last bit of the server's state, whether it lies about its steps or sends an a_i."""
    told = [*(head(steps=steps) for steps in FALSE), *map(adding, (1e-300, 1e-3, 1e6))]
    result = ran(tmp_path / "a", six(name, 1 + len(told)), FaultyGrid(each_round(*told)))
    assert all("layout: upload" in line["dropped"][LIAR] for line in result.history[1 + len(FALSE) :])
    gone = FaultyGrid(each_round(*[fail] * len(told)))
    assert result.final == ran(tmp_path / "b", six(name, 1 + len(told)), gone).final


@pytest.mark.parametrize("name", DIVIDING)
def test_a_liar_from_the_roll_on_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    """Its roll announces what its replies then say. FedNova, whose server would go through so many steps, drops it; the
    others divide by a large number."""
    said = 2**40

    def lie(client: str, round: int, reply: Message) -> Message:
        settings = reply.content.config_records[HEAD]
        if not client and "names" in settings:
            steps = list(settings["steps"])  # type: ignore[call-overload]
            steps[int(LIAR)] = said
            settings["steps"] = steps
        if client == LIAR:
            settings["steps"] = said
        return reply

    result = ran(tmp_path, six(name, 2), FaultyGrid(lie))
    reason = f"meaningless: {said} local steps, and a_i is computed for {MOST_STEPS} at most"
    expected = {} if name in ("fedcm", "scaffoldm") else {LIAR: reason}
    assert [line["dropped"] for line in result.history] == [expected] * 2
    assert bool(torch.isfinite(result.checkpoint.state["model"]).all())


@pytest.mark.parametrize("speed", [{"kind": "stragglers", "share": 1.0}, {"kind": "uniform", "epochs": [1, 3]}])
@pytest.mark.parametrize("name", ["fedavg", "pfedafm"])
def test_honest_partial_work_is_within_the_bound(name: str, speed: dict[str, Any], tmp_path: Path) -> None:
    """Also where an algorithm goes twice through its steps, and where BatchNorm's last batch of one joins another."""
    given = toy(name, task={"sizes": [5, 9, 1, 4, 13]}, speed=speed)
    assert all(line["dropped"] == {} for line in ran(tmp_path / "a", given).history)
    more = FaultyGrid(lies("1", head(steps=20)))
    assert ran(tmp_path / "b", given, more).dropped(2).keys() == {"1"}
