"""A task with all that makes local training delicate: BatchNorm, a frozen layer, dropout, tiny clients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from client.training.work import LocalWork
from common.data.examples import ClientData, Examples
from common.experiment import Experiment, PartitionSettings
from common.tasks.base import Task
from tests.support.helpers import Simulation


class Tiny(Task):
    """Client i holds `sizes[i]` examples of 4 numbers, in 3 classes; input 0 of an example is its own number.

    The network is frozen Linear(4, 8), BatchNorm, ReLU, dropout, Linear(8, 3). `batches` records the examples
    that were trained on.
    """

    def __init__(self, sizes: tuple[int, ...] = (5, 1, 8), dropout: float = 0.0, norm: bool = True) -> None:
        self.sizes, self.dropout, self.norm = sizes, dropout, norm
        self.batches: list[list[int]] = []

    def model(self) -> nn.Module:
        first = nn.Linear(4, 8).requires_grad_(False)
        middle = [nn.BatchNorm1d(8)] if self.norm else []
        return nn.Sequential(first, *middle, nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(8, 3))

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        assert isinstance(model, nn.Sequential)
        return model[-1]

    def names(self) -> list[str]:
        return [str(i) for i in range(len(self.sizes))]

    def client(self, name: str, file: str | None = None) -> ClientData:
        count, source = self.sizes[int(name)], torch.Generator().manual_seed(int(name))
        inputs = torch.randn(count, 4, generator=source)
        inputs[:, 0] = torch.arange(count)
        examples = Examples(inputs, torch.randint(3, (count,), generator=source))
        return ClientData(examples, examples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.batches.append([int(number) for number in batch[0][:, 0]])
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": self.loss(model, batch).item() * len(batch[1])}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`[task] name = "tests.support.tiny:task"`."""
    return Tiny(dropout=options.get("dropout", 0.0))


def settings(strategy: str = "fedavg", seed: int = 0, **local: Any) -> Experiment:
    """An experiment on this task; further keywords are local settings."""
    local = {"lr": 0.1, "batch_size": 2} | local
    task, named = {"name": "tests.support.tiny:task"}, {"name": strategy}
    return Experiment.model_validate({"task": task, "strategy": named, "local": local, "seed": seed})


def simulate(task: Tiny | None = None, strategy: str = "fedavg", **given: Any) -> Simulation:
    """A run on the task given."""
    return Simulation(settings(strategy, **given), task=task or Tiny())


def trained(task: Tiny, name: str = "0", **given: Any) -> tuple[LocalWork, Tensor]:
    """A client's work after plain local training, and its delta."""
    work = simulate(task, **given).work(name)
    for _ in work.steps():
        pass
    return work, work.delta()
