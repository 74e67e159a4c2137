"""What a run, a SuperLink and a server's commands write into their audit logs, and where and when a run says it was."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from client.__main__ import cli as client_cli
from client.app import app
from common.deploy import keys
from common.deploy.audit import NAME, AuditLog
from common.deploy.chain import verify
from common.errors import RunError
from server.__main__ import cli as server_cli
from server.app import run
from server.deploy import federation
from server.deploy.admission import reconcile
from server.deploy.control import Node
from server.deploy.register import book_of, registered
from server.deploy.superlink import LinkOptions
from server.deploy.superlink_program import Refusals
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import NOTES, RunFolder
from server.rounds.provenance import command, now, own_version, stamped, unstamped
from server.watch.audited import audit_of, audited, began, ended
from tests.support.faults import FaultyGrid, fail, lies, toy

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
KEY = "SHA256:" + "a" * 43


def lines(path: Path) -> list[dict[str, Any]]:
    assert verify(path).ok
    return [json.loads(line) for line in path.read_text().splitlines()]


def whats(path: Path) -> list[tuple[str, str, str]]:
    return [(line["what"], line["outcome"], line["site"]) for line in lines(path)]


def test_a_run_says_who_came_what_was_taken_and_how_it_ended(tmp_path):
    folder = RunFolder(tmp_path / "run")
    path = audit_of(folder)
    assert path == tmp_path / "run" / NAME
    for resume, rounds in ((False, 2), (True, 3)):
        experiment = toy(rounds=rounds)
        event = audited(AuditLog(path, "server app"), "run")
        began(event, experiment, resume)
        run(InProcessGrid(app), experiment, folder, resume=resume, say=lambda text: None, event=event)
        ended(event, folder)
    found = lines(path)
    names = sorted({line["site"] for line in found if line["what"] == "joined"})
    assert [line["what"] for line in found if line["what"] not in ("joined",)] == [
        *("started", "round", "round", "finished"),
        *("resumed", "round", "finished"),
    ]
    assert {line["run"] for line in found} == {"run"}
    rounds_ = [line for line in found if line["what"] == "round"]
    assert [line["round"] for line in rounds_] == [1, 2, 3]
    history = folder.history()
    for line, record in zip(rounds_, history, strict=True):
        assert sorted(line["uploads"]) == sorted(line["accepted"]) == names
        assert line["weights"] == record["sha256"]
    assert found[-1]["weights"] == history[-1]["sha256"]
    assert len({line["experiment_sha256"] for line in found if "experiment_sha256" in line}) == 2  # rounds differ


def test_dropped_clients_and_void_rounds_stand_in_it_with_their_causes(tmp_path):
    book = AuditLog(tmp_path / "audit.jsonl")
    name = "2"
    grid = FaultyGrid(lies(name, fail, round=1))
    folder = RunFolder(tmp_path / "run")
    run(grid, toy(rounds=1), folder, say=lambda text: None, event=audited(book, "run"))
    (line,) = [line for line in lines(book.path) if line["what"] == "round"]
    assert list(line["causes"]) == [name]
    assert name not in line["accepted"]


def test_an_audit_log_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, caplog):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    book = AuditLog(tmp_path / "audit.jsonl")
    monkeypatch.setattr(book, "record", full)
    folder = RunFolder(tmp_path / "run")
    run(InProcessGrid(app), toy(rounds=1), folder, say=lambda text: None, event=audited(book, "run"))
    assert folder.status()["status"] == "finished"
    assert "could not be written" in caplog.text


class Superlink:
    """Takes any key but one."""

    def __init__(self, no: bytes) -> None:
        self.held, self._no = list[Node](), no

    def nodes(self) -> list[Node]:
        return list(self.held)

    def register(self, node: Node) -> None:
        if node.public_key == self._no:
            raise RunError("no answer")
        self.held.append(node)

    def unregister(self, node: Node) -> None:
        self.held.remove(node)


def test_a_superlink_writes_down_whom_it_lets_in(tmp_path):
    assert book_of(LinkOptions()) is None
    assert book_of(LinkOptions(state=tmp_path, audit=tmp_path / "own.jsonl")).path == tmp_path / "own.jsonl"
    options = LinkOptions(state=tmp_path / "state")
    book, said = book_of(options), []
    assert book is not None
    assert book.path == tmp_path / "state" / NAME
    a, b = (keys.generate(tmp_path / f"{name}.key").read_bytes() for name in "ab")
    a, b = (keys.read_public(each, "it") for each in (a, b))
    link = Superlink(b)

    def serve() -> None:
        with registered(book, options, said.append):
            reconcile(link, {a: "a", b: "b"}, said.append, book.try_record)
            reconcile(link, {}, said.append, book.try_record)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve()
    assert whats(book.path) == [
        ("superlink started", "ok", ""),
        ("site registered", "ok", "a"),
        ("site registered", "failed", "b"),
        ("site removed", "ok", "a"),
        ("superlink ended", "KeyboardInterrupt", ""),
    ]
    found = lines(book.path)
    assert [line["key"] for line in found[1:4]] == [keys.fingerprint(a), keys.fingerprint(b), keys.fingerprint(a)]
    assert found[2]["why"] == "no answer"
    assert re.fullmatch(r"audit log \S+, head 1:[0-9a-f]{64}", said[0])


def test_a_refusal_is_a_line_with_site_and_key_whatever_a_name_holds(tmp_path):
    """Names and reasons are fields: none is read out of a sentence that a peer had a part in."""
    book = AuditLog(tmp_path / NAME)
    refusals = Refusals(book)
    for _ in range(3):
        refusals.tell("key x of site a may join is in use\x1b[2J", "site a may join", KEY)
    refusals.tell("a call was not let in")
    assert whats(book.path) == [("refused", "ok", "site a may join"), ("refused", "ok", "")]
    assert lines(book.path)[0]["key"] == KEY
    assert "\x1b" not in book.path.read_text()


def test_a_run_with_a_superlink_of_its_own_writes_the_certificate_and_the_sites_too(tmp_path, monkeypatch):
    """Where `--audit` says; else in `--state`, else beside the run."""
    seen: list[LinkOptions] = []

    class Known(Exception):
        pass

    class NoLink:
        def __init__(self, log: Path, *, options: LinkOptions, stop: Any) -> None:
            seen.append(options)
            self.options, self.fleet_address = options, "127.0.0.1:1"

        def __enter__(self) -> None:
            raise Known

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(federation, "SuperLink", NoLink)
    viewer: Any = SimpleNamespace(say=lambda text: None)
    for name, options in (
        ("beside", LinkOptions()),
        ("state", LinkOptions(state=tmp_path / "state")),
        ("told", LinkOptions(state=tmp_path / "state", audit=tmp_path / "told.jsonl")),
    ):
        folder = RunFolder(tmp_path / name)
        folder.checkpoints.mkdir(parents=True)
        folder.append({"round": 1})  # a folder without a run is taken away again
        with pytest.raises(Known):
            federation.run(toy(), folder, viewer, resume=True, options=options)
    assert [options.book for options in seen] == [
        tmp_path / "beside" / NAME,
        tmp_path / "state" / NAME,
        tmp_path / "told.jsonl",
    ]
    assert all(whats(options.book)[0][0] == "superlink started" for options in seen if options.book)


def test_commands_that_change_who_may_join_are_written_down_beside_what_they_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def invoke(cli: Any, *words: str) -> str:
        answer = CliRunner().invoke(cli, list(words))
        assert answer.exit_code == 0, answer.output
        return str(answer.output)

    fingerprint = invoke(client_cli, "keygen", "--out", "site/a.key").split()[-1]
    AuditLog(tmp_path / "srv" / NAME).record("superlink started")  # a log that is there is gone on with
    invoke(server_cli, "nodes", "add", "a", "site/a.key.pub", "--file", "srv/nodes.toml")
    invoke(server_cli, "nodes", "remove", "a", "--file", "srv/nodes.toml")
    invoke(server_cli, "certs", "--out", "certs")
    assert [(line["what"], line["key"]) for line in lines(tmp_path / "site" / NAME)] == [("key", fingerprint)]
    assert whats(tmp_path / "srv" / NAME)[1:] == [("nodes add", "ok", "a"), ("nodes remove", "ok", "a")]
    (made,) = lines(tmp_path / "certs" / NAME)
    assert made["what"] == "certificate"
    assert len(made["certificate_sha256"]) == 64


def test_history_notes_and_run_json_say_when_where_and_by_what(tmp_path):
    before = now()
    folder = RunFolder(tmp_path / "run")
    run(InProcessGrid(app), toy(rounds=2), folder, say=lambda text: None)
    folder.note("something\nsaid")
    run(InProcessGrid(app), toy(rounds=3), folder, say=lambda text: None, resume=True, submitted={"host": "h"})
    times = [line["time"] for line in folder.history()]
    order = [before, *times, now()]
    assert order == sorted(order)
    assert all(re.fullmatch(f"{TIME} .*", line) for line in (folder.path / NOTES).read_text().splitlines())
    assert folder.notes() == ["something said", "resuming after round 2"]
    first, second = folder.status()["starts"]
    assert (first["resumed"], second["resumed"]) == (False, True)
    assert second["submitted"] == {"host": "h"}
    assert set(first) >= {"time", "host", "user", "process", "command", "versions"}
    assert first["versions"]["fedkeel"] == own_version() != ""
    assert re.fullmatch(TIME, folder.status()["time"])


def test_secrets_of_a_command_line_are_not_kept():
    shown = command(
        ["python", "x", "--token", "abc", "--api-token=abc", "--password", "abc", "--name", "site", "two words"]
    )
    assert "abc" not in shown
    assert shown.endswith("--name site 'two words'")
    assert len(command(["x" * 10**5])) <= 2000


def test_a_note_of_an_earlier_release_has_no_time():
    assert unstamped(stamped("round 1 is void: x")) == "round 1 is void: x"
    assert unstamped("round 1 is void: x") == "round 1 is void: x"
