"""Plays as characters: speaking roles read from tables, windows into their text, and what one client keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.arrow import Table
from common.data.examples import Examples
from common.data.tables import column
from common.errors import SettingsError

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's vocabulary, by class number. All others are read as spaces."""

_CODES = np.full(256, LETTERS.index(" "), np.uint8)
_CODES[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))


@dataclass(frozen=True)
class Role:
    """Everything that one role says, as class numbers uint8 (n,)."""

    name: str
    text: Bytes


@dataclass(frozen=True)
class Windows(Examples):
    """Examples that are places in a text: `inputs` (n,) where a window of `length` + 1 characters starts, `targets`
    (n,) its last character. A batch holds the windows themselves (b, length + 1), uint8."""

    text: Tensor
    length: int

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The windows at `index` (b,) and their last characters (b,)."""
        starts, targets = super().batch(index)
        return self.text[starts[:, None] + torch.arange(self.length + 1, device=starts.device)], targets

    def to(self, device: torch.device) -> Windows:
        """The same windows on `device`."""
        return Windows(self.inputs.to(device), self.targets.to(device), self.text.to(device), self.length)


def windows(text: Bytes, starts: Indices, length: int) -> Windows:
    """The windows at `starts` (n,), sorted, with those characters of `text` that lie in one of them and no others."""
    if not len(starts):
        empty = torch.zeros(0, dtype=torch.int64)
        return Windows(empty, empty, torch.zeros(0, dtype=torch.uint8), length)
    first = int(starts[0])
    own, starts = text[first : int(starts[-1]) + length + 1], starts - first
    edges = np.zeros(len(own) + 1, np.int64)
    edges[starts] += 1
    edges[starts + length + 1] -= 1  # distinct places, so that a plain += counts each
    inside = np.cumsum(edges[:-1]) > 0
    place = np.cumsum(inside) - 1
    kept = torch.from_numpy(own[inside])
    begin = torch.from_numpy(place[starts])
    return Windows(begin, kept[begin + length].long(), kept, length)


def roles(table: Table, source: object) -> list[Role]:
    """The roles of a table, in the order of their first row.

    Either one row a role (or several, one after the other) with columns `play` and `role` and either `speeches` (lists
    of texts) or `text`; or, as in LEAF and flwrlabs/shakespeare, one row a sample: `x`, the characters before, `y`, the
    next one, and `character_id`. Without columns of roles all rows are one role, as in a site's own file.
    Raises SettingsError naming what is missing.
    """
    if "x" in table and "y" in table:
        return _of_samples(table, source)
    said = column(table, None, ("speeches", "text"), "one of them", source)
    texts = ["\n".join(each) if isinstance(each, list) else str(each) for each in said]
    keys = [name for name in ("play", "role") if name in table]
    named = list(zip(*(table[key] for key in keys), strict=True)) if keys else [()] * len(texts)
    held: dict[Any, list[str]] = {}
    for name, text in zip(named, texts, strict=True):
        held.setdefault(name, []).append(text)
    return [Role("/".join(map(str, name)), encode("\n".join(parts))) for name, parts in held.items()]


def encode(text: str) -> Bytes:
    """Class numbers uint8 (n,) of a text's characters."""
    return _CODES[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def _of_samples(table: Table, source: object) -> list[Role]:
    """A role's samples overlap: where one is the one before, moved by a character, it adds a single character."""
    x, y = list(map(str, table["x"])), list(map(str, table["y"]))
    if not x:
        return []
    width = len(x[0])
    odd = next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if len(a) != width or len(b) != 1), None)
    if odd is not None:
        raise SettingsError(
            f"{source}, row {odd}: x has {len(x[odd])} characters and y {len(y[odd])}; allowed: "
            f"{width} as in the first row, and 1"
        )
    names = [str(name) for name in table.get("character_id", [""] * len(x))]
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return [
        Role(name, _merged(encode("".join(x[i] + y[i] for i in own)).reshape(-1, width + 1)))
        for name, own in rows.items()
    ]


def _merged(samples: Bytes) -> Bytes:
    follows = np.zeros(len(samples), bool)
    follows[1:] = (samples[1:, :-1] == samples[:-1, 1:]).all(1)
    new = np.repeat(~follows[:, None], samples.shape[1], 1)
    new[:, -1] = True
    text: Bytes = samples[new]
    return text
