"""Trackers: what MLflow and Weights & Biases really store, and that none of them can slow a run or end it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from client.app import app
from common.errors import SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from server.app import run
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from server.rounds.prepare import prepare
from server.rounds.stopping import Stopped
from server.watch import tracking
from server.watch.tracking import Channel, Tracker, Trackers, flat, place, scalars, settings
from strategies.registry import settled

THEIRS = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""MLflow's own use of what SQLAlchemy means to drop."""

WANDB = pytest.mark.usefixtures("fresh_wandb")

RECORD: dict[str, Any] = {
    "round": 3,
    "central": {"accuracy": 0.5, "loss": 1.25},
    "train": {"loss": {"weighted": 1.0, "mean": 2.0, "worst": 3.0}},
    "each": {"accuracy": {"site-3": 0.25}},
    "seconds": {"total": 0.5},
    "bytes_down": 10,
    "bytes_up": 20,
    "lr": 0.1,
    "drift": None,
    "accepted": ["site-3"],
    "dropped": {"site-4": "late"},
    "sha256": "ab" * 32,
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no address, no connection to anywhere but this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a connection to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def fresh_wandb() -> Iterator[None]:
    """W&B reads its environment once a process."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


def small(*use: str, rounds: int = 3, **more: Any) -> Experiment:
    tables = {"name": "small", "rounds": rounds, "task": {"hidden": 4}, "partition": {"clients": 3}}
    return Experiment.model_validate(tables | {"tracking": {"use": list(use), **more}})


def ran(folder: Path, experiment: Experiment, **more: Any) -> tuple[dict[str, Any], list[str]]:
    """The last record of a run in this process, and what it said."""
    said: list[str] = []
    return run(InProcessGrid(app), experiment, RunFolder(folder), say=said.append, **more), said


def after(rounds: int, folder: Path) -> Callable[[], float | None]:
    """A stop when so many rounds are in the history."""
    return lambda: time.monotonic() if len(RunFolder(folder).history()) >= rounds else None


class Probe(Tracker):
    """Keeps what it is told; `fails` names the calls that raise, `gate` holds up each write."""

    def __init__(self, *fails: str, gate: threading.Event | None = None) -> None:
        self.fails, self.gate, self.calls = set(fails), gate, []
        self.calls: list[Any]

    def _called(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name in self.fails:
            raise OSError(f"no {name}: server http://me:secret@host is down\nsecond line")

    def open(self, experiment: Experiment, folder: Path) -> None:
        self._called("open", folder.name)

    def write(self, record: dict[str, Any]) -> None:
        if self.gate:
            self.gate.wait(20)
        self._called("write", record["round"])

    def close(self, status: str) -> None:
        self._called("close", status)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Probe]:
    """Puts a probe in TensorBoard's place."""

    def place_it(*fails: str, gate: threading.Event | None = None) -> Probe:
        made = Probe(*fails, gate=gate)
        monkeypatch.setattr(tracking, "resolve_name", lambda name: lambda: made)
        return made

    return place_it


def tracked(folder: Path, rounds: int = 3, error: BaseException | None = None) -> list[str]:
    """What a run of so many rounds through `Trackers` says."""
    said: list[str] = []
    ends = nullcontext() if error is None else pytest.raises(type(error))
    with ends, Trackers(small("tensorboard"), folder, said.append) as each:
        for round in range(1, rounds + 1):
            each.write(RECORD | {"round": round})
        if error:
            raise error
    return said


def test_records_come_in_order_and_then_the_end(tmp_path: Path, probe: Callable[..., Probe]) -> None:
    """One open, each record, one close."""
    made = probe()
    assert tracked(tmp_path / "a") == []
    assert made.calls == [("open", "a"), ("write", 1), ("write", 2), ("write", 3), ("close", "finished")]


@pytest.mark.parametrize(
    ("error", "status"),
    [(Stopped(), "stopped"), (KeyboardInterrupt(), "stopped"), (ValueError(), "failed")],
)
def test_how_a_run_ended_is_told(
    error: BaseException, status: str, tmp_path: Path, probe: Callable[..., Probe]
) -> None:
    """An asked-for stop is no failure."""
    made = probe()
    tracked(tmp_path, error=error)
    assert made.calls[-1] == ("close", status)


def test_without_a_round_nothing_is_opened(tmp_path: Path, probe: Callable[..., Probe]) -> None:
    """A run that fails before round 1 leaves no trace elsewhere."""
    made = probe()
    assert tracked(tmp_path, rounds=0, error=ValueError()) == []
    assert made.calls == []


def test_a_failure_is_told_once_and_hides_passwords(tmp_path: Path, probe: Callable[..., Probe]) -> None:
    """Three failing writes: one warning of one line, and one that says what is missing."""
    probe("write")
    assert tracked(tmp_path) == [
        "warning: tracking with tensorboard failed: OSError: no write: server http://***@host is down; the run goes on",
        "warning: tensorboard lacks 3 of 3 rounds; history.jsonl has all",
    ]


def test_a_server_that_comes_back_is_sent_what_waited(tmp_path: Path) -> None:
    """Opening fails once; the next record opens it and both are written."""
    made, said = Probe("open"), list[str]()
    channel = Channel("probe", made, small(), tmp_path, said.append)
    channel.write(RECORD | {"round": 1})
    while not said:
        time.sleep(0.001)
    made.fails.clear()
    channel.write(RECORD | {"round": 2})
    channel.end("finished")
    channel.wait(time.monotonic() + 10)
    assert [what for name, what in made.calls if name == "write"] == [1, 2]
    assert len(said) == 1


def test_one_that_hangs_holds_up_neither_rounds_nor_end(
    tmp_path: Path, probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More records than may wait, none of them taken: the run ends after CLOSE_S and says what is missing."""
    monkeypatch.setattr(tracking, "CLOSE_S", 0.2)
    monkeypatch.setattr(tracking, "WAITING", 4)
    gate = threading.Event()
    probe(gate=gate)
    started = time.monotonic()
    said = tracked(tmp_path, rounds=20)
    assert time.monotonic() - started < 5
    assert said == ["warning: tensorboard lacks 20 of 20 rounds and did not end in time; history.jsonl has all"]
    gate.set()


def test_a_failing_tracker_changes_no_weight(tmp_path: Path, probe: Callable[..., Probe]) -> None:
    """The same sha256, a warning in notes.log, exit as ever."""
    plain, _ = ran(tmp_path / "plain", small())
    probe("open")
    other, said = ran(tmp_path / "other", small("tensorboard"))
    assert other["sha256"] == plain["sha256"]
    assert RunFolder(tmp_path / "other").notes() == said
    assert "tracking with tensorboard failed" in said[0]
    assert RunFolder(tmp_path / "other").status()["status"] == "finished"


def test_scalars_hold_no_single_client() -> None:
    """Summaries and counts only: neither a name nor a client's value."""
    found = dict(scalars(RECORD))
    assert found["central/accuracy"] == 0.5
    assert found["train/loss/worst"] == 3.0
    assert (found["round/accepted"], found["round/dropped"]) == (1.0, 1.0)
    assert "round/drift" not in found
    assert not any("each" in key or "site" in key for key in found)


def test_settings_are_flat_words() -> None:
    """Dotted keys as in a plan; lists as JSON; nothing of [tracking]."""
    found = dict(flat(settings(settled(small("mlflow"))[1])))
    assert (found["local.lr"], found["local.betas"], found["task.hidden"]) == ("0.1", "[0.9, 0.99]", "4")
    assert found["strategy.name"] == "fedavg"
    assert not any(key.startswith("tracking") for key in found)


def test_tracking_is_no_part_of_the_experiment() -> None:
    """The same identity, so that a run may be resumed with another tracker, and no word of it to clients."""
    assert small("mlflow", model=True).identity == small().identity
    assert "tracking" not in small("mlflow").json()
    assert "mlflow" in small("mlflow").toml()  # it does reach the server app


def test_an_unknown_tracker_is_named() -> None:
    """Key, value and what is allowed."""
    with pytest.raises(SettingsError, match=r"tracking.use.0 = 'comet': .*'tensorboard', 'mlflow' or 'wandb'"):
        Experiment.parse('tracking.use = ["comet"]')


def test_a_missing_package_ends_before_round_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the words that install it."""
    monkeypatch.setattr("server.rounds.prepare.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"tracking.use = 'wandb': .* not installed; .*pip install '.\[wandb\]'"):
        ran(tmp_path / "run", small("wandb"))
    assert not (tmp_path / "run").exists()
    prepare(small("tensorboard"))


def test_nothing_is_imported_unless_asked(tmp_path: Path) -> None:
    """A whole run with the defaults loads neither package, and leaves TensorBoard's events."""
    code = (
        "import sys; from common import flower; flower.prepare()\n"
        "from pathlib import Path; from tests.server.test_tracking import ran, small\n"
        "ran(Path(sys.argv[1]), small('tensorboard', rounds=1))\n"
        "assert not {'mlflow', 'wandb'} & set(sys.modules), 'imported'"
    )
    root = ROOT
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=root, check=True, timeout=120)
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def cell(folder: Path) -> Path:
    """The run folder of a plan's cell."""
    run = folder / "runs" / "my-plan" / "fednova__partition.alpha-0.1" / "seed-2"
    run.mkdir(parents=True)
    about = {"plan": "my-plan", "variant": "FedNova", "point": {"partition.alpha": 0.1}, "seed": 2, "stage": "final"}
    (run / "cell.json").write_text(json.dumps(about), "utf-8")
    return run


def test_cells_of_a_plan_lie_together(tmp_path: Path) -> None:
    """Project by the plan, group by variant and point, a name that tells the seed."""
    found = place(small(), cell(tmp_path))
    group = "fednova__partition.alpha-0.1"
    assert (found.project, found.group, found.name, found.stage) == ("my-plan", group, f"{group}/seed-2", "final")
    assert found.tags["point.partition.alpha"] == "0.1"
    assert found.tags["variant"] == "FedNova"
    single = place(small(), tmp_path / "runs" / "small-2")
    assert (single.project, single.group, single.name) == ("fedkeel", "small", "small-2")


@THEIRS
def test_mlflow_reads_back_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real store: parameters, metrics by round, hashes, the model; a resumed run goes on with the same one."""
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(tracking, "FAILED_S", 60.0)  # a new store makes its tables
    folder = cell(tmp_path)
    _, said = ran(folder, small("mlflow", model=True), stop=after(2, folder))
    assert said == ["stopped after round 2; go on with --resume"]
    client = MlflowClient(uri)
    (plan,) = [each for each in client.search_experiments() if each.name == "my-plan"]
    (begun,) = client.search_runs([plan.experiment_id])
    assert begun.info.status == "KILLED"
    record, said = ran(folder, small("mlflow", model=True, rounds=4), resume=True)
    assert said == ["resuming after round 2"]
    (done,) = client.search_runs([plan.experiment_id])
    assert (done.info.run_id, done.info.status) == (begun.info.run_id, "FINISHED")
    assert done.data.params["local.lr"] == "0.1"
    assert (done.data.params["rounds"], done.data.params["seed"]) == ("3", "0")
    history = RunFolder(folder).history()
    stored = client.get_metric_history(done.info.run_id, "central/accuracy")
    assert [(m.step, m.value) for m in stored] == [(line["round"], line["central"]["accuracy"]) for line in history]
    tags = done.data.tags
    assert tags["weights_sha256"] == record["sha256"] == history[-1]["sha256"]
    assert tags["initial_sha256"] == RunFolder(folder).status()["initial"]
    assert (tags["plan"], tags["seed"], tags["mlflow.runName"]) == ("my-plan", "0", f"{folder.parent.name}/seed-2")
    assert not any("git" in key or "user" in key for key in tags)
    (model,) = client.list_artifacts(done.info.run_id)
    kept = Path(client.download_artifacts(done.info.run_id, model.path, str(tmp_path)))
    assert kept.read_bytes() == (folder / "model.safetensors").read_bytes()


@THEIRS
def test_an_mlflow_run_that_is_gone_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed with another server: a new run with the rounds from there on."""
    from mlflow.tracking import MlflowClient

    for store, rounds in (("a", 1), ("b", 2)):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/{store}.db")
        _, said = ran(tmp_path / "run", small("mlflow", rounds=rounds), resume=rounds > 1)
        assert not any("warning" in line for line in said)
    client = MlflowClient(f"sqlite:///{tmp_path}/b.db")
    (found,) = client.search_runs([client.get_experiment_by_name("fedkeel").experiment_id])
    assert [m.step for m in client.get_metric_history(found.info.run_id, "round/accepted")] == [2]


@pytest.mark.processes
def test_cells_that_begin_together_share_a_new_store(tmp_path: Path) -> None:
    """Two processes at the first use of one SQLite file: both runs are there. (Unguarded, its tables break.)"""
    code = (
        "import os, sys; from common import flower; flower.prepare()\n"
        "from pathlib import Path; from tests.server.test_tracking import ran, small\n"
        "_, said = ran(Path(sys.argv[1]), small('mlflow', rounds=1)); assert not said, said"
    )
    root, uri = ROOT, f"sqlite:///{tmp_path}/new.db"
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)], cwd=root, env=environment)
        for name in ("a", "b")
    ]
    assert [each.wait(120) for each in both] == [0, 0]


