"""Keys that knocked and are not known: written down by the SuperLink, shown by `nodes list`, taken by fingerprint."""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from common.deploy import keys
from common.errors import SettingsError
from common.files import write_atomically

VARIABLE = "FEDKEEL_WAITING"
"""Tells the SuperLink's process the file."""

MOST = 100
"""Whoever reaches the port can make up keys: the ones seen last are kept."""
KEPT = datetime.timedelta(days=1)
BETWEEN = datetime.timedelta(seconds=1)
"""A key that tries again and again is written down once in so long."""


@dataclass(frozen=True)
class Waiting:
    """A key (an OpenSSH line) that was refused: from where, and when it was seen first and last (UTC, ISO 8601)."""

    key: str
    address: str
    first: str
    last: str

    @property
    def pem(self) -> bytes:
        """The key as Flower knows it. Raises SettingsError for a damaged one."""
        return keys.read_public(self.key, "a waiting key")


def place(nodes: Path, state: Path | None) -> Path | None:
    """Where a server with this nodes file writes: beside it, or in its state folder if it may not write there."""
    beside = nodes.resolve().with_name(f"{nodes.stem}.waiting.json")
    for file in [beside, *([state.resolve() / beside.name] if state else [])]:
        folder = file.parent
        if os.access(folder if folder.exists() else folder.parent, os.W_OK):
            return file
    return None


def read(file: Path | None) -> dict[str, Waiting]:
    """Fingerprint -> key, the one seen last first; nothing from a file that is not there or damaged."""
    try:
        entries = json.loads(file.read_text("utf-8")) if file else {}
        found = {str(print_): Waiting(**entry) for print_, entry in entries.items()}
        return {print_: each for print_, each in found.items() if keys.fingerprint(each.pem) == print_}
    except (OSError, ValueError, TypeError, AttributeError, SettingsError):
        return {}


class Knocks:
    """What the SuperLink saw, in a file; called from several threads."""

    def __init__(self, file: Path, now: Callable[[], datetime.datetime] | None = None) -> None:
        self._file = file
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC))
        self._held = read(file)
        self._lock = threading.Lock()

    def add(self, pem: bytes, address: str) -> None:
        """Write a refused key down. What is no key, or cannot be written, is passed over: this must not fail a call."""
        try:
            key = keys.openssh(keys.read_public(pem, "a node's key"))
            print_ = keys.fingerprint(pem)
        except (SettingsError, ValueError, IndexError):
            return
        now = self._now()
        with self._lock:
            before = self._held.pop(print_, None)
            stamp = now.isoformat(timespec="seconds")
            self._held = {print_: Waiting(key, address[:100], before.first if before else stamp, stamp), **self._held}
            if before and now - datetime.datetime.fromisoformat(before.last) < BETWEEN:
                return
            fresh = [each for each in self._held.items() if now - datetime.datetime.fromisoformat(each[1].last) < KEPT]
            self._held = dict(fresh[:MOST])
            try:
                content = json.dumps({name: asdict(each) for name, each in self._held.items()}, indent=1)
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file, content.encode(), durable=False)
            except OSError:
                return
