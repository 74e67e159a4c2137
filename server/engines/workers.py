"""A Grid over a few worker processes of this machine, each with its own resident model and data."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Self

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from server.engines.inprocess import InProcessGrid, stamp


class WorkerGrid(InProcessGrid):
    """One node, like the in-process grid, whose messages run in `workers` processes, whichever is free.

    Client memory lies in the folder `memory`, or in one that ends with the grid; all workers share it. Workers start
    at once, so that they load torch while this process prepares.
    """

    def __init__(self, app: str, workers: int, device: str = "cpu", memory: Path | None = None) -> None:
        self._identify()
        self._stack = ExitStack()
        folder = str(memory or self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fedkeel-")))
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._workers = [_Worker(app, folder, device) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, "worker")
        self._running: dict[str, Future[Message]] = {}
        self._done = threading.Event()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the workers; returns their ids."""
        ids = []
        for message in messages:
            ids.append(stamp(message))
            future = self._threads.submit(self._run, message)
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

    def _run(self, message: Message) -> Message:
        worker = self._idle.get()
        try:
            return worker.ask(message)
        except (OSError, EOFError) as error:
            worker.restart()
            reason = f"the worker process died: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._stack.close()


class _Worker:
    """A process that answers one message at a time over its standard streams."""

    def __init__(self, app: str, folder: str, device: str) -> None:
        self._command = [sys.executable, "-m", "server.engines.worker", app, folder, device]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            # Ctrl-C is for the parent, which then stops its workers.
            start_new_session=True,
        )

    def ask(self, message: Message) -> Message:
        """Send a message and wait for the reply. Raises OSError or EOFError if the process dies."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        write_frame(self._process.stdin, message_to_proto(message).SerializeToString())
        return message_from_proto(ProtoMessage.FromString(read_frame(self._process.stdout)))

    def restart(self) -> None:
        """Replace a dead process."""
        self.stop()
        self._start()

    def stop(self) -> None:
        """End the process: it stops when its input closes."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(OSError):
            self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Eight bytes of length, then the content."""
    stream.write(len(content).to_bytes(8, "big"))
    stream.write(content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """What `write_frame` wrote; EOFError if the other side is gone."""
    head = stream.read(8)
    content = stream.read(int.from_bytes(head, "big")) if len(head) == 8 else b""
    if len(head) < 8 or len(content) < int.from_bytes(head, "big"):
        raise EOFError("its stream ended")
    return content
