"""A site hears and shows why it was refused or dropped; a server hears at once of a message that is too large."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree

from client.app import app
from client.node.access import Access
from client.node.errors import TooLarge
from client.node.fleet import Fleet, Found
from client.node.metrics import ClientMetrics
from client.node.resident import NodeOptions, Process, _serve
from server.engines.inprocess import InProcessGrid
from strategies.protocol.members import notices
from strategies.protocol.messages import Refused, read_reply


@pytest.fixture(autouse=True)
def identified() -> None:
    """Messages can be made in this process."""
    InProcessGrid._identify()


class Served:
    """A fleet with one message, which is too large or can be fetched; keeps what was sent."""

    connected = True
    node = SimpleNamespace(node_id=1)

    def __init__(self, stop: threading.Event, message: Message, large: bool) -> None:
        self.stop, self.message, self.large = stop, message, large
        self.sent: list[Message] = []
        self._fleet = object.__new__(Fleet)
        self._fleet._confirm = lambda found: None  # type: ignore[method-assign]

    def next_message(self) -> Found | None:
        if self.sent:
            return None
        return Found(message_to_proto(self.message), ObjectTree(object_id="asked"))

    def receive(self, found: Found) -> Message:
        if self.large:
            raise TooLarge("a message holds more than 1 MB, this site's limit")
        return self.message

    def refusal(self, found: Found, why: str) -> Message:
        return self._fleet.refusal(found, why)

    def send(self, reply: Message, runtime_s: float, leaving: Any = None) -> None:
        self.sent.append(reply)
        self.stop.set()


def served(message: Message, large: bool = False) -> tuple[Message, ClientMetrics]:
    """What a node answers to one message, and what it counted."""
    message.metadata.__dict__["_message_id"] = "asked"
    stop, watch = threading.Event(), ClientMetrics(names=["site-1"])
    fleet = Served(stop, message, large)
    options = NodeOptions(Access("127.0.0.1:1"), "site-1")
    _serve(fleet, options, Process(app, stop, watch=watch))  # type: ignore[arg-type]
    return fleet.sent[0], watch


def test_a_message_that_is_too_large_is_answered_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """By an error reply to that message: the round drops the client without waiting for its deadline."""
    reply, _ = served(Message(RecordDict(), 1, MessageType.TRAIN), large=True)
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert reply.metadata.reply_to_message_id == "asked"
    with pytest.raises(Refused, match="lost: site-1: a message holds more than 1 MB, this site's limit"):
        read_reply(reply)
    assert [text for text in caplog.messages if text.endswith("this site's limit; the server is told")]


def test_what_the_server_says_is_in_the_sites_log_and_health(caplog: pytest.LogCaptureFixture) -> None:
    _, watch = served(notices("r", {1: "client site-1: round 3: outlier: delta has norm 1e+09"}, 30.0)[0])
    assert "the server says: client site-1: round 3: outlier: delta has norm 1e+09" in caplog.messages
    watch.connected("site-1", True)
    well, details = watch.health()
    assert well
    assert details["told"]["site-1"].endswith("UTC: client site-1: round 3: outlier: delta has norm 1e+09")


@pytest.mark.parametrize("value", [0, True, 1.5, ["a"], b"x"])
def test_a_notice_that_is_no_text_is_no_notice(value: Any) -> None:
    """Then it is a roll call, which says what is wrong with it."""
    message = notices("r", {1: "x"}, 30.0)[0]
    message.metadata.__dict__["_message_id"] = "asked"
    message.content.config_records["fedkeel"]["notice"] = value
    context = Context(run_id=1, node_id=1, node_config={"name": "site-1"}, state=RecordDict(), run_config={})
    assert app(message, context).content.config_records["fedkeel"]["error"] != "heard"
