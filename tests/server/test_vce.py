"""Ray that dies, or never starts, ends a run under VCE with its cause, and soon."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from client.app import app
from common.errors import RunError
from common.flower import ROOT
from server.engines import vce
from server.rounds.folder import RunFolder
from tests.support.faults import toy
from tests.support.today import cells


@contextmanager
def named(folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that is called `name` and does nothing."""
    program = Path(shutil.copy(shutil.which("sleep") or "/bin/sleep", folder / name))
    with subprocess.Popen([str(program), "60"]) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("name", cells(vce.RAY_PROCESSES, 1, 2, "ray"))
def test_one_of_rays_processes_that_is_gone_is_told(name: str, tmp_path: Path) -> None:
    """Whether somebody has waited for it or not; nothing is wrong before Ray has started, nor with other children."""
    ray = vce._RayProcesses()
    with named(tmp_path, "other"):
        ray.check()
    for waits in (False, True):
        ray = vce._RayProcesses()
        ray.check()
        with named(tmp_path, name) as child:
            while psutil.Process(child.pid).name() != name:
                time.sleep(0.01)
            ray._looked = -1e9
            ray.check()
            child.kill()
            while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            if waits:
                child.wait()
            ray._looked = -1e9
            with pytest.raises(RunError, match=f"Ray, in which the clients run, has died: its process {child.pid} is"):
                ray.check()


def test_an_engine_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the clients of an engine that never was: the cause, as Ray says it, is the run's."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no space for the object store")

    monkeypatch.setattr("ray.init", fails)
    began = time.monotonic()
    words = "Flower's simulation engine failed: OSError: no space for the object store"
    with pytest.raises(RunError, match=words):
        vce.simulate(
            toy(), RunFolder(tmp_path), app, resume=False, workers=1, say=lambda text: None, show=lambda record: None
        )
    assert time.monotonic() - began < 60
    status = RunFolder(tmp_path).status()
    assert (status["status"], status["error"], status["exit_code"]) == ("failed", words, 1)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", vce.RAY_PROCESSES)
def test_ray_that_is_killed_ends_the_run(name: str, tmp_path: Path) -> None:
    """`simulate --engine flower`, one of Ray's processes killed after round 1: one line says so, exit code 1."""
    file, folder = tmp_path / "a.toml", RunFolder(tmp_path / "run")
    file.write_text(toy(rounds=10_000).toml(), "utf-8")
    command = [sys.executable, "-m", "server", "simulate", str(file), "--engine", "flower", "--workers", "1"]
    with subprocess.Popen(
        [*command, "--run-dir", str(folder.path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            while not folder.history() and process.poll() is None:
                time.sleep(0.05)
            [victim] = [child for child in psutil.Process(process.pid).children() if child.name() == name]
            victim.kill()
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 1
    assert f"error: Ray, in which the clients run, has died: its process {victim.pid} is gone" in output
    assert folder.status()["status"] == "failed"
