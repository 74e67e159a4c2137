"""The quadratic with layers: all coordinates but the last are features, the last one is the output layer's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.experiment import PartitionSettings
from common.tasks.base import Task
from common.tasks.quadratic import Quadratic


class Head(nn.Module):
    """Appends its own coordinate to the features."""

    def __init__(self, last: Tensor) -> None:
        super().__init__()
        self.last = nn.Parameter(last.clone())

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([features, self.last])


class Layers(nn.Module):
    """The point in two parts."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.features, self.head = nn.Parameter(start[:-1].clone()), Head(start[-1:])

    def forward(self) -> Tensor:
        point: Tensor = self.head(self.features)
        return point


class Headed(Quadratic):
    """The same losses of the same points (d,), d of at least 2."""

    def model(self) -> nn.Module:
        return Layers(torch.from_numpy(self.arrays["start"]).to(self.dtype))

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        assert isinstance(model, Layers)
        return model.head

    def describe(self, model: Tensor) -> dict[str, float]:
        """Nothing: a personal head is no part of what the server holds."""
        return {}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`[task] name = "tests.support.headed:task"`."""
    return Headed(options, partition, seed)
