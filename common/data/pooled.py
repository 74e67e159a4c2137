"""Examples of several clients as those of one, whatever their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.data.examples import Examples
from common.errors import SettingsError


@dataclass(frozen=True)
class Joined(Examples):
    """The examples of `parts`, one after the other: `inputs` (n,) are their places, a batch is made of the parts'
    own."""

    parts: tuple[Examples, ...]

    def batch(self, index: Tensor) -> Any:
        """The examples at `index` (b,), in that order. Raises SettingsError for batches that cannot be put together."""
        ends = torch.tensor([len(part) for part in self.parts], device=index.device).cumsum(0)
        owner = torch.bucketize(index, ends, right=True)
        found, places = [], []
        for number in sorted(set(owner.tolist())) or [0]:
            place = (owner == number).nonzero().flatten()
            first = int(ends[number]) - len(self.parts[number])
            found.append(self.parts[number].batch(index[place] - first))
            places.append(place)
        return _together(found, torch.cat(places).argsort())

    def to(self, device: torch.device) -> Joined:
        """The same on `device`."""
        return Joined(self.inputs.to(device), self.targets.to(device), tuple(part.to(device) for part in self.parts))


def pooled(parts: Sequence[Examples]) -> Examples:
    """All examples of at least one part, in order; plain tensors of one shape become plain tensors."""
    held = [part for part in parts if len(part)] or list(parts[:1])
    alike = {(part.inputs.shape[1:], part.inputs.dtype, part.targets.shape[1:]) for part in held if _plain(part)}
    if len(held) == 1:
        return held[0]
    if len(alike) == 1 and all(map(_plain, held)):
        return Examples(torch.cat([part.inputs for part in held]), torch.cat([part.targets for part in held]))
    return Joined(*_places(held), tuple(held))


def none_of(examples: Examples) -> Examples:
    """No example, of the same kind."""
    if _plain(examples):
        return Examples(examples.inputs[:0], examples.targets[:0])
    places, targets = _places([examples])
    return Joined(places[:0], targets[:0], (examples,))


def _plain(examples: Examples) -> bool:
    return type(examples) is Examples and isinstance(examples.inputs, Tensor) and isinstance(examples.targets, Tensor)


def _places(parts: Sequence[Examples]) -> tuple[Tensor, Tensor]:
    """A number for each example, and its target where that is one number; else 0.0, which is no class."""
    total, targets = sum(map(len, parts)), [part.targets for part in parts]
    single = all(isinstance(each, Tensor) and each.ndim == 1 for each in targets)
    return torch.arange(total), torch.cat(targets) if single else torch.zeros(total)


def _together(found: Sequence[Any], order: Tensor) -> Any:
    """Batches of one structure as one, its examples in `order`."""
    first = found[0]
    if isinstance(first, Tensor):
        shapes = {tuple(each.shape[1:]) for each in found}
        if len(shapes) > 1:
            raise SettingsError(f"examples of shapes {sorted(shapes)} cannot be in one batch: they cannot be pooled")
        return torch.cat(list(found)).index_select(0, order.to(first.device))
    if isinstance(first, tuple):
        return tuple(_together(each, order) for each in zip(*found, strict=True))
    if isinstance(first, Mapping):
        return {key: _together([each[key] for each in found], order) for key in first}
    if len({repr(each) for each in found}) == 1 and isinstance(first, (str, int, float, bool, type(None))):
        return first
    raise SettingsError(f"batches that hold a {type(first).__name__} cannot be put together: clients cannot be pooled")
