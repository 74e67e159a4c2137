"""What all tasks on a pooled data set share, whatever their inputs and targets are: the split, a loss, metrics.

One's own task is a subclass: `pool` has the examples, `model` the network, `error` the loss of its outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.data.examples import ClientData, Examples, Records, pick
from common.errors import SettingsError, SiteError
from common.experiment import PartitionSettings
from common.partition.assignment import Assignment, split_holdout
from common.partition.make import make_assignment
from common.partition.shift import check_shift, shifted
from common.tasks.base import Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}
BY_CLASS = ("dirichlet", "pathological", "shards")
"""Kinds of a split that need classes."""


class Supervised(Task):
    """Inputs and targets of any shape: tensors, or as `Records` tuples, dicts and lists of unequal size.

    A batch is (inputs, targets). Metrics by name need `metric_kind`; what is no mean over examples is a `Metric` of
    `scores`.
    """

    shifts = True

    takes_loss: bool = True
    """Whether the loss is all of it in `error`, so that an experiment may name another one."""

    def __init__(self, partition: PartitionSettings, seed: int, dtype: str = "float32") -> None:
        self.partition = partition
        self.seed = seed
        self.dtype = DTYPES[dtype]

    @abstractmethod
    def pool(self) -> Examples | Records:
        """All training examples, on the CPU."""

    def groups(self) -> NDArray[Any] | None:
        """The group id of each training example (n,), or None without a natural split."""
        return None

    def labels(self) -> NDArray[Any] | None:
        """A class of each training example (n,), integers from 0, for splits by class: a function of its target. None:
        there is none."""
        return None

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """The model's outputs for the inputs of a batch: `model(inputs)`."""
        return model(inputs)

    def error(self, outputs: Any, targets: Any) -> Tensor:
        """The mean loss over a batch, a 0-d tensor."""
        raise SettingsError(f"{type(self).__name__} has no loss: write error(outputs, targets), or loss(model, batch)")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """`error` of `outputs`."""
        return self.error(*self.outputs(model, batch))

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """The model's outputs and the targets of a batch."""
        inputs, targets = batch
        return self.forward(model, inputs), targets

    def judge(self, outputs: Any, targets: Any) -> Mapping[str, float | Tensor]:
        """The loss."""
        return {"loss": self.error(outputs, targets).detach().double() * size(targets)}

    @cached_property
    def assignment(self) -> Assignment:
        """The partition plan of the pooled examples; the first access may raise SettingsError."""
        labels, kind = self.labels(), self.partition.kind
        pool: Any = self.pool()
        if labels is None:
            if kind in BY_CLASS:
                raise SettingsError(
                    f"partition.kind = {kind!r} splits by classes, and {type(self).__name__} has none (`labels`); "
                    "allowed: iid, size, quantity, natural, file"
                )
            labels = np.zeros(len(pool), np.int64)
        assignment = make_assignment(self.partition, labels, self.groups(), self.seed)
        if assignment.shift != "none":
            if not isinstance(pool, Examples):
                raise SettingsError(
                    f"partition.shift = {assignment.shift!r}: an input of {type(self).__name__} is no single tensor; "
                    "allowed: 'none'"
                )
            check_shift(assignment, pool.inputs)
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
        number = self.number(name)
        pool: Any = self.pool()
        own = ClientData(pick(pool, self.assignment.clients[number]), pick(pool, self.assignment.holdout[number]))
        return shifted(own, self.assignment, number)

    def plan_hash(self) -> str:
        """The plan's sha256, hex, or "" where every client brings its own data."""
        return "" if self.absent else self.assignment.hash

    def site(self, name: str, own: Any) -> ClientData:
        """All examples that a site brings itself; its holdout is `partition.holdout` of them, drawn by the seed and the
        name."""
        train, evaluate = split_holdout(np.arange(len(own)), self.partition.holdout, self.seed, name)
        return ClientData(pick(own, train), pick(own, evaluate))


def size(tree: Any) -> int:
    """How many examples a batch's inputs or targets hold."""
    while isinstance(tree, dict | tuple):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)
