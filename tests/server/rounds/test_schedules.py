"""Random schedules of faults over four kinds of bound state; each fault alone; and faults that must be noticed."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from client.memory.versions import DiskMemory
from common.experiment import Experiment
from strategies.fagc import FAGC
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.members import sample
from strategies.scaffold import Scaffold
from tests.support.corruption import MESSAGE, REPLY
from tests.support.helpers import experiment
from tests.support.schedules import DEADLINE_S, KINDS, Fault, Schedule, one_of_each, schedules
from tests.support.today import cells
from tests.support.world import World

ALGORITHMS = ["scaffold", "fagc", "hafedho", "feddyn"]
COMPRESSED = ["scaffold ef14", "scaffold ef21", "fagc ef14", "hafedho ef21"]
"""The same with top-k both ways: residuals, the server's copies and what clients hold of the model."""
BLOCKS, IN_A_BLOCK = int(os.environ.get("FEDKEEL_SCHEDULES", "150")) // 10, 10


def settings_of(algorithm: str, schedule: Schedule, folder: Path) -> Experiment:
    """Quadratics in float64, unequal in everything."""
    n, d, rng = schedule.clients, 3, np.random.default_rng(schedule.clients)
    arrays = {
        "centers": rng.normal(0, 3, (n, d)),
        "curvatures": rng.uniform(0.5, 2.0, (n, d)),
        "steps": np.arange(n) % 3 + 1,
        "examples": rng.permutation(np.arange(1, n + 1) * 10),
        "start": np.zeros(d),
    }
    tables: dict[str, Any] = {"rounds": 4, "seed": 1, **schedule.tables}
    algorithm, _, feedback = algorithm.partition(" ")
    if feedback:
        tables["compression"] = {"up": "top-k", "down": "top-k", "ratio": 0.5, "feedback": feedback}
    if algorithm == "feddyn":  # it has no momentum on the server
        tables |= {"alpha": 0.5, "server": {"lr": 0.5 if tables.get("server") == {"optimizer": "momentum"} else 1.0}}
    limits = {"deadline_s": DEADLINE_S, "wait_for": n - schedule.late, **tables.pop("round", {})}
    return experiment(
        folder,
        algorithm,
        arrays=arrays,
        weights=schedule.weights,
        local={"lr": 0.05},
        round=limits,
        evaluate={"clients": "none"},
        **tables,
    )


def survived(algorithm: str, schedule: Schedule) -> World:
    """Run a schedule to its end; every promise is checked on the way."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        return World(place, settings_of(algorithm, schedule, place), schedule).run()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", cells(ALGORITHMS + COMPRESSED, 1, 8, "schedules"))
def test_random_schedules(algorithm: str) -> None:
    """Whatever happens: the run ends, the state fits, and the weights are those of its accepted sets.

    FEDKEEL_SCHEDULES sets how many schedules each algorithm gets, a third of it with compression; always the same.
    """
    counts: Counter[str] = Counter()
    blocks = BLOCKS if algorithm in ALGORITHMS else BLOCKS // 3
    for block in range(blocks):

        @seed(block)
        @settings(
            max_examples=IN_A_BLOCK,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(schedules(one_of_each(f"{algorithm} {block}")))
        def check(schedule: Schedule) -> None:
            counts["schedules"] += 1
            counts.update(survived(algorithm, schedule).counts)

        check()
    print(f"\n{algorithm}: {dict(sorted(counts.items()))}")
    assert counts["schedules"] >= blocks * IN_A_BLOCK
    assert {kind: counts[kind] for kind in KINDS if counts[kind] < blocks} == {}  # each kind really struck


# --- each fault alone, in the third of four rounds with four clients; client "1" is struck

UNUSED = {
    "message dropped": "timed out",
    "message delayed": "timed out",
    "message overtaken": "timed out",
    "message corrupted": "not finite: control holds NaN",
    "reply dropped": "timed out",
    "reply failed": "offline: gone|crashed: gone",
    "reply delayed": "timed out",
    "reply corrupted": "not finite: control holds NaN",
    # Its node is there again within the deadline, or it is gone.
    **dict.fromkeys((kind for kind in KINDS if kind.startswith("killed")), "crashed: its process|offline: gone"),
    "node left": "offline: gone",
}
"""Kinds that cost the client its part in the round, and what the history says of it (a pattern)."""


@pytest.mark.parametrize("how", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_fault(kind: str, how: int) -> None:
    """It strikes once; who is accepted tells what it costs: that client's upload at most."""
    at = 0 if kind == "silent at the roll call" else 3
    world = survived("scaffold", Schedule([Fault(kind, at, 1, how)]))
    assert world.counts[kind] == 1
    lost = kind == "disk wiped" or (kind.startswith("version") and how == 1)  # how = 0: a version not asked for
    assert [line["generation"] for line in world.history] == ([1, 1, 2, 2] if lost else [1] * 4)
    assert [len(line["void"]) for line in world.history] == [0, 0, int(lost), 0]
    dropped = world.history[2]["dropped"]
    assert dropped.keys() == ({"1"} if kind in UNUSED else set())
    assert world.history[2]["accepted"] == [name for name in "0123" if name not in dropped]
    if kind in UNUSED:
        assert re.match(UNUSED[kind], dropped["1"])
    assert world.counts["resumes"] == (kind.startswith("server killed") or kind == "newest checkpoint damaged")


