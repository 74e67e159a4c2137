"""A task of one's own that is judged in every way: what may go wrong in a metric can be asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.data.examples import ClientData, Examples
from common.experiment import PartitionSettings
from common.metrics.metric import Metric
from common.tasks.base import Task

SIZES = (40, 7, 25)


def _top(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs.argmax(1) == targets).sum(), len(targets)


top = Metric("top", 2, _top, lambda total: total[0] / total[1])
spoilt = Metric("spoilt", 3, _top, lambda total: total[0])
never = Metric("never", 1, lambda outputs, targets: [1.0], lambda total: math.nan, higher=False)
nothing = "no metric"


class Measured(Task):
    """Linear(3, 4) on three clients of unequal size; `broken`: which clients' metric is what `how` says."""

    metric_kind = "classes"

    def __init__(self, broken: Sequence[str], how: str, own: Sequence[Metric], server: bool) -> None:
        self.broken, self.how, self.own, self.server = broken, how, own, server

    def model(self) -> nn.Module:
        return nn.Linear(3, 4)

    def output_layer(self, model: nn.Module) -> nn.Module:
        return model

    def names(self) -> list[str]:
        return [str(i) for i in range(len(SIZES))]

    def examples(self, name: str) -> Examples:
        source = torch.Generator().manual_seed(int(name))
        count, code = SIZES[int(name)], -1.0 if name in self.broken else 1.0
        inputs = torch.randn(count, 3, generator=source)
        targets = torch.randint(3, (count,), generator=source)
        return Examples(torch.cat([inputs, torch.full((count, 1), code)], 1), targets)

    def client(self, name: str, file: str | None = None) -> ClientData:
        return ClientData(self.examples(name), self.examples(name))

    def central(self) -> Examples | None:
        return self.examples("0") if self.server else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0][:, :3]), batch[1])

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0][:, :3]), batch[1]

    def scores(self) -> Sequence[Metric]:
        return self.own

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float | Tensor]:
        found: Any = self.loss(model, batch) * len(batch[1])
        if float(batch[0][0, 3]) > 0 or not self.how:
            return {"mae": found, "loss": found}
        if self.how == "raises":
            raise ZeroDivisionError("no such class")
        wrong: Any = {"vector": torch.ones(2), "text": "0.5", "none": None, "nan": math.nan, "inf": math.inf}[self.how]
        return {"mae": wrong, "loss": found}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`[task] name = "tests.support.measured:task"`."""
    own = [top] if options.get("top") else []
    return Measured(options.get("broken", []), options.get("how", ""), own, options.get("server", False))
