"""scikit-learn's 1,797 handwritten digits, and what all classification tasks on a pooled data set share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from common.errors import SettingsError
from common.experiment import PartitionSettings, Section, checked
from common.partition import Plan, make_plan
from common.seeds import derive
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
        return make_plan(self.partition, self.pool().targets.numpy(), self.groups(), self.seed)

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
        return ClientData(pick(pool, self.plan.clients[number]), pick(pool, self.plan.holdout[number]))

    def plan_hash(self) -> str:
        """The plan's sha256, hex."""
        return self.plan.hash

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


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """One hidden layer with ReLU: (b, inputs) -> logits (b, outputs)."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def cnn(shape: tuple[int, ...], width: int, classes: int) -> nn.Sequential:
    """Two blocks of convolution, BatchNorm, ReLU and pooling, then a linear layer.

    `shape` is (h, w) or (h, w, channels), h, w >= 8; (b, channels, h, w) -> logits (b, classes).
    """
    height, breadth, channels = (*shape, 1)[:3]
    layers: list[nn.Module] = []
    for before, after in ((channels, width), (width, 2 * width)):
        # No bias: BatchNorm takes the mean out again.
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * (height // 4) * (breadth // 4), classes))


class DigitsSettings(Section):
    """`[task] name = "digits"`."""

    dtype: Literal["float32", "float64"] = "float32"
    hidden: int = Field(64, ge=1, description="units of the hidden layer")


class Digits(Classification):
    """8x8 images as 64 numbers in [0, 1], a multilayer perceptron 64-hidden-10.

    The seed draws the 359 central test images; the other 1,438 are partitioned.
    """

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        settings = checked(DigitsSettings, options, "[task]")
        super().__init__(partition, seed, settings.dtype)
        self.hidden = settings.hidden
        self._pool, self._test = _digits(self.dtype, seed)
        _ = self.plan  # settings errors belong to the start

    def pool(self) -> Examples:
        """1,438 training images: inputs (1438, 64)."""
        return self._pool

    def central(self) -> Examples:
        """359 test images that no client holds: inputs (359, 64)."""
        return self._test

    def model(self) -> nn.Module:
        """Inputs (b, 64), logits (b, 10)."""
        return mlp(64, self.hidden, 10).to(self.dtype)


def _digits(dtype: torch.dtype, seed: int) -> tuple[Examples, Examples]:
    from sklearn.datasets import load_digits  # slow to import

    images, labels = load_digits(return_X_y=True)
    everything = Examples(torch.from_numpy(images / 16).to(dtype), torch.from_numpy(labels).long())
    order = np.random.default_rng(derive(seed, "digits", "test")).permutation(len(labels))
    test = len(labels) // 5
    return pick(everything, np.sort(order[test:])), pick(everything, np.sort(order[:test]))


def pick(examples: Examples, indices: NDArray[np.int64]) -> Examples:
    """A copy of the examples at `indices` (k,)."""
    return Examples(*examples.batch(torch.tensor(indices)))
