"""Files that survive a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
            _flush(temporary)
        temporary.replace(path)
    except Exception:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        _flush(path.parent)


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Replace a file by `content` as a whole; see `replacing`."""
    with replacing(path, durable) as temporary:
        temporary.write_bytes(content)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
