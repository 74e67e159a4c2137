"""Children end with their test, also if the test fails or its process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from common.flower import ROOT
from server.deploy.processes import held_ports
from tests.support.children import carrying
from tests.support.patience import until

MARK = "FEDKEEL_TEST_OF_CHILDREN"

TEST = """
import os, signal, subprocess, sys, time
from pathlib import Path
import pytest

SLEEP = "import time; time.sleep(600)"

@pytest.mark.processes
def test_it():
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    time.sleep(1)
    os.kill(child.pid, signal.SIGSTOP)
    Path(os.environ["FEDKEEL_READY"]).touch()
    REST
"""


def inner(folder: Path, rest: str, mark: str) -> subprocess.Popen[bytes]:
    """A pytest of its own, whose one test has a stopped child in a session of its own, and a grandchild."""
    (folder / "test_inner.py").write_text(TEST.replace("REST", rest), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    command += [f"--basetemp={folder / 'base'}", str(folder / "test_inner.py")]
    environ = {**os.environ, MARK: mark, "FEDKEEL_READY": str(folder / "ready")}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)


@pytest.mark.processes
@pytest.mark.parametrize("killed", [False, True], ids=["failed", "killed"])
def test_no_child_outlives_a_test(killed: bool, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with inner(tmp_path, "time.sleep(600)" if killed else "assert 0", mark) as run:
        until((tmp_path / "ready").exists, (tmp_path / "log").read_text, 60)
        if killed:
            assert len(carrying(MARK, mark)) >= 3
            os.kill(run.pid, signal.SIGKILL)
        until(lambda: run.poll() is not None, "the inner pytest ends", 60)
    assert run.returncode == (-9 if killed else 1), (tmp_path / "log").read_text()
    until(lambda: not carrying(MARK, mark), "its children end", 15)


def test_held_ports_are_given_to_nobody_else() -> None:
    ports = held_ports(20)
    assert len(set(ports)) == 20
    assert not set(ports) & set(held_ports(200))
