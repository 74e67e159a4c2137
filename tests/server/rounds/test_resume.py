"""A run that was stopped, killed or damaged goes on to the weights that it would have had.

That every algorithm does is part of the table over the registry, `tests/strategies/test_table.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from client import session
from client.app import app
from common.errors import SettingsError
from common.experiment import Experiment, StrategySettings
from common.flower import ROOT
from common.partition.file import FORMAT
from server.engines.inprocess import InProcessGrid
from server.rounds import loop
from server.rounds.checkpoint import Checkpoints
from server.rounds.folder import SETTINGS, RunFolder
from server.rounds.stopping import Stop, Stopped
from strategies import registry
from strategies.registry import settled, written_out
from tests.support import faults
from tests.support.faults import Ran, ran, run, toy
from tests.support.helpers import ON_DIGITS

UNLIKE = ("time", "seconds", "bytes_down", "late")  # time, versions to keep, and what is counted by a process


def digits(algorithm: str, rounds: int = 10, **tables: Any) -> Experiment:
    """Six clients of unequal size, three of them in a round."""
    values = {
        "name": "resume",
        "seed": 5,
        "rounds": rounds,
        "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 6},
        "task": {"hidden": 8},
        "strategy": {"name": algorithm},
        "local": {"lr": 0.05, "batch_size": 64},
        "round": {"sample": 3},
        **tables,
    }
    for table, more in tomllib.loads(ON_DIGITS.get(algorithm, "")).items():
        values[table] = {**values.get(table, {}), **more}
    return Experiment.model_validate(values)


def grid(folder: Path) -> InProcessGrid:
    """Client memory on disk, beside the run: it outlives the process."""
    return InProcessGrid(app, memory=str(folder / "memory"))


def after(rounds: int, folder: Path) -> Stop:
    """Stop once so many rounds are done."""
    return lambda: time.monotonic() + 60 if len(RunFolder(folder).history()) >= rounds else None


def lines(result: Ran) -> list[dict[str, Any]]:
    """The history without what no two runs share."""
    return [{key: value for key, value in line.items() if key not in UNLIKE} for line in result.history]


def alike(result: Ran, straight: Ran) -> None:
    """Same history, no line doubled or missing, and the same bits in all of the server's state."""
    assert lines(result) == lines(straight)
    assert result.final == straight.final
    assert result.checkpoint.accepted == straight.checkpoint.accepted
    model = [(each.folder.path / "model.safetensors").read_bytes() for each in (result, straight)]
    assert model[0] == model[1]


def stopped(folder: Path, settings: Experiment, rounds: int = 5) -> Ran:
    """The first rounds of a run."""
    result = run(folder, settings, grid(folder), stop=after(rounds, folder))
    assert isinstance(result.error, Stopped)
    assert len(result.history) == rounds
    return result


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Eight uninterrupted rounds of SCAFFOLD on the toy task."""
    folder = tmp_path_factory.mktemp("straight")
    return ran(folder / "run", toy("scaffold", rounds=8), grid(folder / "run"))


def resumed(folder: Path, **more: Any) -> Ran:
    settings = toy("scaffold", rounds=8, **more)
    return ran(folder, settings, grid(folder), resume=True)


def newest(result: Ran) -> Path:
    return sorted(result.folder.checkpoints.glob("*.safetensors"))[-1]


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_rounds_since_the_checkpoint_are_run_again(every: int, tmp_path: Path, straight: Ran) -> None:
    """Checkpoints every so many rounds: history lines after the last one are cut and written anew."""
    settings = toy("scaffold", rounds=8, checkpoint={"every": every})
    stopped(tmp_path, settings)
    result = ran(tmp_path, settings, grid(tmp_path), resume=True)
    assert result.said == [f"resuming after round {5 // every * every}"]
    alike(result, straight)


def test_killed_between_the_line_and_its_checkpoint(
    tmp_path: Path, straight: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of round 5 is there, its checkpoint is not: the round is run again, the line not doubled."""
    save = Checkpoints.save

    def killed(self: Checkpoints, coordinator: Any) -> None:
        if coordinator.round == 5:
            raise KeyboardInterrupt
        save(self, coordinator)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, toy("scaffold", rounds=8), grid(tmp_path))
    assert len(RunFolder(tmp_path).history()) == 5
    alike(resumed(tmp_path), straight)


