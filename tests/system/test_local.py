"""A whole federation of processes as a user starts it: to its end, stopped by Ctrl-C, killed, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from client.app import app
from common.deploy.chain import verify
from common.experiment import Experiment
from common.flower import ROOT
from server.app import run
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.patience import limit, until
from tests.support.today import cells

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TEXT = """
name = "local"
rounds = {rounds}
partition.kind = "dirichlet"
partition.clients = 3
strategy.name = "scaffold"
local.epochs = {epochs}
"""


def start(experiment: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    """`python -m server local`, marked in its environment so that all its descendants can be found."""
    command = [sys.executable, "-m", "server", "local", str(experiment), "--run-dir", str(folder), *more]
    environ = {**os.environ, "FEDKEEL_TEST": str(folder)}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that carry the mark, after a moment to die in."""
    end = time.monotonic() + limit(15)
    while found := [line for process in psutil.process_iter() if (line := _marked(process, folder))]:
        if time.monotonic() > end:
            return found
        time.sleep(0.2)
    return []


def _marked(process: psutil.Process, folder: Path) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or process.environ().get("FEDKEEL_TEST") != str(folder):
            return ""
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def wait_for_round(folder: Path, round: int) -> None:
    """Until the history has this round."""
    done = RunFolder(folder)
    until(lambda: any(record["round"] >= round for record in done.history()), lambda: str(done.status()), 120)


def both_ends_agree(folder: Path) -> None:
    """The server's audit log names, round by round, the very messages that each site's says it sent."""
    books = [folder / "audit.jsonl", *sorted((folder / "memory").glob("*/audit.jsonl"))]
    assert all(verify(book).ok for book in books)
    server, *sites = ([json.loads(line) for line in book.read_text("utf-8").splitlines()] for book in books)
    assert [line["what"] for line in server if line["what"] != "joined"][:2] == ["submitted", "started"]
    for lines in sites:
        assert (lines[0]["what"], lines[-1]["what"]) == ("started", "stopped")
        sent = {line["message"] for line in lines if line["what"] == "upload out" and line["kind"] == "train"}
        assert sent == {line["uploads"][lines[0]["site"]] for line in server if line["what"] == "round"}
    assert sites


@pytest.mark.rest
def test_runs_to_its_end(tmp_path: Path) -> None:
    """Exit code 0, all rounds shown, the run folder whole, nothing left behind, the weights of the in-process run."""
    text = TEXT.format(rounds=5, epochs=1)
    (tmp_path / "experiment.toml").write_text(text, "utf-8")
    folder = tmp_path / "run"
    process = start(tmp_path / "experiment.toml", folder)
    output, _ = process.communicate(timeout=limit(200))
    assert process.returncode == 0, output
    assert left_behind(folder) == []
    assert "accuracy" in output
    assert str(folder) in output
    for name in ("experiment.toml", "history.jsonl", "model.safetensors", "run.json", "roll.json", "curves.png"):
        assert (folder / name).stat().st_size, name
    assert [r["round"] for r in RunFolder(folder).history()] == [1, 2, 3, 4, 5]
    expected = run(InProcessGrid(app), Experiment.parse(text), RunFolder(tmp_path / "inprocess"))
    assert RunFolder(folder).status()["sha256"] == expected["sha256"]
    assert f"sha256 {expected['sha256']}" in output
    both_ends_agree(folder)


EXIT_CODES = {(signal.SIGINT,): 130, (signal.SIGTERM,): 0, (signal.SIGTERM, signal.SIGTERM): 130, (signal.SIGKILL,): -9}


@pytest.mark.parametrize(
    "how", cells(list(EXIT_CODES), 1, 4, "signals", name=lambda how: "+".join(each.name for each in how))
)
def test_stopped_and_resumed(how: tuple[signal.Signals, ...], tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM once (the round in hand is finished or void) or twice (at once) or SIGKILL of the command ends
    every process; `--resume` then gives the uninterrupted weights, with each round once in the history."""
    text = TEXT.format(rounds=8, epochs=20)
    (tmp_path / "experiment.toml").write_text(text, "utf-8")
    folder = tmp_path / "run"
    process = start(tmp_path / "experiment.toml", folder)
    wait_for_round(folder, 2)
    for each in how:
        process.send_signal(each)
        time.sleep(0.3)
    output, _ = process.communicate(timeout=limit(60))
    assert process.returncode == EXIT_CODES[how], output
    assert "Traceback" not in output
    assert ("stopped after round" in output) is (how == (signal.SIGTERM,)), output
    assert left_behind(folder) == []
    process = start(tmp_path / "experiment.toml", folder, "--resume")
    output, _ = process.communicate(timeout=limit(200))
    assert process.returncode == 0, output
    assert left_behind(folder) == []
    history = RunFolder(folder).history()
    assert [record["round"] for record in history] == list(range(1, 9))
    expected = run(InProcessGrid(app), Experiment.parse(text), RunFolder(tmp_path / "inprocess"))
    assert history[-1]["sha256"] == expected["sha256"], json.dumps(history[-1])


@pytest.mark.parametrize("workers", cells(["1", "2"], 1, 2, "workers"))
def test_a_simulation_that_is_asked_to_stop(workers: str, tmp_path: Path) -> None:
    """SIGTERM: exit code 0 within the grace, and the same weights after `--resume`."""
    text = TEXT.format(rounds=6, epochs=40)
    (tmp_path / "experiment.toml").write_text(text, "utf-8")
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "server", "simulate", str(tmp_path / "experiment.toml"), "--run-dir", str(folder)]
    command += ["--workers", workers, "--grace", "5"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for_round(folder, 2)
        process.terminate()
        output, _ = process.communicate(timeout=limit(60))
    assert process.returncode == 0, output
    assert "stopped after round" in output
    assert RunFolder(folder).status()["status"] == "stopped"
    ended = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=limit(200))
    assert ended.returncode == 0, ended.stderr
    expected = run(InProcessGrid(app), Experiment.parse(text), RunFolder(tmp_path / "inprocess"))
    assert RunFolder(folder).history()[-1]["sha256"] == expected["sha256"]
