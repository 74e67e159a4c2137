"""The audit log of a server or a site: what happened and who did it, each line chained by hash to the last.

A line is canonical JSON (keys sorted, no spaces, ASCII): `seq` from 1, `time` (UTC), `actor` (who did it here),
`run`, `site`, `key` (fingerprint), `what`, `outcome`, further fields, `previous` (the last line's `sha256`) and
`sha256` of the line without that field. What a crash cut off stays and is closed by a line "torn". Nothing here is
secret or signed: who may write the file can write all of it anew. So keep heads (`AuditLog.head`) elsewhere.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from common.deploy.chain import MOST_LINE, Head, canonical, digest, parsed, put_aside
from common.errors import SettingsError

log = logging.getLogger("common.deploy.audit")

NAME = "audit.jsonl"
MOST_BYTES = 64 * 2**20
"""A file that is larger is put aside, as audit.0001.jsonl, and the chain goes on in a new one."""
MOST_TEXT, MOST_ITEMS = 1000, 1000
LOCK_S = 10.0
_TAIL = 2**16


class AuditLog:
    """Appends to a log that other processes may append to as well; may be used from any thread.

    Opening closes what a crash has left half written. Raises SettingsError if `path` cannot be written or is
    something else than an audit log.
    """

    def __init__(self, path: str | Path, actor: str = "", most_bytes: int = MOST_BYTES) -> None:
        self.path = Path(path).expanduser().absolute()
        self._actor, self._most_bytes = actor or user(), most_bytes
        self._lock = threading.Lock()
        self._known: tuple[tuple[int, int], Head] | None = None
        """Inode and size of the file after the last look, and its head then."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, self._opened() as descriptor:
                self._end(descriptor)
        except OSError as error:
            raise SettingsError(f"--audit: {str(self.path)!r} cannot be written: {error}") from None

    @property
    def head(self) -> Head:
        """The last line, as of now."""
        with self._lock, self._opened() as descriptor:
            return self._end(descriptor)

    def record(
        self,
        what: str,
        outcome: str = "ok",
        *,
        run: str = "",
        site: str = "",
        key: str = "",
        actor: str = "",
        durable: bool = True,
        **more: Any,
    ) -> Head:
        """Add a line; when this returns it is on the disk. Raises OSError if it cannot be.

        `key`: a fingerprint. `durable`: False leaves the flush to the next line. `more`: plain values, bounded here.
        """
        fields = {"actor": actor or self._actor, "run": run, "site": site, "key": key, "what": what, "outcome": outcome}
        taken = {*fields, "seq", "time", "previous", "sha256"}
        content = _plain({**{f"{k}_" if k in taken else k: v for k, v in more.items()}, **fields})
        with self._lock:
            with self._opened() as descriptor:
                head = self._end(descriptor)
                full = os.fstat(descriptor).st_size > self._most_bytes and head.seq
            if full:
                self._put_aside()
            with self._opened() as descriptor:
                head = self._append(descriptor, self._end(descriptor), content)
                if durable:
                    os.fsync(descriptor)
            return head

    def try_record(self, what: str, outcome: str = "ok", **more: Any) -> None:
        """The same where nobody may fail for it: an error goes to the process's log."""
        try:
            self.record(what, outcome, **more)
        except OSError as error:
            log.error("audit log %s: %s (%s) could not be written: %s", self.path, what, outcome, error)

    def last(self, what: str) -> dict[str, Any] | None:
        """The latest line of that kind, None if there is none; reads back from the end, a piece at a time."""
        wanted = b'"what":' + json.dumps(what).encode()
        for path in reversed([*put_aside(self.path), self.path]):
            for line in _lines_back(path):
                if wanted in line and (record := parsed(line)) and record.get("what") == what:
                    return record
        return None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, locked for this process."""
        until = time.monotonic() + LOCK_S
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while not _try_lock(descriptor):
                    if time.monotonic() > until:
                        raise TimeoutError(f"another process has held it for {LOCK_S:g} s")
                    time.sleep(0.001)
                if _same(descriptor, self.path):  # not put aside meanwhile
                    yield descriptor
                    return
            finally:
                os.close(descriptor)

    def _end(self, descriptor: int) -> Head:
        """The head of the file, with what was torn closed."""
        status = os.fstat(descriptor)
        stamp = status.st_ino, status.st_size
        if self._known and self._known[0] == stamp:
            return self._known[1]
        end = _read_end(descriptor, status.st_size)
        if end.head is None:
            if status.st_size > MOST_LINE or not b'{"actor":"'.startswith(end.torn[:10]):
                raise SettingsError(f"--audit: {str(self.path)!r} is no audit log; choose another file")
            end.head = self._before()
        if end.torn:
            about = {"bytes": len(end.torn), "torn_sha256": hashlib.sha256(end.torn).hexdigest()}
            fields = {"actor": self._actor, "run": "", "site": "", "key": "", "what": "torn", "outcome": "closed"}
            self._append(descriptor, end.head, fields | about, before=b"" if end.torn.endswith(b"\n") else b"\n")
            os.fsync(descriptor)
        elif end.unfinished:  # all of it but the end of the line
            _write(descriptor, b"\n")
            self._note(descriptor, end.head)
        else:
            self._note(descriptor, end.head)
        assert self._known is not None
        return self._known[1]

    def _append(self, descriptor: int, head: Head, content: Mapping[str, Any], before: bytes = b"") -> Head:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {**content, "seq": head.seq + 1, "time": now, "previous": head.sha256}
        if len(canonical(line)) > MOST_LINE:
            kept = {key: value for key, value in line.items() if isinstance(value, str | int) or value is None}
            line = kept if len(canonical(kept)) <= MOST_LINE else {**dict(list(kept.items())[-20:])}
        line["sha256"] = digest(line)
        self._known = None
        _write(descriptor, before + canonical(line) + b"\n")
        after = Head(head.seq + 1, line["sha256"])
        self._note(descriptor, after)
        return after

    def _note(self, descriptor: int, head: Head) -> None:
        status = os.fstat(descriptor)
        self._known = (status.st_ino, status.st_size), head

    def _before(self) -> Head:
        """The head of the newest file that was put aside."""
        for path in reversed(put_aside(self.path)):
            with path.open("rb") as file:
                if found := _read_end(file.fileno(), path.stat().st_size).head:
                    return found
        return Head()

    def _put_aside(self) -> None:
        with self._opened() as descriptor:
            if os.fstat(descriptor).st_size <= self._most_bytes:
                return  # another process was faster
            older = put_aside(self.path)
            number = int(older[-1].suffixes[-2][1:]) + 1 if older else 1
            try:
                os.rename(self.path, self.path.with_suffix(f".{number:04d}{self.path.suffix}"))
            except OSError as error:
                log.warning("audit log %s grows on: it cannot be renamed: %s", self.path, error)
                self._most_bytes *= 2


def user() -> str:
    """Who this process runs as."""
    try:
        return f"user {getpass.getuser()}"
    except (OSError, KeyError):
        return f"user {os.getuid()}"


@dataclass
class _End:
    """The end of a file: its last line's head, what stands behind that and is no line, whether only "\n" lacks."""

    head: Head | None = None
    torn: bytes = b""
    unfinished: bool = False

    @classmethod
    def of(cls, content: bytes) -> Self:
        """The end of a content that begins with a line, or in the midst of one."""
        lines = content.splitlines(keepends=True)
        for index in range(len(lines) - 1, -1, -1):
            record = parsed(lines[index])
            if record is not None:
                head = Head(int(record["seq"]), str(record["sha256"]))
                return cls(head, b"".join(lines[index + 1 :]), not lines[-1].endswith(b"\n"))
        return cls(None, content)


def _read_end(descriptor: int, size: int) -> _End:
    window = _TAIL
    while True:
        start = max(0, size - window)
        end = _End.of(os.pread(descriptor, size - start, start))
        if end.head is not None or start == 0:
            return end
        window *= 8


def _lines_back(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first; none of a file that is not there."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        end, pieces = file.seek(0, os.SEEK_END), list[bytes]()  # of the line whose begin is not reached, the last first
        while end:
            start = max(0, end - _TAIL)
            file.seek(start)
            head, *lines = file.read(end - start).split(b"\n")
            if lines:
                yield b"".join([lines.pop(), *reversed(pieces)])
                yield from reversed(lines)
                pieces = []
            pieces.append(head)
            end = start
        yield b"".join(reversed(pieces))


def _plain(value: Any, depth: int = 4) -> Any:
    """What every JSON reader takes, and not too much of it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)[:MOST_TEXT]
    if depth and isinstance(value, Mapping):
        return {str(k)[:MOST_TEXT]: _plain(v, depth - 1) for k, v in list(value.items())[:MOST_ITEMS]}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, depth - 1) for each in list(value)[:MOST_ITEMS]]
    return str(value)[:MOST_TEXT]


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(descriptor: int, path: Path) -> bool:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
