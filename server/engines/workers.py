"""Worker processes of this machine, each answering one request at a time; they end with their parent, however it ends.

Not Python's multiprocessing: its children import the parent's main module again, which in a user's script runs the
experiment once more. And not Flower at the top: a worker prepares its environment before the first import of it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import IO, TypeVar

from common import flower

T = TypeVar("T")

Answer = Callable[[bytes], bytes]
"""What a worker does: from a request to its answer. An exception ends the worker."""

Ask = Callable[[bytes], bytes]
"""The same from outside. Raises WorkerDied."""


class WorkerDied(Exception):
    """The process that worked on a request ended; the text says how."""


class Workers:
    """A process for each of `arguments`, which are the words that the function `target` makes its `Answer` of.

    `target` is "module:function", so that a worker imports no more than it needs. One that dies fails its request and
    is replaced. What workers print goes to the file `log`, or where this process's errors go. `variables` of their
    environment come before those of this process.
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[Sequence[str]],
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._closed = False
        self._workers = [_Worker([target, *words], log, variables or {}) for words in arguments]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers), "worker")

    def submit(self, work: Callable[[Ask], T]) -> Future[T]:
        """Call `work` with the next idle worker, in a thread: requests are made one by one, not all at once."""
        return self._threads.submit(self._run, work)

    def _run(self, work: Callable[[Ask], T]) -> T:
        worker = self._idle.get()
        try:
            return work(worker.ask)
        finally:
            if not self._closed:
                worker.revive()
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers at once, whatever they are at."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:  # one may have been replaced meanwhile
            worker.kill()
            worker.release()


class _Worker:
    """A process with which this one talks over the standard streams."""

    def __init__(self, words: Sequence[str], log: Path | None, variables: Mapping[str, str]) -> None:
        self._words, self._log, self._variables = words, log, variables
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") if self._log else nullcontext() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **self._variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Ctrl-C is for the parent, which then stops its workers.
                start_new_session=True,
            )

    def ask(self, request: bytes) -> bytes:
        """Raises WorkerDied."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, request)
            return _read(self._process.stdout)
        except (OSError, EOFError):
            raise WorkerDied(self._ended()) from None

    def _ended(self) -> str:
        """How the process ended, for people."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            return "its stream ended"
        if code == -signal.SIGKILL:
            return "killed (signal 9), perhaps for want of memory"
        if code < 0:
            return f"signal {-code} ({signal.strsignal(-code)})"
        return f"exit code {code}" + (f", see {self._log}" if self._log else "")

    def revive(self) -> None:
        """Replace the process if it has ended."""
        if self._process.poll() is not None:
            self.release()
            self._start()

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Close the streams of a process that has ended."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()


def main() -> None:
    """A worker: `sys.argv` holds target and arguments, requests and answers travel over the standard streams.

    Whatever the work prints goes to standard error.
    """
    flower.prepare()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A stream of its own: as Python ends it would wait for the one that a thread reads from.
    stream = os.fdopen(os.dup(0), "rb")
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(stream, requests), daemon=True).start()
    answer: Answer = resolve_name(sys.argv[1])(*sys.argv[2:])
    gc.freeze()  # What is loaded now stays: no need to look through it again.
    while True:
        _write(replies, answer(requests.get()))


def _receive(stream: IO[bytes], requests: SimpleQueue[bytes]) -> None:
    """Requests, until the input closes: then the parent has ended, however it did, and so does this process."""
    with suppress(EOFError):
        while True:
            requests.put(_read(stream))
    os._exit(0)


def _write(stream: IO[bytes], content: bytes) -> None:
    """Eight bytes of length, then the content."""
    stream.write(len(content).to_bytes(8, "big"))
    stream.write(content)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    """What `_write` wrote. Raises EOFError if the other side is gone."""
    head = stream.read(8)
    content = stream.read(int.from_bytes(head, "big")) if len(head) == 8 else b""
    if len(head) < 8 or len(content) < int.from_bytes(head, "big"):
        raise EOFError("its stream ended")
    return content