def test_killed_before_the_line(tmp_path: Path, straight: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint comes before its line: none is missing afterwards."""
    append = RunFolder.append

    def killed(self: RunFolder, record: dict[str, Any]) -> dict[str, Any]:
        if record["round"] == 5:
            raise KeyboardInterrupt
        return append(self, record)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, toy("scaffold", rounds=8), grid(tmp_path))
    result = resumed(tmp_path)
    assert result.said == ["resuming after round 4"]
    alike(result, straight)


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path, straight: Ran) -> None:
    """Half a line at the end of the history."""
    result = stopped(tmp_path, toy("scaffold", rounds=8))
    with (tmp_path / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result.history[-1])[:50])
    alike(resumed(tmp_path), straight)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "metadata"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage: str, tmp_path: Path, straight: Ran) -> None:
    """Its rounds are run again to the same weights; the damaged file goes."""
    path = newest(stopped(tmp_path, toy("scaffold", rounds=8)))
    content = path.read_bytes()
    # What a checkpoint says of itself is under its checksum as well: here, that client 2 was last accepted in round 4.
    told = content.replace(rb"\"2\": 5", rb"\"2\": 4", 1)
    middle = len(content) // 2
    path.write_bytes(
        {
            "truncated": content[:-7],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
            "metadata": told,
        }[damage]
    )
    assert path.read_bytes() != content
    result = resumed(tmp_path)
    assert result.said == ["resuming after round 4; that of round 5 is damaged"]
    alike(result, straight)


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    """All of them damaged or gone: a SettingsError, and the history stays as it is."""
    result = stopped(tmp_path, toy("scaffold", rounds=8))
    history = (tmp_path / "history.jsonl").read_bytes()
    for path in result.folder.checkpoints.iterdir():
        path.write_bytes(b"x")
    for _ in range(2):
        again = run_again(tmp_path, toy("scaffold", rounds=8))
        assert isinstance(again, SettingsError)
        assert str(again).startswith("nothing to resume: no whole checkpoint in ")
    assert (tmp_path / "history.jsonl").read_bytes() == history


def run_again(folder: Path, settings: Experiment) -> Exception | None:
    try:
        return run(folder, settings, grid(folder), resume=True).error
    except SettingsError as error:
        return error


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    """The error names both hashes; nothing in the folder is changed, the settings of its run least of all."""
    settings = toy("scaffold", rounds=8)
    stopped(tmp_path, settings)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for other in (toy("scaffold", rounds=8, seed=1), toy("fedavg", rounds=8), toy("scaffold", local={"lr": 0.3})):
        error = run_again(tmp_path, other)
        assert isinstance(error, SettingsError)
        assert written_out(*settled(other)).identity in str(error)
        assert written_out(*settled(settings)).identity in str(error)
        assert "only rounds, [evaluate], [stop] and [checkpoint] may change" in str(error)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_may_change(tmp_path: Path, straight: Ran) -> None:
    """A finished run goes on to more rounds, watched and kept differently, and ends where a longer run does."""
    first = ran(tmp_path, toy("scaffold", rounds=3), grid(tmp_path))
    assert len(first.history) == 3
    more = {"checkpoint": {"keep": 1}, "evaluate": {"clients": "all", "every": 2}}
    result = resumed(tmp_path, **more)
    assert result.final == straight.final
    assert [line["round"] for line in result.history] == list(range(1, 9))
    assert (
        len(list(result.folder.checkpoints.iterdir())) == 2
    )  # the one before the newest stays until that is known sound
    assert "rounds = 8" in (tmp_path / SETTINGS).read_text("utf-8")


def test_bounds_of_a_round_may_change_and_the_run_says_so(tmp_path: Path, straight: Ran) -> None:
    """As often as one likes, also back; the checkpoints stay those of one run and its weights are the same."""
    tries = ({"max_void": 5, "quorum": 1}, {"max_void": 4, "deadline_s": 77.0, "norm_factor": 0.0}, {})
    ran(tmp_path, toy("scaffold", rounds=2), grid(tmp_path))
    for rounds, table in zip((4, 6, 8), tries, strict=True):
        result = ran(tmp_path, toy("scaffold", rounds=rounds, round=table), grid(tmp_path), resume=True)
    assert result.final == straight.final
    told = {line["round"]: {c["key"]: (c["from"], c["to"]) for c in line.get("changed", [])} for line in result.history}
    assert told[3] == {"round.max_void": (3, 5), "round.quorum": (None, 1)}
    assert told[5] == {
        "round.deadline_s": (600.0, 77.0),
        "round.quorum": (1, None),
        "round.max_void": (5, 4),
        "round.norm_factor": (1000.0, 0.0),
    }
    assert told[7] == {
        "round.deadline_s": (77.0, 600.0),
        "round.max_void": (4, 3),
        "round.norm_factor": (0.0, 1000.0),
    }
    assert told[4] == told[6] == told[8] == {}
    assert "from round 7 on round.max_void is 3, it was 4" in result.said
    assert len(result.folder.status()["changes"]) == 9


def test_a_site_that_grew_goes_on_if_the_experiment_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allowed on resume, too; each site is told apart in the history, and the run goes on from its new weights."""

    def weighted(rounds: int, **tables: Any) -> Experiment:
        data = StrategySettings(name="scaffold", weights="data")  # type: ignore[call-arg]
        return toy("scaffold", rounds=rounds, **tables).model_copy(update={"strategy": data})

    ran(tmp_path, weighted(2), grid(tmp_path))
    monkeypatch.setattr(faults, "SIZES", (6, 25, 4, 8, 12))
    monkeypatch.setattr(session, "_sessions", {})
    error = run(tmp_path, weighted(4), grid(tmp_path), resume=True).error
    assert "announced 10 training examples at first and 25 now" in str(error)
    assert "data.may_grow" in str(error)
    monkeypatch.setattr(session, "_sessions", {})
    allowed = weighted(4, data={"may_grow": True})
    result = ran(tmp_path, allowed, grid(tmp_path), resume=True)
    assert [line.get("grown") for line in result.history] == [None, None, {"1": [10, 25]}, None]
    assert result.history[2]["changed"][0]["key"] == "data.may_grow"
    assert [line["examples"]["1"] for line in result.history] == [10, 10, 25, 25]
    assert result.checkpoint.known["1"] == 25
    assert result.checkpoint.stands == {}


def test_what_may_not_change_is_named(tmp_path: Path) -> None:
    stopped(tmp_path, toy("scaffold", rounds=8))
    error = run_again(tmp_path, toy("scaffold", rounds=8, local={"lr": 0.3}, round={"sample": 2, "max_void": 9}))
    assert "local.lr was 0.2 and is 0.3" in str(error)
    assert "round.sample was None and is 2" in str(error)
    assert "max_void" not in str(error)
    assert "changes" not in RunFolder(tmp_path).status()


def test_a_run_of_fagc_from_before_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings held the run's seed once more, as strategy.refresh_seed, and its checkpoints their hash."""
    with monkeypatch.context() as patch:
        patch.setattr(loop, "identities", lambda experiment: registry.identities(experiment)[1:])
        ran(tmp_path, toy("fagc", rounds=2), grid(tmp_path))
    whole = toy("fagc", rounds=4)
    former = StrategySettings(name="fagc", **whole.strategy.options, refresh_seed=whole.seed)
    kept = whole.model_copy(update={"rounds": 3, "strategy": former})
    assert len(ran(tmp_path, kept, grid(tmp_path), resume=True).history) == 3
    result = ran(tmp_path, whole, grid(tmp_path), resume=True)
    assert result.final == ran(tmp_path / "straight", whole).final


def test_a_folder_holds_the_hyperparameters_that_nobody_set(tmp_path: Path) -> None:
    """What a run folder keeps goes on with the run as the file does that it was started with."""
    given = toy("hafedho", rounds=2)
    ran(tmp_path, given, grid(tmp_path))
    kept = Experiment.load(tmp_path / SETTINGS)
    assert kept == written_out(*settled(given))
    assert kept.strategy.options["mu"] == 0.01
    assert len(ran(tmp_path, kept.model_copy(update={"rounds": 3}), grid(tmp_path), resume=True).history) == 3
    whole = ran(tmp_path, toy("hafedho", rounds=4), grid(tmp_path), resume=True)
    assert whole.final == ran(tmp_path / "straight", toy("hafedho", rounds=4)).final
    changed = StrategySettings(name="hafedho", mu=0.02)
    other = run(tmp_path, toy("hafedho", rounds=5).model_copy(update={"strategy": changed}), resume=True)
    assert "is of another experiment" in str(other.error)


def test_a_folder_of_before_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows only what the file said: its hash and its settings are without the hyperparameters that nobody set."""
    with monkeypatch.context() as earlier:
        earlier.setattr("server.rounds.loop.written_out", lambda strategy, experiment: experiment)
        ran(tmp_path, toy("hafedho", rounds=2), grid(tmp_path))
    kept = Experiment.load(tmp_path / SETTINGS)
    assert "mu" not in kept.strategy.options
    for rounds in (3, 4):
        settings = kept.model_copy(update={"rounds": rounds})
        result = ran(tmp_path, settings, grid(tmp_path), resume=True)
    assert result.final == ran(tmp_path / "straight", toy("hafedho", rounds=4)).final


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    """Resumed with nothing left to do: the last line comes back, nothing is run."""
    ran(tmp_path, toy(rounds=2), grid(tmp_path))
    before = (tmp_path / "history.jsonl").read_bytes()
    ran(tmp_path, toy(rounds=2), grid(tmp_path), resume=True)
    assert (tmp_path / "history.jsonl").read_bytes() == before


# --- the folder


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A run is never overwritten, and nothing is resumed where none was."""
    ran(tmp_path / "run", toy(rounds=1))
    with pytest.raises(SettingsError, match=r"holds a run already: add --resume to go on with it, or choose another"):
        run(tmp_path / "run", toy(rounds=1))
    with pytest.raises(SettingsError, match=r"nothing to resume: .*/none' holds no run"):
        run(tmp_path / "none", toy(rounds=1), resume=True)
    assert not (tmp_path / "none").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """While another process holds its lock; afterwards it is free."""
    stopped(tmp_path, toy(rounds=3), 2)
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SettingsError, match="is in use by process "):
            run(tmp_path, toy(rounds=3), resume=True)
        other.communicate("\n")
    ran(tmp_path, toy(rounds=3), grid(tmp_path), resume=True)


