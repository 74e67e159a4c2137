"""Any .npz file of labelled images or vectors, optionally with a group id (writer, user) per example."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.errors import SettingsError
from common.experiment import PartitionSettings, checked
from common.mixture import of_sequences
from common.partition import split_holdout
from common.tasks.arrays import NpzSettings, Pooled, drawn, examples_of, find, fit, opened, read_pooled, take
from common.tasks.base import ClientData, Examples
from common.tasks.classification import Classification, check_heads, cnn, mlp, pick

REPRESENTATION = 128
"""Numbers between extractors and head of a mixture."""


class Npz(Classification):
    """Images (n, h, w) or (n, h, w, channels), or vectors (n, d), with labels (n,).

    uint8 inputs stay uint8 in memory and become floats x/255 batch by batch, on the batch's device; others
    are taken as they are, in `dtype`. The cnn has BatchNorm and needs h, w >= 8. With both `shape` and
    `classes` given, the pooled file is read only when it is needed: where clients bring their own files, it
    may be missing.
    """

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        self.settings = checked(NpzSettings, options, "[task]")
        super().__init__(partition, seed, self.settings.dtype)
        check_heads(self.settings.projection, self.settings.extractor)
        if self.settings.shape is None or self.settings.classes is None:
            _ = self.plan  # settings errors belong to the start
        if len(self.shape) not in (1, 2, 3) or min(self.shape) < 1:
            raise SettingsError(f"task.shape = {self.shape}: allowed: (d,), (h, w) or (h, w, channels)")
        image = len(self.shape) > 1 and min(self.shape[:2]) >= 8
        self.kind = self.settings.model or ("cnn" if len(self.shape) > 1 else "mlp")
        if self.kind == "cnn" and not image:
            raise SettingsError(
                f"task.model = 'cnn' needs images of at least 8x8; one input is {self.shape}; allowed: mlp"
            )

    @cached_property
    def pooled(self) -> Pooled:
        """The pooled file; the first access may raise SettingsError."""
        if self.settings.file is None:
            raise SettingsError(
                "task.file is required: an .npz file; without one, task.shape and task.classes are, "
                "and every client brings its own file"
            )
        return read_pooled(self.settings, self.seed)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, channels last."""
        return self.settings.shape or tuple(self.pooled.train.inputs.shape[1:])

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.settings.classes or self.pooled.classes

    def names(self) -> list[str]:
        """As of every pooled set; none where every client brings its own file."""
        return [] if self.settings.file is None else super().names()

    def pool(self) -> Examples:
        """The training examples of the pooled file."""
        return self.pooled.train

    def groups(self) -> NDArray[Any] | None:
        """The group ids of the pooled file, or None."""
        return self.pooled.groups

    def central(self) -> Examples | None:
        """The test examples of the pooled file, or None."""
        return None if self.settings.file is None else self.pooled.test

    def plan_hash(self) -> str:
        """The plan's sha256, hex, or "" where every client brings its own file."""
        return "" if self.settings.file is None else super().plan_hash()

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client of the plan or, with `file`, all training examples in that site's own file.

        The site's holdout is `partition.holdout` of them, drawn by the seed and the name. Raises
        SettingsError if the file cannot be used or its inputs have another shape than the run's.
        """
        if file is None:
            return super().client(name)
        path = find(file, f"file of client {name!r}")
        with opened(path) as arrays:
            inputs, labels = (take(arrays, role, self.settings, path) for role in ("inputs", "labels"))
        own = examples_of(inputs, labels, self.settings.dtype, str(path))
        fit(own, self.shape, self.classes, str(path))
        own = pick(own, drawn(len(own), self.settings.limit, self.seed, name))
        train, evaluate = split_holdout(np.arange(len(own)), self.partition.holdout, self.seed, name)
        return ClientData(pick(own, train), pick(own, evaluate))

    def features(self, inputs: Tensor) -> Tensor:
        """Floats, scaled if they were bytes: channels first for the cnn, flat for the mlp."""
        floats = inputs.to(self.dtype) / 255 if inputs.dtype == torch.uint8 else inputs
        if self.kind == "mlp":
            return floats.flatten(1)
        return floats.unsqueeze(1) if floats.ndim == 3 else floats.permute(0, 3, 1, 2)

    def model(self) -> nn.Module:
        """Logits (b, classes) from what `features` gives."""
        width, small = self.settings.width or (64 if self.kind == "mlp" else 32), self.settings.extractor
        if small is None:
            return self._network(width, self.classes, self.settings.projection)
        # The cnn's own representation is too wide for a shared extractor to be small.
        head = nn.Linear(REPRESENTATION, self.classes, dtype=self.dtype)
        full = nn.Sequential(*self._network(width, REPRESENTATION), nn.ReLU(), head)
        return of_sequences(full, self._network(small, REPRESENTATION))

    def _network(self, width: int, outputs: int, projection: int | None = None) -> nn.Sequential:
        if self.kind == "mlp":
            return mlp(int(np.prod(self.shape)), width, outputs, projection).to(self.dtype)
        return cnn(self.shape, width, outputs, projection).to(self.dtype)
