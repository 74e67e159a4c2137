"""Experiments that wait for their turn behind a SuperLink: one file each, so that a restart forgets none."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from common.files import locked, write_atomically

FOLDER = "queue"
WAIT_S = 5.0

State = Literal["waiting", "submitting", "submitted", "done", "withdrawn"]


@dataclass(frozen=True)
class Entry:
    """An experiment in the queue. `experiment`: its text; `folder`: of the run, "" for a new one of its name; `run`:
    Flower's id once it is submitted; `tries`: how often it was begun without getting further than `reached`."""

    id: str
    name: str
    experiment: str
    owner: str
    since: float
    folder: str = ""
    resume: bool = False
    state: State = "waiting"
    run: int = 0
    claim: str = ""
    tries: int = 0
    reached: int = -1
    stop: bool = False
    error: str = ""


class Queue:
    """The queue in a folder, in the order in which entries came; several processes may use it."""

    def __init__(self, books: Path) -> None:
        self._folder = books / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)

    def entries(self) -> list[Entry]:
        """All of them, also those that are done."""
        found = []
        for path in sorted(self._folder.glob("q*.json"), key=lambda path: int(path.stem[1:])):
            try:
                found.append(Entry(**json.loads(path.read_text("utf-8"))))
            except (OSError, ValueError, TypeError):
                continue  # of another release
        return found

    def get(self, id: str) -> Entry | None:
        """The entry of an id."""
        return next((entry for entry in self.entries() if entry.id == id), None)

    def add(self, name: str, experiment: str, owner: str, folder: str = "", resume: bool = False) -> Entry:
        """Put an experiment at the end."""
        with self._alone():
            numbers = [int(path.stem[1:]) for path in self._folder.glob("q*.json")]
            id = f"q{max(numbers, default=0) + 1}"
            return self._write(Entry(id, name, experiment, owner, time.time(), folder, resume))

    def change(self, id: str, **fields: object) -> Entry | None:
        """Other values for some fields of an entry as it is now; the new entry, None if there is none."""
        with self._alone():
            entry = self.get(id)
            return self._write(replace(entry, **fields)) if entry else None  # type: ignore[arg-type]

    def withdraw(self, id: str) -> bool:
        """Take out an entry whose turn has not come; False if it has."""
        with self._alone():
            entry = self.get(id)
            if entry is None or entry.state != "waiting":
                return False
            self._write(replace(entry, state="withdrawn"))
            return True

    def take(self, id: str, claim: str, folder: str) -> Entry | None:
        """Its turn has come: nobody withdraws it any more. None if somebody has."""
        with self._alone():
            entry = self.get(id)
            if entry is None or entry.state != "waiting":
                return None
            return self._write(replace(entry, state="submitting", claim=claim, folder=folder))

    def _write(self, entry: Entry) -> Entry:
        write_atomically(self._folder / f"{entry.id}.json", json.dumps(asdict(entry), indent=1).encode())
        return entry

    def _alone(self) -> AbstractContextManager[None]:
        """Nobody else changes the queue meanwhile."""
        return locked(self._folder / ".lock", "the queue", WAIT_S)
