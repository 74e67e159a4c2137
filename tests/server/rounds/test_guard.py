"""What comes over the network is bounded before it is held, and nonsense costs its sender one message, not the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.superlink.grid import http_grid
from hypothesis import given
from hypothesis import strategies as st

from client.node.errors import TooLarge
from client.node.fleet import _bounded
from server.engines.inprocess import InProcessGrid
from server.rounds import reply_limits as guard
from server.rounds.prepare import prepare
from strategies.protocol import wire
from strategies.protocol.messages import Refused, read_reply
from tests.support.faults import toy


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's Grid with the guard, and as it was again afterwards."""
    for name in ("pull_objects", "inflate_object_from_contents"):
        monkeypatch.setattr(http_grid, name, getattr(http_grid, name))
    monkeypatch.setattr(guard, "_most_bytes", 10**6)
    guard.guard_replies()


def reply(numbers: int = 10) -> Message:
    InProcessGrid._identify()
    asked = Message(RecordDict(), 2, MessageType.TRAIN)
    asked.metadata.__dict__["_message_id"] = "asked"
    content = RecordDict({"a": ArrayRecord({"w": wire.to_array(torch.zeros(numbers))}), "c": ConfigRecord({"k": 1})})
    return Message(content, reply_to=asked)


class Runtime:
    """The SuperLink's side of one pull: messages, each as a tree of objects and their bytes."""

    def __init__(self, *messages: tuple[Message, ObjectTree, dict[str, bytes]]) -> None:
        self.messages = messages
        self.objects = {name: content for _, _, objects in messages for name, content in objects.items()}

    def PullMessages(self, request: Any) -> Any:
        return SimpleNamespace(
            messages_list=[message_to_proto(message) for message, _, _ in self.messages],
            message_object_trees=[tree for _, tree, _ in self.messages],
        )

    def PullObject(self, request: Any) -> Any:
        content = self.objects[request.object_id]
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        pass


def parts(message: Message) -> tuple[Message, ObjectTree, dict[str, bytes]]:
    message.metadata.__dict__["_message_id"] = message.object_id
    objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    light = Message(RecordDict(), metadata=message.metadata)
    return light, get_object_tree(message), objects


def pull(*messages: tuple[Message, ObjectTree, dict[str, bytes]]) -> list[Message]:
    grid = http_grid.HttpGrid(token="x", insecure=True)
    grid._client = Runtime(*messages)  # type: ignore[assignment]
    grid._run = SimpleNamespace(run_id=0)  # type: ignore[assignment]
    return list(grid.pull_messages(["asked"]))


def test_a_true_reply_comes_through_whole() -> None:
    sent = reply()
    (got,) = pull(parts(sent))
    assert got.content == sent.content


def test_one_that_is_too_large_is_dropped_and_the_other_is_not() -> None:
    large, small = pull(parts(reply(10**6)), parts(reply()))
    assert small.has_content()
    with pytest.raises(Refused, match="more than 1 MB") as refused:
        read_reply(large)
    assert refused.value.kind == "lost"


@given(st.data())
def test_one_that_is_nonsense_is_dropped_and_the_other_is_not(data: st.DataObject) -> None:
    """Any bytes in place of any object of a message."""
    light, tree, objects = parts(reply())
    names = [each.object_id for each in iterate_object_tree(tree)]
    name = data.draw(st.sampled_from(names))
    cut = data.draw(st.integers(0, len(objects[name])))
    objects[name] = data.draw(st.sampled_from([objects[name][:cut], data.draw(st.binary(max_size=100))]))
    other = parts(reply(11))
    pulled = pull((light, tree, objects | {k: v for k, v in other[2].items() if k not in objects}), other)
    assert len(pulled) == 2
    if pulled[0].has_error():
        with pytest.raises(Refused):
            read_reply(pulled[0])


def test_a_reply_that_is_no_message_is_dropped() -> None:
    light, _, _ = parts(reply())
    array = Array("float32", (1,), "raw", b"0000")
    tree = get_object_tree(array)
    (got,) = pull((light, tree, {name: each.deflate() for name, each in get_all_nested_objects(array).items()}))
    assert got.has_error()
    assert "not a message" in got.error.reason


def test_the_bound_follows_the_model(tmp_path: Path) -> None:
    """SCAFFOLD sends two vectors."""
    limits = []
    for algorithm in ("fedavg", "scaffold"):
        prepared = prepare(toy(algorithm))
        guard.bound_replies(prepared)
        limits.append(guard._most_bytes)
    assert limits[1] - limits[0] == 2 * prepared.model.vector.numel() * 4
    assert limits[0] > guard.SLACK_BYTES


def test_a_client_bounds_what_it_receives() -> None:
    take = _bounded(lambda name: b"x" * 40, 100)
    assert len(take("a")) == len(take("b")) == 40
    with pytest.raises(TooLarge, match="limit"):
        take("c")
