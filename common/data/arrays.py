"""Labelled examples as arrays: the settings, .npz files, and whether a source can be used."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from pydantic import Field

from common.data.examples import Examples, pick
from common.data.labels import agree, numbered, own_names
from common.data.mosaic import read_mosaics
from common.data.raw import Raw
from common.errors import SettingsError, SiteError
from common.seeds import derive
from common.settings import Opened, Section

# What an array may be called; the first name that a file has is taken, unless the settings name one.
KEYS: Mapping[str, tuple[str, ...]] = {
    "inputs": ("x_train", "train_x", "train_images", "x", "images", "inputs"),
    "labels": ("y_train", "train_y", "train_labels", "y", "labels", "targets"),
    "groups": (
        "group_train",
        "writer_train",
        "client_train",
        "user_train",
        "group",
        "writer",
        "client",
        "user",
    ),
    "test_inputs": ("x_test", "test_x", "test_images"),
    "test_labels": ("y_test", "test_y", "test_labels"),
}


class SourceSettings(Section):
    """Where labelled images or vectors come from and how they are read: the part of `[task]` that readers know."""

    file: Opened | None = Field(None, description="a file or folder; relative to the working directory or FEDKEEL_DATA")
    test_file: Opened | None = Field(None, description="the central test set, read by the server alone")
    inputs: str | None = Field(None, description="array or column of the training inputs; default: the first of KEYS")
    labels: str | None = Field(None, description="array or column of the training labels")
    groups: str | None = Field(None, description="array or column of the training examples' group ids")
    test_inputs: str | None = Field(None, description="array of the central test inputs")
    test_labels: str | None = Field(None, description="array of the central test labels")
    variant: str | None = Field(None, description="of a named data set: full, jpeg, subset, ...; default: the first")
    download: bool = Field(False, description="fetch a named data set that is nowhere on this machine")
    pooled: bool = Field(True, description="false: every client brings its own file, and the server needs none")
    dtype: Literal["float32", "float64"] = "float32"
    limit: int | None = Field(None, ge=1, description="at most so many training and test examples, by the seed")
    classes: Annotated[int, Field(ge=1)] | list[str] | None = Field(
        None, description="a number or the names in order; default: the source's, else the largest label + 1"
    )
    shape: tuple[int, ...] | None = Field(None, strict=False, description="of one input; default: from the file")
    resize: bool = Field(False, description="image files are scaled to `shape`; else all must have one size")


@dataclass(frozen=True)
class Pooled:
    """A pooled source, checked. `groups` (n,) belongs to the training examples; `names` are those of the classes."""

    train: Examples
    test: Examples | None
    groups: NDArray[Any] | None
    classes: int
    names: tuple[str, ...] | None
    columns: tuple[str, ...] = ()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[NpzFile]:
    """An open .npz file, without pickle; faults in it become SettingsError."""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, NpzFile):
            raise SettingsError(f"{path} is not an .npz archive")
        with file:
            yield file
    except SettingsError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SettingsError(f"{path} cannot be read as an .npz archive: {error}") from None


def read_npz(path: Path, settings: SourceSettings) -> Raw:
    """The arrays of an .npz file by their roles, or the images of its mosaics."""
    with opened(path) as file:
        if "train_jpeg_0" in file.files:
            return read_mosaics(file, path)
        found: dict[str, Any] = {role: take(file, role, settings, path) for role in KEYS}
        return Raw(**found, classes=_declared_classes(file, path))


def pool(raw: Raw, settings: SourceSettings, names: tuple[str, ...] | None, source: str, seed: int) -> Pooled:
    """Check a pooled source and take its part. Raises SettingsError naming the source and the fault.

    `names`: the classes that the run names, which text labels are then of.
    """
    if names is None:
        names = own_names([raw.labels, raw.test_labels], raw.classes)
    else:
        agree(raw.labels, raw.classes, names, source)
    train = examples_of(raw.inputs, numbered(raw.labels, names, source), settings.dtype, f"{source}, training data")
    test, groups = None, raw.groups
    if raw.test_inputs is not None or raw.test_labels is not None:
        labels = numbered(raw.test_labels, names, source)
        test = examples_of(raw.test_inputs, labels, settings.dtype, f"{source}, test data")
    if groups is not None and len(groups) != len(train):
        raise SettingsError(f"{source}: {len(groups)} group ids for {len(train)} training examples")
    declared = settings.classes or (len(names) if names else raw.classes)
    classes = len(declared) if isinstance(declared, (list, tuple)) else declared
    if classes is None:
        classes = 1 + max((int(part.targets.max()) for part in (train, test) if part), default=0)
    shape = settings.shape or tuple(train.inputs.shape[1:])
    fit(train, shape, classes, f"{source}, training data")
    if test is not None:
        fit(test, shape, classes, f"{source}, test data")
        test = pick(test, drawn(len(test), settings.limit, seed, "test"))
    kept = drawn(len(train), settings.limit, seed, "train")
    return Pooled(pick(train, kept), test, None if groups is None else groups[kept], classes, names, raw.columns)


def take(file: NpzFile, role: str, settings: SourceSettings, path: Path) -> NDArray[Any] | None:
    """The array of a role; None if the file has none and the settings name none."""
    named: str | None = getattr(settings, role)
    key = named or next((key for key in KEYS[role] if key in file.files), None)
    if named is not None and named not in file.files:
        raise SettingsError(f"task.{role} = {named!r}: {path} has no such key; allowed: {', '.join(file.files)}")
    if key is None and role in ("inputs", "labels"):
        raise SettingsError(
            f"{path}: none of its keys ({', '.join(file.files)}) is known for the {role} "
            f"({', '.join(KEYS[role])}); name it with task.{role}"
        )
    return None if key is None else _array(file, key, path)


def _array(file: NpzFile, key: str, path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = file[key]
    except ValueError as error:  # an object array needs pickle, which can run code
        raise SettingsError(f"{path}: key {key!r} cannot be read: {error}") from None
    return array


def _declared_classes(file: NpzFile, path: Path) -> tuple[str, ...] | int | None:
    """From the key `classes`: names (k,) or a number."""
    if "classes" not in file.files:
        return None
    declared = _array(file, "classes", path)
    if declared.ndim == 1 and len(declared):
        return tuple(map(str, declared.tolist())) if declared.dtype.kind == "U" else len(declared)
    if declared.ndim == 0 and declared.dtype.kind in "iu":
        return int(declared)
    raise SettingsError(
        f"{path}: key 'classes' must be names (k,) or an integer, not {declared.dtype} {declared.shape}"
    )


def examples_of(inputs: NDArray[Any] | None, labels: NDArray[Any] | None, dtype: str, source: str) -> Examples:
    """Tensors of checked arrays: uint8 inputs as they are, others in `dtype`; int64 targets."""
    if inputs is None or labels is None:
        raise SiteError(
            "data-unreadable", f"{source}: has {'labels' if inputs is None else 'inputs'} only; allowed: both or none"
        )
    if inputs.dtype.kind not in "fiu" or inputs.ndim not in (2, 3, 4):
        raise SiteError(
            "data-shape",
            f"{source}: inputs are {inputs.dtype} {inputs.shape}; "
            "allowed: numbers (n, d), (n, h, w) or (n, h, w, channels)",
        )
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise SiteError("data-labels", f"{source}: labels are {labels.dtype} {labels.shape}; allowed: integers (n,)")
    if len(inputs) != len(labels):
        raise SiteError("data-shape", f"{source}: {len(inputs)} inputs and {len(labels)} labels; they must be as many")
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        raise SiteError("data-unreadable", f"{source}: inputs hold NaN or infinite values")
    values = inputs if inputs.dtype == np.uint8 else inputs.astype(dtype, copy=False)
    return Examples(torch.from_numpy(values), torch.from_numpy(labels.astype(np.int64)))


def fit(examples: Examples, shape: tuple[int, ...], classes: int, source: str) -> None:
    """Check that examples have the run's input shape and classes."""
    if tuple(examples.inputs.shape[1:]) != shape:
        raise SiteError(
            "data-shape", f"{source}: one input is {tuple(examples.inputs.shape[1:])}; this run's are {shape}"
        )
    targets = examples.targets
    if len(targets) and not (targets.min() >= 0 and targets.max() < classes):
        raise SiteError(
            "data-labels",
            f"{source}: labels from {int(targets.min())} to {int(targets.max())}; allowed: 0 to {classes - 1}",
        )


def drawn(examples: int, limit: int | None, seed: int, purpose: str) -> NDArray[np.int64]:
    """Which examples a limit keeps, sorted."""
    if limit is None or limit >= examples:
        return np.arange(examples)
    order = np.random.default_rng(derive(seed, "limit", purpose)).permutation(examples)
    return np.sort(order[:limit])
