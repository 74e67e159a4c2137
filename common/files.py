"""Files that survive a crash."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import SettingsError

AGAIN_S = 0.01
"""Between two looks at a lock that is waited for."""


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `path` to write to, which then takes its place as a whole.

    After a crash `path` holds the old or the new content, never a part. With `durable` both the file and its folder
    are flushed to the disk before this returns.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        if durable:
            flush(temporary)
        temporary.replace(path)
    except Exception:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        flush(path.parent)


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Replace a file by `content` as a whole; see `replacing`."""
    with replacing(path, durable) as temporary:
        temporary.write_bytes(content)


class InUse(SettingsError):
    """A lock that another process holds."""


@contextmanager
def locked(path: Path, what: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock that ends with the process, also with one that is killed.

    Raises InUse, with `what` and the other process, if another one holds it for longer than `wait_s` seconds, and
    OSError if the file cannot be made.
    """
    descriptor, until = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + wait_s
    try:
        while not _taken(descriptor):
            if time.monotonic() >= until:
                holder = os.pread(descriptor, 300, 0).decode("utf-8", "replace")
                raise InUse(f"{what} is in use by {holder or 'another process'}")
            time.sleep(AGAIN_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
