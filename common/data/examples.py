"""Examples that stay in memory, and what a client holds of them."""

from __future__ import annotations

from dataclasses import dataclass

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
class ClientData:
    """What one client holds: training and evaluation examples, disjoint; `steps` overrides its local work; `columns`:
    of a site's own table, which column each number of an input is, () if that was no table.

    Raises SettingsError for steps that are no whole number from 1.
    """

    train: Examples
    evaluate: Examples
    steps: int | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise SettingsError(f"ClientData: steps = {self.steps!r}; allowed: a whole number from 1, or None")


def pick(examples: Examples, indices: NDArray[np.int64]) -> Examples:
    """A copy of the examples at `indices` (k,), sorted and without repetition; the same ones if those are all."""
    return examples if len(indices) == len(examples) else Examples(*examples.batch(torch.tensor(indices)))
