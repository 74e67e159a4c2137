"""The audit log: chained, torn by crashes and closed again, written by several processes, and verified."""

import hashlib
import io
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client import __main__ as client
from common.deploy import audit
from common.deploy.audit import AuditLog
from common.deploy.chain import MOST_LINE, START, Head, canonical, digest, put_aside, verify
from common.errors import SettingsError
from server import __main__ as server


def written(path: Path, count: int = 4) -> list[bytes]:
    log = AuditLog(path, actor="test")
    for number in range(count):
        log.record("message", "in", run="r1", site=f"site-{number}", bytes_=number)
    return path.read_bytes().splitlines(keepends=True)


def test_each_line_says_who_what_and_when_and_follows_the_last(tmp_path):
    path = tmp_path / "audit.jsonl"
    lines = [json.loads(line) for line in written(path)]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4]
    assert [line["previous"] for line in lines] == [START, *(line["sha256"] for line in lines[:-1])]
    for line in lines:
        assert {"time", "actor", "run", "site", "key", "what", "outcome"} <= set(line)
        assert line["time"].endswith("Z")
        assert digest(line) == line["sha256"]
    verdict = verify(path)
    assert verdict.ok
    assert (verdict.lines, str(verdict.head)) == (4, f"4:{lines[-1]['sha256']}")
    assert path.stat().st_mode & 0o077 == 0


CHANGES = {
    "edited": lambda lines: [lines[0], lines[1].replace(b"site-1", b"site-9"), *lines[2:]],
    "edited and hashed anew": lambda lines: [lines[0], rehashed(lines[1]), *lines[2:]],
    "spaced": lambda lines: [lines[0], json.dumps(json.loads(lines[1])).encode() + b"\n", *lines[2:]],
    "removed": lambda lines: [lines[0], *lines[2:]],
    "moved": lambda lines: [lines[1], lines[0], *lines[2:]],
    "repeated": lambda lines: [lines[0], lines[1], lines[1], *lines[2:]],
    "put in": lambda lines: [lines[0], b"hello\n", *lines[1:]],
    "first removed and renumbered": lambda lines: [rehashed(lines[1], seq=1), *lines[2:]],
    "last edited": lambda lines: [*lines[:-1], lines[-1].replace(b"site-3", b"site-9")],
    "last made garbage": lambda lines: [*lines[:-1], b"garbage\n"],
    "binary": lambda lines: [lines[0], b"\0\xff" * 40 + b"\n", *lines[1:]],
}


def rehashed(line: bytes, **more: object) -> bytes:
    record = json.loads(line) | {"site": "site-9"} | more
    return canonical(record | {"sha256": digest(record)}) + b"\n"


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_found(change, tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b"".join(CHANGES[change](written(path))))
    assert not verify(path).ok
    # Nor does it go away by writing on.
    AuditLog(path).record("stopped")
    verdict = verify(path)
    if change != "last made garbage":  # then indistinguishable from what a crash leaves
        assert not verdict.ok
    else:
        assert verdict.torn