# --- a real process


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_killed_processes(tmp_path: Path) -> None:
    """`server simulate`, killed twice by SIGKILL in the middle and resumed, the last time with two worker processes:
    the weights, and the clients' controls behind them, are those of a run that nobody touched."""
    settings = digits("scaffold", rounds=60)
    file, folder = tmp_path / "experiment.toml", RunFolder(tmp_path / "run")
    file.write_text(settings.toml(), "utf-8")
    command = [sys.executable, "-m", "server", "simulate", str(file), "--run-dir", str(folder.path)]
    killed = []
    for piece in range(2):
        with (tmp_path / "log").open("a") as log:
            process = subprocess.Popen([*command, *["--resume"] * piece], cwd=ROOT, stdout=log, stderr=log)
        seen = len(folder.history())
        while len(folder.history()) < seen + 5 and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed.append(len(folder.history()))
    assert 0 < killed[0] < killed[1] < 60
    done = subprocess.run([*command, "--resume", "--workers", "2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    straight = ran(tmp_path / "straight", settings, grid(tmp_path / "straight"))
    assert [line["round"] for line in folder.history()] == list(range(1, 61))
    assert [line["sha256"] for line in folder.history()] == [line["sha256"] for line in straight.history]
    assert {line["generation"] for line in folder.history()} == {1}


def test_data_that_changed_are_not_gone_on_with(tmp_path: Path) -> None:
    """A plan file in which two examples have changed hands is another split: refused, the run stays as it is."""
    file = tmp_path / "plan.json"

    def split(first: int) -> None:
        rest = [number for number in range(100) if number != first]
        clients = [{"train": [first], "evaluate": []}, {"train": rest, "evaluate": []}]
        file.write_text(json.dumps({"format": FORMAT, "data": {"examples": 1438}, "clients": clients}), "utf-8")

    given = {"partition": {"kind": "file", "file": str(file)}, "round": {}}
    split(0)
    ran(tmp_path / "run", digits("fedavg", 2, **given))
    split(1)
    result = run(tmp_path / "run", digits("fedavg", 3, **given), resume=True)
    assert isinstance(result.error, SettingsError)
    assert "the data or the plan file changed; start a new run" in str(result.error)
    split(0)
    assert len(ran(tmp_path / "run", digits("fedavg", 3, **given), resume=True).history) == 3
