"""Labelled examples from local files and folders of every kind."""

from __future__ import annotations

from pathlib import Path

from common.data.arrays import SourceSettings, read_npz
from common.data.cache import stamp
from common.data.image_folder import read_folder
from common.data.raw import Raw
from common.data.rows import holds_tables, read_rows
from common.data.tables import ENDINGS
from common.errors import SettingsError

_READS = {"inputs", "labels", "groups", "test_inputs", "test_labels"}
"""Settings that decide what is read of an .npz archive."""

_last: tuple[str, Raw] | None = None


def read_pooled(path: Path, settings: SourceSettings, shape: tuple[int, ...] | None = None) -> Raw:
    """As `read`, for a pooled source: server and clients of a simulation, and one run after the other in a comparison,
    read the same archive in one process. The last one is held; its arrays are read-only by custom, as all examples are.
    """
    global _last
    if path.suffix != ".npz" or not path.is_file():
        return read(path, settings, shape)
    key = f"{stamp(path)} {settings.model_dump_json(include=_READS)}"
    if _last is None or _last[0] != key:
        _last = None  # never two of them in memory
        _last = key, read(path, settings, shape)
    return _last[1]


def read(path: Path, settings: SourceSettings, shape: tuple[int, ...] | None = None) -> Raw:
    """What a path holds: an .npz archive, a table (CSV, JSON lines, parquet), a folder with a subfolder of images for
    each class, or a data set that Hugging Face's `datasets` saved.

    `shape` (h, w) or (h, w, channels) of the run, where known: image files are read as grey or RGB accordingly.
    Raises SettingsError naming the file and the fault.
    """
    if settings.resize and shape is None:
        raise SettingsError("task.resize = true needs task.shape: the size to scale to")
    if path.is_dir():
        return read_rows(path, settings, shape) if holds_tables(path) else read_folder(path, shape, settings.resize)
    if path.name.endswith(ENDINGS):
        return read_rows(path, settings, shape)
    try:
        return read_npz(path, settings)
    except SettingsError as error:
        if path.suffix == ".npz":
            raise
        raise SettingsError(f"{error}; allowed: .npz, {', '.join(ENDINGS)}, or a folder") from None
