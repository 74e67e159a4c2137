"""The kinds of split. Where flwr-datasets has a partitioner it does the work, with explicit seeds and errors that name
the setting; what is here is what it lacks."""

from __future__ import annotations

import contextlib
import io
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.seeds import derive

Indices = NDArray[np.int64]


def split(
    settings: PartitionSettings, clients: int, labels: Indices, groups: NDArray[Any] | None, seed: int
) -> list[Indices]:
    """The examples of each client before the holdout is taken: a function of its arguments alone."""
    # Some partitioners cut the rows in the order given, without a seed: the order is where chance comes in.
    rows = np.random.default_rng(derive(seed, "partition", "order")).permutation(len(labels))
    try:
        counts = class_counts(settings, clients, seed)
        if settings.kind == "pathological" and len(set(counts)) > 1:
            return _unequal_classes(counts, rows, labels, derive(seed, "partition", "pathological"))
        if groups is not None:
            return _natural(clients, rows, groups, derive(seed, "partition", "groups"))
        return _by_library(settings, clients, rows, labels, seed)
    except ValueError as error:
        raise SettingsError(_reason(settings, clients, len(labels), error)) from None


def class_counts(settings: PartitionSettings, clients: int, seed: int) -> list[int]:
    """How many classes each client of a pathological split holds: as given, cycled, or drawn by the seed."""
    given = settings.classes_per_client
    if isinstance(given, str):
        chance = np.random.default_rng(derive(seed, "partition", "classes"))
        return [int(count) for count in chance.integers(*class_range(settings), clients, endpoint=True)]
    cycle = given if isinstance(given, list) else [given]
    return [cycle[i % len(cycle)] for i in range(clients)]


def class_range(settings: PartitionSettings) -> tuple[int, int]:
    """The fewest and the most classes that `classes_per_client` can give to a client."""
    given = settings.classes_per_client
    numbers = [int(end) for end in re.findall(r"\d+", str(given))]
    return min(numbers), max(numbers)


def _unequal_classes(counts: Sequence[int], rows: Indices, labels: Indices, seed: int) -> list[Indices]:
    """NIID-Bench's #C = k (arXiv 2102.02079) with a k for each client, which flwr-datasets has for equal k only.

    Client i surely holds class i modulo the number of classes, the others are drawn; a class's examples are divided
    evenly among those who hold it.
    """
    chance = np.random.default_rng(seed)
    classes = np.unique(labels)
    held = np.zeros((len(counts), len(classes)), bool)
    for client, count in enumerate(counts):
        first = client % len(classes)
        others = np.delete(np.arange(len(classes)), first)
        held[client, [first, *chance.choice(others, count - 1, replace=False)]] = True
    parts: list[list[Indices]] = [[] for _ in counts]
    for label, holding in zip(classes, held.T, strict=True):
        own, holders = rows[labels[rows] == label], np.flatnonzero(holding)
        if len(holders) > len(own):
            raise ValueError(f"class {label} has {len(own)} examples for {len(holders)} clients")
        if len(holders):
            for holder, piece in zip(holders, np.array_split(own, len(holders)), strict=True):
                parts[holder].append(piece)
    return [np.concatenate(pieces) for pieces in parts]


def _natural(clients: int, rows: Indices, groups: NDArray[Any], seed: int) -> list[Indices]:
    """A client for each of the sorted groups, or for `clients` of them. Not the library's partitioner: it goes through
    all rows once a client, which is an hour for the writers of FEMNIST."""
    names, member = np.unique(groups[rows], return_inverse=True)
    parts = np.split(rows[np.argsort(member, kind="stable")], np.cumsum(np.bincount(member))[:-1])
    if clients == len(names):
        return parts
    return [parts[i] for i in np.sort(np.random.default_rng(seed).choice(len(names), clients, replace=False))]


def _by_library(settings: PartitionSettings, clients: int, rows: Indices, labels: Indices, seed: int) -> list[Indices]:
    columns = {"index": rows, "label": labels[rows]}
    if settings.kind == "quantity":
        columns["label"] = np.zeros_like(rows)  # one class for all: the Dirichlet draw divides the whole
    elif settings.balanced:
        columns["label"] = np.unique(labels, return_inverse=True)[1][rows]  # this partitioner counts classes from 0
    with _quiet():
        import datasets  # slow to import, so only where a plan is made

        partitioner = _partitioner(settings, clients, len(labels), derive(seed, "partition", settings.kind))
        partitioner.dataset = datasets.Dataset.from_dict(columns)  # in memory: no cache files
        parts = [partitioner.load_partition(number)["index"][:] for number in range(partitioner.num_partitions)]
    return [np.asarray(part, np.int64) for part in parts]


def _partitioner(settings: PartitionSettings, clients: int, examples: int, seed: int) -> Any:
    from flwr_datasets import partitioner as library  # 2.4 s, so only where a split is made

    if settings.balanced:
        sizes = [examples // clients + (i < examples % clients) for i in range(clients)]
        return library.InnerDirichletPartitioner(sizes, "label", settings.alpha, seed=seed)
    if settings.kind in ("dirichlet", "quantity"):
        return library.DirichletPartitioner(
            clients, "label", settings.alpha, min_partition_size=settings.min_examples, seed=seed
        )
    if settings.kind == "pathological":
        # Client i surely gets class i modulo the number of classes: with enough clients no class is left out.
        mode = "first-deterministic"
        (count,) = set(class_counts(settings, clients, seed))
        return library.PathologicalPartitioner(clients, "label", count, class_assignment_mode=mode, seed=seed)
    if settings.kind == "shards":
        return library.ShardPartitioner(clients, "label", settings.shards_per_client, seed=seed)
    if settings.kind == "size":
        growth = {"linear": "Linear", "square": "Square", "exponential": "Exponential"}[settings.growth]
        return getattr(library, f"{growth}Partitioner")(clients)
    return library.IidPartitioner(clients)


def _reason(settings: PartitionSettings, clients: int, examples: int, error: ValueError) -> str:
    """What the user can change when a split failed."""
    with_clients = f"with partition.clients = {clients} on {examples} examples"
    if settings.balanced:
        return (
            f"partition.alpha = {settings.alpha} {with_clients}: a client's classes ran out before it had its equal "
            "share; raise alpha or leave partition.balanced out"
        )
    if settings.kind in ("dirichlet", "quantity"):
        return (
            f"partition.alpha = {settings.alpha} {with_clients}: no draw gave each client "
            f"partition.min_examples = {settings.min_examples}; raise alpha, or lower clients or min_examples"
        )
    if settings.kind == "pathological":
        return (
            f"partition.classes_per_client = {settings.classes_per_client!r} {with_clients}: a class would be "
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
