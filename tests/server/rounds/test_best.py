"""The best model by the headline: kept apart, whole after a crash in any place, and cut where the run goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.errors import SettingsError
from common.vector import State
from server import api
from server.rounds import best as best_module
from server.rounds.best import Best
from server.rounds.folder import BEST, EARLIER, MODEL, RunFolder
from server.rounds.records import Record
from tests.support.faults import ran, toy

WATCHED = {"evaluate": {"clients": "all"}, "rounds": 6, "local": {"lr": 3.0, "batch_size": 4}}
"""Steps so long that the loss goes up and down."""


def line(round: int, value: float | None, metric: str = "accuracy", higher: bool = True) -> Record:
    return {"round": round, "central": {metric: value}, "headline": {"metric": metric, "higher": higher}}


def model(round: int) -> State:
    return {"w": torch.full((3,), float(round))}


def of(path: Path) -> float:
    return float(load_file(path)["w"][0])


class Kept:
    """A run whose every round leaves a line, perhaps a best model, then a checkpoint, of which three are kept."""

    def __init__(self, folder: Path, values: list[float | None], higher: bool = True) -> None:
        self.folder, self.history = RunFolder(folder), list[Record]()
        folder.mkdir(exist_ok=True)
        best, kept = Best(self.folder), [0]
        for round, value in enumerate(values, 1):
            self.history.append(line(round, value, higher=higher))
            best.heed(self.history[-1], lambda round=round: model(round), kept)  # type: ignore[misc]
            kept = [*kept, round][-3:]

    def resumed(self, round: int) -> tuple[float | None, Any]:
        """What the file holds, and run.json says, where the run goes on from the checkpoint of a round."""
        Best(self.folder, self.history[:round])
        path = self.folder.path / BEST
        return of(path) if path.exists() else None, self.folder.status().get("best")


def test_it_is_the_best_and_ties_stay_with_the_earlier(tmp_path: Path) -> None:
    run = Kept(tmp_path, [0.1, None, 0.5, 0.5, 0.3])
    assert of(tmp_path / BEST) == 3
    about = {"round": 3, "metric": "accuracy", "value": 0.5, "file": BEST}
    assert run.folder.status()["best"] == about
    Kept(tmp_path / "loss", [3.0, 1.0, 2.0], higher=False)
    assert of(tmp_path / "loss" / BEST) == 2


def test_a_run_that_goes_back_has_the_best_of_before(tmp_path: Path) -> None:
    """From each checkpoint that is still there: rounds 4, 5 and 6 of values that grow and fall."""
    values = [0.1, 0.4, 0.2, 0.3, 0.5, 0.6]
    for round, wanted in {6: 6, 5: 5, 4: 2, 3: 2}.items():
        run = Kept(tmp_path / str(round), values)
        found, about = run.resumed(round)
        assert (found, about["round"], about["file"]) == (wanted, wanted, BEST)
        Best(run.folder, run.history[:round]).heed(line(round + 1, 0.9), lambda: model(99), [round])
        assert of(run.folder.path / BEST) == 99


def test_few_earlier_ones_are_kept(tmp_path: Path) -> None:
    Kept(tmp_path, [round / 50 for round in range(40)])
    assert len(list((tmp_path / EARLIER).iterdir())) <= 3


def test_before_the_first_value_there_is_none(tmp_path: Path) -> None:
    run = Kept(tmp_path, [None, 0.2])
    assert run.resumed(1) == (None, None)
    assert not (tmp_path / BEST).exists()


@pytest.mark.parametrize("damage", [b"", b"garbage"])
def test_a_damaged_file_is_not_taken_for_the_best(damage: bytes, tmp_path: Path) -> None:
    """The history knows the value still: what comes later has to be better than that."""
    run = Kept(tmp_path, [0.5, 0.4])
    (tmp_path / BEST).write_bytes(damage)
    found, about = run.resumed(2)
    assert found is None
    assert about == {"round": 1, "metric": "accuracy", "value": 0.5, "file": None}
    best = Best(run.folder, run.history)
    best.heed(line(3, 0.45), lambda: model(3), [2])
    assert not (tmp_path / BEST).exists()
    best.heed(line(4, 0.6), lambda: model(4), [3])
    assert of(tmp_path / BEST) == 4


@pytest.mark.parametrize("where", ["_link", "write_atomically"])
def test_a_crash_between_its_steps_leaves_the_one_before(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Kept(tmp_path, [0.1, 0.4])

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(best_module, where, crash)
        with pytest.raises(KeyboardInterrupt):
            Best(run.folder, run.history).heed(line(3, 0.9), lambda: model(3), [0, 1, 2])
    run.history.append(line(3, 0.9))
    assert run.resumed(2)[0] == 2


def test_where_the_disk_has_no_links_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr("os.link", refuse)
    run = Kept(tmp_path, [0.1, 0.4, 0.5])
    assert run.resumed(2)[0] == 2


def test_another_headline_begins_anew(tmp_path: Path) -> None:
    run = Kept(tmp_path, [0.9])
    best = Best(run.folder, run.history)
    best.heed(line(2, 7.0, "mae", higher=False), lambda: model(2), [1])
    assert of(tmp_path / BEST) == 2
    assert run.folder.status()["best"]["metric"] == "mae"


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_it_is_the_model_that_a_run_to_that_round_ends_with(algorithm: str, tmp_path: Path) -> None:
    """To the bit, buffers too; also after a resume from any checkpoint."""
    whole = ran(tmp_path / "whole", toy(algorithm, **WATCHED))
    losses = [line["clients"]["loss"]["weighted"] for line in whole.history]
    round = losses.index(min(losses)) + 1
    about = whole.folder.status()["best"]
    assert about == {"round": round, "metric": "loss", "value": min(losses), "file": BEST}
    assert 1 < round < 6, losses
    shorter = ran(tmp_path / "shorter", toy(algorithm, **{**WATCHED, "rounds": round}))
    expected = load_file(shorter.folder.path / MODEL)
    kept = load_file(whole.folder.path / BEST)
    assert kept.keys() == load_file(whole.folder.path / MODEL).keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    (whole.folder.path / BEST).unlink()
    for newest in sorted(whole.folder.checkpoints.glob("*"))[1:]:
        newest.write_bytes(b"gone")
    again = ran(whole.folder.path, toy(algorithm, **WATCHED), resume=True)
    assert "resuming after round 4" in "".join(again.said)
    assert again.folder.status()["best"]["round"] == round


def test_from_python_and_without(tmp_path: Path) -> None:
    tables = {"rounds": 3, "task": {"hidden": 4}, "partition": {"clients": 3}}
    run = api.simulate(tables, run_dir=tmp_path / "run", progress=False)
    assert run.best_round in (1, 2, 3)
    kept = load_file(run.folder / BEST)
    assert all(torch.equal(value, kept[name]) for name, value in run.best.state_dict().items())
    without = api.simulate(tables, progress=False, **{"checkpoint.best": False})
    assert without.best_round is None
    with pytest.raises(SettingsError, match=r"holds no best\.safetensors"):
        _ = without.best
    assert not (without.folder / BEST).exists()
