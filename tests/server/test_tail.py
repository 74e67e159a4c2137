"""A file that grows, read as it does."""

from __future__ import annotations

from pathlib import Path

from server.watch.tail import Tail


def test_whole_lines_come_once(tmp_path: Path) -> None:
    """No file, half a line, its rest; what only looks like the end of a line is none."""
    path = tmp_path / "notes"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("one\ntw", "utf-8")
    assert (tail.lines(), tail.anew) == (["one"], True)
    assert (tail.lines(), tail.anew) == ([], False)
    with path.open("a", encoding="utf-8") as file:
        file.write("o\n\nZ\u2028\x0b\x85ü\n")
    assert tail.lines() == ["two", "", "Z\u2028\x0b\x85ü"]


def test_a_file_that_is_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    tail.lines()
    path.write_text("one\n")
    assert (tail.lines(), tail.anew) == (["one"], True)
    (tmp_path / "other").write_text("three\nfour\n")
    (tmp_path / "other").replace(path)
    assert (tail.lines(), tail.anew) == (["three", "four"], True)


def test_what_is_there_already_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("one\n")
    tail = Tail(path, skip=True)
    path.write_text("one\ntwo\n")
    assert (tail.lines(), tail.anew) == (["two"], False)
