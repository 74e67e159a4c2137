"""Splits that processes share. The library that makes them takes seconds to load and 200 MB to hold: a resident client
has its one split made by a process of its own, once, whoever else waits for the same one."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from common.experiment import PartitionSettings
from common.files import write_atomically
from common.flower import ROOT

FOLDER = "FEDKEEL_PLANS"
"""Environment variable that names the folder; without it nothing is remembered."""

Parts = list[NDArray[np.int64]]


def share() -> None:
    """Remember splits in a folder of this process's lifetime, for it and for the processes that it starts."""
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fedkeel-plans-")
        atexit.register(folder.cleanup)
        os.environ[FOLDER] = folder.name


_resident = False


def share_in(folder: Path) -> None:
    """Remember splits in this folder, for good: all who use it make each split once between them, and none holds the
    library for as long as it stays."""
    global _resident
    _resident = True
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(FOLDER, str(folder))


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
    if (parts := _read(path)) is not None:
        return parts
    with _turn(path.with_suffix(".lock")):
        if (parts := _read(path)) is not None:
            return parts  # Somebody else made it meanwhile.
        if _resident and groups is None:
            parts = apart(split, settings, clients, labels, seed)
        else:  # by groups it needs no library
            parts = split(settings, clients, labels, groups, seed)
        with suppress(OSError):
            write_atomically(path, _packed(parts), durable=False)
    return parts


def apart(
    split: Callable[..., Parts], settings: PartitionSettings, clients: int, labels: NDArray[Any], seed: int
) -> Parts:
    """`split(...)` in a process of its own, that takes what it loaded along when it ends. Where that fails, for
    whatever reason, it is made here: so errors are those of `split`."""
    given = io.BytesIO()
    np.savez(given, settings=settings.model_dump_json(exclude_none=True), clients=clients, seed=seed, labels=labels)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {_CHILD}"]
    try:
        made = subprocess.run(
            [*command, split.__module__, split.__name__], input=given.getvalue(), capture_output=True, check=True
        )
        return _unpacked(io.BytesIO(made.stdout))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, subprocess.SubprocessError):
        return split(settings, clients, labels, None, seed)


_CHILD = "from common.partition.split_cache import main; main(sys.argv[1], sys.argv[2])"


def main(module: str, name: str) -> None:
    """The process that makes a split: arguments from standard input, the parts to standard output."""
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as file:
        settings = PartitionSettings.model_validate_json(str(file["settings"]))
        split = getattr(importlib.import_module(module), name)
        parts = split(settings, int(file["clients"]), file["labels"], None, int(file["seed"]))
    sys.stdout.buffer.write(_packed(parts))


def _packed(parts: Parts) -> bytes:
    content = io.BytesIO()
    np.savez(content, indices=np.concatenate(parts), cuts=np.cumsum([len(part) for part in parts])[:-1])
    return content.getvalue()


def _unpacked(source: Path | io.BytesIO) -> Parts:
    with np.load(source, allow_pickle=False) as file:
        return list(np.split(file["indices"], file["cuts"]))


def _read(path: Path) -> Parts | None:
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile):
        return _unpacked(path)
    return None


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait for one's turn; where no lock can be made, all go at once."""
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, also with one that is killed
        yield


def _key(
    settings: PartitionSettings, clients: int, labels: NDArray[Any], groups: NDArray[Any] | None, seed: int
) -> str:
    digest = hashlib.sha256(f"{settings.model_dump_json()} {clients} {seed}".encode())
    for array in (labels, groups):
        if array is not None:
            digest.update(f"{array.dtype.str} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