def test_every_byte_changed_is_found(tmp_path):
    path = tmp_path / "audit.jsonl"
    content = b"".join(written(path, 2)[:2])
    for place in range(len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert not verify(path).ok, (place, content[max(0, place - 10) : place + 10])


def test_a_cut_off_end_shows_against_a_head_noted_before(tmp_path):
    path = tmp_path / "audit.jsonl"
    lines = written(path)
    head = verify(path).head
    assert verify(path, Head.parse(str(head))).ok
    path.write_bytes(b"".join(lines[:2]))
    assert verify(path).ok  # that is what a chain alone cannot show
    assert "not in it" in verify(path, head).faults[0]
    AuditLog(path).record("stopped")
    AuditLog(path).record("stopped")
    assert "not in it" in verify(path, head).faults[0]
    with pytest.raises(SettingsError, match="NUMBER:SHA256"):
        Head.parse("4:abc")


def test_killed_at_every_byte_of_a_write(tmp_path):
    path = tmp_path / "audit.jsonl"
    lines = written(path, 2)
    whole = b"".join(lines)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert verify(path).ok, cut
        log = AuditLog(path, actor="test")
        log.record("started")
        verdict = verify(path)
        assert verdict.ok, (cut, verdict.faults)
        ends = {0, *(sum(map(len, lines[:n])) for n in (1, 2)), *(sum(map(len, lines[:n])) - 1 for n in (1, 2))}
        assert bool(verdict.torn) == (cut not in ends), cut
        assert path.read_bytes().startswith(whole[:cut])  # nothing is ever taken out


def test_killed_at_every_byte_while_a_torn_line_is_closed(tmp_path):
    path = tmp_path / "audit.jsonl"
    torn = b"".join(written(path, 2))[:-50]
    path.write_bytes(torn)
    AuditLog(path, actor="test")
    closed = path.read_bytes()
    for cut in range(len(torn), len(closed) + 1):
        path.write_bytes(closed[:cut])
        AuditLog(path, actor="test").record("started")
        verdict = verify(path)
        assert verdict.ok, (cut, verdict.faults)
        assert verdict.torn


def test_several_processes_and_threads_write_one_chain(tmp_path):
    path = tmp_path / "audit.jsonl"
    start = multiprocessing.get_context("fork")
    writers = [start.Process(target=_write_many, args=(path, number)) for number in range(3)]
    for each in writers:
        each.start()
    threads = [threading.Thread(target=_write_many, args=(path, 10 + number)) for number in range(2)]
    for each in threads:
        each.start()
    for each in [*writers, *threads]:
        each.join()
    verdict = verify(path)
    assert verdict.ok, verdict.faults[:3]
    assert verdict.lines == 5 * 20


def _write_many(path: Path, number: int) -> None:
    log = AuditLog(path, actor=f"writer {number}", most_bytes=4000)
    for _ in range(20):
        log.record("message", durable=False)


def test_rotation_keeps_the_chain(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, most_bytes=1000)
    for _ in range(12):
        log.record("message", durable=False)
    older = put_aside(path)
    assert len(older) > 1
    assert older[0].name == "audit.0001.jsonl"
    verdict = verify(path)
    assert verdict.ok
    assert verdict.lines == 12
    path.unlink()  # killed between the rename and the next line
    at = verify(path).head.seq
    assert AuditLog(path).record("started").seq == at + 1
    assert verify(path).ok
    older[1].unlink()
    assert "removed" in verify(path).faults[0]
    older[0].unlink()  # the oldest may go, which shows
    for each in older[2:]:
        each.unlink()
    verdict = verify(path)
    assert verdict.ok
    assert verdict.first == at + 1


def test_hostile_and_odd_values_stay_one_bounded_ascii_line(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.record(
        "refused\n\x1b[2J",
        "\ud800\u202e",
        site="x" * 10**6,
        why=float("nan"),
        number=2**70,
        seq="taken",
        deep={"a": {"b": {"c": {"d": {"e": object()}}}}},
        many=["y" * 900] * 10**4,
        keys={"k" * 5000: 1},
        raw=b"bytes",
    )
    log.record("after")
    content = path.read_bytes()
    assert content.count(b"\n") == 2
    assert all(32 <= byte < 127 or byte == 10 for byte in content)
    assert len(content) < 2 * MOST_LINE
    assert verify(path).ok


def test_another_file_is_not_written_to(tmp_path):
    path = tmp_path / "data.csv"
    for content in (b"a,b\n1,2\n", b"{}\n" * 10, b'{"actor":"x"\n' + b"x" * 10**6):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match="no audit log"):
            AuditLog(path)
        assert path.read_bytes() == content
    with pytest.raises(SettingsError, match="cannot be written"):
        AuditLog(tmp_path / "data.csv" / "audit.jsonl")
    with pytest.raises(SettingsError, match="cannot be read"):
        verify(tmp_path / "none.jsonl")


def test_a_full_disk_is_an_error_and_the_next_line_closes_what_it_left(tmp_path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    written(path, 1)
    log, write = AuditLog(path), os.write
    told = []

    def full(descriptor: int, content: bytes) -> int:
        if told:
            raise OSError(28, "No space left on device")
        told.append(1)
        return write(descriptor, bytes(content[:30]))

    monkeypatch.setattr(audit.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        log.record("upload")
    log.try_record("upload")  # said in the process's log
    monkeypatch.undo()
    log.record("upload")
    verdict = verify(path)
    assert verdict.ok
    assert verdict.torn
    torn = json.loads(path.read_bytes().splitlines()[2])
    assert torn["torn_sha256"] == hashlib.sha256(path.read_bytes().splitlines()[1]).hexdigest()


def test_both_commands_say_where_a_chain_breaks(tmp_path):
    path = tmp_path / "audit.jsonl"
    lines = written(path)
    for cli in (client.cli, server.cli):
        answer = CliRunner().invoke(cli, ["audit", "verify", str(path)])
        assert answer.exit_code == 0
        assert "4 lines, from its beginning; the chain holds; head 4:" in answer.output
        assert "--head" in answer.output
        head = CliRunner().invoke(cli, ["audit", "head", str(path)]).output.strip()
        anchored = CliRunner().invoke(cli, ["audit", "verify", str(path), "--head", head])
        assert anchored.exit_code == 0
        assert "cut off" not in anchored.output
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    for cli in (client.cli, server.cli):
        answer = CliRunner().invoke(cli, ["audit", "verify", str(path)])
        assert answer.exit_code == 1
        assert "BROKEN audit.jsonl line 2 does not follow the line before it: lines 2 to 2" in answer.output
        assert CliRunner().invoke(cli, ["audit", "verify", str(path), "--head", "x"]).exit_code in (1, 2)


@pytest.mark.parametrize("tail", [1, 3, 64, 2**16])
def test_the_latest_line_of_a_kind_is_found_from_the_end(tail: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever piece of the file is read at a time, over files that were put aside, and with a torn end."""
    book = AuditLog(tmp_path / "audit.jsonl", most_bytes=1500)
    assert book.last("policy") is None
    for number in range(20):
        book.record("policy" if number in (2, 17) else "message in", number=number, text="x" * (7 * number))
    assert len(put_aside(book.path)) > 1
    monkeypatch.setattr(audit, "_TAIL", tail)
    assert (book.last("policy") or {})["number"] == 17
    for number, what in ((0, "message in"), (2, "policy")):
        other = AuditLog(tmp_path / f"{what}.jsonl")
        other.record(what, number=number)
        with other.path.open("ab") as file:
            file.write(b'{"what":"policy"')
        assert (other.last(what) or {})["number"] == number
    assert book.last("never") is None


def test_a_long_log_is_not_read_to_find_its_latest_line(tmp_path: Path, monkeypatch: Any) -> None:
    book = AuditLog(tmp_path / "audit.jsonl")
    line = b'{"what":"message in"}\n'
    book.path.write_bytes(line * 200_000)
    with book.path.open("ab") as file:
        file.write(b'{"seq":1,"sha256":"0","what":"policy"}\n' + line * 10)
    read = list[int]()
    whole = io.BufferedReader.read
    opened = Path.open

    class Counted:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def seek(self, *words: int) -> int:
            return int(self._file.seek(*words))

        def read(self, size: int) -> bytes:
            read.append(size)
            return whole(self._file, size)

    monkeypatch.setattr(Path, "open", lambda path, mode="r": Counted(opened(path, mode)))
    assert (book.last("policy") or {})["seq"] == 1
    assert sum(read) <= audit._TAIL
