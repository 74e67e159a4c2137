"""Worker processes: whatever becomes of one, of its work or of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from common.flower import ROOT
from server.engines.workers import Ask, WorkerDied, Workers

WORK = """
import os, signal, sys, time

def answerer(mark):
    print("loaded")
    def answer(request):
        print("asked")
        if request == b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if request == b"raise":
            raise ValueError("no answer")
        if request == b"hang":
            time.sleep(600)
        return f"{mark} {os.getpid()} ".encode() + request
    return answer

def broken():
    raise RuntimeError("nothing to load")
"""

PARENT = """
import sys
from server.engines.workers import Workers
workers = Workers("work:answerer", [["a"], ["b"]])
for future in [workers.submit(lambda ask: ask(b"x")) for _ in range(2)]:
    future.result()
busy = workers.submit(lambda ask: ask(b"hang"))
print("ready", flush=True)
busy.result()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "work.py").write_text(WORK, "utf-8")


@contextmanager
def working(words: list[list[str]], log: Path, target: str = "work:answerer") -> Iterator[Workers]:
    workers = Workers(target, words, log)
    try:
        yield workers
    finally:
        workers.close()


def asked(workers: Workers, request: bytes) -> bytes:
    return workers.submit(lambda ask: ask(request)).result(timeout=60)


def test_each_worker_has_words_of_its_own_and_what_they_print_goes_to_the_log(tmp_path: Path) -> None:
    """Answers come back whole, large ones too, whatever the work prints."""

    def both(ask: Ask) -> set[bytes]:
        return {ask(b"x").split()[0]}

    with working([["a"], ["b"]], tmp_path / "log") as workers:
        marks: set[bytes] = set()
        while len(marks) < 2:
            marks |= set().union(*(future.result(60) for future in [workers.submit(both) for _ in range(4)]))
        large = os.urandom(10**7)
        assert asked(workers, large).endswith(large)
    assert marks == {b"a", b"b"}
    assert (tmp_path / "log").read_text().count("loaded") == 2


@pytest.mark.parametrize(("sent", "words"), [(b"kill", r"killed \(signal 9\)"), (b"raise", "exit code 1, see .*log")])
def test_one_that_dies_fails_its_work_and_is_replaced(sent: bytes, words: str, tmp_path: Path) -> None:
    """The next request is another process's."""
    with working([["a"]], tmp_path / "log") as workers:
        before = asked(workers, b"x")
        with pytest.raises(WorkerDied, match=words):
            asked(workers, sent)
        assert asked(workers, b"x").split()[1] != before.split()[1]


def test_one_that_cannot_start_fails_all_work(tmp_path: Path) -> None:
    """Nobody waits for ever; the log says why."""
    with working([[]], tmp_path / "log", "work:broken") as workers:
        for _ in range(2):
            with pytest.raises(WorkerDied, match="exit code 1, see"):
                asked(workers, b"x")
    assert "nothing to load" in (tmp_path / "log").read_text()


def answers(process: psutil.Process) -> bool:
    """Whether a child is a worker of these tests; what others left in this process may have ended meanwhile."""
    with suppress(psutil.Error):
        return "work:answerer" in process.cmdline()
    return False


def test_closing_ends_busy_ones_at_once(tmp_path: Path) -> None:
    """And leaves no process."""
    with working([["a"], ["b"]], tmp_path / "log") as workers:
        asked(workers, b"x")
        busy = workers.submit(lambda ask: ask(b"hang"))
        children = [each for each in psutil.Process().children() if answers(each)]
        assert len(children) == 2
    with pytest.raises(WorkerDied):
        busy.result(timeout=10)
    assert not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_they_end_with_their_parent(sent: signal.Signals, tmp_path: Path) -> None:
    """Idle or busy, also if it is killed; the parent is a script without `if __name__ == "__main__"`."""
    (tmp_path / "parent.py").write_text(PARENT, "utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        process.send_signal(sent)
    assert not psutil.wait_procs(children, timeout=10)[1]
