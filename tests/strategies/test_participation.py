"""Unequal speed and presence: who is there, how much each does, and that all engines agree on it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from server.rounds.prepare import prepare
from strategies.protocol.members import Member
from strategies.protocol.participation import Budget, Participation
from tests.support.faults import FaultyGrid, head, lies, ran, toy
from tests.support.helpers import Simulation, experiment

NAMES = [str(number) for number in range(200)]


def participation(seed: int = 0, **tables: dict[str, Any]) -> Participation:
    return Participation(Experiment.model_validate({"seed": seed, **tables}))


def member(name: str, steps: int = 40) -> Member:
    return Member(name, 0, 320, 0, steps)


def csv(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return str(path)


# --- how much


def test_by_default_all_do_all() -> None:
    """Nothing is asked beyond the settings, nobody is late, no clock runs."""
    assert participation().budget(1, member("0")) == Budget()
    assert participation().present(1, 0, NAMES) == NAMES
    assert participation().late(1, [member("0")]) == {}
    assert participation().clock(1, [member("0")]) is None


def test_uniform_epochs() -> None:
    """U(2, 5): each of 2, 3, 4, 5 for a quarter of 200 clients x 20 rounds (deviation sqrt(4000 * 3/16) = 27)."""
    drawn = participation(speed={"kind": "uniform"})
    counts = Counter(drawn.budget(round, member(name)).epochs for round in range(1, 21) for name in NAMES)
    assert counts.keys() == {2, 3, 4, 5}
    assert all(abs(count - 1000) < 4 * 27 for count in counts.values())
    assert drawn.most([member("0")], epochs=2) == 120  # 40 steps in 2 epochs are at most 120 in 5 (ceil 2.5 = 3)


def test_stragglers_do_one_step_to_all() -> None:
    """A share of 1/2: so many are bounded, by 1 to 39 of 40 steps; the others are not."""
    found = [
        participation(speed={"kind": "stragglers", "share": 0.5}).budget(round, member(name))
        for round in range(1, 6)
        for name in NAMES
    ]
    bounded = [budget.steps for budget in found if budget.steps]
    assert abs(len(bounded) - 500 * 39 / 40) < 4 * 16  # deviation sqrt(1000 / 4) = 16
    assert set(bounded) <= set(range(1, 40))
    assert {min(bounded), max(bounded)} == {1, 39}
    assert all(budget.late == "" for budget in found)


def test_stragglers_that_are_dropped() -> None:
    """`late = "drop"`: the same clients, and nothing of them counts."""
    partial, dropped = (
        participation(speed={"kind": "stragglers", "share": 0.3, "late": late}) for late in ("partial", "drop")
    )
    members = [member(name) for name in NAMES]
    late = dropped.late(3, members)
    assert late.keys() == {m.name for m in members if partial.budget(3, m).steps}
    assert all("of 40 steps by the deadline" in reason for reason in late.values())


def test_a_profile(tmp_path: Path) -> None:
    """10, 4 and 0.1 steps a second for 5 seconds: 40 of 40, 20 of 40, none. The clock stops at the deadline."""
    file = csv(tmp_path / "speeds.csv", "client,speed", "a,10", "b,4", "c,0.1")
    given = participation(speed={"kind": "profile", "file": file, "deadline_s": 5.0})
    assert given.budget(1, member("a")) == Budget(seconds=4.0)
    assert given.budget(1, member("b")) == Budget(steps=20, seconds=5.0)
    assert given.late(1, map(member, "abc")) == {"c": "0 of 40 steps by the deadline"}
    assert given.clock(1, [member("a")]) == 4.0
    assert given.clock(1, [member("a"), member("b")]) == 5.0
    assert "has no row for it" in given.budget(1, member("d")).late


def test_a_profile_without_deadline_only_runs_the_clock(tmp_path: Path) -> None:
    """All do all; the slowest decides: 40 steps at 4 a second."""
    file = csv(tmp_path / "speeds.csv", "client,speed", "a,10", "b,4")
    given = participation(speed={"kind": "profile", "file": file})
    assert given.budget(1, member("b")).steps == 0
    assert given.clock(1, [member("a"), member("b")]) == 10.0


def test_exactly_a_deadline_is_in_time() -> None:
    """3 steps at 0.3 a second take 10 seconds; 0.3 * 10 is below 3 in floating point, and still it is 3 steps."""
    given = participation(speed={"kind": "profile", "speeds": [0.1 + 0.2 - 1e-12], "deadline_s": 10.0})
    assert given.budget(1, member("a", steps=3)).steps == 0


def test_speeds_are_dealt_by_the_seed_and_stay() -> None:
    """A client keeps its speed from round to round; jitter moves it by exp(sigma z)."""
    still = participation(speed={"kind": "profile", "speeds": [1.0, 2.0, 4.0]})
    seconds = {name: {still.budget(round, member(name)).seconds for round in range(1, 6)} for name in NAMES}
    assert all(len(each) == 1 for each in seconds.values())
    assert {min(each) for each in seconds.values()} == {10.0, 20.0, 40.0}
    moving = participation(speed={"kind": "profile", "speeds": [4.0], "jitter": 0.5})
    logs = np.log([moving.budget(round, member(name)).seconds / 10 for round in range(1, 11) for name in NAMES])
    assert abs(logs.std() - 0.5) < 0.05
    assert abs(logs.mean()) < 0.05


# --- who


def test_bernoulli() -> None:
    """Each client in each round with probability 0.3: 200 x 50 draws, deviation sqrt(10000 * 0.21) = 46."""
    given = participation(presence={"kind": "bernoulli", "probability": 0.3})
    assert abs(sum(len(given.present(round, 0, NAMES)) for round in range(1, 51)) - 3000) < 4 * 46
    assert given.present(1, 0, NAMES) != given.present(1, 1, NAMES)


def test_diurnal() -> None:
    """With a day of 20 rounds and a probability of 0.25 each client is there for 5 rounds in a row of each day."""
    given = participation(presence={"kind": "diurnal", "probability": 0.25, "period": 20})
    for name in NAMES[:20]:
        there = [bool(given.present(round, 0, [name])) for round in range(1, 41)]
        assert there[:20] == there[20:]
        assert sum(there[:20]) == 5


def test_a_trace(tmp_path: Path) -> None:
    """Rounds from first to last, several spans a client; a second try at a round is a round later."""
    file = csv(tmp_path / "trace.csv", "client,first,last", "a,1,2", "b,2,4", "a,4,4")
    given = participation(presence={"kind": "trace", "file": file})
    assert [given.present(round, 0, "abc") for round in range(1, 6)] == [["a"], ["a", "b"], ["b"], ["a", "b"], []]
    assert given.present(1, 1, "abc") == ["a", "b"]


def test_all_is_a_function_of_seed_name_and_round() -> None:
    """Not of who else is there, nor of what was asked before."""
    tables = {
        "speed": {"kind": "profile", "speeds": [1.0, 3.0], "jitter": 1.0, "deadline_s": 9.0},
        "presence": {"kind": "bernoulli"},
    }
    one, other = participation(7, **tables), participation(7, **tables)
    forwards = [one.budget(round, member(name)) for round in (1, 2, 3) for name in NAMES]
    backwards = [other.budget(round, member(name)) for round in (3, 2, 1) for name in reversed(NAMES)]
    assert forwards == backwards[::-1]
    assert [n for n in NAMES if one.present(2, 0, [n])] == other.present(2, 0, NAMES)
    assert participation(8, **tables).present(2, 0, NAMES) != other.present(2, 0, NAMES)


# --- in a run


def test_partial_work_is_exact(tmp_path: Path) -> None:
    """FedAvg on two quadratics: client 0 manages 3 of 8 steps, client 1 all 8. Each ends at e + (1 - lr a)^k (w - e),
    and FedNova divides by what was done."""
    arrays = {
        "centers": [[1.0], [3.0]],
        "curvatures": [[1.0], [1.0]],
        "steps": [8, 8],
        "examples": [1, 1],
        "start": [0.0],
    }
    file = csv(tmp_path / "speeds.csv", "client,speed", "0,3", "1,8")
    speed = {"kind": "profile", "file": file, "deadline_s": 1.0}
    tables: dict[str, Any] = {"arrays": arrays, "speed": speed, "local": {"lr": 0.1}}
    moved = (1 - 0.9**3) * 1.0, (1 - 0.9**8) * 3.0
    run = Simulation(experiment(tmp_path, "fedavg", **tables))
    assert [u.steps for u in run.step()] == [3, 8]
    assert float(run.x) == pytest.approx(sum(moved) / 2, abs=1e-14)
    run = Simulation(experiment(tmp_path, "fednova", **tables))
    run.step()
    assert float(run.x) == pytest.approx(5.5 * (moved[0] / 3 + moved[1] / 8) / 2, abs=1e-14)


def test_epochs_in_a_run(tmp_path: Path) -> None:
    """40 examples in batches of 16 are 3 steps an epoch: the history's steps are 2 to 5 times 3 and differ."""
    result = ran(tmp_path, toy(speed={"kind": "uniform"}, local={"batch_size": 16}, rounds=4))
    steps = {(name, line["round"]): count for line in result.history for name, count in line["steps"].items()}
    roll = {name: -(-count // 16) for name, count in result.history[0]["examples"].items()}
    assert {count / roll[name] for (name, _), count in steps.items()} == {2.0, 3.0, 4.0, 5.0}


def test_the_late_are_in_the_history(tmp_path: Path) -> None:
    """They are sampled, not asked, and dropped with the reason; the clock is the deadline."""
    speed = {"kind": "profile", "speeds": [1000.0, 0.001], "deadline_s": 1.0}
    result = ran(tmp_path, toy("scaffold", speed=speed, round={"quorum": 1}, seed=1))
    for line in result.history:
        late = set(line["sampled"]) - set(line["accepted"])
        assert late
        assert line["accepted"]
        assert line["causes"] == dict.fromkeys(late, "late")
        assert all("by the deadline" in line["dropped"][name] for name in late)
        assert line["clock"] == 1.0


def test_too_few_present_make_a_round_void(tmp_path: Path) -> None:
    """Client 3 alone is there in round 2, and the quorum is 2: the second try is a round later, where all are."""
    rows = ["client,first,last", "3,2,2", *(f"{name},{first},9" for name in "01234" for first in (1, 3))]
    rows = [row for row in rows if not row.endswith(",1,9")] + [f"{name},1,1" for name in "01234"]
    file = csv(tmp_path / "trace.csv", *rows)
    given = toy(presence={"kind": "trace", "file": file}, round={"quorum": 2}, rounds=3)
    result = ran(tmp_path / "run", given)
    assert [v["cause"] for line in result.history for v in line["void"]] == ["1 of 5 clients are present, quorum 2"]


def test_nobody_there_ends_the_run(tmp_path: Path) -> None:
    """After round.max_void tries, with the reason."""
    file = csv(tmp_path / "trace.csv", "client,first,last", "0,1,1")
    given = toy(presence={"kind": "trace", "file": file}, round={"quorum": 1, "max_void": 2})
    with pytest.raises(RunError, match=r"no progress in round 2 after 2 tries.*0 of 5 clients are present, quorum 1"):
        ran(tmp_path / "run", given)


def test_fewer_present_than_wanted_are_all_asked(tmp_path: Path) -> None:
    """`sample = 4` with two there: both take part."""
    file = csv(tmp_path / "trace.csv", "client,first,last", "0,1,9", "4,1,9")
    result = ran(tmp_path / "run", toy(presence={"kind": "trace", "file": file}, round={"sample": 4, "quorum": 1}))
    assert all(line["accepted"] == ["0", "4"] for line in result.history)


def test_more_steps_than_asked_for_are_refused(tmp_path: Path) -> None:
    """A client that claims them is dropped: FedNova divides by them."""
    speed = {"kind": "profile", "speeds": [1.0], "deadline_s": 1.0}
    result = ran(
        tmp_path, toy("fednova", speed=speed, round={"quorum": 1}), FaultyGrid(lies("1", head(steps=99), round=1))
    )
    assert result.history[0]["dropped"] == {"1": "steps: 99 local steps, asked for 1 at most"}


UNEVEN: dict[str, Any] = {
    "speed": {"kind": "profile", "speeds": [9.0, 2.0, 1.0], "jitter": 0.5, "deadline_s": 3.0},
    "presence": {"kind": "bernoulli", "probability": 0.8},
    "round": {"sample": 3, "quorum": 1},
}


@pytest.mark.parametrize("algorithm", ["scaffold", "mime", "hafedho"])
def test_resumed_is_uninterrupted(algorithm: str, tmp_path: Path) -> None:
    """Four rounds, and two after two."""
    whole = ran(tmp_path / "whole", toy(algorithm, rounds=4, **UNEVEN)).final
    ran(tmp_path / "part", toy(algorithm, rounds=2, **UNEVEN))
    assert ran(tmp_path / "part", toy(algorithm, rounds=4, **UNEVEN), resume=True).final == whole


# --- what is refused


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"speed": {"kind": "profile"}}, "kind 'profile' needs either speeds or file"),
        ({"speed": {"speeds": [1.0]}}, "no other kind has them"),
        ({"speed": {"kind": "uniform", "epochs": [5, 2]}}, "the first must not be above the second"),
        ({"speed": {"kind": "uniform", "epochs": [0, 2]}}, r"speed\.epochs\.0 = 0"),
        ({"speed": {"jitter": 1.0}}, "belong to kind 'profile'"),
        ({"speed": {"kind": "stragglers", "share": 1.5}}, r"speed\.share = 1\.5"),
        ({"speed": {"kind": "profile", "speeds": [0.0]}}, r"speed\.speeds\.0 = 0\.0"),
        ({"presence": {"kind": "trace"}}, "kind 'trace' needs file"),
        ({"presence": {"kind": "bernoulli", "probability": 0.0}}, r"presence\.probability = 0\.0"),
    ],
)
def test_settings_without_meaning(tables: dict[str, Any], text: str) -> None:
    from common.settings import checked

    with pytest.raises(SettingsError, match=text):
        checked(Experiment, tables, "x.toml")


