"""`run --superlink` waits for its SuperLink as a site does, at the start and in the middle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from server.deploy import federation
from server.deploy.control import Control, NoAnswer
from server.rounds.folder import RunFolder
from server.rounds.stopping import Stopped


class Link:
    """A control address at which nobody answers at the looks `away`."""

    address = "127.0.0.1:8000"

    def __init__(self, *away: int) -> None:
        self.looks, self.away = 0, away

    def absent(self) -> str:
        self.looks += 1
        return "connection refused" if self.looks in self.away else ""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "AGAIN_S", 0.01)
    monkeypatch.setattr(federation, "LOOK_S", 0.005)


def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Link, *ends: Any, **more: Any) -> list[Any]:
    """Attach, where each life of the run ends as told; returns what was said and how each life began."""
    said: list[Any] = []
    lives = iter(ends)

    def attached(experiment: Any, folder: Any, display: Any, resume: bool, control: Any, *_: Any) -> None:
        said.append(resume)
        if (end := next(lives)) is not None:
            (folder.path / "history.jsonl").parent.mkdir(exist_ok=True)
            (folder.path / "history.jsonl").touch()
            raise end

    monkeypatch.setattr(federation, "_attached", attached)
    display: Any = SimpleNamespace(say=said.append)
    control: Any = link
    federation.attach(Experiment(), RunFolder(tmp_path / "run"), display, resume=False, control=control, **more)
    return said


def test_a_superlink_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = attach(tmp_path, monkeypatch, Link(1, 2, 3), None)
    assert said == [
        "no SuperLink at 127.0.0.1:8000 yet, waiting: connection refused",
        "the SuperLink at 127.0.0.1:8000 is here",
        False,
    ]


def test_one_that_goes_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on, with what it left; what ends late of its life before is no matter either."""
    said = attach(tmp_path, monkeypatch, Link(2, 3), NoAnswer("gone"), RunError("the server app has died"), None)
    assert [each for each in said if isinstance(each, bool)] == [False, True, True]
    assert "the SuperLink at 127.0.0.1:8000 was gone (gone); the run goes on with it" in said


def test_a_run_that_fails_while_the_superlink_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="no progress"):
        attach(tmp_path, monkeypatch, Link(), RunError("no progress"))
    with pytest.raises(SettingsError, match="wrong"):
        attach(tmp_path, monkeypatch, Link(2), SettingsError("wrong"))


def test_a_stop_while_waiting_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped):
        attach(tmp_path, monkeypatch, Link(*range(1, 10**4)), stop=lambda: 0.0)


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("[Errno 111] Connection refused", True),
        ("[Errno -2] Name or service not known", True),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate", False),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", False),
    ],
)
def test_what_no_waiting_mends_is_an_error(text: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, request: Any) -> Any:
        raise httpx.ConnectError(text)

    monkeypatch.setattr("server.deploy.control.ControlHttpClient.ListNodes", fails)
    control = Control("127.0.0.1:8000")
    if waits:
        assert text in control.absent()
    else:
        with pytest.raises(SettingsError, match=r"is this its ca\.pem, and its name"):
            control.absent()
