"""Tensors of client memory that stay on the training device between rounds. The disk stays the truth."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from common.vector import State

CACHE_BYTES = 2 * 2**30

Whose = tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    file: Path
    stamp: tuple[int, ...]
    state: State
    edits: list[int]
    size: int


class StateCache:
    """The newest saved version of each client, for up to `limit` bytes in all; the longest unused goes first.

    One version a client: it is the next one asked for unless a reply was lost. An entry counts only while its file
    is as it was saved and its tensors have not been changed in place. Safe to use from several threads.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._entries: OrderedDict[Whose, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, file: Path, whose: Whose) -> State | None:
        """The state in `file`, read-only, if it is `whose` newest version."""
        with self._lock:
            entry = self._entries.get(whose)
            if entry is None or entry.file != file:
                return None
            if entry.stamp != _stamp(file) or entry.edits != _edits(entry.state):
                del self._entries[whose]
                return None
            self._entries.move_to_end(whose)
            return dict(entry.state)

    def put(self, file: Path, whose: Whose, state: State) -> None:
        """Hold what was just saved to `file` in place of `whose` version before it."""
        own = {name: _compact(value) for name, value in state.items()}
        size = sum(value.nbytes for value in own.values())
        with self._lock:
            self._entries.pop(whose, None)
            stamp = _stamp(file)
            if stamp is None or size > self._limit:
                return
            self._entries[whose] = _Entry(file, stamp, own, _edits(own), size)
            while self.size > self._limit:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as a new process would."""
        with self._lock:
            self._entries.clear()

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(entry.size for entry in self._entries.values())


def _stamp(file: Path) -> tuple[int, ...] | None:
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def _edits(state: State) -> list[int]:
    """Torch's counters of changes in place."""
    return [-1 if value.is_inference() else value._version for value in state.values()]


def _compact(value: Tensor) -> Tensor:
    """Without the rest of a larger storage that it is a part of."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
