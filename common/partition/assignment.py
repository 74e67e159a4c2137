"""Who holds what of a pooled data set: the assignment of its examples to simulated clients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.seeds import derive

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Assignment:
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


def assignment_of(
    pairs: Sequence[tuple[Indices, Indices]], labels: Indices, seed: int, shift: str = "none", strength: float = 0.0
) -> Assignment:
    """The plan that gives client i the training and evaluation indices `pairs[i]`, each sorted, none of them twice."""
    classes = int(labels.max()) + 1
    counts = np.stack([np.bincount(labels[train], minlength=classes) for train, _ in pairs]).astype(np.int64)
    if shift in ("none", "rotation"):
        strength = 0.0  # it has none
    assignment = Assignment(
        clients=tuple(train for train, _ in pairs),
        holdout=tuple(evaluate for _, evaluate in pairs),
        seed=seed,
        class_counts=counts,
        hash=_hash([*(array for pair in pairs for array in pair), *counts], shift, strength, seed),
        shift=shift,
        shift_strength=strength,
    )
    for array in (*assignment.clients, *assignment.holdout, assignment.class_counts):
        array.setflags(write=False)
    return assignment


def split_holdout(indices: Indices, share: float, seed: int, client: str) -> tuple[Indices, Indices]:
    """The training and evaluation parts of one client's n indices, each sorted.

    floor(n * share) indices, chosen by the seed and the client's name, are for evaluation; one always stays
    for training.
    """
    count = min(math.floor(len(indices) * share), max(len(indices) - 1, 0))
    order = np.random.default_rng(derive(seed, "holdout", client)).permutation(len(indices))
    return np.sort(indices[order[count:]]), np.sort(indices[order[:count]])


def _hash(arrays: list[Indices], shift: str, strength: float, seed: int) -> str:
    digest = hashlib.sha256()
    for array in arrays:  # each with its length, so that no two plans share a byte stream
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    if shift != "none":
        digest.update(f"{shift} {strength!r} {seed}".encode())
    return digest.hexdigest()
