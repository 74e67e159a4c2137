"""Experiments from a notebook or a script: frames, models, errors as exceptions."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from common.tasks.base import evaluate
from server import api
from server.engines.grid import CLIENT_APP
from server.report import frames
from server.rounds.folder import RunFolder
from server.rounds.prepare import prepare
from tests.server.compare.test_compare import Inline

SMALL = {"name": "small", "rounds": 2, "task": {"hidden": 4}, "partition": {"clients": 3}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    yield
    from matplotlib import pyplot

    pyplot.close("all")


# --- one run


def test_five_lines() -> None:
    """The module's example, as written, with fewer rounds: a file, overrides, history, model, plot."""
    lines = [line.strip() for line in (api.__doc__ or "").splitlines() if line.startswith("    ")]
    assert len(lines) == 5
    here: dict[str, Any] = {}
    exec("\n".join(lines[:2]).replace("experiments/", f"{ROOT}/experiments/").replace("20", "3"), here)
    run = here["run"]
    assert (len(run.history), run.settings.strategy.name, run.settings.rounds) == (3, "scaffold", 3)
    assert run.history.index.name == "round"
    assert list(run.history.index) == [1, 2, 3]
    assert repr(run) == f"<Run 'digits-scaffold': 3 rounds, accuracy {run.history['accuracy'].iloc[-1]:.4f}>"
    axes = run.plot()
    assert [axis.get_legend().get_texts()[0].get_text() for axis in axes] == ["accuracy", "loss"]
    assert len(run.plot("drift", "seconds.total")) == 2
    with pytest.raises(SettingsError, match=r"plot: no column 'acc'; allowed: accuracy, loss, bytes_down"):
        run.plot("acc")


def test_the_model_is_the_run_s_last() -> None:
    """A plain module in evaluation mode: it scores what the history says; torch's generator is left alone."""
    run = api.simulate(SMALL)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = run.model
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert model.state_dict().keys() == load_file(run.folder / "model.safetensors").keys()
    task = prepare(run.settings).task
    central = task.central()
    assert central is not None
    assert evaluate(task, model, central, 256)["accuracy"] == run.history["accuracy"].iloc[-1]
    assert run.model is model


def test_the_same_weights_as_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """From tables, settings and a file; in worker processes; with progress or without. Nothing is printed unasked."""
    run = api.simulate(SMALL, **{"local.lr": 0.05, "seed": 3})
    sha = run.history["sha256"].iloc[-1]
    assert capsys.readouterr() == ("", "")
    settings = Experiment.model_validate({**SMALL, "seed": 3})
    Path("a.toml").write_text(settings.toml(), "utf-8")
    for again in (
        api.simulate(settings, local={"lr": 0.05}),
        api.simulate("a.toml", **{"local.lr": 0.05}, progress=True),
    ):
        assert again.history["sha256"].iloc[-1] == sha
    shown = capsys.readouterr().out
    assert "\rround 1/2  accuracy 0." in shown
    assert shown.endswith("\n")


def test_the_run_folder() -> None:
    """A temporary one goes with its object; one that was named stays, can be loaded and gone on with."""
    run = api.simulate(SMALL)
    folder = run.folder
    assert folder.exists()
    del run
    gc.collect()
    assert not folder.exists()
    kept = api.simulate(SMALL, run_dir="kept")
    assert kept.folder == Path("kept").resolve()
    with pytest.raises(SettingsError, match=r"'.*/kept' holds a run already"):
        api.simulate(SMALL, run_dir="kept")
    longer = api.simulate(SMALL, run_dir="kept", resume=True, rounds=3)
    assert len(longer.history) == 3
    assert longer.history["sha256"].iloc[-1] == api.simulate(SMALL, rounds=3).history["sha256"].iloc[-1]
    loaded = api.load("kept")
    pd.testing.assert_frame_equal(loaded.history, longer.history)
    assert loaded.notes == ["resuming after round 2"]
    with pytest.raises(SettingsError, match=r"'none' holds no run: no experiment.toml"):
        api.load("none")


def test_what_cannot_work_is_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never an exit; a temporary folder does not stay; threads are as they were."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = torch.get_num_threads()
    for overrides, words in (
        ({"rond": 1}, "experiment: rond = 1: unknown key; allowed here: name, seed, rounds"),
        ({"strategy.name": "x"}, "strategy.name: 'x' is unknown; allowed: "),
        ({"round.sample": 9}, "round.sample = 9 is more than the 3 clients"),
    ):
        with pytest.raises(SettingsError) as caught:
            api.simulate(SMALL, **overrides)  # type: ignore[arg-type]
        assert str(caught.value).startswith(words)
    with pytest.raises(SettingsError, match=r"experiment file 'none.toml' cannot be read"):
        api.simulate("none.toml")
    with pytest.raises(RunError, match="no progress in round 1 after 1 tries"):
        api.simulate(SMALL, **{"local.lr": 1e300, "round.max_void": 1})
    assert not list(tmp_path.glob("fedkeel-run-*"))
    assert torch.get_num_threads() == threads


def test_inside_an_event_loop_and_in_a_thread() -> None:
    """As in a notebook's cell, and where no signal handler may be set."""

    async def cell() -> str:
        inside = api.simulate(SMALL).history["sha256"].iloc[-1]
        beside = await asyncio.to_thread(lambda: api.simulate(SMALL).history["sha256"].iloc[-1])
        assert inside == beside
        return str(inside)

    assert asyncio.run(cell()) == api.simulate(SMALL).history["sha256"].iloc[-1]


# --- a plan


