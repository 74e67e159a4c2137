"""A partition plan as a JSON file that can be shared: who holds which rows of a pooled data set.

    {"format": "fedkeel-plan-1",
     "hash": "...",                                the plan's hash
     "seed": 0, "shift": "none", "shift_strength": 0.0,
     "data": {"task": "digits", "examples": 1438, "labels": "..."},
     "made_by": {"kind": "dirichlet", ...},        the settings, for people
     "clients": [
      {"train": [3, 17, ...], "evaluate": [5, ...]},
      ...]}

Row i of `clients` is client str(i). In a plan of one's own `data.examples` and `clients` are enough.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from common.data.places import find
from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.partition.assignment import Assignment, Indices
from common.settings import Section, checked

FORMAT = "fedkeel-plan-1"


class HeldRows(Section):
    """One client's rows of the pooled data set, from 0."""

    train: list[int]
    evaluate: list[int] = []


class PooledData(Section):
    """What the rows are of. `labels` is the sha256 (hex) of the labels as little-endian int64, in their order."""

    task: str = ""
    examples: int = Field(ge=1)
    labels: str | None = None


class PlanFile(Section):
    """The content of a plan file."""

    format: Literal["fedkeel-plan-1"]
    hash: str | None = None
    seed: int | None = None
    shift: Literal["none", "noise", "rotation", "brightness", "contrast"] = "none"
    shift_strength: float = Field(0.0, ge=0)
    data: PooledData
    made_by: dict[str, Any] = {}
    clients: list[HeldRows] = Field(min_length=1)

    def pairs(self) -> list[tuple[Indices, Indices]]:
        """The training and evaluation rows of each client, int64, sorted."""
        return [(_sorted(client.train), _sorted(client.evaluate)) for client in self.clients]


def labels_hash(labels: NDArray[Any]) -> str:
    """The sha256 (hex) of labels (n,): equal for the same data set in the same order."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def text(assignment: Assignment, labels: NDArray[Any], settings: PartitionSettings, task: str) -> str:
    """The content of the file for a plan of these labels (n,), which the task named `task` holds: a client a line."""
    head = {
        "format": FORMAT,
        "hash": assignment.hash,
        "seed": assignment.seed,
        "shift": assignment.shift,
        "shift_strength": assignment.shift_strength,
        "data": {"task": task, "examples": len(labels), "labels": labels_hash(labels)},
        "made_by": settings.model_dump(mode="json", exclude_none=True, exclude={"file"}),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    pairs = zip(assignment.clients, assignment.holdout, strict=True)
    rows = [{"train": train.tolist(), "evaluate": evaluate.tolist()} for train, evaluate in pairs]
    held = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
    return "\n".join(["{", *lines, ' "clients": [', held, " ]", "}", ""])


def read(settings: PartitionSettings, labels: NDArray[Any], seed: int) -> PlanFile:
    """The file `settings.file`, checked against the labels (n,) of this run's data set.

    Looked for like a data file: as it is, else in the folder that FEDKEEL_DATA names. Raises SettingsError if it is
    missing or malformed, was made for other data, or gives an example twice.
    """
    path = find(settings.file or "", "partition.file")
    source = f"plan file {str(path)!r}"
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{source} cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{source} holds a {type(values).__name__}; allowed: an object of format {FORMAT!r}")
    try:
        file = checked(PlanFile, values, source)
    except SettingsError as error:  # a wrong value may be as long as the file
        lines = str(error).splitlines()
        raise SettingsError(
            "\n".join(f"{line[:150]} ... {line[-100:]}" if len(line) > 260 else line for line in lines[:5])
        ) from None
    _check_data(file, labels, seed, source)
    _check_rows(file, source)
    if settings.clients not in (None, len(file.clients)):
        raise SettingsError(
            f"partition.clients = {settings.clients}: {source} has {len(file.clients)} clients; "
            "allowed: that number, or none given"
        )
    return file


def _check_data(file: PlanFile, labels: NDArray[Any], seed: int, source: str) -> None:
    if file.data.examples != len(labels):
        raise SettingsError(
            f"{source} is of a data set of {file.data.examples} examples"
            f"{f' (task {file.data.task!r})' if file.data.task else ''}; this one has {len(labels)}"
        )
    if file.data.labels not in (None, own := labels_hash(labels)):
        seeds = f": the file's seed is {file.seed}, this run's {seed}" if file.seed not in (None, seed) else ""
        raise SettingsError(
            f"{source} is of labels with sha256 {file.data.labels[:12]}, this data set's have {own[:12]}: another data "
            f"set, another order, or another seed where the seed draws the examples{seeds}"
        )


def _check_rows(file: PlanFile, source: str) -> None:
    """No row outside the data, none twice."""
    holder = np.full(file.data.examples, -1)
    for number, pair in enumerate(file.pairs()):
        rows = np.concatenate(pair)
        outside = rows[(rows < 0) | (rows >= len(holder))]
        if len(outside):
            raise SettingsError(f"{source}: clients.{number} holds row {outside[0]}; allowed: 0 to {len(holder) - 1}")
        unique, times = np.unique(rows, return_counts=True)
        taken = unique[(holder[unique] >= 0) | (times > 1)]
        if len(taken):
            other = holder[taken[0]] if holder[taken[0]] >= 0 else number
            raise SettingsError(
                f"{source}: row {taken[0]} is held by clients.{other} and clients.{number}; allowed: each row once"
            )
        holder[rows] = number


def _sorted(rows: list[int]) -> Indices:
    # Numbers beyond int64 are outside every data set.
    return np.sort(np.array([max(-1, min(row, 2**62)) for row in rows], np.int64))
