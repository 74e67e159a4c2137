"""Who is asked in a round: functions of seed and history, the same in every engine and after a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.errors import SettingsError
from common.experiment import Experiment
from server.engines.grid import CLIENT_APP, grid
from server.rounds.prepare import prepare
from strategies.protocol.members import Member, sample
from strategies.protocol.selection import READY, Selection, power_of_choice
from tests.support.faults import SIZES, FaultyGrid, fail, ran, run, toy

NAMES = ["a", "b", "c", "d", "e", "f"]
MEMBERS = [Member(name, 0, examples, 0, 1) for name, examples in zip(NAMES, (1, 2, 4, 8, 16, 32), strict=True)]


def line(round: int, sampled: str = "", **losses: float | None) -> dict[str, Any]:
    return {"round": round, "sampled": list(sampled), "losses": losses}


def drawn(kind: str, history: list[dict[str, Any]], count: int = 2, times: int = 2000) -> Counter[str]:
    return Counter(name for seed in range(times) for name in READY[kind]({}, MEMBERS, history, seed, 1, count))


def test_uniform_is_as_it_always_was() -> None:
    chosen = Selection(Experiment(seed=3))
    for attempt in range(3):
        assert chosen.choose({}, MEMBERS, 5, attempt, 2) == sample(3, 5, attempt, NAMES, 2)


def test_by_size_the_first_is_drawn_in_proportion() -> None:
    found = drawn("size", [], count=1)
    assert abs(found["f"] / 2000 - 32 / 63) < 0.04
    assert abs(found["d"] / 2000 - 8 / 63) < 0.03
    two = drawn("size", [], count=2)
    assert sum(two.values()) == 4000
    assert max(two.values()) <= 2000  # without replacement


def test_by_loss_the_unknown_have_the_largest_that_is_known() -> None:
    found = drawn("loss", [line(1, a=9.0, b=3.0), line(2, a=1.0, c=None)], count=1)
    whole = 1 + 3 + 4 * 3
    assert abs(found["a"] / 2000 - 1 / whole) < 0.03
    assert abs(found["b"] / 2000 - 3 / whole) < 0.04
    assert abs(found["c"] / 2000 - 3 / whole) < 0.04
    assert min(drawn("loss", []).values()) > 500  # nothing is known: uniform
    assert sum(drawn("loss", [line(1, a=0.0, b=-2.0)], times=50).values()) == 100


def test_power_of_choice_takes_the_largest_losses_of_its_candidates() -> None:
    history = [line(1, a=1.0, b=2.0, c=3.0, d=4.0, e=5.0, f=6.0)]
    every = power_of_choice({}, MEMBERS, history, 0, 2, 2, candidates=6)
    assert sorted(every) == ["e", "f"]
    assert sorted(power_of_choice({}, MEMBERS, [line(1, b=1.0, c=9.0)], 0, 2, 4, candidates=6)) == ["a", "d", "e", "f"]
    few = {name for seed in range(300) for name in power_of_choice({}, MEMBERS, history, seed, 2, 2, candidates=2)}
    assert few == set(NAMES)


def test_round_robin_asks_who_was_asked_longest_ago() -> None:
    history: list[dict[str, Any]] = []
    for round in range(1, 7):
        names = READY["round-robin"]({}, MEMBERS, history, 0, round, 4)
        history.append(line(round, "".join(names)))
    assert history[0]["sampled"] == list("abcd")
    assert history[1]["sampled"] == list("efab")
    assert set(Counter(name for each in history for name in each["sampled"]).values()) == {4}


KINDS = [*READY, "tests.strategies.test_selection:least"]


def least(state: Any, members: Any, history: Any, seed: int, round: int, count: int) -> list[str]:
    """Of one's own: who was taken the fewest times, by the number of rounds before and the seed's last bit."""
    taken = Counter(name for record in history for name in record["accepted"])
    assert all("seconds" not in record and "time" not in record for record in history)
    assert round == len(history) + 1
    assert state["model"].numel()
    sign = 1 if seed % 2 else -1
    return sorted((m.name for m in members), key=lambda name: (taken[name], sign * int(name)))[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_asks_the_same(kind: str, tmp_path: Path) -> None:
    """From any round; an upload that got lost on the way leaves its loss unknown in both."""
    tables: dict[str, Any] = {"round": {"sample": 2, "quorum": 1, "select": kind}, "seed": 1}
    straight = ran(tmp_path / "straight", toy("scaffold", rounds=6, **tables))
    for killed in (1, 4):
        place, memory = tmp_path / str(killed), str(tmp_path / f"memory{killed}")
        ran(place, toy("scaffold", rounds=killed, **tables), FaultyGrid(memory=memory))
        resumed = ran(place, toy("scaffold", rounds=6, **tables), FaultyGrid(memory=memory), resume=True)
        assert [line["sampled"] for line in resumed.history] == [line["sampled"] for line in straight.history]
        assert resumed.final == straight.final


def test_worker_processes_ask_the_same(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"round": {"sample": 2, "select": "power-of-choice"}, "rounds": 4}
    here = ran(tmp_path / "here", toy(**tables))
    with grid(CLIENT_APP, 2, "cpu", tmp_path / "memory") as workers:
        there = ran(tmp_path / "there", toy(**tables), workers)  # type: ignore[arg-type]
    assert [line["sampled"] for line in there.history] == [line["sampled"] for line in here.history]
    assert there.final == here.final


def test_a_second_try_draws_anew(tmp_path: Path) -> None:
    """Everybody fails in the first try of round 2."""
    asked: set[str] = set()

    def lie(name: str, round: int, reply: Any) -> Any:
        if round == 2 and len(asked) < 2 and name not in asked:
            asked.add(name)
            return fail(reply)
        return reply

    result = ran(tmp_path, toy(round={"sample": 2, "quorum": 2, "select": "size"}), FaultyGrid(lie))
    assert len(result.history[1]["void"]) >= 1
    assert len(result.history) == 3


def wrong(state: Any, members: Any, history: Any, seed: int, round: int, count: int) -> Any:
    return WRONG[0]


def fails(*given: Any) -> Any:
    return 1 / 0


WRONG: list[Any] = [None]
number = 5


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0", "9"], "in round 1: '9' is no client that is there; allowed: 0, 1, 2, 3, 4"),
        (["0", 1], "in round 1: 1 is no client that is there"),
        (["0", "0"], "in round 1: '0' comes twice"),
        (["0"], "in round 1 gave 1 clients; needed: 2"),
        (["0", "1", "2"], "in round 1 gave 3 clients; needed: 2"),
        (None, "failed in round 1: TypeError: "),
        ("01", ""),
    ],
)
def test_a_selection_that_is_none_is_one_clear_error(names: Any, message: str, tmp_path: Path) -> None:
    WRONG[0] = names
    own = f"{__name__}:wrong"
    found = run(tmp_path, toy(round={"sample": 2, "select": own}, rounds=1))
    if not message:
        assert found.error is None
        return
    assert isinstance(found.error, SettingsError)
    assert f"round.select = '{own}' {message}" in str(found.error)


def test_its_exception_is_told_with_file_and_line(tmp_path: Path) -> None:
    found = run(tmp_path, toy(round={"sample": 2, "select": f"{__name__}:fails"}))
    assert isinstance(found.error, SettingsError)
    assert "failed in round 1: ZeroDivisionError: division by zero (" in str(found.error)
    assert "test_selection.py:" in str(found.error)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"select": "best"}, "round.select = 'best'; allowed: uniform, size, loss, power-of-choice, round-robin"),
        ({"select": "no.such:thing"}, "round.select = 'no.such:thing' cannot be imported"),
        ({"select": f"{__name__}:number"}, "is a int; allowed: a function"),
        ({"candidates": 4}, "round.candidates belongs to round.select = 'power-of-choice', not to 'uniform'"),
    ],
)
def test_wrong_settings_are_told_before_round_1(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        prepare(toy(round={"sample": 2, **given}))


def test_clients_hear_nothing_of_it_and_old_runs_keep_their_identity() -> None:
    plain, chosen = toy(round={"sample": 2}), toy(round={"sample": 2, "select": "size"})
    assert plain.json() == chosen.json()
    assert plain.identity != chosen.identity
    assert Experiment().identity == "4e9424213bc56d5c"
    assert len(SIZES) == 5
