"""Image files: decoding many of one size, and folders with a subfolder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from common.data.raw import Raw
from common.errors import SettingsError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
TESTS = ("test", "val", "valid", "validation")
"""Folders of the central test set beside `train`; the first that has images of classes."""

ANNOTATIONS = "val_annotations.txt"
"""TinyImageNet's: the classes of its flat folder of validation images."""


def read_images(paths: Sequence[Path], shape: tuple[int, ...] | None, resize: bool) -> NDArray[np.uint8]:
    """Decoded images (n, h, w) or (n, h, w, 3), uint8: grey or RGB as `shape` says; without it, grey if all are.

    With `resize` scaled to `shape`, else all must have the first one's size. Raises SettingsError naming the file.
    """
    size = (shape[1], shape[0]) if shape and resize else None
    grey = len(shape) == 2 or shape[2] == 1 if shape else all(_mode(path) in ("L", "1") for path in paths)
    images: NDArray[np.uint8] | None = None
    for number, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                plain = image.convert("L" if grey else "RGB")
                if size is not None and plain.size != size:
                    plain = plain.resize(size, Image.Resampling.BILINEAR)
                pixels = np.asarray(plain)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise SettingsError(f"{path} cannot be read as an image: {error}") from None
        if images is None:
            images = np.empty((len(paths), *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            raise SettingsError(
                f"{path} is {pixels.shape[1]}x{pixels.shape[0]} pixels and {paths[0]} {images.shape[2]}x"
                f"{images.shape[1]}; allowed: one size, or task.resize = true with task.shape"
            )
        images[number] = pixels
    if images is None:
        return np.zeros((0, *(shape or (0, 0))), np.uint8)
    return images[..., None] if shape and shape[2:] == (1,) else images


def _mode(path: Path) -> str:
    try:
        with Image.open(path) as image:
            return str(image.mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise SettingsError(f"{path} cannot be read as an image: {error}") from None


def read_folder(path: Path, shape: tuple[int, ...] | None, resize: bool) -> Raw:
    """The images of a folder, labelled by the names of its subfolders: those of `train` and, for a central test set, of
    the first of `TESTS`, or those of the folder itself. TinyImageNet's own layout is such a folder too.

    Classes are the sorted names. Raises SettingsError for a file that cannot be read or is of another size.
    """
    root = path / "train" if (path / "train").is_dir() else path
    train = _labelled(root)
    if not train:
        raise SettingsError(
            f"{root}: no images; allowed: a subfolder for each class with {', '.join(sorted(SUFFIXES))}"
        )
    test = _test(path) if root != path else []
    paths = [file for file, _ in [*train, *test]]
    pixels = read_images(paths, shape, resize)
    labels = np.array([label for _, label in [*train, *test]])
    cut = len(train)
    names = tuple(sorted({folder.name for folder in _subfolders(root)} | set(labels.tolist())))
    if not test:
        return Raw(pixels, labels, classes=names)
    return Raw(pixels[:cut], labels[:cut], None, pixels[cut:], labels[cut:], names)


def _labelled(root: Path) -> list[tuple[Path, str]]:
    """Each image below a class's folder, in the order of classes and paths, with the class's name."""
    return [(file, folder.name) for folder in _subfolders(root) for file in _images(folder)]


def _test(path: Path) -> list[tuple[Path, str]]:
    annotations = path / "val" / ANNOTATIONS
    if annotations.is_file():
        rows = [line.split("\t")[:2] for line in annotations.read_text("utf-8").splitlines() if line]
        return [(annotations.parent / "images" / file, label) for file, label in rows]
    return next((found for name in TESTS if (found := _labelled(path / name))), [])


def _subfolders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    found: list[Any] = [file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES]
    return sorted(file for file in found if not file.name.startswith(".") and file.is_file())
