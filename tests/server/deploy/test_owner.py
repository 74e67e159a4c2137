"""A run has an owner: whenever the command that looks after it is told to stop, the run stops too, or never begins."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import CliRunner

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from server.__main__ import cli
from server.app import run as run_app
from server.deploy import federation
from server.deploy.control import RunStatus
from server.rounds import stopping
from server.rounds.folder import RunFolder
from tests.support.faults import FaultyGrid, ran

SETTINGS = """
name = "owned"
rounds = 3
task.name = "tests.support.faults:task"
round.wait_for = 2
"""

OWN = ("commands/run.py", "deploy/federation.py", "rounds/folder.py", "rounds/stopping.py", "watch/follow.py")
"""What runs between the command line and the rounds."""


class Waiting(FaultyGrid):
    """Nobody is here: a run waits for its sites."""

    def get_nodes(self) -> list[Any]:
        return []


class Link:
    """A SuperLink: runs what is submitted in a thread, after a while, as Flower does."""

    def __init__(self, delay_s: float = 0.0, lost: bool = False) -> None:
        self.delay_s, self.lost = delay_s, lost
        self.runs: list[threading.Thread] = []
        self.killed = threading.Event()

    def absent(self) -> str:
        return ""

    def submit(self, project: Path, config: dict[str, Any]) -> int:
        thread = threading.Thread(target=self._app, args=(config,))
        self.runs.append(thread)
        thread.start()
        if self.lost:
            raise RunError("no answer from the Flower server")
        return len(self.runs)

    def _app(self, config: dict[str, Any]) -> None:
        if self.killed.wait(self.delay_s):
            return
        settings, folder = Experiment.parse(config["experiment-toml"]), RunFolder(config["run-dir"])
        with suppress(SettingsError, RunError):  # Flower writes them into its log
            run_app(
                Waiting(),
                settings,
                folder,
                resume=config["resume"],
                say=lambda text: None,
                stop=lambda: time.monotonic() if self.killed.is_set() else None,
                claim=config["claim"],
            )

    def status(self, run_id: int) -> RunStatus:
        alive = self.runs[run_id - 1].is_alive()
        return RunStatus("running" if alive else "finished", "" if alive else "completed", "")

    def log(self, run_id: int) -> str:
        return ""

    def stop(self, run_id: int) -> None:
        self.killed.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal makes a process impatient for the rest of its life: that of the tests is longer."""
    monkeypatch.setattr(stopping, "_longest_wait_s", float("inf"))


class At:
    """Raises a signal at the line number `count` of those that are reached for the first time."""

    def __init__(self, count: int, number: signal.Signals, late: threading.Event) -> None:
        self.count, self.number, self.late = count, number, late
        self.seen: set[tuple[str, int]] = set()
        self.hit = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.endswith(OWN):
            return None
        place = (name, frame.f_lineno)
        if (
            event == "line"
            and not (self.hit or self.late.is_set())
            and place not in self.seen
            and signal.getsignal(self.number) in LISTENING
        ):
            self.seen.add(place)
            if len(self.seen) == self.count:
                self.hit = f"{Path(name).name}:{frame.f_lineno}"
                signal.raise_signal(self.number)
        return self


class _Listening:
    """Handlers of the commands, not those that were there before."""

    def __contains__(self, handler: object) -> bool:
        return handler not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


LISTENING = _Listening()


def command(folder: Path, *more: str, trace: Callable[..., Any] | None = None) -> Any:
    file = folder / "owned.toml"
    file.write_text(SETTINGS)
    words = ["run", str(file), "--superlink", "127.0.0.1:1", "--run-dir", str(folder / "run"), *more]
    sys.settrace(trace)
    try:
        return CliRunner().invoke(cli, words)
    finally:
        sys.settrace(None)


def over(link: Link, folder: RunFolder) -> None:
    """Nothing runs, and nothing ever will."""
    for thread in link.runs:
        thread.join(20)
        assert not thread.is_alive(), "it runs without an owner"
    assert not folder.in_use()
    assert folder.status().get("status") in (None, "finished", "stopped", "starting")


