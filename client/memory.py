"""Client state that survives: versions that count only once the server has accepted the upload made with them.

The client trains from the version that the server names, saves the next one durably *before* it replies, and drops
none that a kept checkpoint of the server may still ask for. A lost, late or refused reply thus needs no message.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

from flwr.app import RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from common import wire
from common.files import write_atomically
from common.vector import State, sha256


class Memory(Protocol):
    """Where the memory of one process's clients lives."""

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        """That version, read-only; None if it is gone or damaged."""

    def save(self, run: str, client: str, generation: int, version: int, state: State, keep: Collection[int]) -> None:
        """Store a version so that it survives what this home survives, then drop older generations and, in this one,
        all other versions but those in `keep`."""


class RamMemory:
    """In this process: for simulations with one worker."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], dict[tuple[int, int], State]] = {}

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        return self._versions.get((run, client), {}).get((generation, version))

    def save(self, run: str, client: str, generation: int, version: int, state: State, keep: Collection[int]) -> None:
        held = self._versions.get((run, client), {})
        kept = {(g, v): s for (g, v), s in held.items() if g > generation or (g == generation and v in keep)}
        self._versions[run, client] = kept | {(generation, version): state}


class DiskMemory:
    """On disk, `folder/run/client/generation/version.safetensors`: for resident clients.

    A file is written beside its place, flushed, renamed and its folder flushed, so a crash leaves the old or the new
    version whole; a checksum tells damage. `durable=False` leaves out the flushes, for simulations: a crash of the
    machine, not of a process, may then cost versions.
    """

    def __init__(self, folder: str | Path, durable: bool = True) -> None:
        self._folder = Path(folder)
        self._durable = durable

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        path = self._place(run, client, generation) / _file(version)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
        return state if about == _about(run, client, generation, version, state) else None

    def save(self, run: str, client: str, generation: int, version: int, state: State, keep: Collection[int]) -> None:
        place = self._place(run, client, generation)
        place.mkdir(parents=True, exist_ok=True)
        about = _about(run, client, generation, version, state)
        write_atomically(place / _file(version), save(state, about), self._durable)
        for old, path in self._versions(place):
            if old != version and old not in keep:
                path.unlink(missing_ok=True)
        for sibling in place.parent.iterdir():
            if sibling.name.isdigit() and int(sibling.name) < generation:
                shutil.rmtree(sibling, ignore_errors=True)

    def _place(self, run: str, client: str, generation: int) -> Path:
        return self._folder / _safe(run) / _safe(client) / str(generation)

    @staticmethod
    def _versions(place: Path) -> Iterator[tuple[int, Path]]:
        for path in place.glob("*.safetensors"):
            if path.stem.isdigit():
                yield int(path.stem), path


class ContextMemory:
    """In Flower's context: for VCE and stock SuperNodes, where Flower carries it from message to message."""

    def __init__(self, records: RecordDict) -> None:
        self._records = records

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        record = self._records.array_records.get(self._name(run, client, generation, version))
        return None if record is None else wire.from_records(record)

    def save(self, run: str, client: str, generation: int, version: int, state: State, keep: Collection[int]) -> None:
        for name in list(self._records.array_records):
            whose, held, old = json.loads(name)
            if whose == [run, client] and (held < generation or (held == generation and old not in keep)):
                del self._records[name]
        self._records[self._name(run, client, generation, version)] = wire.to_records(state)

    @staticmethod
    def _name(run: str, client: str, generation: int, version: int) -> str:
        return json.dumps([[run, client], generation, version])


def _about(run: str, client: str, generation: int, version: int, state: State) -> dict[str, str]:
    """What a file says of itself: whose it is and a checksum."""
    return {
        "run": run,
        "client": client,
        "generation": str(generation),
        "version": str(version),
        "sha256": sha256(state),
    }


def _file(version: int) -> str:
    return f"{version:09d}.safetensors"


def _safe(name: str) -> str:
    """A client or run name as a folder name; names come from the network and must not leave the folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}", name):
        raise ValueError(f"name {name!r} cannot name a folder")
    return name
