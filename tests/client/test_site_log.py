"""A site's audit log: what came in, what went out, and that nothing leaves that could not be written down."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client.node import resident
from client.node.access import Access
from client.node.audited import SiteLog
from client.node.resident import NodeOptions, Process
from common.deploy import keys
from common.deploy.audit import AuditLog
from common.deploy.chain import verify
from common.errors import SettingsError


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 0, raising=False)


def asked(run: str = "digits-1") -> Message:
    content = RecordDict({"fedkeel": ConfigRecord({"run": run}), "more": MetricRecord({"x": 1.0})})
    message = Message(content, dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = "in-1"
    return message


class FakeFleet:
    """Gives so many messages, takes the replies, then stops."""

    def __init__(self, stop: threading.Event, messages: int = 1) -> None:
        self.address, self.connected, self.node = "fake:1", True, SimpleNamespace(node_id=7)
        self.stop, self.left, self.sent = stop, messages, []

    def join(self) -> None: ...

    def leave(self) -> None: ...

    def next_message(self) -> Any:
        if not self.left:
            self.stop.set()
            return None
        self.left -= 1
        return SimpleNamespace(run_id=5)

    def receive(self, found: Any) -> Message:
        return asked()

    def send(self, reply: Message, runtime_s: float, leaving: Callable[[str], None] = lambda sha256: None) -> None:
        leaving("out-1")
        self.sent.append(reply)


def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int = 1, **more: Any) -> FakeFleet:
    stop = threading.Event()
    fleet = FakeFleet(stop, messages)
    monkeypatch.setattr(resident, "Fleet", lambda access, stop, changed: fleet)
    options = NodeOptions(Access("127.0.0.1:9"), "a", audit=str(tmp_path / "audit.jsonl"), **more)

    def app(message: Message, context: Any) -> Message:
        return Message(RecordDict({"fedkeel": ConfigRecord({"status": "ok"})}), reply_to=message)

    resident._run(options, Process(app, stop))
    return fleet


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    assert verify(tmp_path / "audit.jsonl").ok
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


def test_each_message_in_and_upload_out(tmp_path, monkeypatch):
    assert len(serve(tmp_path, monkeypatch, messages=2).sent) == 2
    found = lines(tmp_path)
    assert [line["what"] for line in found] == [
        *("started", "policy", "joined", "message in", "upload out", "message in", "upload out", "stopped")
    ]
    assert {line["site"] for line in found} == {"a"}
    assert {line["key"] for line in found} == {"none: joined without --key"}
    assert (found[3]["run"], found[3]["kind"], found[3]["message"]) == ("digits-1", "train", "in-1")
    assert (found[4]["outcome"], found[4]["run"], found[4]["message"]) == ("ok", "digits-1", "out-1")
    assert found[4]["bytes"] > 0


def test_nothing_leaves_that_cannot_be_written_down(tmp_path, monkeypatch):
    record = AuditLog.record

    def full(self: AuditLog, what: str, *more: Any, **named: Any) -> Any:
        if what == "upload out":
            raise OSError(28, "No space left on device")
        return record(self, what, *more, **named)

    monkeypatch.setattr(AuditLog, "record", full)
    (sent,) = serve(tmp_path, monkeypatch).sent
    assert sent.has_error()
    assert not sent.has_content()
    assert "audit log cannot be written" in sent.error.reason
    assert str(tmp_path) not in sent.error.reason


def test_a_policy_is_noted_by_its_hash_when_it_changes(tmp_path, monkeypatch):
    policy = tmp_path / "policy.toml"
    for text in ("max_steps = 5\n", "max_steps = 5\n", "max_steps = 6\n"):
        policy.write_text(text)
        serve(tmp_path, monkeypatch, messages=0, policy=str(policy))
    noted = [line for line in lines(tmp_path) if line["what"] == "policy"]
    assert [line["outcome"] for line in noted] == ["first seen", "changed"]
    assert noted[0]["policy_sha256"] != noted[1]["policy_sha256"]


def test_a_refusal_by_the_server_and_the_key_are_in_it(tmp_path, monkeypatch):
    public = keys.generate(tmp_path / "a.key")
    known = keys.fingerprint(keys.read_public(public.read_bytes(), ""))
    access = Access("127.0.0.1:9", key=str(tmp_path / "a.key"))

    def refused(self: Any) -> None:
        raise SettingsError("the server refuses this key")

    monkeypatch.setattr(FakeFleet, "join", refused)
    monkeypatch.setattr(resident, "Fleet", lambda access, stop, changed: FakeFleet(stop))
    options = NodeOptions(access, "a", audit=str(tmp_path / "audit.jsonl"))
    with pytest.raises(SettingsError, match="refuses"):
        resident._run(options, Process(lambda message, context: message, threading.Event()))
    last = lines(tmp_path)[-1]
    assert (last["what"], last["outcome"], last["key"]) == ("ended", "refused", known)
    assert "refuses this key" in last["why"]


def test_an_error_reply_and_odd_messages_are_lines_too(tmp_path):
    book = SiteLog(tmp_path / "audit.jsonl", "a", Access("127.0.0.1:9"))
    message = asked("x" * 10**5 + "\x1b[2J\n")
    book.received(message)
    book.leaving(Message(Error(1, "no"), reply_to=message), "out")
    assert [line["outcome"] for line in lines(tmp_path)][-1] == "error"
    assert len(lines(tmp_path)[-1]["run"]) == 1000
