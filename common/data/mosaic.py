"""Images in mosaics: square JPEG sheets of tiles, which hold ten times as many images in as many bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from PIL import Image

from common.data.cache import kept, stamp
from common.data.raw import Raw
from common.errors import SettingsError


def read_mosaics(file: NpzFile, path: Path) -> Raw:
    """The images of an archive with keys `train_jpeg_0`, ... (bytes of JPEG files), `test_jpeg_0`, ...,
    `tiles_per_side`, `y_train`, `y_test` and `classes`; decoded once and kept in the cache."""

    def decode() -> Raw:
        try:
            tiles, arrays = int(file["tiles_per_side"]), {key: file[key] for key in ("y_train", "y_test", "classes")}
        except KeyError as error:
            raise SettingsError(f"{path}: mosaics without {error}") from None
        train, test = (_images(file, part, tiles, path) for part in ("train", "test"))
        names = tuple(map(str, arrays["classes"].tolist()))
        return Raw(train, arrays["y_train"], None, test, arrays["y_test"], names)

    return kept(f"{path.stem}-{stamp(path)}", decode)


def _images(file: NpzFile, part: str, tiles: int, path: Path) -> NDArray[np.uint8]:
    """(n, h, w, 3), in the order of the sheets, their rows and columns."""
    sheets: list[Any] = []
    while (key := f"{part}_jpeg_{len(sheets)}") in file.files:
        try:
            with Image.open(io.BytesIO(file[key].tobytes()), formats=["JPEG"]) as image:
                sheet = np.asarray(image.convert("RGB"))
        except (OSError, Image.DecompressionBombError) as error:
            raise SettingsError(f"{path}: key {key!r} cannot be read as JPEG: {error}") from None
        height, breadth = sheet.shape[0] // tiles, sheet.shape[1] // tiles
        cut = sheet[: height * tiles, : breadth * tiles].reshape(tiles, height, tiles, breadth, 3)
        sheets.append(cut.swapaxes(1, 2).reshape(-1, height, breadth, 3))
    if not sheets:
        raise SettingsError(f"{path}: has no key '{part}_jpeg_0'")
    return np.concatenate(sheets)