def begun(folder: Path) -> RunFolder:
    """A run with a round in it, to be resumed."""
    settings = Experiment.parse(SETTINGS).model_copy(update={"rounds": 1})
    ran(folder / "run", settings, FaultyGrid(memory=str(folder / "memory")))
    RunFolder(folder / "run").set_status("finished")
    return RunFolder(folder / "run")


@pytest.mark.parametrize(
    ("number", "resume"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.rest),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.rest),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.rest),
    ],
)
def test_a_signal_at_each_line(
    number: signal.Signals, resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first line of the command to the one that waits for the run: the answer is the same everywhere."""
    folder = begun(tmp_path) if resume else RunFolder(tmp_path / "run")
    history = folder.history()
    more = ("--resume",) if resume else ()
    places: list[str] = []
    while True:
        link = Link()
        at = At(len(places) + 1, number, link.killed)
        monkeypatch.setattr(federation, "running_link", lambda *_, link=link: link)
        timer = threading.Timer(2.0, link.killed.set)
        timer.start()
        result = command(tmp_path, *more, trace=at)
        timer.cancel()
        if not at.hit:
            break
        places.append(at.hit)
        wanted = (0,) if number == signal.SIGTERM else (130,)
        assert result.exit_code in wanted, (at.hit, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), (at.hit, result.exception)
        over(link, folder)
        assert folder.history() == history, at.hit
        assert folder.holds_run() == resume, at.hit
    assert len(places) > 60, places


@pytest.mark.parametrize("delay_s", [0.2, 1.0])
def test_a_run_that_was_withdrawn_never_begins(delay_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink starts it later, beside a successor that has the folder by then: it leaves both alone."""
    folder = begun(tmp_path)
    link = Link(delay_s)
    link.stop = lambda run_id: None  # type: ignore[method-assign]
    monkeypatch.setattr(federation, "running_link", lambda *_: link)
    at = time.monotonic()
    submit = link.submit

    def submitted(project: Path, config: dict[str, Any]) -> int:
        run_id = submit(project, config)
        signal.raise_signal(signal.SIGTERM)
        return run_id

    link.submit = submitted  # type: ignore[method-assign]
    result = command(tmp_path, "--resume")
    assert (result.exit_code, time.monotonic() - at < 5) == (0, True), result.output
    assert "stopped before it began" in result.output
    with folder.claimed(True) as claim:
        before = folder.status()
        for thread in link.runs:
            thread.join(20)
            assert not thread.is_alive()
        assert folder.status() == before
        assert before["claim"] == claim
    assert [line["round"] for line in folder.history()] == [1]


def test_an_answer_that_is_lost_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink took the run and its answer did not arrive: the command fails, and the run does not begin."""
    link, folder = Link(0.3, lost=True), RunFolder(tmp_path / "run")
    monkeypatch.setattr(federation, "running_link", lambda *_: link)
    result = command(tmp_path)
    assert (result.exit_code, "no answer" in result.output) == (1, True), result.output
    over(link, folder)


def test_a_request_to_stop_outlives_the_start_of_the_server_app(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    with folder.claimed(True) as claim:
        folder.stop.ask(5)
        with folder.open(True, claim):
            assert folder.stop() is not None
        with pytest.raises(SettingsError, match="given it up"), folder.open(True, "another"):
            pass
    with folder.open(True):
        assert folder.stop() is None


def test_before_a_command_listens_it_may_be_stopped_too(tmp_path: Path) -> None:
    """While it is imported: with 0, for `compare` and the like by the signal, as any program."""
    code = (
        "import os, signal, sys; sys.argv = ['server', sys.argv[1]]; import common.portable; "
        "common.portable.start = lambda: os.kill(os.getpid(), signal.SIGTERM); import server.__main__"
    )
    for word, wanted in (("run", 0), ("local", 0), ("superlink", 0), ("check", -signal.SIGTERM)):
        ended = subprocess.run([sys.executable, "-c", code, word], cwd=ROOT, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (wanted, ""), word
