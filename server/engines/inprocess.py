"""A Grid that runs the ClientApp in this process: no server, no Ray, model and data stay resident."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

NODE = 2


class InProcessGrid(Grid):
    """One node that hosts all clients. A message runs when its reply is asked for, one after the other.

    Client memory lies in a folder, or in "ram", where it ends with the process.
    """

    caution = ""
    """What a run on this grid has to say of itself."""

    def __init__(self, app: ClientApp, device: str = "cpu", memory: str = "ram") -> None:
        self._identify()
        self._app = app
        self._context = host_context(memory, device)
        self._waiting: dict[str, Message] = {}

    @staticmethod
    def _identify() -> None:
        """Flower's Message asks these of the process; behind a SuperLink Flower has set them."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, SUPERLINK_NODE_ID, 0

    def set_run(self, run: Run) -> None:
        """There is nothing to set."""

    @property
    def run(self) -> Run:
        """There is no Flower run."""
        raise NotImplementedError("an in-process grid has no Flower run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Deprecated in Flower; `Message(...)` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The one node."""
        return [NODE]

    def get_nodes(self) -> Iterable[NodeInfo]:
        """The one node."""
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages in place of those that nobody asked for any more; returns their ids."""
        self._waiting.clear()
        ids = []
        for message in messages:
            ids.append(stamp(message))
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run one of the messages asked for and return its reply."""
        for message_id in message_ids:
            if (message := self._waiting.pop(message_id, None)) is not None:
                return [answer(self._app, message, self._context)]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run all messages; they are never late."""
        return [
            reply for message_id in list(self.push_messages(messages)) for reply in self.pull_messages([message_id])
        ]

    def close(self) -> None:
        """Nothing to stop."""


Together = Callable[[Sequence[Message], Context, int], list[Message]]
"""Messages to clients, a node's context, how many at once (0: all) -> their replies, in order."""


class CohortGrid(InProcessGrid):
    """The same with a round's TRAIN messages worked on together by `together`, `most` at once (0: all)."""

    def __init__(
        self, app: ClientApp, together: Together, most: int = 0, device: str = "cpu", memory: str = "ram"
    ) -> None:
        super().__init__(app, device, memory)
        self.caution = "cohort mode: weights are those of one client after the other to rounding, not bit for bit"
        self._together, self._most = together, most
        self._done: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See `InProcessGrid`."""
        self._done.clear()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """One reply, as when one client runs after the other: a round that has enough asks for no more."""
        wanted = list(message_ids)
        training = [id for id in wanted if id in self._waiting and is_training(self._waiting[id])]
        if training:
            replies = self._together([self._waiting.pop(id) for id in training], self._context, self._most)
            self._done.update(zip(training, replies, strict=True))
        for message_id in wanted:
            if message_id in self._done:
                return [self._done.pop(message_id)]
        return super().pull_messages(wanted)


def is_training(message: Message) -> bool:
    """Whether it asks a client to train."""
    return str(message.metadata.message_type) == MessageType.TRAIN


def host_context(memory: str, device: str) -> Context:
    """The context of a node that hosts all clients, with their memory in "ram" or in a folder."""
    config: dict[str, bool | float | int | str] = {
        "partition-id": 0,
        "num-partitions": 1,
        "memory": memory,
        "durable": False,
        "device": device,
        "trusted": True,
    }
    return Context(run_id=0, node_id=NODE, node_config=config, state=RecordDict(), run_config={})


def stamp(message: Message) -> str:
    """Give a message its id, which Flower's servers do for real nodes."""
    message_id = uuid.uuid4().hex
    message.metadata.__dict__["_message_id"] = message_id
    return message_id


def answer(app: ClientApp, message: Message, context: Context) -> Message:
    """The app's reply, or an error reply with the exception."""
    try:
        reply = app(message, context)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
    return reply