@pytest.mark.parametrize(
    ("lines", "table", "text"),
    [
        (["client,speed", "0,fast"], "speed", "cannot be read: could not convert"),
        (["client,speed", "0,-1"], "speed", "allowed: steps a second, above 0"),
        (["name,speed", "0,1"], "speed", "needed: client, speed"),
        (["client,speed", "0,1"], "speed", "no row for client 1, 2"),
        (["client,first,last", "0,3,1"], "presence", "allowed: 1 <= first <= last"),
        (["client,first,last", "x,1,3"], "presence", "none of the run's clients"),
        (["client,first,last", "0,1"], "presence", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(lines: list[str], table: str, text: str, tmp_path: Path) -> None:
    file = csv(tmp_path / "file.csv", *lines)
    given = {"kind": "profile" if table == "speed" else "trace", "file": file}
    with pytest.raises(SettingsError, match=rf"{table}\.file = .*{text}"):
        prepare(toy(**{table: given}))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"speed\.file = 'none\.csv': no such file"):
        prepare(toy(speed={"kind": "profile", "file": "none.csv"}))


def test_epochs_beside_steps() -> None:
    with pytest.raises(SettingsError, match=r"speed\.kind = 'uniform' draws epochs and local\.steps = 3 fixes steps"):
        prepare(toy(speed={"kind": "uniform"}, local={"steps": 3}))
