"""Texts for language models: documents from text files or a column of a table, and windows of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.arrow import Table
from common.data.tables import column, read_table, splits
from common.data.tokens import PADDING, Encoder
from common.errors import SiteError

TEXT_FILES = (".txt", ".text", ".md")
TEXTS = ("text", "sentence", "content")
GROUPS = ("group", "user", "client", "author", "writer", "role")

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """Texts in their order, and of each the group that it belongs to by nature, None where there are none."""

    texts: Sequence[str]
    groups: NDArray[np.str_] | None


@dataclass(frozen=True)
class Columns:
    """Of a table: names of the columns of the texts and of their groups; None: the first usual name there is."""

    text: str | None
    group: str | None


def read_documents(path: Path, columns: Columns, grouped: bool, part: str = "train") -> Documents:
    """A text file, a folder of text files, or a table; of a folder of tables that called `part`, if there is one.

    `grouped`: of a text file its paragraphs (parted by blank lines) are the documents, each a group; without, it is
    one. Each file of a folder is a group. Raises SiteError for a file that is no UTF-8, or holds no text.
    """
    if (files := text_files(path)) is not None:
        texts = [_content(file) for file in files]
        if grouped and not path.is_dir():
            texts = ["\n".join(lines) + "\n" for lines in _paragraphs(texts[0])]
            found = Documents(texts, np.array([f"{i:08d}" for i in range(len(texts))], np.str_))
        else:
            found = Documents(texts, np.array([file.name for file in files], np.str_) if grouped else None)
    else:
        table = read_table(path, part if part in splits(path) else None)
        found = _of_table(table, columns, grouped, path)
    if not any(found.texts):
        raise SiteError("data-unreadable", f"{path}: holds no text")
    return found


def text_files(path: Path) -> list[Path] | None:
    """The text file that a path is, or those that lie in the folder that it is, by name; None if it is a table."""
    if not path.is_dir():
        return [path] if path.suffix.lower() in TEXT_FILES else None
    return sorted(each for each in path.iterdir() if each.suffix.lower() in TEXT_FILES and each.is_file()) or None


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SiteError("data-unreadable", f"{path}: no UTF-8 text, at byte {error.start}") from None
    except OSError as error:
        raise SiteError("data-unreadable", f"{path}: cannot be read: {error.strerror}") from None


def _paragraphs(text: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [lines for lines in found if lines]


def _of_table(table: Table, columns: Columns, grouped: bool, path: Path) -> Documents:
    texts = list(map(str, column(table, columns.text, TEXTS, "task.text", path)))
    if not grouped:
        return Documents(texts, None)
    return Documents(texts, np.array(list(map(str, column(table, columns.group, GROUPS, "task.group", path))), np.str_))


@dataclass(frozen=True)
class Windows:
    """tokens   (n, length + 1), int16 or int32, filled at the end with PADDING
    starts      (n,) where each begins in all tokens, one stream after the other
    sizes       (n,) how many tokens it has, without the filling
    groups      (n,) its group, or None
    """

    tokens: NDArray[Any]
    starts: Indices
    sizes: Indices
    groups: NDArray[np.str_] | None


def windows(documents: Documents, encoder: Encoder, length: int, stride: int) -> Windows:
    """The windows of a stream of tokens: of all texts, or those of each group, one after the other; after each of
    several texts stands the end-of-text token. `stride` <= length + 1 tokens lie between their beginnings. The last one
    of a stream is filled, and left out if it has nothing to predict."""
    kind = np.int16 if encoder.vocabulary <= np.iinfo(np.int16).max else np.int32
    end = [encoder.separator] if len(documents.texts) > 1 else []
    coded = [np.array([*tokens, *end], kind) for tokens in encoder.encode(documents.texts)]
    streams = _joined(coded, documents.groups, kind)
    rows, starts, sizes, groups, begin = [], [], [], [], 0
    for name, stream in streams:
        own = np.arange(0, max(len(stream) - length - 1 + stride, 1), stride)
        own = own[len(stream) - own >= 2]
        filled = np.concatenate([stream, np.full(length + 1, PADDING, kind)])
        rows.append(np.lib.stride_tricks.sliding_window_view(filled, length + 1)[own])
        starts.append(begin + own)
        sizes.append(np.minimum(len(stream) - own, length + 1))
        groups.append(np.full(len(own), name))
        begin += len(stream)
    named = None if documents.groups is None else np.concatenate(groups)
    return Windows(np.concatenate(rows), np.concatenate(starts), np.concatenate(sizes), named)


def _joined(coded: list[NDArray[Any]], groups: NDArray[np.str_] | None, kind: type) -> list[tuple[str, NDArray[Any]]]:
    """Streams by group, sorted: (name, tokens)."""
    if groups is None:
        return [("", np.concatenate([*coded, np.zeros(0, kind)]))]
    order = np.argsort(groups, kind="stable")
    names, first = np.unique(groups[order], return_index=True)
    return [
        (str(name), np.concatenate([coded[i] for i in part]))
        for name, part in zip(names, np.split(order, first[1:]), strict=True)
    ]


def apart(
    parts: Sequence[Indices], share: float, starts: Indices, sizes: Indices
) -> list[tuple[Indices, Indices]] | None:
    """Each part's windows for training and for evaluation. Those for evaluation are the last `share` of a part, in the
    order of the text; no window that anybody trains on has a token in common with any of them: windows that would are
    left out. A part that could not train by that has nothing to evaluate instead; None if one cannot even so."""
    kept = [max(len(part) - int(len(part) * share), min(len(part), 1)) for part in parts]
    held = [part[count:] for part, count in zip(parts, kept, strict=True)]
    for _ in range(2):
        trained = _without(parts, held, starts, sizes)
        held = [own if len(train) else own[:0] for own, train in zip(held, trained, strict=True)]
    if any(len(part) and not len(train) for part, train in zip(parts, trained, strict=True)):
        return None
    return list(zip(trained, held, strict=True))


def _without(parts: Sequence[Indices], held: Sequence[Indices], starts: Indices, sizes: Indices) -> list[Indices]:
    """The windows of each part that share no token with any that is held."""
    taken = np.concatenate([*held, np.zeros(0, np.int64)])
    total = int((starts + sizes).max(initial=0))
    edges = np.zeros(total + 1, np.int64)
    np.add.at(edges, starts[taken], 1)
    np.add.at(edges, (starts + sizes)[taken], -1)
    before = np.concatenate([[0], np.cumsum(np.cumsum(edges) > 0)])  # tokens held, before each place
    free = before[(starts + sizes)] == before[starts]
    return [part[free[part]] for part in parts]
