"""Compression of what clients send, through messages, memory and checkpoints, with every algorithm."""

from __future__ import annotations

import shutil
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from common.errors import SettingsError
from common.experiment import Experiment
from strategies.protocol.messages import STATE
from strategies.registry import REGISTRY, settled
from tests.server.rounds.test_resume import alike, digits, grid, stopped
from tests.support.faults import FaultyGrid, fail, lies, put, ran, toy
from tests.support.helpers import Simulation, experiment, problem
from tests.support.today import cells

ADDED_UP = {"scaffold", "scaffoldm", "padamfed", "fednovavr", "feddyn", "fagc", "fant", "fedsplit"}
"""Algorithms that send an "increment"."""

LOSSY = ("top-k", "random-k", "sign", "int8", "bfloat16", "float16")
CELLS = [(algorithm, up) for algorithm in REGISTRY for up in LOSSY]


def squeezed(strategy: str, up: str, **given: Any) -> Experiment:
    """The toy task with `[compression] up`; further compression settings as keywords of `more`."""
    more = given.pop("more", {})
    return toy(strategy, compression={"up": up, "ratio": 0.3, **more}, **given)


@pytest.mark.parametrize("sampled", [None, 3], ids=["all", "sampled"])
@pytest.mark.parametrize("algorithm", REGISTRY)
def test_identity_is_the_uncompressed_run(algorithm: str, sampled: int | None, tmp_path: Path) -> None:
    """Bit for bit, for every algorithm and everything that it sends."""
    given = {"round": {"sample": sampled} if sampled else {}}
    plain = ran(tmp_path / "plain", toy(algorithm, compression={"up": "none"}, **given))
    same = ran(tmp_path / "identity", squeezed(algorithm, "identity", **given))
    assert [line["sha256"] for line in same.history] == [line["sha256"] for line in plain.history]


@pytest.mark.parametrize("feedback", ["ef14", "ef21", "none"])
@pytest.mark.parametrize("up", LOSSY)
def test_bytes_are_those_of_what_was_sent(up: str, feedback: str, tmp_path: Path) -> None:
    """14 numbers in four tensors; k = ceil(0.3 * 14) = 5. EF21 sends all of it the first time."""
    sizes: dict[int, int] = {}

    def lie(name: str, round: int, reply: Message) -> Message:
        if name == "0":
            arrays = reply.content.array_records[STATE]
            sizes[round] = sum(len(array.data) for array in arrays.values())
        return reply

    run = ran(tmp_path, squeezed("fedavg", up, more={"feedback": feedback}), FaultyGrid(lie))
    later = {"top-k": 5 * 8, "random-k": 5 * 4, "sign": 2 + 16, "int8": 14 + 16, "bfloat16": 28, "float16": 28}[up]
    assert sizes == {1: 56 if feedback == "ef21" else later, 2: later, 3: later}
    plain = ran(tmp_path / "plain", toy("fedavg"))
    saved = [a["bytes_up"] - b["bytes_up"] for a, b in zip(plain.history, run.history, strict=True)]
    assert saved[1:] == [5 * (56 - later)] * 2


@pytest.mark.parametrize(
    "cell", cells([(up, way) for up in LOSSY for way in ("ef14", "ef21")], 3, 12, "minimizer", name="-".join)
)
def test_scaffold_still_reaches_the_minimizer(cell: tuple[str, str], tmp_path: Path) -> None:
    """Full participation on three quadratics: what is left behind arrives later, so that SCAFFOLD's deltas and changes
    of control go to zero as without compression; and what compressors lose shrinks with what they are given."""
    up, feedback = cell
    compression = {"up": up, "ratio": 0.5, "feedback": feedback}
    server = {"lr": 0.3} if up in ("sign", "random-k") else {}
    run = Simulation(
        experiment(tmp_path, "scaffold", arrays=problem(3), local={"lr": 0.05}, compression=compression, server=server)
    )
    target = run.task.minimizer("uniform")  # type: ignore[attr-defined]
    start = run.distance(target)
    run.run(300)
    assert run.distance(target) < 1e-3 * start


def test_without_feedback_what_is_left_behind_is_lost(tmp_path: Path) -> None:
    """The same top-k without memory rests elsewhere."""
    given: dict[str, Any] = {"weights": "uniform", "local": {"lr": 0.05}}
    rest = Simulation(experiment(tmp_path, "fedavg", **given)).rest(tolerance=1e-13).x
    compression = {"up": "top-k", "ratio": 0.2, "feedback": "none"}
    run = Simulation(experiment(tmp_path, "fedavg", compression=compression, **given))
    run.run(200)
    assert run.distance(rest) > 0.05


