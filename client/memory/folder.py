"""A site's memory folder as a whole: who may use it, what lies in it, and how it is emptied."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from client.memory.versions import read, versions_in
from common.errors import SettingsError
from common.files import InUse, locked
from common.tensor_files import Damaged

LOCK = ".lock"


class OpenMemory:
    """A memory folder that no one else can open until `close`, or until this process ends, however it ends."""

    def __init__(self, folder: Path, lock: ExitStack) -> None:
        self.folder = folder
        self._lock = lock
        _opened.add(self)

    def close(self) -> None:
        """Give the folder free."""
        _opened.discard(self)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Not even a node that loses its handle gives a folder free before its process ends.
_opened: set[OpenMemory] = set()


def open_memory(folder: str | Path) -> OpenMemory:
    """Take a site's memory folder for this process, made if it is missing, and clear away what a killed one had
    half written. Two nodes of one process exclude each other as two processes do.

    Raises SettingsError, naming the folder, if it cannot be written or another node holds it.
    """
    folder, lock = Path(folder).expanduser(), ExitStack()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.enter_context(locked(folder / LOCK, f"memory folder {str(folder)!r}"))
        for path in _half_written(folder):
            path.unlink(missing_ok=True)
    except InUse as error:
        raise InUse(
            f"{error}: a client's memory belongs to one node at a time; stop that one, or join with another name or "
            "folder"
        ) from None
    except OSError as error:
        lock.close()
        raise SettingsError(f"memory folder {str(folder)!r} cannot be used: {error}") from None
    return OpenMemory(folder, lock)


def _half_written(folder: Path) -> list[Path]:
    """Temporary files of `common.files.replacing`, left by killed processes."""
    return [path for path in folder.glob("*/*/*/.*.safetensors.*") if path.is_file()]


@dataclass(frozen=True)
class StoredMemory:
    """What one client remembers of one generation of a run.

    `bytes` over all versions; `age_s` seconds since the newest was saved; `damaged`: version -> why it cannot be used.
    """

    run: str
    client: str
    generation: int
    versions: tuple[int, ...]
    bytes: int
    age_s: float
    damaged: dict[int, str]


def list_memories(folder: str | Path) -> list[StoredMemory]:
    """What lies in a memory folder, by run, client and generation; every file is read and checked.

    A model's layout is not known here: whether a file fits a task shows when that task asks for it. May be called
    while a node is at work. Raises SettingsError if there is no such folder.
    """
    folder = _existing(folder)
    found = [_stored(place) for place in folder.glob("*/*/*") if place.is_dir() and place.name.isdecimal()]
    return sorted((one for one in found if one), key=lambda one: (one.run, one.client, one.generation))


def _stored(place: Path) -> StoredMemory | None:
    run, client, generation = place.parts[-3:]
    size, newest, damaged = 0, 0.0, {}
    versions = dict(sorted(versions_in(place)))
    for version, path in list(versions.items()):
        try:
            about = path.stat()
        except FileNotFoundError:  # pruned meanwhile
            del versions[version]
            continue
        size, newest = size + about.st_size, max(newest, about.st_mtime)
        try:
            read(path, {"run": run, "client": client, "generation": generation, "version": str(version)})
        except Damaged as error:
            if path.exists():
                damaged[version] = str(error)
    if not versions:
        return None
    return StoredMemory(run, client, int(generation), tuple(versions), size, max(0.0, time.time() - newest), damaged)


@dataclass(frozen=True)
class Removed:
    """What `reset_memory` deleted: names of runs, number of files and their bytes."""

    runs: tuple[str, ...]
    files: int
    bytes: int


def reset_memory(folder: str | Path, run: str | None = None) -> Removed:
    """Delete all that a site remembers, or what it remembers of one run.

    Algorithms with bound memory then start a new generation at the client's next round. Raises SettingsError if
    there is no such folder or run, or while a node holds the folder.
    """
    folder = _existing(folder)
    with open_memory(folder):
        runs = {path.name: path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
        if run is not None and run not in runs:
            raise SettingsError(f"run {run!r} is not in {str(folder)!r}; there: {', '.join(sorted(runs)) or 'none'}")
        chosen = runs if run is None else {run: runs[run]}
        files = [path for place in chosen.values() for path in place.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        try:
            for place in chosen.values():
                shutil.rmtree(place)
        except OSError as error:
            raise SettingsError(f"memory folder {str(folder)!r} cannot be emptied: {error}") from None
    return Removed(tuple(sorted(chosen)), len(files), size)


def _existing(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise SettingsError(f"memory folder {str(folder)!r} does not exist")
    return folder
