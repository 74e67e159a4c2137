"""The partition plan: which example of a pooled data set belongs to which simulated client.

Simulation and deployment compute the same plan, or read it from the same file, and `Plan.hash` shows it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.partition import file as plan_files
from common.partition import split_cache as plans
from common.partition.splits import class_range, split
from common.seeds import derive

Indices = NDArray[np.int64]

DEFAULT_CLIENTS = 10


@dataclass(frozen=True, eq=False)
class Plan:
    """Who holds what: row i of everything is client str(i). The arrays are read-only.

    clients         training indices of each client into the pooled data set, int64, sorted, disjoint
    holdout         evaluation indices of each client, int64, sorted; disjoint from all training indices
    seed            the seed from which the plan was derived: the run's, or that of a plan file
    class_counts    training examples by client and class, int64 (clients, classes)
    hash            sha256 (hex) over all indices, the class counts and the shift
    shift           what makes the clients' inputs differ, and how much; see common/partition/shift.py
    shift_strength
    """

    clients: tuple[Indices, ...]
    holdout: tuple[Indices, ...]
    seed: int
    class_counts: Indices
    hash: str
    shift: str = "none"
    shift_strength: float = 0.0


def make_plan(settings: PartitionSettings, labels: NDArray[Any], groups: NDArray[Any] | None, seed: int) -> Plan:
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
    parts = plans.remembered(split, settings, clients, labels, groups, seed)
    smallest = min(len(part) for part in parts)
    if smallest < settings.min_examples:
        raise SettingsError(
            f"partition.min_examples = {settings.min_examples}: the {settings.kind} split over "
            f"partition.clients = {clients} has a client of {smallest}; lower one of the two"
        )
    pairs = [split_holdout(part, settings.holdout, seed, str(i)) for i, part in enumerate(parts)]
    return plan_of(pairs, labels, seed, settings.shift, settings.shift_strength)


def _from_file(settings: PartitionSettings, labels: Indices, seed: int) -> Plan:
    """The plan of a file; the experiment's own shift, if it has one, takes the place of the file's."""
    file = plan_files.read(settings, labels, seed)
    made_with = seed if file.seed is None else file.seed
    plan = plan_of(file.pairs(), labels, made_with, file.shift, file.shift_strength)
    if file.hash not in (None, plan.hash):
        raise SettingsError(
            f"plan file {settings.file!r} says hash {file.hash[:12]!r}, its content has {plan.hash[:12]!r}: "
            "it was changed; allowed: the file as it was made, or a plan of your own without `hash`"
        )
    if settings.shift == "none":
        return plan
    return plan_of(file.pairs(), labels, made_with, settings.shift, settings.shift_strength)


def plan_of(
    pairs: Sequence[tuple[Indices, Indices]], labels: Indices, seed: int, shift: str = "none", strength: float = 0.0
) -> Plan:
    """The plan that gives client i the training and evaluation indices `pairs[i]`, each sorted, none of them twice."""
    classes = int(labels.max()) + 1
    counts = np.stack([np.bincount(labels[train], minlength=classes) for train, _ in pairs]).astype(np.int64)
    if shift in ("none", "rotation"):
        strength = 0.0  # it has none
    plan = Plan(
        clients=tuple(train for train, _ in pairs),
        holdout=tuple(evaluate for _, evaluate in pairs),
        seed=seed,
        class_counts=counts,
        hash=_hash([*(array for pair in pairs for array in pair), *counts], shift, strength, seed),
        shift=shift,
        shift_strength=strength,
    )
    for array in (*plan.clients, *plan.holdout, plan.class_counts):
        array.setflags(write=False)
    return plan


def split_holdout(indices: Indices, share: float, seed: int, client: str) -> tuple[Indices, Indices]:
    """The training and evaluation parts of one client's n indices, each sorted.

    floor(n * share) indices, chosen by the seed and the client's name, are for evaluation; one always stays
    for training.
    """
    count = min(math.floor(len(indices) * share), max(len(indices) - 1, 0))
    order = np.random.default_rng(derive(seed, "holdout", client)).permutation(len(indices))
    return np.sort(indices[order[count:]]), np.sort(indices[order[:count]])


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


def _hash(arrays: list[Indices], shift: str, strength: float, seed: int) -> str:
    digest = hashlib.sha256()
    for array in arrays:  # each with its length, so that no two plans share a byte stream
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    if shift != "none":
        digest.update(f"{shift} {strength!r} {seed}".encode())
    return digest.hexdigest()
