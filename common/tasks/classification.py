"""What all classification tasks on a pooled data set share: the split, cross entropy, accuracy."""

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

from common.data.examples import ClientData, Examples, pick
from common.errors import SiteError
from common.experiment import PartitionSettings
from common.metrics.ready import Kind
from common.models.images import output_layer
from common.partition.assignment import Assignment, split_holdout
from common.partition.make import make_assignment
from common.partition.shift import check_shift, shifted
from common.tasks.base import Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Classification(Task):
    """Classes of a pooled data set that a plan splits over clients: cross entropy and accuracy."""

    metric_kind: Kind = "classes"
    headline = "accuracy"

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
    def assignment(self) -> Assignment:
        """The partition plan of the pooled examples; the first access may raise SettingsError."""
        assignment = make_assignment(self.partition, self.pool().targets.numpy(), self.groups(), self.seed)
        check_shift(assignment, self.pool().inputs)
        return assignment

    @property
    def absent(self) -> bool:
        """Whether there is no pooled set: every client brings its own data."""
        return False

    def names(self) -> list[str]:
        """Client i is called str(i); none where every client brings its own data."""
        return [] if self.absent else [str(i) for i in range(len(self.assignment.clients))]

    def number(self, name: str) -> int:
        """The row of a client in the plan. Raises SettingsError if there is none."""
        if self.absent:
            raise SiteError(
                "data-missing", f"client {name!r} brings no data: in this experiment every site does (--data)"
            )
        names = self.names()
        if name not in names:
            raise SiteError("client-unknown", f"client {name!r}: no such client; allowed: '0' to {names[-1]!r}")
        return int(name)

    def client(self, name: str, file: str | None = None) -> ClientData:
        """The examples that the plan gives to client `name`."""
        if file is not None:
            raise SiteError(
                "data-unused", f"client {name!r}: this task reads no file of a site ({file!r}); task 'images' does"
            )
        number, pool = self.number(name), self.pool()
        own = ClientData(pick(pool, self.assignment.clients[number]), pick(pool, self.assignment.holdout[number]))
        return shifted(own, self.assignment, number)

    def plan_hash(self) -> str:
        """The plan's sha256, hex, or "" where every client brings its own data."""
        return "" if self.absent else self.assignment.hash

    def site(self, name: str, own: Examples) -> ClientData:
        """All examples that a site brings itself; its holdout is `partition.holdout` of them, drawn by the seed and the
        name."""
        train, evaluate = split_holdout(np.arange(len(own)), self.partition.holdout, self.seed, name)
        return ClientData(pick(own, train), pick(own, evaluate))

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        """The last linear layer; see `common.models.images.output_layer`."""
        return output_layer(model)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross entropy, nats."""
        inputs, targets = batch
        return functional.cross_entropy(model(self.features(inputs)), targets)

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (b, c) and classes (b,)."""
        inputs, targets = batch
        return model(self.features(inputs)), targets

    def judge(self, outputs: Any, targets: Any) -> Mapping[str, float | Tensor]:
        """Cross entropy (nats) and right answers."""
        loss = functional.cross_entropy(outputs, targets, reduction="sum")
        return {"loss": loss.detach(), "accuracy": (outputs.argmax(1) == targets).sum()}
