"""Labels as numbers, as text, and the names of classes that both sides must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from common.errors import SiteError

Labels = NDArray[Any] | None
"""(n,): integers or text."""

Classes = tuple[str, ...] | int | None
"""Names, a number, or unknown."""


def own_names(parts: Sequence[Labels], declared: Classes) -> tuple[str, ...] | None:
    """The names of a source's classes; of text labels without declared names the sorted texts, unless all are
    numbers."""
    if isinstance(declared, tuple):
        return declared
    texts = {str(each) for labels in parts if _is_text(labels) for each in labels.tolist()}
    return tuple(sorted(texts)) if texts and not all(map(_number, texts)) else None


def _is_text(labels: Labels) -> TypeGuard[NDArray[Any]]:
    return labels is not None and labels.dtype.kind == "U"


def _number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def numbered(labels: Labels, names: tuple[str, ...] | None, source: str) -> Labels:
    """Labels (n,) as integers: text by its place among the names of the run's classes."""
    if not _is_text(labels):
        return labels
    texts, inverse = np.unique(labels, return_inverse=True)
    if names is None:
        if not all(map(_number, texts.tolist())):
            raise SiteError(
                "data-labels",
                f"{source}: its labels are text ({_some(texts.tolist())}) and this run's classes have no names; give "
                "them to both sides, in order, as task.classes = [...] in the experiment",
            )
        return texts.astype(np.int64)[inverse]
    places = {name: place for place, name in enumerate(names)}
    if unknown := [text for text in texts.tolist() if text not in places]:
        raise SiteError(
            "data-labels", f"{source}: labels {_some(unknown)} are none of this run's classes: {_some(names)}"
        )
    return np.array([places[text] for text in texts.tolist()], np.int64)[inverse]


def agree(labels: Labels, declared: Classes, names: tuple[str, ...], source: str) -> None:
    """Raise SiteError if a source's numbers mean other classes than the run's."""
    if isinstance(declared, tuple) and not _is_text(labels) and declared != names:
        raise SiteError(
            "data-labels",
            f"{source}: its classes are {_some(declared)}; this run's are {_some(names)}: the same names, in the "
            "same order, or labels as text",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