@THEIRS
def test_an_mlflow_server_that_is_down_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real refused connection: the run finishes."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    _, said = ran(tmp_path / "run", small("mlflow"))
    assert [line.split(":")[0] for line in said] == ["warning", "warning"]
    assert "tracking with mlflow failed" in said[0]
    assert said[1] == "warning: mlflow lacks 3 of 3 rounds; history.jsonl has all"


def entries(file: Path) -> Iterator[bytes]:
    """The entries of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, size, kind) after 7 bytes."""
    data, at, entry = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        entry += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline(folder: Path) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Rows, the runs' own records and the summary in the files of offline W&B runs."""
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    runs: list[Any] = []
    summary: dict[str, Any] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for entry in entries(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(entry)
            if record.HasField("history"):
                rows.append(values(record.history.item) | {"step": record.history.step.num})
            elif record.HasField("run"):
                runs.append(record.run)
            elif record.HasField("summary"):
                summary |= values(record.summary.update)
    return rows, runs, summary


@WANDB
def test_wandb_offline_files_hold_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real files of WANDB_MODE=offline, which `wandb sync` sends later; a resumed run keeps its id."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = cell(tmp_path)
    _, said = ran(folder, small("wandb"), stop=after(2, folder))
    assert said == ["stopped after round 2; go on with --resume"]
    first = (folder / "wandb-run.txt").read_text("utf-8").strip()
    time.sleep(1.1)  # the names of offline runs hold seconds
    record, said = ran(folder, small("wandb"), resume=True)
    assert said == ["resuming after round 2"]
    rows, runs, summary = offline(folder)
    group = folder.parent.name
    about = [(each.run_id, each.project, each.run_group, each.job_type, each.git.remote_url) for each in runs]
    assert set(about) == {(first, "my-plan", group, "final", "")}
    config = values(runs[0].config.update)
    assert (config["local"]["lr"], config["place"]["variant"]) == (0.1, "FedNova")
    history = RunFolder(folder).history()
    assert [(row["step"], row["central/accuracy"]) for row in rows] == [
        (line["round"], line["central"]["accuracy"]) for line in history
    ]
    assert summary["weights_sha256"] == record["sha256"]
    files = {path.name for path in folder.glob("wandb/offline-run-*/files/*")}
    assert not files & {"requirements.txt", "output.log", "diff.patch", "wandb-metadata.json"}


@WANDB
def test_wandb_without_a_key_says_so_and_asks_nobody(tmp_path: Path) -> None:
    """No prompt, no connection, one warning; the run goes on."""
    _, said = ran(tmp_path / "run", small("wandb", rounds=1))
    assert "no key: set WANDB_API_KEY" in said[0]
    assert len(said) == 2
