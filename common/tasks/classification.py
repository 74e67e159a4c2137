"""What all classification tasks on a pooled data set share: the split, cross entropy, accuracy, small models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.mixture import Mixture
from common.partition import Plan, make_plan
from common.shift import check_shift, shifted
from common.tasks.base import ClientData, Examples, Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Classification(Task):
    """Classes of a pooled data set that a plan splits over clients: cross entropy and accuracy."""

    def __init__(self, partition: PartitionSettings, seed: int, dtype: str) -> None:
        self.partition = partition
        self.seed = seed
        self.dtype = DTYPES[dtype]

    @abstractmethod
    def pool(self) -> Examples:
        """All training examples: inputs (n, ...) and int64 targets (n,) on the CPU."""

    def groups(self) -> NDArray[Any] | None:
        """The group id of each training example (n,), or None without a natural split."""
        return None

    def features(self, inputs: Tensor) -> Tensor:
        """What the model receives for a batch of inputs (b, ...), on the batch's device."""
        return inputs

    @cached_property
    def plan(self) -> Plan:
        """The partition plan of the pooled examples; the first access may raise SettingsError."""
        plan = make_plan(self.partition, self.pool().targets.numpy(), self.groups(), self.seed)
        check_shift(plan, self.pool().inputs)
        return plan

    def names(self) -> list[str]:
        """Client i is called str(i)."""
        return [str(i) for i in range(len(self.plan.clients))]

    def client(self, name: str, file: str | None = None) -> ClientData:
        """The examples that the plan gives to client `name`."""
        if file is not None:
            raise SettingsError(f"client {name!r}: this task reads no file of a site ({file!r}); task 'npz' does")
        names = self.names()
        if name not in names:
            raise SettingsError(f"client {name!r}: no such client; allowed: '0' to {names[-1]!r}")
        number, pool = int(name), self.pool()
        own = ClientData(pick(pool, self.plan.clients[number]), pick(pool, self.plan.holdout[number]))
        return shifted(own, self.plan, number)

    def plan_hash(self) -> str:
        """The plan's sha256, hex."""
        return self.plan.hash

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        """The last linear layer of a sequence, or a mixture's head."""
        if isinstance(model, Mixture):
            return model.head
        last = model[-1] if isinstance(model, nn.Sequential) else None
        return last if isinstance(last, nn.Linear) else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross entropy, nats."""
        inputs, targets = batch
        return functional.cross_entropy(model(self.features(inputs)), targets)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float]:
        """Sums over the batch: cross entropy (nats) and right answers."""
        inputs, targets = batch
        logits = model(self.features(inputs))
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        return {"loss": loss.item(), "accuracy": float((logits.argmax(1) == targets).sum())}


def mlp(inputs: int, hidden: int, outputs: int, projection: int | None = None) -> nn.Sequential:
    """One hidden layer with ReLU, then the output of `head`: (b, inputs) -> logits (b, outputs)."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), *head(hidden, outputs, projection))


def head(features: int, outputs: int, projection: int | None) -> list[nn.Module]:
    """The output layer; with `projection`, behind MOON's projection head of two layers of that width, whose result is
    what it reads. (MOON's own first layer is as wide as the features: for `cnn` that would be millions of weights.)"""
    if projection is None:
        return [nn.Linear(features, outputs)]
    layers = [nn.Linear(features, projection), nn.ReLU(), nn.Linear(projection, projection)]
    return [*layers, nn.Linear(projection, outputs)]


def check_heads(projection: int | None, extractor: int | None) -> None:
    """Raise SettingsError for a model of two extractors with a projection head, which no algorithm trains."""
    if projection and extractor:
        raise SettingsError(
            f"task.projection = {projection} beside task.extractor = {extractor}: allowed: one of them, the first for "
            "'moon', the second for 'pfedafm'"
        )


def cnn(shape: tuple[int, ...], width: int, classes: int, projection: int | None = None) -> nn.Sequential:
    """Two blocks of convolution, BatchNorm, ReLU and pooling, then the output of `head`.

    `shape` is (h, w) or (h, w, channels), h, w >= 8; (b, channels, h, w) -> logits (b, classes).
    """
    height, breadth, channels = (*shape, 1)[:3]
    layers: list[nn.Module] = []
    for before, after in ((channels, width), (width, 2 * width)):
        # No bias: BatchNorm takes the mean out again.
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    features = 2 * width * (height // 4) * (breadth // 4)
    return nn.Sequential(*layers, nn.Flatten(), *head(features, classes, projection))


def pick(examples: Examples, indices: NDArray[np.int64]) -> Examples:
    """A copy of the examples at `indices` (k,)."""
    return Examples(*examples.batch(torch.tensor(indices)))
