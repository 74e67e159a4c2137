"""A Grid over a few worker processes of this machine, each with its own resident model and data."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Self

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from server.engines.inprocess import InProcessGrid, answer, host_context, stamp
from server.engines.workers import Answer, Ask, WorkerDied, Workers


class WorkerGrid(InProcessGrid):
    """One node, like the in-process grid, whose messages run in `workers` processes, whichever is free.

    Client memory lies in the folder `memory`, or in one that ends with the grid; all workers share it. Workers start
    at once, so that they load torch while this process prepares.
    """

    def __init__(self, app: str, workers: int, device: str = "cpu", memory: Path | None = None) -> None:
        self._identify()
        self._stack = ExitStack()
        folder = str(memory or self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fedkeel-")))
        self._workers = Workers(f"{__name__}:client", [(app, folder, device)] * workers)
        self._stack.callback(self._workers.close)
        self._running: dict[str, Future[Message]] = {}
        self._done = threading.Event()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the workers; returns their ids."""
        ids = []
        for message in messages:
            ids.append(stamp(message))
            future = self._workers.submit(partial(_answered, message))
            future.add_done_callback(lambda _: self._done.set())
            self._running[ids[-1]] = future
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are ready; waits up to a quarter of a second for one."""
        wanted = [message_id for message_id in message_ids if message_id in self._running]
        if not any(self._running[message_id].done() for message_id in wanted):
            self._done.wait(0.25)
        self._done.clear()
        return [self._running.pop(m).result() for m in wanted if self._running[m].done()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _answered(message: Message, ask: Ask) -> Message:
    try:
        reply = ask(message_to_proto(message).SerializeToString())
        return message_from_proto(ProtoMessage.FromString(reply))
    except WorkerDied as error:
        reason = f"the worker process died: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)


def client(app: str, memory: str, device: str) -> Answer:
    """In a worker: what answers messages with the ClientApp `app`."""
    loaded, context = resolve_name(app), host_context(memory, device)

    def answered(request: bytes) -> bytes:
        message = message_from_proto(ProtoMessage.FromString(request))
        reply: bytes = message_to_proto(answer(loaded, message, context)).SerializeToString()
        return reply

    return answered
