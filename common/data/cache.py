"""The folder where data sets are kept once they are decoded: one file each, without pickle, that the processes of a
machine map into memory together."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from common.data.raw import Raw
from common.files import replacing

log = logging.getLogger("common.tasks")

FOLDER = "FEDKEEL_CACHE"
"""Environment variable that names the folder; default ~/.cache/fedkeel."""

ARRAYS = ("inputs", "labels", "groups", "test_inputs", "test_labels")


def folder() -> Path:
    """The cache's folder, which need not exist."""
    return Path(os.environ.get(FOLDER) or "~/.cache/fedkeel").expanduser()


def path_of(name: str) -> Path:
    """Where the data set `name` is kept."""
    return folder() / f"{name}.safetensors"


def stamp(path: Path) -> str:
    """Names one state of a file: its place, size and time."""
    about = path.stat()
    text = f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def kept(name: str, make: Callable[[], Raw], required: bool = False) -> Raw:
    """The data set `name` from the cache, or else what `make` gives, which is then kept. Of several processes one
    makes it and the others wait.

    Where the folder cannot be written, `make` serves this process alone, or, with `required`, OSError is raised.
    """
    path = path_of(name)
    if (held := _load(path)) is not None:
        return held
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if (held := _load(path)) is None:
                _save(path, make())
                held = _load(path)
        if held is not None:
            return held
    except OSError as error:
        if required:
            raise
        log.info("%s is decoded for this process alone: %s cannot be written: %s", name, path.parent, error)
    return make()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock, waited for, that ends with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that makes %s", path.with_suffix(".safetensors"))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _save(path: Path, raw: Raw) -> None:
    arrays = {name: np.ascontiguousarray(value) for name in ARRAYS if (value := getattr(raw, name)) is not None}
    for name in arrays.keys() & {"labels", "test_labels", "groups"}:
        arrays[name] = _integers(arrays[name])
    with replacing(path) as temporary:
        save_file(arrays, temporary, {"classes": json.dumps(raw.classes)})
        temporary.chmod(0o644)  # the library's own choice shuts other users out


def _integers(values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers as they are; text by its place among the sorted texts, which keeps the order of groups."""
    codes = np.unique(values, return_inverse=True)[1] if values.dtype.kind == "U" else values
    return codes.astype(np.int64)


def _load(path: Path) -> Raw | None:
    """A file of the cache, mapped into memory: pages are read when they are used, and shared. None without one, or
    with one that cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
            classes = json.loads((file.metadata() or {})["classes"])
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        log.warning("%s is made anew: it cannot be read: %s", path, error)
        return None
    return replace(Raw(None, None, classes=tuple(classes) if isinstance(classes, list) else classes), **arrays)
