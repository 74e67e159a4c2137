"""The partition plan: which example of a pooled data set belongs to which simulated client.

The split itself is flwr-datasets' work. Here it gets explicit seeds, the columns it needs and no others, and
errors that name the setting. Simulation and deployment compute the same plan, and `Plan.hash` shows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import plans
from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.seeds import derive

Indices = NDArray[np.int64]

DEFAULT_CLIENTS = 10


@dataclass(frozen=True, eq=False)
class Plan:
    """Who holds what: row i of everything is client str(i). The arrays are read-only.

    clients       training indices of each client into the pooled data set, int64, sorted, disjoint
    holdout       evaluation indices of each client, int64, sorted; disjoint from all training indices
    seed          the run's seed, from which the plan was derived
    class_counts  training examples by client and class, int64 (clients, classes)
    hash          sha256 (hex) over all indices and the class counts
    """

    clients: tuple[Indices, ...]
    holdout: tuple[Indices, ...]
    seed: int
    class_counts: Indices
    hash: str


def make_plan(settings: PartitionSettings, labels: NDArray[Any], groups: NDArray[Any] | None, seed: int) -> Plan:
    """Split n examples over clients: a function of its arguments alone, the same in every process.

    `labels` (n,) are integers from 0; `groups` (n,) are the integer or text ids of a natural split, or None.
    A natural split has one client per group, in the order of the sorted ids; with `clients = k` the seed
    chooses k groups. The pathological and shards splits may leave examples out: classes that no client drew,
    and the remainder of equal shards. All others cover the data set. A Dirichlet split may
    have empty clients if `min_examples = 0`.

    Raises SettingsError, naming the `[partition]` keys, if the settings cannot work with this data.
    """
    labels, groups = _columns(settings, labels, groups)
    clients = _check(settings, labels, groups)
    parts = plans.remembered(_split, settings, clients, labels, groups, seed)
    smallest = min(len(part) for part in parts)
    if smallest < settings.min_examples:
        raise SettingsError(
            f"partition.min_examples = {settings.min_examples}: the {settings.kind} split over "
            f"partition.clients = {clients} has a client of {smallest}; lower one of the two"
        )
    pairs = [split_holdout(part, settings.holdout, seed, str(i)) for i, part in enumerate(parts)]
    classes = int(labels.max()) + 1
    counts = np.stack([np.bincount(labels[train], minlength=classes) for train, _ in pairs]).astype(np.int64)
    plan = Plan(
        clients=tuple(train for train, _ in pairs),
        holdout=tuple(evaluate for _, evaluate in pairs),
        seed=seed,
        class_counts=counts,
        hash=_hash([*(array for pair in pairs for array in pair), *counts]),
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
            "allowed without groups: iid, dirichlet, pathological, shards, size"
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
    if settings.kind == "pathological" and settings.classes_per_client > classes:
        raise SettingsError(
            f"partition.classes_per_client = {settings.classes_per_client}: the data set has only {classes} classes"
        )
    if settings.kind == "shards" and clients * settings.shards_per_client > available:
        raise SettingsError(
            f"partition.shards_per_client = {settings.shards_per_client} with partition.clients = {clients}: "
            f"{clients * settings.shards_per_client} shards cannot be cut from {available} examples"
        )
    return clients


def _split(
    settings: PartitionSettings, clients: int, labels: Indices, groups: NDArray[Any] | None, seed: int
) -> list[Indices]:
    """The examples of each client before the holdout is taken."""
    # Some partitioners cut the rows in the order given, without a seed: the order is where chance comes in.
    rows = np.random.default_rng(derive(seed, "partition", "order")).permutation(len(labels))
    columns = {"index": rows, "label": labels[rows]} | ({} if groups is None else {"group": groups[rows]})
    with _quiet():
        import datasets  # slow to import, so only where a plan is made

        partitioner = _partitioner(settings, clients, derive(seed, "partition", settings.kind))
        partitioner.dataset = datasets.Dataset.from_dict(columns)  # in memory: no cache files
        try:
            numbers = np.arange(partitioner.num_partitions)
            if clients < len(numbers):  # some groups of a natural split
                chance = np.random.default_rng(derive(seed, "partition", "groups"))
                numbers = np.sort(chance.choice(numbers, clients, replace=False))
            parts = [partitioner.load_partition(int(number))["index"][:] for number in numbers]
        except ValueError as error:
            raise SettingsError(_reason(settings, clients, len(labels), error)) from None
    return [np.asarray(part, np.int64) for part in parts]


def _partitioner(settings: PartitionSettings, clients: int, seed: int) -> Any:
    from flwr_datasets import partitioner as library

    if settings.kind == "dirichlet":
        return library.DirichletPartitioner(
            clients, "label", settings.alpha, min_partition_size=settings.min_examples, seed=seed
        )
    if settings.kind == "pathological":
        # Client i surely gets class i modulo the number of classes: with enough clients no class is left out.
        mode = "first-deterministic"
        return library.PathologicalPartitioner(
            clients, "label", settings.classes_per_client, class_assignment_mode=mode, seed=seed
        )
    if settings.kind == "shards":
        return library.ShardPartitioner(clients, "label", settings.shards_per_client, seed=seed)
    if settings.kind == "natural":
        return library.NaturalIdPartitioner("group")
    if settings.kind == "size":
        growth = {"linear": "Linear", "square": "Square", "exponential": "Exponential"}[settings.growth]
        return getattr(library, f"{growth}Partitioner")(clients)
    return library.IidPartitioner(clients)


def _reason(settings: PartitionSettings, clients: int, examples: int, error: ValueError) -> str:
    """What the user can change when the library gave up."""
    with_clients = f"with partition.clients = {clients} on {examples} examples"
    if settings.kind == "dirichlet":
        return (
            f"partition.alpha = {settings.alpha} {with_clients}: no draw gave each client "
            f"partition.min_examples = {settings.min_examples}; raise alpha, or lower clients or min_examples"
        )
    if settings.kind == "pathological":
        return (
            f"partition.classes_per_client = {settings.classes_per_client} {with_clients}: a class would be "
            "shared by more clients than it has examples; lower one of the two"
        )
    if settings.kind == "size":
        return (
            f"partition.growth = {settings.growth!r} {with_clients}: the smallest client would be empty; "
            "lower clients or choose a slower growth (linear, square, exponential)"
        )
    return f"partition.kind = {settings.kind!r} {with_clients}: {error}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' warnings, progress bar and use of Python's global generator to themselves."""
    state = random.getstate()  # importing `datasets` draws from it
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)


def _hash(arrays: list[Indices]) -> str:
    digest = hashlib.sha256()
    for array in arrays:  # each with its length, so that no two plans share a byte stream
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    return digest.hexdigest()
