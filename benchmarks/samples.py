"""Random examples, for what measures time alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.data.examples import ClientData, Examples
from common.tasks.base import Task


class Samples(Task):
    """Client i holds `counts[i]` inputs of a shape in ten classes; `build` makes the model."""

    def __init__(self, build: Callable[[], nn.Module], shape: tuple[int, ...], counts: Sequence[int]) -> None:
        self._build, self._shape, self._counts = build, shape, counts

    def model(self) -> nn.Module:
        return self._build()

    def names(self) -> list[str]:
        return [str(number) for number in range(len(self._counts))]

    def client(self, name: str, file: str | None = None) -> ClientData:
        source, count = torch.Generator().manual_seed(int(name)), self._counts[int(name)]
        inputs = torch.randn(count, *self._shape, generator=source)
        examples = Examples(inputs, torch.randint(10, (count,), generator=source))
        return ClientData(examples, Examples(inputs[:0], examples.targets[:0]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float]:
        return {}
