"""The partition plan: which example of a pooled data set belongs to which simulated client.

Simulation and deployment compute the same plan, or read it from the same file, and `Assignment.hash` shows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.partition import file as plan_files
from common.partition import split_cache
from common.partition.assignment import Assignment, Indices, assignment_of, split_holdout
from common.partition.splits import class_range, split

DEFAULT_CLIENTS = 10


def make_assignment(
    settings: PartitionSettings, labels: NDArray[Any], groups: NDArray[Any] | None, seed: int
) -> Assignment:
    """Split n examples over clients: a function of its arguments (and of a plan file) alone, the same in every process.

    `labels` (n,) are integers from 0; `groups` (n,) are the integer or text ids of a natural split, or None.
    A natural split has one client per group, in the order of the sorted ids; with `clients = k` the seed
    chooses k groups. The pathological and shards splits may leave examples out: classes that no client drew,
    and the remainder of equal shards; a plan file may, too. All others cover the data set. With `min_examples = 0`
    there may be empty clients.

    Raises SettingsError, naming the `[partition]` keys, if the settings cannot work with this data.
    """
    labels, groups = _columns(settings, labels, groups)
    if settings.kind == "file":
        return _from_file(settings, labels, seed)
    clients = _check(settings, labels, groups)
    parts = split_cache.remembered(split, settings, clients, labels, groups, seed)
    smallest = min(len(part) for part in parts)
    if smallest < settings.min_examples:
        raise SettingsError(
            f"partition.min_examples = {settings.min_examples}: the {settings.kind} split over "
            f"partition.clients = {clients} has a client of {smallest}; lower one of the two"
        )
    pairs = [split_holdout(part, settings.holdout, seed, str(i)) for i, part in enumerate(parts)]
    return assignment_of(pairs, labels, seed, settings.shift, settings.shift_strength)


def _from_file(settings: PartitionSettings, labels: Indices, seed: int) -> Assignment:
    """The plan of a file; the experiment's own shift, if it has one, takes the place of the file's."""
    file = plan_files.read(settings, labels, seed)
    made_with = seed if file.seed is None else file.seed
    assignment = assignment_of(file.pairs(), labels, made_with, file.shift, file.shift_strength)
    if file.hash not in (None, assignment.hash):
        raise SettingsError(
            f"plan file {settings.file!r} says hash {file.hash[:12]!r}, its content has {assignment.hash[:12]!r}: "
            "it was changed; allowed: the file as it was made, or a plan of your own without `hash`"
        )
    if settings.shift == "none":
        return assignment
    return assignment_of(file.pairs(), labels, made_with, settings.shift, settings.shift_strength)


def _columns(
    settings: PartitionSettings, labels: NDArray[Any], groups: NDArray[Any] | None
) -> tuple[Indices, NDArray[Any] | None]:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise SettingsError(f"labels must be integers, shape (n,), not {labels.dtype} {labels.shape}")
    if len(labels) and labels.min() < 0:
        raise SettingsError(f"labels must be integers from 0; the smallest is {labels.min()}")
    if settings.kind != "natural":
        return labels.astype(np.int64), None
    if groups is None:
        raise SettingsError(
            "partition.kind = 'natural' needs a group for each example, and this data set has none; "
            "allowed without groups: iid, dirichlet, pathological, shards, size, quantity, file"
        )
    if groups.shape != labels.shape or groups.dtype.kind not in "iuU":
        raise SettingsError(
            f"groups must be integers or text, shape {labels.shape} like the labels, not {groups.dtype} {groups.shape}"
        )
    return labels.astype(np.int64), groups


def _check(settings: PartitionSettings, labels: Indices, groups: NDArray[Any] | None) -> int:
    """The number of clients, after the checks that need no attempt at a split."""
    available = len(labels) if groups is None else len(np.unique(groups))
    clients = settings.clients or (DEFAULT_CLIENTS if groups is None else available)
    if clients > available or not available:
        things = "examples" if groups is None else "groups"
        raise SettingsError(f"partition.clients = {clients}: the data set has only {available} {things}")
    classes = len(np.unique(labels))
    if settings.kind == "pathological" and class_range(settings)[1] > classes:
        raise SettingsError(
            f"partition.classes_per_client = {settings.classes_per_client!r}: the data set has only {classes} classes"
        )
    if settings.kind == "shards" and clients * settings.shards_per_client > available:
        raise SettingsError(
            f"partition.shards_per_client = {settings.shards_per_client} with partition.clients = {clients}: "
            f"{clients * settings.shards_per_client} shards cannot be cut from {available} examples"
        )
    return clients
