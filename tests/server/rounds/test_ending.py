"""A run that ends before its last round: by `[stop]`, from its history alone, or by a callback."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import SettingsError
from common.experiment import Experiment, StopSettings
from server import api
from server.app import run as run_app
from server.report.runs import read
from server.rounds.ending import Ending
from server.rounds.folder import MODEL, RunFolder
from server.rounds.prepare import prepare
from server.rounds.records import Record
from tests.support.faults import FaultyGrid, ran, run, toy


def line(
    round: int, value: float | None, metric: str = "accuracy", higher: bool = True, seconds: float = 1.0
) -> Record:
    about = {"metric": metric, "higher": higher}
    return {"round": round, "central": {metric: value, "f1": value}, "headline": about, "seconds": {"total": seconds}}


def ends(values: Iterable[float | None], *, higher: bool = True, **settings: Any) -> tuple[int, str]:
    """The round after which these values of the headline end a run, 0 for none, and why."""
    ending = Ending(StopSettings(**settings), lambda name: higher)
    for round, value in enumerate(values, 1):
        if why := ending.heed(line(round, value, higher=higher)):
            return round, why
    return 0, ""


@pytest.mark.parametrize(
    ("values", "settings", "round", "why"),
    [
        (
            [0.1, 0.2, 0.3, 0.2, 0.3, 0.4],
            {"patience": 2},
            5,
            "did not improve in 2 evaluations, stop.patience = 2: best",
        ),
        ([0.1, 0.2, 0.3, 0.2, 0.4, 0.3], {"patience": 2}, 0, ""),
        ([0.1, 0.14, 0.18, 0.3], {"patience": 2, "min_change": 0.1}, 3, "by more than 0.1 in 2 evaluations"),
        ([0.1, 0.14, 0.21, 0.3], {"patience": 2, "min_change": 0.1}, 0, ""),
        ([3.0, 2.0, 2.0, 2.5], {"patience": 2, "higher": False}, 4, "best 2 in round 2"),
        ([None, None], {"patience": 2}, 2, "no evaluation gave a number"),
        ([0.5, None, None, 0.6], {"patience": 2}, 3, "best 0.5 in round 1"),
        ([None, 0.1, 0.2], {"patience": 2}, 0, ""),
        ([0.5, 0.8, 0.9], {"target": 0.8}, 2, "accuracy 0.8 has reached stop.target = 0.8"),
        ([0.5, 0.8, 0.9], {"target": "f1 = 0.85"}, 3, "f1 0.9 has reached stop.target = f1 0.85"),
        ([3.0, 2.0, 1.0], {"target": 2, "higher": False}, 2, "accuracy 2 has reached"),
        ([None, 0.5], {"target": 0.1}, 2, "accuracy 0.5 has reached"),
        ([0.1] * 9, {"max_seconds": 3.5}, 4, "its rounds took 4.0 s, stop.max_seconds = 3.5"),
        ([0.1] * 9, {}, 0, ""),
    ],
)
def test_when(values: list[float | None], settings: dict[str, Any], round: int, why: str) -> None:
    found = ends(values, **settings)
    assert found[0] == round
    assert why in found[1]


def test_rounds_that_are_not_evaluated_do_not_count_but_take_time() -> None:
    ending = Ending(StopSettings(patience=2, max_seconds=3), lambda name: True)
    plain = {"round": 2, "headline": {"metric": "accuracy", "higher": True}, "seconds": {"total": 1.5}}
    assert not ending.heed(line(1, 0.5))
    assert not ending.heed(plain)
    assert not ending.overdue(0.4)
    assert ending.overdue(0.6)
    assert not ending.heed(plain)  # the time is up, and the model is not evaluated: so the next round is the last
    assert "its rounds took 5.0 s" in ending.heed(line(4, 0.5))


def test_another_headline_begins_anew() -> None:
    ending = Ending(StopSettings(patience=2), lambda name: True)
    values = [line(1, 0.9), line(2, 0.8), line(3, 0.1, "f2"), line(4, 0.1, "f2")]
    assert [bool(ending.heed(each)) for each in values] == [False] * 4
    assert ending.heed(line(5, 0.1, "f2"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "good"}, "stop.target: 'good' is no target; allowed: a number, of the headline, or METRIC=NUMBER"),
        ({"target": "=1"}, "stop.target: '=1' is no target"),
        ({"target": "mae=nan"}, "stop.target: 'mae=nan' is no target"),
    ],
)
def test_a_target_without_meaning_is_told_before_round_1(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        prepare(toy(stop=given))


@pytest.mark.parametrize(
    "text",
    ["patience = 0", "min_change = 0.1", "max_seconds = 0", "target = true", "patience = 2.5", "stop_at = 3"],
)
def test_wrong_settings(text: str) -> None:
    with pytest.raises(SettingsError, match="stop"):
        Experiment.parse(f"[stop]\n{text}")


def test_what_is_never_evaluated_is_refused(tmp_path: Path) -> None:
    failed = run(tmp_path, toy(stop={"patience": 2}))
    assert isinstance(failed.error, SettingsError)
    assert "stop.patience = 2: nothing is evaluated in this run" in str(failed.error)


def test_a_target_of_an_unknown_metric_names_those_there_are(tmp_path: Path) -> None:
    failed = run(tmp_path, toy(stop={"target": "f1=0.5"}, evaluate={"clients": "all"}))
    assert isinstance(failed.error, SettingsError)
    assert "stop.target = 'f1=0.5': 'f1' is no metric of this run; allowed: loss" in str(failed.error)


def test_old_runs_keep_their_identity_and_clients_hear_nothing_of_it() -> None:
    plain, stopped = toy(), toy(stop={"patience": 2, "target": 0.5})
    assert plain.identity == stopped.identity
    assert plain.json() == stopped.json()
    assert Experiment().identity == "4e9424213bc56d5c"


def app(folder: Path, settings: Experiment, **more: Any) -> RunFolder:
    place = RunFolder(folder / "run")
    run_app(FaultyGrid(memory=str(folder / "memory")), settings, place, say=lambda text: None, **more)
    return place


WATCHED = {"evaluate": {"clients": "all"}, "rounds": 8}


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_it_ends_as_a_shorter_run_would_and_is_finished(algorithm: str, tmp_path: Path) -> None:
    """Weights of the round it ended with, a model, a status with the reason, a report that counts it as complete."""
    stop = {"patience": 1, "min_change": 100.0}
    settings = toy(algorithm, stop=stop, checkpoint={"every": 5}, **WATCHED)
    place = app(tmp_path, settings)
    status = place.status()
    assert [record["round"] for record in place.history()] == [1, 2]
    assert status["status"] == "finished"
    assert status["ended"]["round"] == 2
    assert "loss did not improve by more than 100 in 1 evaluations" in status["ended"]["why"]
    assert any("ended after round 2 of 8: loss did not" in note for note in place.notes())
    assert (place.path / MODEL).exists()
    found = read(place.path)
    assert found.complete
    assert found.state == "finished"
    shorter = ran(tmp_path / "shorter", toy(algorithm, **{**WATCHED, "rounds": 2}))
    assert place.history()[-1]["sha256"] == shorter.history[-1]["sha256"]
    again = app(tmp_path, settings, resume=True)
    assert len(again.history()) == 2
    assert again.status()["ended"] == status["ended"]
    longer = app(tmp_path, toy(algorithm, checkpoint={"every": 5}, **WATCHED), resume=True)
    straight = ran(tmp_path / "straight", toy(algorithm, **WATCHED))
    assert longer.history()[-1]["sha256"] == straight.history[-1]["sha256"]
    assert "ended" not in longer.status()


def test_a_resumed_run_ends_where_it_would_have(tmp_path: Path) -> None:
    """Killed in any round before, its patience goes on from the history."""
    stop = {"patience": 3, "min_change": 100.0}
    whole = ran(tmp_path / "whole", toy(stop=stop, **WATCHED))
    assert len(whole.history) == 4
    for killed in (1, 2, 3):
        folder = tmp_path / str(killed)
        ran(folder, toy(stop=stop, **{**WATCHED, "rounds": killed}))
        resumed = ran(folder, toy(stop=stop, **WATCHED), resume=True)
        assert [line["sha256"] for line in resumed.history] == [line["sha256"] for line in whole.history]


def test_the_last_round_by_the_clock_is_evaluated(tmp_path: Path) -> None:
    settings = toy(stop={"max_seconds": 1e-6}, rounds=8, evaluate={"clients": "all", "every": 5})
    result = ran(tmp_path, settings)
    assert len(result.history) == 1
    assert result.history[0]["clients"]["loss"]


SMALL = {"name": "small", "rounds": 4, "task": {"hidden": 4}, "partition": {"clients": 3}}


def stops(record: Record) -> bool:
    raise StopIteration


@pytest.mark.parametrize("end", [lambda record: record["round"] == 2, stops])
def test_a_callback_ends_a_run_cleanly(end: Any, tmp_path: Path) -> None:
    """What it left is finished and goes on to the bit."""
    straight = api.simulate(SMALL, progress=False)
    short = api.simulate(SMALL, run_dir=tmp_path / "run", callback=end, progress=False)
    done = len(short.records)
    assert done == (1 if end is stops else 2)
    status = RunFolder(short.folder).status()
    assert (status["status"], status["ended"]) == ("finished", {"round": done, "why": "the callback asked for it"})
    assert read(short.folder).complete
    assert all(torch.isfinite(value).all() for value in short.model.state_dict().values())
    seen: list[int] = []
    rest = api.simulate(
        SMALL,
        run_dir=tmp_path / "run",
        resume=True,
        callback=lambda record: seen.append(record["round"]),
        progress=False,
    )
    assert seen == list(range(done + 1, 5))
    assert rest.records[-1]["sha256"] == straight.records[-1]["sha256"]


def test_what_a_callback_returns_beside_true_is_nothing(tmp_path: Path) -> None:
    assert len(api.simulate(SMALL, callback=lambda record: "no", progress=False).records) == 4  # type: ignore[arg-type,return-value]


def test_an_error_in_a_callback_comes_through_and_the_round_is_kept(tmp_path: Path) -> None:
    def broken(record: Record) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        api.simulate(SMALL, run_dir=tmp_path / "run", callback=broken, progress=False)
    assert RunFolder(tmp_path / "run").status()["status"] == "failed"
    assert len(api.simulate(SMALL, run_dir=tmp_path / "run", resume=True, progress=False).records) == 4