def test_the_sum_of_what_was_sent_is_the_sum_of_what_was_meant(tmp_path: Path) -> None:
    """SCAFFOLD's c = mean of the c_i - e_i: each client's part of the server's control is behind by its residual."""
    compression = {"up": "top-k", "ratio": 0.3}
    run = Simulation(experiment(tmp_path, "scaffold", local={"lr": 0.05}, round={"sample": 3}, compression=compression))
    for round in range(30):
        run.step(lost=[run.sampled[0]] if round % 4 == 3 else [])
        parts = [run.memory(name) for name in run.members]
        zero = torch.zeros_like(run.x)
        owed = [m.get("control", zero) - m.get("residual.control", zero) for m in parts]
        assert torch.allclose(run.coordinator.state["control"], torch.stack(owed).mean(0), atol=1e-12)


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
@pytest.mark.parametrize("up", ["top-k", "random-k", "int8"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "hafedho"])
def test_a_resumed_run_is_straight(algorithm: str, up: str, feedback: str, tmp_path: Path) -> None:
    """Residuals lie in acknowledged versions, the server's copies in checkpoints."""
    settings = digits(algorithm, 6, compression={"up": up, "ratio": 0.05, "feedback": feedback})
    straight = ran(tmp_path / "straight", settings, grid(tmp_path / "straight"))
    stopped(tmp_path / "run", settings, 3)
    alike(ran(tmp_path / "run", settings, grid(tmp_path / "run"), resume=True), straight)


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
def test_a_lost_reply_is_as_if_it_had_not_been_made(feedback: str, tmp_path: Path) -> None:
    """Three rounds of which one client's second reply is lost: its residual (copy) of round 1 stays, on both sides."""
    settings = squeezed("fedavg", "top-k", rounds=4, more={"feedback": feedback})
    run = ran(tmp_path / "a", settings, FaultyGrid(lies("2", fail), memory=str(tmp_path / "memory")))
    assert run.dropped(2) == {"2": "offline: gone"}
    assert [line["generation"] for line in run.history] == [1] * 4
    again = ran(tmp_path / "b", settings, FaultyGrid(lies("2", fail)))
    assert run.final == again.final


@pytest.mark.parametrize(("feedback", "generations"), [("ef14", [1, 1, 1, 1]), ("ef21", [1, 1, 2, 2])])
def test_a_lost_disk(feedback: str, generations: list[int], tmp_path: Path) -> None:
    """A residual is the client's own affair and starts from zero; EF21's copies are bound to the server's."""
    memory = tmp_path / "memory"

    def lie(name: str, round: int, reply: Message) -> Message:
        if (name, round) == ("4", 2):
            shutil.rmtree(next(memory.glob("*/4")))
        return reply

    settings = squeezed("fedavg", "top-k", rounds=4, more={"feedback": feedback})
    run = ran(tmp_path / "run", settings, FaultyGrid(lie, memory=str(memory)))
    assert [line["generation"] for line in run.history] == generations


LIES = {
    "an index twice": put(lambda v: torch.full_like(v, int(v[0])), "delta/indices"),
    "an index too large": put(lambda v: v + 14, "delta/indices"),
    "another number of values": put(lambda v: v[:-1], "delta/values"),
    "NaN": put(lambda v: v * float("nan"), "delta/values"),
    "another dtype": put(lambda v: v.double(), "delta/values"),
    "a part missing": lambda reply: reply.content.array_records[STATE].pop("delta/indices"),
    "sent whole": put(lambda v: torch.zeros(14), "delta/values"),
}


@pytest.mark.parametrize("lie", LIES)
def test_malformed_parts_cost_their_client_the_round(lie: str, tmp_path: Path) -> None:
    """And nothing else; the reason says what is wrong."""

    def told(reply: Message) -> None:
        LIES[lie](reply)

    run = ran(tmp_path, squeezed("fedavg", "top-k"), FaultyGrid(lies("1", told)))
    assert run.history[1]["accepted"] == ["0", "2", "3", "4"]
    assert run.dropped(2)["1"].startswith("layout: delta: ")
    assert run.history[1]["causes"] == {"1": "invalid"}


def test_the_norm_is_that_of_what_arrives(tmp_path: Path) -> None:
    """round.max_upload_norm bounds the decoded vector."""
    run = ran(
        tmp_path,
        squeezed("fedavg", "int8", round={"max_upload_norm": 1.0}),
        FaultyGrid(lies("1", put(lambda v: v * 1e6, "delta/scales"))),
    )
    assert run.dropped(2)["1"].startswith("norm: delta has norm")


@pytest.mark.parametrize("cell", cells(CELLS, 1, 6, "uplink", name="-".join, key=itemgetter(0)))
def test_every_algorithm_runs_compressed(cell: tuple[str, str], tmp_path: Path) -> None:
    """Everything that each of them sends, with a client sampled now and then; and the same in a second run."""
    algorithm, up = cell
    settings = squeezed(algorithm, up, rounds=4, round={"sample": 3})
    if up in ("top-k", "random-k", "sign"):
        assert settled(settings)[0].memory_kind(settings) != "none"
    first = ran(tmp_path / "a", settings, FaultyGrid(memory=str(tmp_path / "memory")))
    again = ran(tmp_path / "b", settings)
    assert not any(line["dropped"] for line in first.history)
    assert first.final == again.final


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_what_is_added_up_for_ever_needs_feedback(algorithm: str) -> None:
    """A tracker whose changes lose a part in each round would drift: refused, for exactly those that have one."""
    settings = squeezed(algorithm, "top-k", more={"feedback": "none"})
    if algorithm not in ADDED_UP:
        assert settled(settings)[0]
        return
    with pytest.raises(SettingsError, match=rf"feedback = 'none' loses .* strategy.name = '{algorithm}' adds up"):
        settled(settings)[0]
