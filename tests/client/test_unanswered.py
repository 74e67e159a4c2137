"""A node that seems to be online and does not answer its roll call before it expires."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Error, Message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from client.app import app
from server.engines.inprocess import InProcessGrid
from tests.support.faults import ran, toy

DEAF = 77
UNANSWERED = [ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE]


class WithADeafNode(InProcessGrid):
    """A further node that never answers. For it Flower's server itself answers with an error, under its own id."""

    def __init__(self, code: int) -> None:
        super().__init__(app)
        self.code = code
        self.asked = 0

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [*super().get_nodes(), NodeInfo(node_id=DEAF)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            if message_id in self._waiting and self._waiting[message_id].metadata.dst_node_id == DEAF:
                self.asked += 1
                reply = Message(Error(self.code, "expired"), reply_to=self._waiting.pop(message_id))
                reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
                return [reply]
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("code", UNANSWERED)
def test_it_costs_one_roll_call_and_no_run(code: int, tmp_path: Path) -> None:
    """The run goes on without it, and it is refused nothing: it may answer the next roll call."""
    grid = WithADeafNode(code)
    result = ran(tmp_path, toy(rounds=2), grid)
    assert grid.asked == 1
    assert len(result.history) == 2
    assert not [text for text in result.said if "refused" in text]
