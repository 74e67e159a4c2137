"""Calls of a node whose answers are lost on the way, and senders that die half-way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.proto.fleet_pb2 import PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, ObjectUnavailableError, pull_objects

from client.node import fleet
from client.node.access import Access
from client.node.errors import SenderGone
from client.node.fleet import Fleet
from server.engines.inprocess import InProcessGrid
from strategies.protocol import wire


class Lossy(Fleet):
    """A connection to Flower's bookkeeping of a reply's parts.

    The answers to the first `lost` calls of a method are lost and the calls repeated: Flower refuses a part that has
    come already, and, once the server app has `taken` the message, the message itself.
    """

    def __post_init__(self) -> None:
        self.pending: set[str] | None = None
        self.lost = {"PushMessages": 0, "PushObject": 0}
        self.taken = False
        self.pushed: list[str] = []
        self.guard = threading.Lock()

    def _try(self, method: str, request: Any, timeout_s: float = 30.0) -> tuple[Any, bool]:
        with self.guard:
            answer, repeated = self.serve(method, request), False
            if self.lost[method] > 0:
                self.lost[method] -= 1
                answer, repeated = self.serve(method, request), True
            return answer, repeated

    def serve(self, method: str, request: Any) -> Any:
        if method == "PushObject":
            assert self.pending is not None
            stored = request.object_id in self.pending and request.session_id in ("first", "")
            if stored:
                self.pending.discard(request.object_id)
                self.pushed.append(request.object_id)
            return PushObjectResponse(stored=stored)
        if self.pending is not None:
            missing = set() if self.taken else self.pending
            return PushMessagesResponse(objects_to_push=sorted(missing), session_id="second" if self.taken else "first")
        tree, self.pending = [request.message_object_trees[0]], set()
        while tree:
            self.pending.add((part := tree.pop()).object_id)
            tree += part.children
        return PushMessagesResponse(objects_to_push=sorted(self.pending), session_id="first")


def message() -> Message:
    InProcessGrid._identify()
    state = {name: torch.full((3,), value) for name, value in (("model", 1.0), ("control", 2.0))}
    return Message(RecordDict({"state": wire.to_records(state)}), dst_node_id=5, message_type="train")


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("messages", [0, 1])
@pytest.mark.parametrize("objects", [0, 1, 2, 10])
def test_a_reply_survives_lost_answers(objects: int, messages: int, taken: bool) -> None:
    """All parts arrive, each once."""
    sent, server = message(), Lossy(Access("127.0.0.1:1"), threading.Event())
    server.lost |= {"PushObject": objects, "PushMessages": messages}
    server.taken = taken
    server.send(sent, 0.0)
    assert server.pending == set()
    assert sorted(server.pushed) == sorted(get_all_nested_objects(sent))


def test_a_part_that_the_server_does_not_take_is_an_error() -> None:
    """Refused at the first try: its session is gone."""

    class Refusing(Lossy):
        def serve(self, method: str, request: Any) -> Any:
            return PushObjectResponse(stored=False) if method == "PushObject" else super().serve(method, request)

    with pytest.raises(ObjectPushError):
        Refusing(Access("127.0.0.1:1"), threading.Event()).send(message(), 0.0)


def test_a_message_whose_sender_died_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part is there, the second never comes, and a newer message has."""
    monkeypatch.setattr(fleet, "PART_S", 0.2)

    def pull(object_id: str) -> bytes:
        if object_id == "first":
            return b"content"
        raise ObjectUnavailableError(object_id)

    with pytest.raises(SenderGone, match=r"no part of a message has come for 0 s; its sender is gone"):
        pull_objects(
            ["first", "second"], fleet._patient(pull, lambda: True), initial_backoff=0.01, max_tries_per_object=None
        )
