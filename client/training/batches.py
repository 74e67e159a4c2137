"""Batches of a client's examples: their order, their memory format, and the ones that BatchNorm cannot take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def channels_last(batch: Any) -> Any:
    """The batch with its tensors of 4 dimensions in torch.channels_last; parameters stay views of one vector."""
    if isinstance(batch, Tensor):
        return batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch
    return tuple(map(channels_last, batch)) if isinstance(batch, (tuple, list)) else batch


def batches_per_epoch(count: int, size: int, merge_single: bool) -> int:
    """Number of batches that `epoch_batches` gives."""
    whole, rest = divmod(count, size)
    return whole + (1 if rest > 1 or (rest == 1 and not (merge_single and whole)) else 0)


def epoch_batches(
    count: int, size: int, order: torch.Generator, merge_single: bool, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """A shuffled epoch as index tensors on `device`, where they go in one copy. With `merge_single` a last batch of one
    example joins the one before it: BatchNorm cannot normalize over one value. With size 1 all batches are such, and
    stay."""
    batches = list(torch.split(torch.randperm(count, generator=order).to(device), size))
    if merge_single and size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def has_normalization(module: nn.Module) -> bool:
    """Whether a model has BatchNorm layers."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


class normalization_frozen:
    """BatchNorm layers use their running statistics: for a client whose only example makes a batch of one.

    Layers that the model itself holds in evaluation mode stay in it.
    """

    def __init__(self, module: nn.Module, active: bool) -> None:
        layers = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)) if active else ()
        self._layers = [layer for layer in layers if layer.training]

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.eval()

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            layer.train()
