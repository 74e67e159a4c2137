"""Where named data sets lie: in the folder that FEDKEEL_DATA names, else on Hugging Face's hub, else nowhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.data.arrow import Column, Table
from common.data.grant import granted
from common.data.places import find, own
from common.data.tables import dataset_table, library, read_table, splits
from common.errors import SettingsError

PROBE_S = 5.0
"""Seconds within which the hub must answer."""


@dataclass(frozen=True)
class Corpus:
    """A data set: its folder under FEDKEEL_DATA, its name (and configuration) on the hub, and its parts there or here.

    Those of `train` and of `test` that exist are read, one after the other; at least one of each must.
    """

    folder: str
    hub: str
    config: str | None = None
    train: tuple[str, ...] = ("train",)
    test: tuple[str, ...] = ("test",)
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    classes: int = 2


def local_table(file: str, what: str, part: str = "train") -> tuple[Table, Path]:
    """The table in a file, or that part of a folder: as it is, else in FEDKEEL_DATA; `what` is the setting that names
    it."""
    return _table(find(file, what, folders=True), part)


def own_table(file: str, client: str) -> tuple[Table, Path]:
    """The same for a client's own file, which it named itself."""
    return _table(own(file, f"file of client {client!r}", folders=True), "train")


def _table(path: Path, part: str) -> tuple[Table, Path]:
    return read_table(path, part if part in splits(path) else None), path


def read_corpus(corpus: Corpus, part: str) -> tuple[Table, str]:
    """The table of a data set's part, "train" or "test", and where it came from: the local folder or a download, which
    `datasets` keeps in its cache. Raises SettingsError that names every place looked at."""
    wanted = corpus.train if part == "train" else corpus.test
    root = os.environ.get("FEDKEEL_DATA")
    folder = Path(root) / corpus.folder if root else None
    if folder is not None and folder.is_dir():
        found = [name for name in wanted if name in splits(folder)]
        if not found:
            raise SettingsError(f"{folder}: none of the tables {', '.join(wanted)}; it has {', '.join(splits(folder))}")
        return _joined([read_table(folder, name) for name in found]), str(folder)
    here = f"no folder {folder}" if folder else "FEDKEEL_DATA names no folder"
    held = _download(corpus, here)
    parts = [dataset_table(held[name], corpus.hub) for name in wanted if name in held]
    if not parts:
        raise SettingsError(f"{corpus.hub}: none of the parts {', '.join(wanted)}; it has {', '.join(held)}")
    return _joined(parts), corpus.hub


def reachable() -> bool:
    """Whether the hub answers at all, within seconds: its own client retries for minutes."""
    import httpx  # 60 ms that only downloads need
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=PROBE_S)
    except (httpx.HTTPError, httpx.InvalidURL, OSError):
        return False
    return True


def _download(corpus: Corpus, here: str) -> Any:
    """The data set's splits from the hub or its cache."""
    granted().download(corpus.folder, f"data set {corpus.folder!r}", own=True)
    with library() as datasets, _offline(datasets, not reachable()):
        try:
            return datasets.load_dataset(corpus.hub, corpus.config)
        except Exception as error:  # whatever network, hub and cache raise
            name = corpus.hub + (f" ({corpus.config})" if corpus.config else "")
            cause = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise SettingsError(
                f"data set {corpus.folder!r}: {here}, and {name} cannot be had from Hugging Face or its cache "
                f"{datasets.config.HF_DATASETS_CACHE}: {cause}. Put it into FEDKEEL_DATA as {corpus.folder}/"
                f"{corpus.train[0]}.jsonl, or load it once on a machine with a network"
            ) from None


@contextmanager
def _offline(datasets: Any, active: bool) -> Iterator[None]:
    """The libraries' own offline mode, which they read from the environment when they are imported: only the cache."""
    from huggingface_hub import constants  # as above

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if active:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _joined(tables: list[Table]) -> Table:
    first = tables[0]
    return {name: _column([table[name] for table in tables]) for name in first} if len(tables) > 1 else first


def _column(parts: list[Column]) -> Column:
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [value for part in parts for value in part]
