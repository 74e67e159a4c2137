"""Client state that survives: versions that count only once the server has accepted the upload made with them.

The client trains from the version that the server names, saves the next one durably *before* it replies, and drops
none that a kept checkpoint of the server may still ask for. A lost, late or refused reply thus needs no message.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import save

from client.memory.cache import StateCache
from common.errors import MessageError
from common.files import flush, write_atomically
from common.tensor_files import Damaged, read_tensors, unshared
from common.vector import State, sha256
from strategies.protocol import wire

log = logging.getLogger("client.memory.versions")

CPU = torch.device("cpu")
MOST_HEADER = 2**20


class Memory(Protocol):
    """Where the memory of one process's clients lives."""

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        """That version, read-only; None if it is gone or damaged."""

    def save(
        self,
        run: str,
        client: str,
        generation: int,
        version: int,
        state: State,
        keep: Collection[int],
        order: int = 0,
    ) -> None:
        """Store a version so that it survives what this home survives, then drop older generations and, in this one,
        all other versions but those in `keep`. `order` is that of the message that was worked on."""

    def newest(self, run: str, client: str) -> int:
        """The order of the last message that a version was saved for; 0 if there is none."""


class RamMemory:
    """In this process: for simulations with one worker."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], dict[tuple[int, int], State]] = {}
        self._orders: dict[tuple[str, str], int] = {}

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        return self._versions.get((run, client), {}).get((generation, version))

    def save(
        self,
        run: str,
        client: str,
        generation: int,
        version: int,
        state: State,
        keep: Collection[int],
        order: int = 0,
    ) -> None:
        held = self._versions.get((run, client), {})
        kept = {(g, v): s for (g, v), s in held.items() if g > generation or (g == generation and v in keep)}
        # In main memory: a GPU could not hold all clients of a simulation.
        self._versions[run, client] = kept | {(generation, version): to_cpu(state)}
        self._orders[run, client] = order

    def newest(self, run: str, client: str) -> int:
        return self._orders.get((run, client), 0)


def to_cpu(state: State) -> State:
    """The state on the CPU; no copy if it is there."""
    return {name: value.cpu() for name, value in state.items()}


class DiskMemory:
    """On disk, `folder/run/client/generation/version.safetensors`: for resident clients.

    A file is written beside its place, flushed, renamed and its folder flushed, so a crash leaves the old or the new
    version whole; a checksum tells damage, and the model's layout hash a file that another model or task has left.
    `durable=False` leaves out the flushes, for simulations: a crash of the machine, not of a process, may then cost
    versions.

    With `layout` "" files of any layout are read. `device` is where loaded tensors go, `to_host` how saved ones come
    from there; with a `cache` the newest version of each client stays on the device.
    """

    def __init__(
        self,
        folder: str | Path,
        durable: bool = True,
        *,
        layout: str = "",
        device: torch.device = CPU,
        to_host: Callable[[State], State] = to_cpu,
        cache: StateCache | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._durable = durable
        self._layout = layout
        self._device = device
        self._to_host = to_host
        self._cache = cache

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        path = self._place(run, client, generation) / _file(version)
        if self._cache is not None and (held := self._cache.get(path, self._whose(run, client))) is not None:
            return held
        about = _about(run, client, generation, version, self._layout)
        try:
            state = read(path, about)
        except Damaged as error:
            log.warning("memory of client %s, version %d is lost: %s: %s", client, version, path, error)
            return None
        return {name: value.to(self._device) for name, value in state.items()}

    def save(
        self,
        run: str,
        client: str,
        generation: int,
        version: int,
        state: State,
        keep: Collection[int],
        order: int = 0,
    ) -> None:
        place = self._place(run, client, generation)
        self._make(place)
        path, host = place / _file(version), unshared(self._to_host(state))
        content = save(
            host,
            _about(run, client, generation, version, self._layout) | {"sha256": sha256(host), "order": str(order)},
        )
        keep = {version, *keep}
        try:
            write_atomically(path, content, self._durable)
        except OSError as error:
            # Nobody will ask for what is not to be kept; its room may be all that is missing.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._prune(place, generation, keep):
                raise
            write_atomically(path, content, self._durable)
        self._prune(place, generation, keep)
        if self._cache is not None:
            self._cache.put(path, self._whose(run, client), state)

    def newest(self, run: str, client: str) -> int:
        orders = [0]
        for path in (self._folder / _safe(run) / _safe(client)).glob("*/*.safetensors"):
            with suppress(OSError, ValueError, LookupError, AttributeError, TypeError), path.open("rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER)))
                orders.append(int(header["__metadata__"]["order"]))
        return max(orders)

    def _prune(self, place: Path, generation: int, keep: Collection[int]) -> bool:
        """Drop older generations and, in this one, all versions but those in `keep`; whether there were any."""
        versions = [path for version, path in versions_in(place) if version not in keep]
        for path in versions:
            path.unlink(missing_ok=True)
        older = [p for p in place.parent.iterdir() if p.name.isdecimal() and int(p.name) < generation]
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)
        return bool(versions or older)

    def _make(self, place: Path) -> None:
        missing = [folder for folder in (place, *place.parents) if not folder.exists()]
        place.mkdir(parents=True, exist_ok=True)
        if self._durable:
            for folder in missing:
                flush(folder.parent)

    def _place(self, run: str, client: str, generation: int) -> Path:
        return self._folder / _safe(run) / _safe(client) / str(generation)

    def _whose(self, run: str, client: str) -> tuple[str, ...]:
        return (str(self._folder), run, client, self._layout, str(self._device))


def read(path: Path, expected: dict[str, str]) -> State:
    """The state in a file. Raises Damaged unless it is whole and says what is `expected` of it (entries "" may be
    anything)."""
    state, about = read_tensors(path)
    for key, value in expected.items():
        if value and about.get(key) != value:
            raise Damaged(f"it is foreign: {key} {about.get(key)!r}, expected {value!r}")
    if about.get("sha256") != sha256(state):
        raise Damaged("it is damaged: its checksum is wrong")
    return state


def versions_in(place: Path) -> Iterator[tuple[int, Path]]:
    """The versions in the folder of a generation, unread."""
    for path in place.glob("*.safetensors"):
        if path.stem.isdecimal():
            yield int(path.stem), path


class ContextMemory:
    """In Flower's context: for VCE and stock SuperNodes, where Flower carries it from message to message."""

    def __init__(self, records: RecordDict) -> None:
        self._records = records

    def load(self, run: str, client: str, generation: int, version: int) -> State | None:
        record = self._records.array_records.get(self._name(run, client, generation, version))
        return None if record is None else wire.from_records(record)

    def save(
        self,
        run: str,
        client: str,
        generation: int,
        version: int,
        state: State,
        keep: Collection[int],
        order: int = 0,
    ) -> None:
        for name in list(self._records.array_records):
            whose, held, old = json.loads(name)
            if whose == [run, client] and (held < generation or (held == generation and old not in keep)):
                del self._records[name]
        self._records[self._name(run, client, generation, version)] = wire.to_records(state)
        self._records[json.dumps([run, client])] = ConfigRecord({"order": order})

    def newest(self, run: str, client: str) -> int:
        record = self._records.config_records.get(json.dumps([run, client]))
        return 0 if record is None else int(record["order"])  # type: ignore[arg-type]

    @staticmethod
    def _name(run: str, client: str, generation: int, version: int) -> str:
        return json.dumps([[run, client], generation, version])


def _about(run: str, client: str, generation: int, version: int, layout: str) -> dict[str, str]:
    """What a file says of itself, beside its checksum."""
    return {
        "run": run,
        "client": client,
        "generation": str(generation),
        "version": str(version),
        "layout": layout,
    }


def _file(version: int) -> str:
    return f"{version:09d}.safetensors"


def _safe(name: str) -> str:
    """A client or run name as a folder name; names come from the network and must not leave the folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}", name):
        raise MessageError(f"name {name!r} cannot name a folder")
    return name
