"""Folders of images with a mask for each: `images/scan.png` and `masks/scan.png`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from common.data.image_folder import SUFFIXES, TESTS, read_images
from common.errors import SettingsError, SiteError

Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]

IGNORED = 255
"""A mask's pixel that is of no class."""


def read_masked(path: Path, shape: tuple[int, ...] | None, resize: bool) -> tuple[Pair, Pair | None]:
    """Images (n, h, w) or (n, h, w, 3) and masks (n, h, w) of class numbers, uint8: the training ones, in `train` or
    the folder itself, and, for a central test set, those of the first of `TESTS` beside it.

    Masks are grey or palette images whose values are classes, 255 for none. With `resize` both are scaled to `shape`,
    masks by the nearest pixel. Raises SettingsError naming the file.
    """
    root = path / "train" if (path / "train").is_dir() else path
    train = _read(root, shape, resize)
    shape = shape or train[0].shape[1:]
    tests = [path / name for name in TESTS if (path / name / "images").is_dir()] if root != path else []
    return train, _read(tests[0], shape, resize) if tests else None


def _read(root: Path, shape: tuple[int, ...] | None, resize: bool) -> Pair:
    images, masks = _files(root / "images"), _files(root / "masks")
    if not images:
        raise SiteError("data-unreadable", f"{root}: no images; allowed: a folder with images/ and masks/")
    if missing := sorted(images.keys() - masks.keys()):
        raise SiteError("data-labels", f"{root}: {images[missing[0]].name} has no mask of its name in masks/")
    names = sorted(images)
    pixels = read_images([images[name] for name in names], shape, resize)
    return pixels, _masks([masks[name] for name in names], pixels.shape[1:3], resize)


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    found: list[Any] = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != "."]
    return {file.stem: file for file in found}


def _masks(paths: Sequence[Path], size: tuple[int, ...], resize: bool) -> NDArray[np.uint8]:
    masks = np.empty((len(paths), *size), np.uint8)
    for number, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                plain = image if image.mode in ("L", "P") else image.convert("L")
                if resize and plain.size != (size[1], size[0]):
                    plain = plain.resize((size[1], size[0]), Image.Resampling.NEAREST)
                pixels = np.asarray(plain)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise SettingsError(f"{path} cannot be read as an image: {error}") from None
        if pixels.shape != tuple(size):
            raise SiteError("data-shape", f"{path} is {pixels.shape[::-1]} pixels and its image {tuple(size)[::-1]}")
        masks[number] = pixels
    return masks
