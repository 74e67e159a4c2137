"""Splits that the processes of one command share: the library that makes them takes seconds to load in each."""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from common.experiment import PartitionSettings
from common.files import write_atomically

FOLDER = "FEDKEEL_PLANS"
"""Environment variable that names the folder; without it nothing is remembered."""

Parts = list[NDArray[np.int64]]


def share() -> None:
    """Remember splits in a folder of this process's lifetime, for it and for the processes that it starts."""
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fedkeel-plans-")
        atexit.register(folder.cleanup)
        os.environ[FOLDER] = folder.name


def remembered(
    split: Callable[..., Parts],
    settings: PartitionSettings,
    clients: int,
    labels: NDArray[Any],
    groups: NDArray[Any] | None,
    seed: int,
) -> Parts:
    """`split(settings, clients, labels, groups, seed)`, from the folder if these arguments were split before.

    A file that cannot be read is made anew; a wrong one shows in the plan's hash, which the roll call compares.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return split(settings, clients, labels, groups, seed)
    path = Path(folder) / f"{_key(settings, clients, labels, groups, seed)}.npz"
    with suppress(OSError, ValueError, KeyError, BadZipFile), np.load(path, allow_pickle=False) as file:
        return list(np.split(file["indices"], file["cuts"]))
    parts = split(settings, clients, labels, groups, seed)
    content = io.BytesIO()
    np.savez(content, indices=np.concatenate(parts), cuts=np.cumsum([len(part) for part in parts])[:-1])
    with suppress(OSError):
        write_atomically(path, content.getvalue(), durable=False)
    return parts


def _key(
    settings: PartitionSettings, clients: int, labels: NDArray[Any], groups: NDArray[Any] | None, seed: int
) -> str:
    digest = hashlib.sha256(f"{settings.model_dump_json()} {clients} {seed}".encode())
    for array in (labels, groups):
        if array is not None:
            digest.update(f"{array.dtype.str} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
