"""Clients that are given a name: the lowest that is free, with what its bearer remembers."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer

from client.commands.options import AUTO, _checked_names
from client.memory.folder import OpenMemory
from client.memory.names import claim
from common.errors import SettingsError
from common.flower import ROOT


def taken(root: Path, most: int | None = None) -> OpenMemory:
    found = claim(root, most, threading.Event())
    assert found is not None
    assert found[1].folder == root / found[0]
    return found[1]


def test_the_lowest_free_name_is_taken_and_given_free(tmp_path: Path) -> None:
    """A client that leaves leaves its memory to the next of that name."""
    held = [taken(tmp_path) for _ in range(3)]
    assert [each.folder.name for each in held] == ["0", "1", "2"]
    (tmp_path / "1" / "kept").touch()
    held[1].close()
    again = taken(tmp_path)
    assert again.folder == tmp_path / "1"
    assert (again.folder / "kept").exists()
    for each in (*held, again):
        each.close()


def test_one_too_many_waits_until_one_leaves(tmp_path: Path) -> None:
    first, second = taken(tmp_path, 2), taken(tmp_path, 2)
    stop, found = threading.Event(), list[str]()

    def wait() -> None:
        claimed = claim(tmp_path, 2, stop)
        found.append(claimed[0] if claimed else "none")

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    first.close()
    waiting.join(10)
    assert found == ["0"]
    stop.set()
    assert claim(tmp_path, 2, stop) is None
    second.close()


def test_a_killed_client_gives_its_name_free(tmp_path: Path) -> None:
    code = (
        "import sys, threading, pathlib\nfrom client.memory.names import claim\n"
        "print(claim(pathlib.Path(sys.argv[1]), None, threading.Event())[0], flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "0\n"
        second = taken(tmp_path)
        assert second.folder.name == "1"
        other.kill()
        other.wait()
    first = taken(tmp_path)
    assert first.folder.name == "0"
    first.close()
    second.close()


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be used"):
        claim(tmp_path / "file", None, threading.Event())


@pytest.mark.parametrize("name", ["auto", "auto:1", "auto:50"])
def test_what_stands_for_any_name(name: str) -> None:
    assert AUTO.fullmatch(name)
    assert _checked_names([name]) == [name]


@pytest.mark.parametrize("names", [["auto:0"], ["auto:"], ["auto:-1"], ["auto:x"], ["auto:2", "auto:3"]])
def test_what_does_not(names: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        _checked_names(names)
