"""Arrow tables as numpy arrays and lists; images in them are decoded."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from common.errors import SettingsError

Column = NDArray[Any] | list[Any]
Table = dict[str, Column]
"""name -> column of n rows. Numbers are arrays (n,), lists of as many numbers (n, k), images uint8 (n, h, w[, 3]);
text and everything else are lists."""


def arrow_table(table: Any, source: object, blanks: bool = False) -> Table:
    """The table of a `pyarrow.Table`. A missing value is an error or, with `blanks`, None in a list."""
    return {name: _from_arrow(table.column(name), f"{source}, column {name!r}", blanks) for name in table.column_names}


def _from_arrow(chunks: Any, where: str, blanks: bool = False) -> Column:
    import pyarrow as pa  # 30 ms that only tables need

    array = pa.concat_arrays(chunks.chunks) if chunks.num_chunks else pa.array([], chunks.type)
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if array.null_count and blanks:
        held: list[Any] = array.to_pylist()
        return held
    if array.null_count:
        raise SettingsError(f"{where}, row {array.is_null().to_pylist().index(True)}: no value")
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.array(array.to_numpy(zero_copy_only=False))
    if pa.types.is_struct(kind) and "bytes" in [kind.field(i).name for i in range(kind.num_fields)]:
        return _images(array.field("bytes").to_pylist(), where)
    if _nested(kind):
        return _stacked(array, where)
    values: list[Any] = array.to_pylist()
    return values


def _nested(kind: Any) -> bool:
    """Whether an arrow type is of lists of numbers."""
    import pyarrow as pa  # 30 ms that only tables need

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    deep = False
    while any(is_one(kind) for is_one in lists):
        kind, deep = kind.value_type, True
    return deep and (pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _stacked(array: Any, where: str) -> NDArray[Any]:
    """Lists of as many numbers, one for each row, as one array."""
    shape: list[int] = [len(array)]
    while hasattr(array.type, "value_type"):
        inner = array.flatten()
        if array.null_count or len(array) * (width := len(inner) // max(1, len(array))) != len(inner):
            raise SettingsError(f"{where}: lists of unequal length")
        import pyarrow.compute as pc  # 30 ms that only tables need

        if len(array) and pc.min_max(pc.list_value_length(array)).as_py() != {"min": width, "max": width}:
            raise SettingsError(f"{where}: lists of unequal length")
        shape.append(width)
        array = inner
    if array.null_count:
        raise SettingsError(f"{where}: a list misses a value")
    return np.array(array.to_numpy(zero_copy_only=False)).reshape(shape)


def _images(encoded: list[bytes | None], where: str) -> NDArray[np.uint8]:
    """Decoded images: (n, h, w) if all are grey, else (n, h, w, 3)."""
    images: list[NDArray[np.uint8]] = []
    for row, content in enumerate(encoded):
        if content is None:
            raise SettingsError(f"{where}, row {row}: an image that lies elsewhere; save the data set with its images")
        try:
            with Image.open(io.BytesIO(content)) as image:
                images.append(np.asarray(image if image.mode == "L" else image.convert("RGB")))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise SettingsError(f"{where}, row {row}: no image: {error}") from None
        if images[row].shape[:2] != images[0].shape[:2]:
            raise SettingsError(
                f"{where}, row {row}: an image of {images[row].shape[:2]}; row 0 has {images[0].shape[:2]}: "
                "all must be of one size"
            )
    if not images:
        return np.zeros((0, 0, 0), np.uint8)
    if {image.ndim for image in images} == {2, 3}:
        images = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, 2) for image in images]
    return np.stack(images)
