"""A TCP proxy whose network can be made bad: cut, refused, stalled, slow, reset at random."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Direction = Literal["up", "down"]
CHUNK = 32 * 1024
# Small kernel buffers: what is held back or slowed down must not disappear into megabytes of them.
_BUFFER = 64 * 1024


@dataclass(eq=False)
class _Connection:
    """Both halves of one proxied connection."""

    writers: list[asyncio.StreamWriter]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self) -> None:
        """RST to both ends; what is under way is lost."""
        for task in self.tasks:
            task.cancel()
        for writer in self.writers:
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`, in a thread of its own; a context manager.

    `rate`: bytes a second, for each connection and direction, None: no limit. `reset_share`: the chance that forwarding
    a piece of up to 32 KiB resets its connection instead; gRPC lives on one connection, so a share of connections would
    mean nothing. Both may be changed at any time. Counters: `opened` connections, `resets` of them by `reset_share`,
    `forwarded` bytes "up" (towards the target) and "down".
    """

    def __init__(self, target: int, *, port: int = 0, seed: int = 0) -> None:
        self.rate: float | None = None
        self.reset_share = 0.0
        self.opened = self.resets = 0
        self.forwarded: dict[Direction, int] = {"up": 0, "down": 0}
        self._target = target
        self._random = random.Random(seed)
        self._left: dict[Direction, int | None] = {"up": None, "down": None}
        self._held = threading.Event()
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._socket = _listening(port)
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Where to connect, HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- faults

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        return self._do(self._cut)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Cut all connections and refuse new ones."""
        self._do(self._close)
        try:
            yield
        finally:
            self._do(self._listen)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Keep all connections and accept new ones, but forward nothing."""
        self._do(self._stall)
        try:
            yield
        finally:
            self.flow()

    def hold(self, direction: Direction, after: int) -> threading.Event:
        """Stall both ways once so many more bytes have gone in one direction (the piece that would exceed them waits).
        The event is set when it happens; `flow` goes on."""
        self._held = threading.Event()
        self._left[direction] = after
        return self._held

    def flow(self) -> None:
        """End a stall or a hold."""
        self._left = {"up": None, "down": None}
        self._do(self._go)

    # --- in the thread

    def _do(self, call: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()

        async def run() -> None:
            try:
                result = call()
                done.set_result(await result if asyncio.iscoroutine(result) else result)
            except BaseException as error:
                done.set_exception(error)

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return done.result(10)

    async def _listen(self) -> None:
        if self._socket.fileno() < 0:
            self._socket = _listening(self.port)
        self._server = await asyncio.start_server(self._connected, sock=self._socket, limit=CHUNK)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._cut()
        await asyncio.sleep(0.01)  # Aborted transports close at the next turn of the loop.

    def _cut(self) -> int:
        connections, self._connections = self._connections, set()
        for connection in connections:
            connection.reset()
        return len(connections)

    def _stall(self) -> None:
        self._flowing.clear()

    def _go(self) -> None:
        self._flowing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        connection = _Connection([writer])
        self._connections.add(connection)
        try:
            if not self._flowing.is_set():
                await self._flowing.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._target, limit=CHUNK)
        except OSError:
            connection.reset()  # As the target would.
            self._connections.discard(connection)
            return
        connection.writers.append(back)
        if connection not in self._connections:  # cut meanwhile
            connection.reset()
            return
        connection.tasks = [
            asyncio.ensure_future(self._pump(connection, reader, back, "up")),
            asyncio.ensure_future(self._pump(connection, there, writer, "down")),
        ]

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        try:
            while piece := await reader.read(CHUNK):
                await self._pass(direction, len(piece))
                if self._random.random() < self.reset_share:
                    self.resets += 1
                    break
                writer.write(piece)
                await writer.drain()
                self.forwarded[direction] += len(piece)
                if self.rate:
                    await asyncio.sleep(len(piece) / self.rate)
            else:
                writer.write_eof()
                if not all(task.done() or task is asyncio.current_task() for task in connection.tasks):
                    return  # The other direction may still have something to say.
        except OSError:
            pass  # One end is gone: so is the other.
        connection.reset()
        self._connections.discard(connection)

    async def _pass(self, direction: Direction, count: int) -> None:
        left = self._left[direction]
        if left is not None:
            self._left[direction] = left - count
            if left < count:
                self._flowing.clear()
                self._held.set()
        await self._flowing.wait()


def _listening(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)  # Accepted sockets inherit it.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening
