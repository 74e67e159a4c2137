"""Numbers, or several labels at once, from images or vectors: `regression` and `multilabel`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from common.data.arrays import SourceSettings, drawn
from common.data.examples import ClientData, Examples, pick
from common.data.places import find
from common.data.places import own as own_file
from common.data.raw import Raw
from common.data.sources import read, read_pooled
from common.errors import SettingsError, SiteError
from common.experiment import PartitionSettings
from common.metrics.metric import Metric
from common.metrics.ready import Kind
from common.models.images import NORMS, WIDTHS, Model, Norm, check_network, network, output_layer
from common.settings import checked
from common.tasks.supervised import Supervised


class TargetsSettings(SourceSettings):
    """`[task] name = "regression"` and `"multilabel"`. `labels` is the array or column of the targets: (n,) or (n, k),
    numbers; or of which labels hold, 0 or 1."""

    outputs: int | None = Field(
        None, ge=1, description="k; needed, with `shape`, where every client brings its own file"
    )
    model: Model | None = Field(None, description="default: cnn for images, mlp for vectors")
    width: int | None = Field(None, ge=1, description="default: 64 channels (vgg11), 32 (cnn), 64 hidden units (mlp)")
    norm: Norm | None = Field(None, description="default: batch (resnet18, cnn), none (vgg11, mlp)")
    norm_groups: int = Field(2, ge=1, description="groups of norm = 'group'")
    dropout: float | None = Field(None, ge=0, lt=1, description="vgg11: default 0.5")
    loss: Literal["mse", "mae", "huber"] = Field("mse", description="regression")


class Targets(Supervised):
    """Inputs (n, d), (n, h, w) or (n, h, w, channels); bytes become floats in [0, 1]. Targets (n, k) in `dtype`."""

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        self.settings = given = checked(TargetsSettings, options, "[task]")
        super().__init__(partition, seed, given.dtype)
        for key in ("variant", "download", "classes"):
            if getattr(given, key):
                raise SettingsError(f"task.{key} = {getattr(given, key)!r} belongs to classes; leave it out")
        if self.absent and (given.shape is None or given.outputs is None):
            raise SettingsError(
                "task.file is required: a file or folder; without one, task.shape and task.outputs are, and every "
                "client brings its own file"
            )
        if not self.absent:
            _ = self.assignment  # settings errors belong to the start
        self.network = given.model or ("cnn" if len(self.shape) > 1 else "mlp")
        check_network(self.network, self.shape, self._norm, given.norm_groups, given.width, None, None, given.dropout)

    @property
    def absent(self) -> bool:
        """Whether every client brings its own data."""
        return not self.settings.pooled or self.settings.file is None

    @property
    def _norm(self) -> Norm:
        return self.settings.norm or NORMS[self.network][0]

    @cached_property
    def _pooled(self) -> tuple[Examples, Examples | None, NDArray[Any] | None]:
        given = self.settings
        assert given.file is not None
        path = find(given.file, "task.file", folders=True)
        raw = read_pooled(path, given, given.shape)
        train = self._examples(raw.inputs, raw.labels, f"{path}, training data")
        test = None
        if raw.test_inputs is not None:
            test = self._examples(raw.test_inputs, raw.test_labels, f"{path}, test data")
            test = pick(test, drawn(len(test), given.limit, self.seed, "test"))
        kept = drawn(len(train), given.limit, self.seed, "train")
        return pick(train, kept), test, None if raw.groups is None else raw.groups[kept]

    def _examples(self, inputs: NDArray[Any] | None, targets: NDArray[Any] | None, source: str) -> Examples:
        if inputs is None or targets is None:
            raise SiteError("data-unreadable", f"{source}: has no {'inputs' if inputs is None else 'targets'}")
        if inputs.dtype.kind not in "fiu" or inputs.ndim not in (2, 3, 4):
            raise SiteError("data-shape", f"{source}: inputs are {inputs.dtype} {inputs.shape}; allowed: numbers")
        wanted = targets[:, None] if targets.ndim == 1 else targets
        if wanted.dtype.kind not in "fiub" or wanted.ndim != 2 or len(wanted) != len(inputs):
            raise SiteError(
                "data-labels", f"{source}: targets are {targets.dtype} {targets.shape}; allowed: numbers (n,) or (n, k)"
            )
        for what, values in (("inputs", inputs), ("targets", wanted)):
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise SiteError("data-unreadable", f"{source}: {what} hold NaN or infinite values")
        self.check_targets(wanted, source)
        dtype = self.settings.dtype
        x = inputs.astype(dtype) / 255 if inputs.dtype == np.uint8 else inputs.astype(dtype, copy=False)
        return Examples(torch.from_numpy(x.astype(dtype, copy=False)), torch.from_numpy(wanted.astype(dtype)))

    def check_targets(self, targets: NDArray[Any], source: str) -> None:
        """Raise SiteError for targets (n, k) that mean nothing here."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.settings.shape or tuple(self._pooled[0].inputs.shape[1:])

    @property
    def count(self) -> int:
        """k, the number of outputs."""
        return self.settings.outputs or int(self._pooled[0].targets.shape[1])

    def pool(self) -> Examples:
        """The training examples of the pooled source."""
        return self._pooled[0]

    def groups(self) -> NDArray[Any] | None:
        """The group ids of the pooled source, or None."""
        return self._pooled[2]

    def central(self) -> Examples | None:
        """The examples of `task.test_file`, else the test examples of the pooled source, or None."""
        if self.settings.test_file is not None:
            return self._test
        return None if self.absent else self._pooled[1]

    @cached_property
    def _test(self) -> Examples:
        """What `task.test_file` names: its test part, if it has one, else all that it holds."""
        path = find(str(self.settings.test_file), "task.test_file", folders=True)
        raw = read(path, self.settings, self.shape)
        inputs, targets = (
            (raw.test_inputs, raw.test_labels) if raw.test_inputs is not None else (raw.inputs, raw.labels)
        )
        test = self._examples(inputs, targets, str(path))
        self._fit(test, path)
        return pick(test, drawn(len(test), self.settings.limit, self.seed, "test"))

    def _fit(self, examples: Examples, path: Path) -> None:
        told = tuple(examples.inputs.shape[1:]), examples.targets.shape[1]
        if told != (self.shape, self.count):
            raise SiteError(
                "data-shape",
                f"{path}: one example is {told[0]} -> {told[1]}; this run's are {self.shape} -> {self.count}",
            )

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client of the plan or, with `file`, all examples of that site's own file."""
        if file is None:
            return super().client(name)
        path = own_file(file, f"file of client {name!r}", folders=True)
        raw: Raw = read(path, self.settings, self.shape)
        own = self._examples(raw.inputs, raw.labels, str(path))
        self._fit(own, path)
        return self.site(name, pick(own, drawn(len(own), self.settings.limit, self.seed, name)))

    def model(self) -> nn.Module:
        """Outputs (b, k)."""
        given = self.settings
        return network(
            self.network,
            self.shape,
            self.count,
            width=given.width or WIDTHS[self.network],
            norm=self._norm,
            groups=given.norm_groups,
            projection=None,
            extractor=None,
            dropout=0.5 if given.dropout is None else given.dropout,
            dtype=self.dtype,
        )

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        """The last linear layer."""
        return output_layer(model)

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        """Outputs (b, k) for inputs as they are stored."""
        if self.network == "mlp":
            found: Tensor = model(inputs.flatten(1))
            return found
        images: Tensor = model(inputs.unsqueeze(1) if inputs.ndim == 3 else inputs.permute(0, 3, 1, 2))
        return images


class Regression(Targets):
    """Numbers: squared, absolute or Huber's error; `rmse` and `mae` in the targets' own units."""

    metric_kind: Kind = "numbers"
    headline = "rmse"

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean error over examples and outputs."""
        kinds = {"mse": functional.mse_loss, "mae": functional.l1_loss, "huber": functional.smooth_l1_loss}
        return kinds[self.settings.loss](outputs, targets)

    def judge(self, outputs: Tensor, targets: Tensor) -> Mapping[str, float | Tensor]:
        """The loss and the absolute error."""
        far = (outputs - targets).detach().double().abs().mean(1)
        return {**super().judge(outputs, targets), "mae": far.sum()}

    def scores(self) -> list[Metric]:
        """The root of the mean squared error, over all outputs."""
        return [RMSE]


class Multilabel(Targets):
    """Which of k labels hold, several or none: cross entropy of each, and the share of labels that are told right."""

    metric_kind: Kind = "labels"
    headline = "accuracy"

    def check_targets(self, targets: NDArray[Any], source: str) -> None:
        """0 and 1 alone."""
        if not np.isin(targets, (0, 1)).all():
            raise SiteError("data-labels", f"{source}: targets hold other values than 0 and 1")

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean binary cross entropy over examples and labels, nats."""
        return functional.binary_cross_entropy_with_logits(outputs, targets)

    def judge(self, outputs: Tensor, targets: Tensor) -> Mapping[str, float | Tensor]:
        """The loss, and the share of an example's labels that are told right."""
        right = ((outputs > 0) == (targets > 0.5)).double().mean(1)
        return {**super().judge(outputs, targets), "accuracy": right.sum()}


def _squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    far = (outputs - targets).double()
    return (far * far).sum(), far.numel()


RMSE = Metric("rmse", 2, _squares, lambda total: (total[0] / total[1]).sqrt(), higher=False)