@pytest.mark.parametrize("how", range(len(MESSAGE)), ids=MESSAGE)
def test_a_corrupt_message_is_noticed(how: int) -> None:
    """By the client, or by the server in what comes of it."""
    world = survived("scaffold", Schedule([Fault("message corrupted", 3, 1, how)]))
    assert world.history[2]["accepted"] == ["0", "2", "3"]


@pytest.mark.parametrize("how", range(len(REPLY)), ids=REPLY)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_corrupt_reply_is_noticed(algorithm: str, how: int) -> None:
    """It costs that client the round and nothing else."""
    world = survived(algorithm, Schedule([Fault("reply corrupted", 3, 1, how)]))
    assert world.history[2]["accepted"] == ["0", "2", "3"]


def test_a_message_of_a_void_try_comes_again_after_the_retry() -> None:
    """Both tries make version 3 of client 2, which refreshes its tracker only in the first: the version of the second,
    which was accepted, must stay. (One reply of the first try is lost, so it is void.)"""
    tries = [sample(5, 3, attempt, "0123", 3) for attempt in (0, 1)]
    assert tries == [["0", "1", "2"], ["0", "2", "3"]]
    assert [sorted(FAGC().assign({}, names, 3, 5)) for names in tries] == [["0", "2"], ["0", "3"]]
    void = Fault("reply dropped", 3, 0)
    again = Fault("message doubled late", 3, 2)
    tables = {"seed": 5, "round": {"sample": 3, "quorum": 3}}
    world = survived("fagc", Schedule([void, again], tables=tables))
    assert [len(line["void"]) for line in world.history] == [0, 0, 1, 0]
    assert world.counts["generations"] == 0


# --- what the harness must notice: the protocol with one part left out


def fails(schedule: Schedule, text: str, algorithm: str = "scaffold") -> None:
    with pytest.raises(AssertionError, match=text):
        survived(algorithm, schedule)


@pytest.mark.parametrize("algorithm", ["scaffold", "fagc", "feddyn"])
def test_a_client_that_goes_on_from_its_newest_version_is_noticed(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients do that do not hear whether their upload was used."""

    class Newest(DiskMemory):
        def load(self, run: str, client: str, generation: int, version: int) -> Any:
            held = Path(self._folder).rglob("*.safetensors")
            return super().load(run, client, generation, max(int(path.stem) for path in held))

    schedule = Schedule([Fault("reply dropped", at, who) for at, who in ((2, 0), (2, 1), (3, 2), (3, 3))])
    survived(algorithm, schedule)
    monkeypatch.setattr("client.session.DiskMemory", Newest)
    fails(schedule, "off its clients'|part at", algorithm)


def test_a_client_that_keeps_too_little_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the version accepted last, while an older checkpoint may still ask for the one before."""
    save = DiskMemory.save

    def forgetful(
        memory: DiskMemory, run: str, client: str, generation: int, version: int, state: Any, keep: Any, *more: Any
    ) -> None:
        save(memory, run, client, generation, version, state, [max(keep, default=0)], *more)

    monkeypatch.setattr(DiskMemory, "save", forgetful)
    fails(Schedule(), "dropped version")


def test_a_server_that_acknowledges_what_it_did_not_use_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone who was asked counts as accepted."""
    advance = Coordinator.advance

    def generous(coordinator: Coordinator, round: int, uploads: Any, *informed: Any) -> Any:
        result = advance(coordinator, round, uploads, *informed)
        coordinator.accepted = dict.fromkeys(coordinator.known, round)
        return result

    monkeypatch.setattr(Coordinator, "advance", generous)
    fails(Schedule([Fault("reply dropped", 3, 1)]), "off its clients'|part at")


def test_a_server_that_keeps_its_trackers_in_a_new_generation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaffold, "reset", lambda strategy, state: state)
    fails(Schedule([Fault("disk wiped", 3, 1)]), "not zero in generation 2")