PLAN: dict[str, Any] = {
    "name": "p",
    "base": SMALL,
    "seeds": [0, 1],
    "grid": {"local.epochs": [1, 2]},
    "variants": [{"name": "FedAvg"}, {"name": "Tuned", "tune": {"local.betas": [[0.9, 0.99], [0.8, 0.99]]}}],
    "tuning": {"rounds": 1},
}


def test_a_plan_is_one_tidy_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each round of each final cell; the folder stays, and what has run there is not run again."""
    pools: list[Inline] = []

    def pool(devices: list[str], log: Path, portably: bool) -> Inline:
        pools.append(Inline())
        return pools[-1]

    monkeypatch.setattr("server.compare.start.ProcessPool", pool)
    frame = api.compare(PLAN)
    assert len(pools[0].ran) == 4 + 8
    assert list(frame.columns[:6]) == ["variant", "local.epochs", "tuned.local.betas", "seed", "round", "accuracy"]
    assert len(frame) == 2 * 2 * 2 * 2
    means = frame[frame["round"] == 2].groupby(["variant", "local.epochs"])["accuracy"].mean()
    cell = RunFolder("runs/p/fedavg__epochs-2/seed-1").history()[-1]["central"]["accuracy"]
    other = RunFolder("runs/p/fedavg__epochs-2/seed-0").history()[-1]["central"]["accuracy"]
    assert means["FedAvg", 2] == (cell + other) / 2
    pd.testing.assert_frame_equal(api.compare(PLAN), frame)
    assert len(pools) == 1
    with pytest.raises(SettingsError, match=r"'none' holds no plan: cells.json cannot be read: .*No such file"):
        api.results("none")
    with pytest.raises(SettingsError, match="plan: sedes = 3: unknown key"):
        api.compare({**PLAN, "sedes": 3})


def test_cells_that_fail_are_an_exception_after_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names them; `results` has the others."""
    monkeypatch.setattr("server.compare.start.ProcessPool", lambda devices, log, portably: Inline())
    variants = [{"name": "wild", "local.lr": 1e300, "round.max_void": 1}, {"name": "tame"}]
    Path("plan.toml").write_text(
        'name = "p"\n[base]\nrounds = 1\ntask.hidden = 4\npartition.clients = 3\n[[variants]]\nname = "wild"\n'
        'local.lr = 1e300\nround.max_void = 1\n[[variants]]\nname = "tame"\n'
    )
    with pytest.raises(RunError) as caught:
        api.compare("plan.toml", run_dir="here")
    assert "1 of 2 cells failed; results('" in str(caught.value)
    assert "wild/seed-0: no progress in round 1" in str(caught.value)
    assert list(api.results("here")["variant"]) == ["tame"]
    with pytest.raises(RunError):
        api.compare({"name": "p2", "base": {**SMALL, "rounds": 1}, "variants": variants[:1]})
    assert list(api.results("runs/p2").columns) == ["variant", "seed", "round"]
    assert CLIENT_APP == "client.app:app"


# --- frames


RECORD: dict[str, Any] = {
    "round": 1,
    "generation": 1,
    "sampled": ["a", "b"],
    "accepted": ["a"],
    "dropped": {"b": "late"},
    "void": [],
    "late": 0,
    "lr": 0.1,
    "steps": {"a": 3},
    "examples": {"a": 10},
    "losses": {"a": 0.5, "b": None},
    "train": {"loss": {"weighted": 0.5, "mean": 0.5, "worst": 0.5, "client": "a", "n": 1}},
    "bytes_down": 20,
    "bytes_up": 10,
    "drift": None,
    "sha256": "x",
    "central": {},
    "clients": {"accuracy": {"weighted": 0.75, "mean": 0.5, "worst": 0.25, "client": "b", "n": 2}},
    "each": {"accuracy": {"a": 0.75, "b": 0.25}},
    "task": {"distance": 2.0},
    "seconds": {"collect": 0.5, "total": 1.0},
}
PLAIN = {key: RECORD[key] for key in RECORD if key not in ("central", "clients", "each", "task")} | {"round": 2}


def test_a_history_as_a_frame() -> None:
    """Flat columns, numbers of names, NaN where nothing was evaluated (accuracy, and the loss, which is not that of
    training) or nothing compared (drift)."""
    frame = frames.history([RECORD, PLAIN])
    first, second = frame.loc[1], frame.loc[2]
    wanted = {
        "accuracy": 0.75,
        "sampled": 2,
        "accepted": 1,
        "dropped": 1,
        "void": 0,
        "clients.accuracy.worst": 0.25,
        "clients.accuracy.client": "b",
        "train.loss.weighted": 0.5,
        "task.distance": 2.0,
        "seconds.total": 1.0,
    }
    assert {key: first[key] for key in wanted} == wanted
    assert math.isnan(second["accuracy"])
    assert math.isnan(first["loss"])
    assert math.isnan(second["clients.accuracy.worst"])
    assert frame["drift"].isna().all()
    assert (frame["bytes_up"].sum(), frame["accuracy"].dtype) == (20, "float64")
    assert len(frames.history([])) == 0


def test_clients_as_a_long_frame() -> None:
    """Each client's metrics; what a client did not report is no row."""
    frame = frames.clients([RECORD, PLAIN])
    assert frame.to_numpy().tolist() == [
        [1, "a", "accuracy", 0.75],
        [1, "b", "accuracy", 0.25],
        *([k, "a", metric, value] for k in (1, 2) for metric, value in ROWS),
    ]
    assert list(frames.clients([]).columns) == ["round", "client", "metric", "value"]


ROWS = [("train.loss", 0.5), ("steps", 3.0), ("examples", 10.0)]
