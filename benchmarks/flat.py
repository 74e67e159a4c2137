"""A task of one parameter vector that trains for no time: what is left of a round is everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.data.examples import ClientData, Examples
from common.experiment import PartitionSettings
from common.tasks.base import Task


class Vector(nn.Module):
    """One parameter of `size` numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size))


class Flat(Task):
    """`clients` clients with one example each and a linear loss: gradients are dense and differ by client, or equal
    vectors would cross the wire only once."""

    def __init__(self, size: int, clients: int) -> None:
        self._size = size
        self._clients = clients
        self._slope = torch.randn(size, generator=torch.Generator().manual_seed(1))

    def model(self) -> nn.Module:
        return Vector(self._size)

    def names(self) -> list[str]:
        return [str(number) for number in range(self._clients)]

    def client(self, name: str, file: str | None = None) -> ClientData:
        none = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
        own = Examples(torch.full((1, 1), 1.0 + int(name)), torch.zeros(1, dtype=torch.int64))
        return ClientData(own, none)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = model.w
        assert isinstance(weight, Tensor)
        loss: Tensor = torch.dot(weight, self._slope) * batch[0].sum()
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float]:
        return {}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`task.name = "benchmarks.flat:task"` with `task.size` parameters."""
    return Flat(int(options.get("size", 1_000_000)), partition.clients or 2)
