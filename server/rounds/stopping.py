"""Stopping a run so that nothing is lost: the round in hand is finished, or void; a second request ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from common.files import write_atomically

GRACE_S = 30.0

Stop = Callable[[], float | None]
"""Until when, by `time.monotonic()`, the round in hand may go on; None: nobody asked to stop."""


class Stopped(Exception):
    """The run was asked to stop; what it has done is on disk."""


class StopOnSignal:
    """SIGTERM asks once and then ends the process; a context manager and a `Stop`.

    In another thread than the main one, as under Flower's simulation, signals are not its affair and nobody asks.
    `at_once`: what the second SIGTERM does. Ctrl-C stays an interrupt: a checkpoint makes it safe too.
    """

    def __init__(self, grace_s: float = GRACE_S, at_once: Callable[[], None] = lambda: os._exit(143)) -> None:
        self._grace_s, self._at_once = grace_s, at_once
        self._until: float | None = None

    def __call__(self) -> float | None:
        return self._until

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._until is not None:
            self._at_once()
        self._until = time.monotonic() + self._grace_s

    def __enter__(self) -> StopOnSignal:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._before)


@contextmanager
def stop_on_signals(grace_s: float) -> Iterator[StopOnSignal]:
    """SIGTERM asks to stop; the second one, or Ctrl-C, unwinds at once, so that what was started is stopped too.

    While it is, further signals wait. Enter it before anything is imported or started: whatever comes later finds the
    request.
    """

    def unwind(number: int = 0, frame: Any = None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        hurry()
        raise KeyboardInterrupt

    with StopOnSignal(grace_s, at_once=unwind) as stop:
        before = signal.signal(signal.SIGINT, unwind)
        try:
            yield stop
        finally:
            signal.signal(signal.SIGINT, before)


_longest_wait_s = float("inf")


def hurry(most_s: float = 2.0) -> None:
    """From now on nothing that this process stops is waited for longer than `most_s` seconds."""
    global _longest_wait_s
    _longest_wait_s = most_s


def patience(wanted_s: float) -> float:
    """How long to wait for something that was told to end, in seconds."""
    return min(wanted_s, _longest_wait_s)


def heed(stop: Stop) -> None:
    """Raise Stopped if somebody asked to stop."""
    if stop() is not None:
        raise Stopped


class StopFile:
    """A file in the run folder that asks the server app to stop, wherever it runs: it holds the seconds of grace."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "stop"
        self._until: float | None = None

    def ask(self, grace_s: float, by: str = "") -> None:
        """Ask the run that uses this folder to stop, or that is about to. `by`: who asks, where it is not the command
        that looks after the run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, f"{grace_s:g}\n{by}".rstrip().encode())

    def clear(self) -> None:
        """Take an old request back."""
        self._path.unlink(missing_ok=True)

    def __call__(self) -> float | None:
        if self._until is None:
            with suppress(OSError, ValueError):
                self._until = time.monotonic() + float(self._path.read_text().partition("\n")[0] or GRACE_S)
        return self._until

    def by(self) -> str:
        """Who asked, "" if it was the run's own command or nobody."""
        with suppress(OSError):
            return self._path.read_text("utf-8").partition("\n")[2].strip()
        return ""


def earliest(*stops: Stop) -> Stop:
    """The one that asks first, or for the shortest time."""
    return lambda: min((until for stop in stops if (until := stop()) is not None), default=None)


def end_with_parent(grace_s: float = 5.0) -> None:
    """End this process at the latest `grace_s` seconds after its parent, wherever its threads are stuck by then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
