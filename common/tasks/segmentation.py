"""A class for each pixel of an image: `segmentation`, from folders of images and masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from common.data.arrays import drawn
from common.data.examples import ClientData, Examples, pick
from common.data.masks import IGNORED, read_masked
from common.data.places import find
from common.data.places import own as own_file
from common.errors import SettingsError, SiteError
from common.experiment import PartitionSettings
from common.metrics.metric import Metric
from common.metrics.ready import NONE, ready
from common.models.unet import UNet
from common.settings import Opened, Section, checked
from common.tasks.supervised import Supervised


class SegmentationSettings(Section):
    """`[task] name = "segmentation"`."""

    file: Opened | None = Field(None, description="folder with images/ and masks/, in train/ and test/ or by itself")
    classes: int = Field(2, ge=2, le=254, description="of pixels: 0 to classes - 1; 255 is none")
    shape: tuple[int, ...] | None = Field(None, strict=False, description="(h, w) or (h, w, 3); default: the images'")
    resize: bool = Field(False, description="images and masks are scaled to `shape`")
    pooled: bool = Field(True, description="false: every client brings its own folder")
    width: int = Field(16, ge=4, multiple_of=4, description="channels of the first layer")
    limit: int | None = Field(None, ge=1, description="at most so many training and test images, by the seed")
    dtype: Literal["float32", "float64"] = "float32"


class Segmentation(Supervised):
    """Images uint8 (n, h, w) or (n, h, w, 3), masks (n, h, w); cross entropy of the pixels that are of a class.

    An example counts once, however many pixels have a class. Splits by class are by the class that most pixels have
    beside 0, the background.
    """

    metric_kind = "classes"
    headline = "iou"

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        self.settings = given = checked(SegmentationSettings, options, "[task]")
        super().__init__(partition, seed, given.dtype)
        if given.resize and given.shape is None:
            raise SettingsError("task.resize = true needs task.shape: the size to scale to")
        if self.absent and given.shape is None:
            raise SettingsError(
                "task.file or task.shape is required: without a file every client brings its own folder"
            )
        if not self.absent:
            _ = self.assignment  # settings errors belong to the start
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise SettingsError(f"task.shape = {list(self.shape)}: allowed: [h, w] or [h, w, 3]")

    @property
    def absent(self) -> bool:
        """Whether every client brings its own folder."""
        return not self.settings.pooled or self.settings.file is None

    @cached_property
    def _pooled(self) -> tuple[Examples, Examples | None]:
        given = self.settings
        assert given.file is not None
        path = find(given.file, "task.file", folders=True)
        train, test = read_masked(path, given.shape, given.resize)
        held = [self._examples(*part, str(path)) if part is not None else None for part in (train, test)]
        cut = [
            None if part is None else pick(part, drawn(len(part), given.limit, self.seed, purpose))
            for part, purpose in zip(held, ("train", "test"), strict=True)
        ]
        assert cut[0] is not None
        return cut[0], cut[1]

    def _examples(self, images: NDArray[np.uint8], masks: NDArray[np.uint8], source: str) -> Examples:
        known = masks[masks != IGNORED]
        if known.size and known.max() >= self.settings.classes:
            raise SiteError(
                "data-labels",
                f"{source}: masks hold class {known.max()}; allowed: 0 to {self.settings.classes - 1}, 255",
            )
        return Examples(torch.from_numpy(images), torch.from_numpy(masks))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return self.settings.shape or tuple(self._pooled[0].inputs.shape[1:])

    def pool(self) -> Examples:
        """The training images of the pooled folder."""
        return self._pooled[0]

    def labels(self) -> NDArray[Any]:
        """The class that most pixels of an image have beside the background; 0 where there is none."""
        classes, masks = self.settings.classes, self.pool().targets
        counts = np.stack([(masks == each).flatten(1).sum(1).numpy() for each in range(1, classes)], 1)
        found: NDArray[Any] = np.where(counts.any(1), 1 + counts.argmax(1), 0)
        return found

    def central(self) -> Examples | None:
        """The test images of the pooled folder, or None."""
        return None if self.absent else self._pooled[1]

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client of the plan or, with `file`, all training images of that site's own folder."""
        if file is None:
            return super().client(name)
        path = own_file(file, f"folder of client {name!r}", folders=True)
        own = self._examples(*read_masked(path, self.shape, self.settings.resize)[0], str(path))
        if tuple(own.inputs.shape[1:]) != self.shape:
            raise SiteError(
                "data-shape", f"{path}: one image is {tuple(own.inputs.shape[1:])}; this run's are {self.shape}"
            )
        return self.site(name, pick(own, drawn(len(own), self.settings.limit, self.seed, name)))

    def model(self) -> nn.Module:
        """Logits (b, classes, h, w)."""
        channels = 1 if len(self.shape) == 2 else self.shape[2]
        return UNet(channels, self.settings.classes, self.settings.width).to(self.dtype)

    def output_size(self, model: nn.Module) -> int:
        """The classes."""
        return self.settings.classes

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        """Logits for images as they are stored."""
        floats = inputs.to(self.dtype) / 255 if inputs.dtype == torch.uint8 else inputs
        found: Tensor = model(floats.unsqueeze(1) if floats.ndim == 3 else floats.permute(0, 3, 1, 2))
        return found

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (b, classes, h, w) and classes (b, h, w), `NONE` where there is none."""
        inputs, masks = batch
        targets = masks.long()
        return self.forward(model, inputs), targets.masked_fill(targets == IGNORED, NONE)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the images of the mean cross entropy of an image's pixels, nats; an image without a pixel of any
        class counts with 0."""
        pixels = functional.cross_entropy(outputs, targets, ignore_index=NONE, reduction="none").flatten(1)
        return (pixels.sum(1) / (targets != NONE).flatten(1).sum(1).clamp(min=1)).mean()

    def judge(self, outputs: Tensor, targets: Tensor) -> Mapping[str, float | Tensor]:
        """The loss, and the share of an image's pixels that are told right."""
        known = (targets != NONE).flatten(1)
        right = (outputs.argmax(1) == targets).flatten(1) & known
        return {
            **super().judge(outputs, targets),
            "accuracy": (right.sum(1).double() / known.sum(1).clamp(min=1)).sum(),
        }

    def scores(self) -> list[Metric]:
        """Intersection over union, over the classes that occur, and of each class."""
        # Who runs this task shares what it is judged by.
        return [replace(ready("iou", "classes", lambda: self.settings.classes), reveals="")]
