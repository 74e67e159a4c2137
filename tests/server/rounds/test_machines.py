"""How server and clients compute is on the roll and in run.json; a mixture is told once, and refused where the
experiment is portable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Message

from common import portable
from common.arithmetic import describe, host
from common.errors import SettingsError
from server.rounds.folder import ROLL, RunFolder
from server.rounds.machines import UNTOLD, Machines
from strategies.protocol.members import Member
from strategies.protocol.messages import HEAD
from tests.support.faults import FaultyGrid, Lie, ran, run, toy

OTHER = "torch 9.9, MKL 1, oneDNN v1, AVX2, 1 thread, answers 0123456789ab on cpu"


def saying(text: str | None) -> Lie:
    """A node whose roll says so, or None: nothing, as that of an older release."""

    def lie(name: str, round: int, reply: Message) -> Message:
        head = reply.content.config_records[HEAD]
        if "arithmetic" in head:
            del head["arithmetic"]
            if text is not None:
                head["arithmetic"] = text
        return reply

    return lie


def members(*lines: str) -> dict[str, Member]:
    return {f"site-{i}": Member(f"site-{i}", i, 1, 1, 1, arithmetic=line) for i, line in enumerate(lines)}


def test_roll_and_run_json_say_how_all_compute(tmp_path: Path) -> None:
    """Alike: no note."""
    result = ran(tmp_path, toy(), FaultyGrid())
    roll = json.loads((tmp_path / ROLL).read_text())
    assert [each["arithmetic"] for each in roll] == [describe()] * 5
    assert RunFolder(tmp_path).status()["arithmetic"] == {"server": [describe()], "clients": [describe()]}
    assert result.said == []


def test_a_mixture_is_told_in_one_note(tmp_path: Path) -> None:
    """With who computes how; both lines are in run.json."""
    result = ran(tmp_path, toy(), FaultyGrid(saying(OTHER)))
    assert len(result.said) == 1
    assert "can be repeated with these machines and not on one" in result.said[0]
    assert f"the server: {describe()}" in result.said[0]
    assert f"0, 1, 2 and 2 more: {OTHER}" in result.said[0]
    assert RunFolder(tmp_path).status()["arithmetic"] == {"server": [describe()], "clients": [OTHER]}


def test_an_older_client_is_let_in(tmp_path: Path) -> None:
    """Its roll lacks the field; that it may compute otherwise is told."""
    result = ran(tmp_path, toy(), FaultyGrid(saying(None)))
    assert len(result.history) == 3
    assert UNTOLD in result.said[0]
    assert [each["arithmetic"] for each in json.loads((tmp_path / ROLL).read_text())] == [""] * 5


def test_a_line_that_is_no_text_is_malformed_and_a_wild_one_tamed(tmp_path: Path) -> None:
    """It comes from the network."""

    def number(name: str, round: int, reply: Message) -> Message:
        if "arithmetic" in (head := reply.content.config_records[HEAD]):
            head["arithmetic"] = 7
        return reply

    assert "malformed: arithmetic = '7'" in str(run(tmp_path / "a", toy(), FaultyGrid(number)).error)
    ran(tmp_path / "b", toy(), FaultyGrid(saying("\x1b[2J" + "x" * 1000)))
    told = json.loads((tmp_path / "b" / ROLL).read_text())[0]["arithmetic"]
    assert told == ("?[2J" + "x" * 1000)[:300]


@pytest.mark.parametrize(
    ("lines", "notes"),
    [
        ([OTHER], 1),
        (["OWN on cpu", OTHER], 1),
        (["OWN on cpu", "OWN on cpu"], 0),
        (["OWN on NVIDIA H200, CUDA 13.0, cuDNN 92400"] * 2, 0),
        (["OWN on NVIDIA H200, CUDA 13.0, cuDNN 92400", "OWN on cpu"], 1),
    ],
)
def test_cards_beside_one_kind_of_processor_are_no_mixture(tmp_path: Path, lines: list[str], notes: int) -> None:
    """The server's own processor is part of any machine; cards and processors that train side by side are mixed."""
    said: list[str] = []
    lines = [line.replace("OWN", host(describe())) for line in lines]
    folder = RunFolder(tmp_path)
    machines = Machines(folder, said.append, resume=False)
    for _ in range(3):
        machines.heed(members(*lines))
    assert len(said) == notes
    assert folder.status()["arithmetic"]["clients"] == list(dict.fromkeys(lines))


def test_a_run_that_goes_on_elsewhere_is_a_mixture(tmp_path: Path) -> None:
    """Of processes one after the other; told when it becomes one, not at every resume."""
    folder = RunFolder(tmp_path)
    folder.path.mkdir(exist_ok=True)
    folder.set_status("running", arithmetic={"server": [OTHER], "clients": [OTHER]})
    said: list[str] = []
    Machines(folder, said.append, resume=True).heed(members(describe()))
    assert len(said) == 1
    assert f"earlier: {OTHER}" in said[0]
    Machines(folder, said.append, resume=True).heed(members(describe()))
    assert len(said) == 1
    assert folder.status()["arithmetic"] == {"server": [OTHER, describe()], "clients": [OTHER, describe()]}


def test_native_clients_of_a_portable_run_are_refused_before_round_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client itself, and by the server's own process first if it is native, too."""
    monkeypatch.setattr(portable, "_entered", [False])
    result = run(tmp_path, toy().portable(), FaultyGrid())
    assert isinstance(result.error, SettingsError)
    assert str(result.error).startswith("roll call failed: client 0: local.arithmetic = 'portable' and this process")
    assert result.history == []


def test_clients_that_compute_otherwise_are_refused_where_all_must_be_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another release of torch, for instance."""
    monkeypatch.setattr("client.session.require", lambda arithmetic, device: None)
    result = run(tmp_path, toy().portable(), FaultyGrid(saying(OTHER)))
    assert f"arithmetic: client '0' computes with {OTHER}, the server with {describe()}" in str(result.error)
