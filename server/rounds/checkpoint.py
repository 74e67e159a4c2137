"""Checkpoints: all that decides the rest of a run, in one file of tensors for each kept round."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from common.errors import SettingsError
from common.files import replacing
from common.tensor_files import Damaged, read_tensors, unshared
from common.vector import State, sha256
from strategies.protocol.coordinator import Coordinator

FORMAT = "1"

DOUBTFUL = ".doubtful"
"""Ending of a checkpoint that no run goes on from."""


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds."""

    round: int
    run: str
    generation: int
    accepted: dict[str, int]
    known: dict[str, int]
    state: State
    buffers: State
    copies: State
    downlink: State
    usual: dict[str, float]
    stands: dict[str, int]
    facts: str = ""
    columns_hash: str = ""


class Checkpoints:
    """The kept checkpoints of a run folder.

    Writing overlaps the next round: server states are never changed in place. `asked` therefore looks only at files
    that are safely on disk.
    """

    def __init__(self, folder: Path, identities: Sequence[str], keep: int) -> None:
        """`identities`: the experiment's, and others under which it may have been kept."""
        self._folder = folder
        self._identities = identities
        # The newest is not yet known to be sound: the one before it stays until it is.
        self._keep = max(keep, 2)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self.passed_over: list[str] = []
        """What `latest` says of newer checkpoints that it did not take."""
        self._pending: Future[None] | None = None
        self._kept: dict[int, tuple[int, dict[str, int]]] = {}  # round -> generation, accepted

    def save(self, coordinator: Coordinator) -> None:
        """Begin to write the coordinator's present state; waits for the write before it."""
        self.wait()
        about = {
            "format": FORMAT,
            "identity": self._identities[0],
            "round": str(coordinator.round),
            "run": coordinator.run,
            "generation": str(coordinator.generation),
            "accepted": json.dumps(coordinator.accepted),
            "known": json.dumps(coordinator.known),
            "usual": json.dumps(coordinator.usual),
        } | ({"stands": json.dumps(coordinator.stands)} if coordinator.stands else {})
        about |= {key: value for key in ("facts", "columns_hash") if (value := getattr(coordinator, key))}
        tensors = {f"state/{k}": v for k, v in coordinator.state.items()}
        tensors |= {f"buffers/{k}": v for k, v in coordinator.buffers.items()}
        tensors |= {f"copies/{k}": v for k, v in coordinator.copies.items()}
        tensors |= {f"downlink/{k}": v for k, v in coordinator.downlink.items()}
        self._pending = self._writer.submit(self._write, coordinator.round, tensors, about)

    def wait(self) -> None:
        """Until the write under way is on disk; raises its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Finish writing."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    @property
    def kept(self) -> list[int]:
        """The rounds of the checkpoints that are safely on disk."""
        return sorted(self._kept)

    def asked(self, generation: int) -> dict[str, set[int]]:
        """Name -> the versions of this generation that a run resumed from a kept checkpoint asks a client for."""
        versions: dict[str, set[int]] = {}
        for of, accepted in self._kept.copy().values():
            for name, version in accepted.items() if of == generation else ():
                versions.setdefault(name, set()).add(version)
        return versions

    def _write(self, round: int, tensors: State, about: Mapping[str, str]) -> None:
        path = self._folder / f"{round:09d}.safetensors"
        tensors = unshared(tensors)
        with replacing(path) as temporary:
            save_file(tensors, temporary, {**about, "sha256": _digest(about, tensors)})
        path.with_suffix(DOUBTFUL).unlink(missing_ok=True)
        self._kept[round] = int(about["generation"]), json.loads(about["accepted"])
        for old in sorted(self._kept)[: -self._keep]:
            (self._folder / f"{old:09d}.safetensors").unlink(missing_ok=True)
            del self._kept[old]

    def set_aside(self, round: int) -> int | None:
        """Take the checkpoint of a round out of those that a run goes on from, because no upload made from its model
        could be used; returns the round of the one before it, None if there is none and all stays as it is."""
        self.wait()
        before = max((each for each in self._kept if each < round), default=None)
        path = self._folder / f"{round:09d}.safetensors"
        if before is None or not path.exists():
            return None
        path.replace(path.with_suffix(DOUBTFUL))
        del self._kept[round]
        return before

    def latest(self, identities: Sequence[str] = (), differing: str = "") -> Checkpoint:
        """The newest whole checkpoint that was not set aside.

        `identities`: instead of those given at first, where the run began with other settings that may change since;
        `differing`: what the settings have that this run has not, for the error.

        Later files than that one (damaged) are removed. Raises SettingsError if there is none or if it belongs to
        another experiment.
        """
        self._identities = identities or self._identities
        for path in sorted(self._folder.glob("*.safetensors"), reverse=True):
            loaded = read(path)
            if loaded is None:
                path.unlink()
                self.passed_over.append(f"that of round {int(path.stem)} is damaged")
                continue
            checkpoint, identity = loaded
            if identity not in self._identities:
                raise SettingsError(
                    f"checkpoint {str(path)!r} is of another experiment: its settings have hash {identity}, this "
                    f"experiment's {self._identities[0]}; only rounds, [evaluate], [stop] and [checkpoint] may change, "
                    f"and deadline, quorum and the like (docs/operate.md){differing}"
                )
            for earlier in sorted(self._folder.glob("*.safetensors")):
                if (found := read(earlier)) is not None:
                    self._kept[found[0].round] = found[0].generation, found[0].accepted
            self.passed_over += [
                f"that of round {int(path.stem)} is set aside, as no upload made from it was finite"
                for path in sorted(self._folder.glob(f"*{DOUBTFUL}"))
                if int(path.stem) > checkpoint.round
            ]
            return checkpoint
        raise SettingsError(f"nothing to resume: no whole checkpoint in {str(self._folder)!r}")


def _digest(about: Mapping[str, str], tensors: State) -> str:
    """Hash of all that a file holds: settings and tensors."""
    return hashlib.sha256(f"{sorted(about.items())} {sha256(tensors)}".encode()).hexdigest()


def read(path: Path) -> tuple[Checkpoint, str] | None:
    """A checkpoint and the identity of its experiment; None if the file is damaged."""
    try:
        tensors, about = read_tensors(path)
    except Damaged:
        return None
    if about.get("format") != FORMAT or about.pop("sha256", "") != _digest(about, tensors):
        return None
    parts: dict[str, State] = {"state": {}, "buffers": {}, "copies": {}, "downlink": {}}
    for name, tensor in tensors.items():
        part, _, key = name.partition("/")
        parts[part][key] = tensor
    checkpoint = Checkpoint(
        int(about["round"]),
        about["run"],
        int(about["generation"]),
        json.loads(about["accepted"]),
        json.loads(about["known"]),
        parts["state"],
        parts["buffers"],
        parts["copies"],
        parts["downlink"],
        json.loads(about.get("usual", "{}")),
        json.loads(about.get("stands", "{}")),
        about.get("facts", ""),
        about.get("columns_hash", ""),
    )
    return checkpoint, about["identity"]
