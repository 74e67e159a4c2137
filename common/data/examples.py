"""Examples that stay in memory, and what a client holds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import SettingsError


@dataclass(frozen=True)
class Examples:
    """Inputs (n, ...) and targets (n,) as tensors that stay in memory; batches are gathered by index."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The examples at `index` (b,), an int64 tensor; no copy of it if it lies where they do."""
        index = index.to(self.targets.device)
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def to(self, device: torch.device) -> Examples:
        """The same examples on `device`; no copy if they are there."""
        return Examples(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Records:
    """Examples of any shape: `inputs` and `targets` are tensors (n, ...), lists of n values of unequal size, or tuples
    and dicts of such.

    A batch is (inputs, targets) of the same make; of a list it has the chosen values, in a list, unless `collate` makes
    something else of the two. Raises SettingsError if they are not all of one length.
    """

    inputs: Any
    targets: Any
    collate: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        lengths = sorted({len(leaf) for leaf in _leaves((self.inputs, self.targets))})
        if len(lengths) != 1:
            raise SettingsError(f"Records: inputs and targets have {lengths} entries; allowed: all the same number")

    def __len__(self) -> int:
        return len(next(_leaves(self.targets)))

    def batch(self, index: Tensor) -> Any:
        """The examples at `index` (b,), an int64 tensor."""
        chosen = self._at(index)
        return self.collate(*chosen) if self.collate is not None else chosen

    def _at(self, index: Tensor) -> tuple[Any, Any]:
        places: list[int] = []

        def take(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.index_select(0, index.to(leaf.device))
            if not places:
                places.extend(index.tolist())
            return [leaf[place] for place in places]

        return _mapped(self.inputs, take), _mapped(self.targets, take)

    def at(self, indices: NDArray[np.int64]) -> Records:
        """Some of them (k,), as they are."""
        return Records(*self._at(torch.tensor(indices)), self.collate)

    def to(self, device: torch.device) -> Records:
        """The same examples on `device`; no copy if they are there."""

        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.to(device)
            return [_mapped(each, lambda part: part.to(device)) for each in leaf]

        return Records(_mapped(self.inputs, move), _mapped(self.targets, move), self.collate)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples and dicts with other leaves: tensors and lists. What is neither stays."""
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_mapped(value, change) for value in tree)
    return change(tree) if isinstance(tree, Tensor | list) else tree


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each)
    elif isinstance(tree, Tensor | list):
        yield tree
    else:
        raise SettingsError(f"Records: a {type(tree).__name__}; allowed: tensors, lists, tuples and dicts of such")


@dataclass(frozen=True)
class ClientData:
    """What one client holds: training and evaluation examples, disjoint; `steps` overrides its local work; `columns`:
    of a site's own table, which column each number of an input is, () if that was no table.

    Raises SettingsError for steps that are no whole number from 1.
    """

    train: Any
    """`Examples`, `Records`, or what else has a length, `batch` and `to`."""
    evaluate: Any
    steps: int | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise SettingsError(f"ClientData: steps = {self.steps!r}; allowed: a whole number from 1, or None")


E = TypeVar("E", Examples, Records)


def pick(examples: E, indices: NDArray[np.int64]) -> E:
    """A copy of the examples at `indices` (k,), sorted and without repetition; the same ones if those are all."""
    if len(indices) == len(examples):
        return examples
    return examples.at(indices) if isinstance(examples, Records) else Examples(*examples.batch(torch.tensor(indices)))
