"""The chain of an audit log: how a line is written and hashed, and whether a file's lines still follow each other."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import SettingsError

START = "0" * 64
"""What the first line follows."""
MOST_LINE = 2**18


@dataclass(frozen=True)
class Head:
    """The last line of a log: its number and its hash. As text NUMBER:SHA256."""

    seq: int = 0
    sha256: str = START

    def __str__(self) -> str:
        return f"{self.seq}:{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """A head as `audit head` prints it. Raises SettingsError if it is none."""
        match = re.fullmatch(r"([0-9]{1,15}):([0-9a-f]{64})", text.strip())
        if match is None:
            raise SettingsError(f"--head: {text!r} is not NUMBER:SHA256, as `audit head FILE` prints it")
        return cls(int(match[1]), match[2])


def canonical(line: Mapping[str, Any]) -> bytes:
    """The one way to write a line."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(line: Mapping[str, Any]) -> str:
    """The hash that a line carries."""
    return hashlib.sha256(canonical({key: value for key, value in line.items() if key != "sha256"})).hexdigest()


def put_aside(path: Path) -> list[Path]:
    """The older files of a log, oldest first."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.([0-9]{{4,}}){re.escape(path.suffix)}")
    found = {int(match[1]): each for each in path.parent.glob("*") if (match := pattern.fullmatch(each.name))}
    return [found[number] for number in sorted(found)]


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line as a record; None for what is none, such as a part of one."""
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record["seq"], int) and isinstance(record["sha256"], str):
            return record
    except (ValueError, KeyError, RecursionError):
        pass
    return None


@dataclass
class Verdict:
    """What `verify` found: lines, the head, faults, and what crashes had cut off."""

    lines: int = 0
    first: int = 0
    head: Head = field(default_factory=Head)
    faults: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was edited, removed, added or moved, as far as the files can tell."""
        return not self.faults


class Verifying:
    """Follows the chain through the files of a log."""

    def __init__(self, anchor: Head | None) -> None:
        self.verdict = Verdict()
        self._anchor, self._anchored = anchor, anchor is None
        self._expected: Head | None = None
        self._garbage, self._garbage_at = b"", ""

    def line(self, place: str, content: bytes) -> None:
        """One more line, without the end of line where a crash cut it off."""
        record = parsed(content)
        if record is None:
            self._garbage_at = self._garbage_at or place
            self._garbage += content
            return
        self._follows(place, record)
        claimed = Head(int(record["seq"]), str(record["sha256"]))
        if digest(record) != claimed.sha256 or canonical(record) != content.rstrip(b"\n"):
            self.verdict.faults.append(f"{place} was edited: it does not have the hash that it carries")
        self._closed(place, record)
        if self._anchor and claimed.seq == self._anchor.seq:
            self._anchored = claimed.sha256 == self._anchor.sha256
        self._expected = self.verdict.head = claimed
        self.verdict.first = self.verdict.first or claimed.seq
        self.verdict.lines += 1

    def _follows(self, place: str, record: Mapping[str, Any]) -> None:
        seq, expected = int(record["seq"]), self._expected
        if expected is None:
            if seq == 1 and record.get("previous") != START:
                self.verdict.faults.append(f"{place} says that it is the first, and follows another")
            return
        if record.get("previous") == expected.sha256 and seq == expected.seq + 1:
            return
        if seq > expected.seq + 1:
            why = f"lines {expected.seq + 1} to {seq - 1} were removed"
        elif seq <= expected.seq:
            why = f"it has number {seq} after {expected.seq}: lines were moved, repeated or put in"
        else:
            why = "the line before it was edited, removed or put in"
        self.verdict.faults.append(f"{place} does not follow the line before it: {why}")

    def _closed(self, place: str, record: Mapping[str, Any]) -> None:
        """Whether this line accounts for what stood before it and was no line."""
        garbage, at = self._garbage, self._garbage_at
        self._garbage, self._garbage_at = b"", ""
        told = record.get("bytes"), record.get("torn_sha256")
        if not garbage:
            if record.get("what") == "torn":
                self.verdict.faults.append(f"{place} closes a torn line that is not there")
            return
        # The end of line may have been written with the closing line.
        fits = any(
            told == (len(each), hashlib.sha256(each).hexdigest()) for each in (garbage, garbage.removesuffix(b"\n"))
        )
        if record.get("what") == "torn" and fits:
            self.verdict.torn.append(f"{at}: {len(garbage)} bytes, closed by {place}")
        else:
            self.verdict.faults.append(f"{at} is no line of an audit log")

    def end(self) -> Verdict:
        """The verdict after the last line."""
        if self._garbage:
            whole = self._garbage.endswith(b"\n")
            place = f"{self._garbage_at}: {len(self._garbage)} bytes"
            if whole:
                self.verdict.faults.append(f"{self._garbage_at} is no line of an audit log")
            else:
                self.verdict.torn.append(f"{place}, not closed yet: a process ended while it wrote them")
        if not self._anchored and self._anchor:
            self.verdict.faults.append(
                f"line {self._anchor.seq} with hash {self._anchor.sha256[:12]}... is not in it: cut off or written anew"
            )
        return self.verdict


def verify(path: str | Path, anchor: Head | None = None) -> Verdict:
    """Follow the chain through a log and the files put aside before it. With `anchor`, a head noted earlier, also
    whether that line is still in it: a cut-off end shows by nothing else.

    Raises SettingsError if the file cannot be read.
    """
    path, verifying = Path(path).expanduser(), Verifying(anchor)
    try:
        older = put_aside(path)
        for each in [*older, path] if path.exists() or not older else older:
            for number, content in enumerate(_lines(each), 1):
                verifying.line(f"{each.name} line {number}", content)
    except OSError as error:
        raise SettingsError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    return verifying.end()


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file as of now; none that is being written at this moment."""
    with path.open("rb") as file:
        with suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)
        left = os.fstat(file.fileno()).st_size
        with suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
        while left and (line := file.readline(min(left, 2 * MOST_LINE))):
            left -= len(line)
            yield line
