"""Tasks of labelled images or vectors: named data sets, and any local source."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from common.data.arrays import Pooled, SourceSettings, drawn, examples_of, fit, pool
from common.data.columns import difference, listed
from common.data.examples import ClientData, Examples, pick
from common.data.labels import agree, numbered
from common.data.named_images import DATASETS, load
from common.data.places import find
from common.data.places import own as own_file
from common.data.raw import Raw
from common.data.sources import read, read_pooled
from common.errors import ExperimentError, SettingsError, not_one_of
from common.experiment import PartitionSettings
from common.models.augment import crop_flip
from common.models.images import NORMS, WIDTHS, Model, Norm, check_network, network
from common.settings import checked, shown
from common.tasks.classification import Classification

log = logging.getLogger("common.tasks")
_told: set[str] = set()


class ImagesSettings(SourceSettings):
    """`[task]` of every task of labelled images or vectors: their source, and the network that learns them."""

    model: Model | None = Field(None, description="default: cnn for images, mlp for vectors")
    width: int | None = Field(None, ge=1, description="default: 64 channels (vgg11), 32 (cnn), 64 hidden units (mlp)")
    norm: Norm | None = Field(None, description="default: batch (resnet18, cnn), none (vgg11, mlp)")
    norm_groups: int = Field(2, ge=1, description="groups of norm = 'group'; 2 as in arXiv 2003.00295")
    dropout: float | None = Field(None, ge=0, lt=1, description="vgg11: default 0.5, as FedNova's code")
    projection: int | None = Field(None, ge=1, description="moon: width of a projection head before the output layer")
    extractor: int | None = Field(None, ge=1, description="pfedafm: width of a shared extractor beside it")
    augment: Literal["none", "crop-flip"] = Field(
        "none", description="of training batches; see common/models/augment.py"
    )
    mean: list[float] | None = Field(None, description="of inputs in [0, 1], one a channel; default: the data set's")
    std: list[float] | None = Field(None, description="the same")


class Images(Classification):
    """Images (n, h, w) or (n, h, w, channels), or vectors (n, d), with labels (n,).

    uint8 inputs stay uint8 in memory and are augmented as such; batch by batch, on the batch's device, they become
    floats (x/255 - mean)/std in `dtype`. Others are taken as they are. With both shape and classes known (a named data
    set, or the settings) the pooled source is read only when it is needed: where clients bring their own files, it may
    be missing.
    """

    def __init__(self, name: str, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        """`name`: of a row of `DATASETS`, or "images" for what `task.file` names."""
        if isinstance(options.get("inputs"), list):
            raise ExperimentError(
                f"[task]: inputs = {shown(options['inputs'])}: several columns by name are of task.name = 'table'; "
                "allowed here: one array or column"
            )
        self.name, self.source = name, DATASETS.get(name)
        self.settings = checked(ImagesSettings, options, "[task]")
        super().__init__(partition, seed, self.settings.dtype)
        self._check_source()
        self._given = self._given_classes()
        if self.settings.pooled and (self._shape is None or self._given is None):
            _ = self.assignment  # settings errors belong to the start
        if len(self.shape) not in (1, 2, 3) or min(self.shape) < 1:
            raise SettingsError(f"task.shape = {self.shape}: allowed: (d,), (h, w) or (h, w, channels)")
        given = self.settings
        self.kind = given.model or ("cnn" if len(self.shape) > 1 else "mlp")
        self.norm = given.norm or NORMS[self.kind][0]
        check_network(
            self.kind,
            self.shape,
            self.norm,
            given.norm_groups,
            given.width,
            given.projection,
            given.extractor,
            given.dropout,
        )
        if given.augment != "none" and len(self.shape) == 1:
            raise SettingsError(f"task.augment = {given.augment!r}: one input is {self.shape}; allowed: for images")
        self._scale = self._normalization()
        self._scales: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _check_source(self) -> None:
        given, row = self.settings, self.source
        if row is None:
            if given.variant is not None or given.download:
                key = "variant" if given.variant is not None else "download"
                named = ", ".join(DATASETS)
                raise SettingsError(f"task.{key} = {getattr(given, key)!r} belongs to named data sets: {named}")
            if given.file is None and (given.shape is None or given.classes is None):
                raise SettingsError(
                    "task.file is required: a file or folder; without one, task.shape and task.classes are, "
                    "and every client brings its own file"
                )
            if not given.pooled and (given.shape is None or given.classes is None):
                raise SettingsError("task.pooled = false needs task.shape and task.classes")
            return
        if given.variant is not None and given.variant not in row.places:
            raise not_one_of("task.variant", given.variant, row.places)
        if given.shape is not None and given.shape != row.shape:
            raise SettingsError(f"task.shape = {given.shape}: {self.name}'s inputs are {row.shape}; leave it out")

    @property
    def variant(self) -> str:
        """Which form of a named data set; "" of others."""
        return "" if self.source is None else self.settings.variant or next(iter(self.source.places))

    def _given_classes(self) -> tuple[str, ...] | int | None:
        """The classes by name or number, as far as they are known without data."""
        given = self.settings.classes
        wanted = tuple(given) if isinstance(given, list) else given
        if isinstance(wanted, tuple) and (not wanted or len(set(wanted)) < len(wanted)):
            raise SettingsError(f"task.classes = {given}: allowed: names, each once")
        if self.source is None:
            return wanted
        own = self.source.names(self.variant)
        if wanted is None:
            return own
        counts = [len(each) if isinstance(each, tuple) else each for each in (wanted, own)]
        if counts[0] != counts[1]:
            raise SettingsError(f"task.classes = {given}: {self.name} has {counts[1]} classes; leave it out")
        return wanted if isinstance(wanted, tuple) else own

    @property
    def absent(self) -> bool:
        """Whether there is no pooled source."""
        return not self.settings.pooled or (self.source is None and self.settings.file is None)

    @cached_property
    def pooled(self) -> Pooled:
        """The pooled source; the first access may raise SettingsError."""
        given = self.settings
        if self.absent:
            raise SettingsError(f"task {self.name!r}: every client brings its own file (task.pooled, task.file)")
        if given.file is None:
            raw, place = load(self.name, self.variant, given)
        else:
            path = find(given.file, "task.file", folders=True)
            raw, place = read_pooled(path, given, self._shape), str(path)
        if place not in _told:  # once a process, however many runs it makes
            _told.add(place)
            log.info("%s: %s", self.name, place)
        names = self._given if isinstance(self._given, tuple) else None
        held = pool(raw, given, names, place, self.seed)
        if self.source is not None:
            count = len(self._given) if isinstance(self._given, tuple) else int(self._given or 0)
            for part in (held.train, held.test):
                if part is not None:
                    fit(part, self.source.shape, count, place)
        return held

    @property
    def _shape(self) -> tuple[int, ...] | None:
        """The shape of one input, as far as it is known without data."""
        return self.settings.shape or (self.source.shape if self.source else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, channels last."""
        return self._shape or tuple(self.pooled.train.inputs.shape[1:])

    @property
    def classes(self) -> int:
        """The number of classes."""
        if self._given is None:
            return self.pooled.classes
        return len(self._given) if isinstance(self._given, tuple) else self._given

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, which a site's labels may be; None if this process need not know them."""
        if self._given is None:
            return None if self.absent else self.pooled.names
        return self._given if isinstance(self._given, tuple) else None

    def pool(self) -> Examples:
        """The training examples of the pooled source."""
        return self.pooled.train

    def groups(self) -> NDArray[Any] | None:
        """The group ids of the pooled source, or None."""
        if self.pooled.groups is None and self.name == "emnist" and self.partition.kind == "natural":
            raise SettingsError(
                "partition.kind = 'natural': EMNIST's files do not say who wrote what; allowed: task.name = 'femnist', "
                "the same handwriting with its writers, or a task.file with groups"
            )
        return self.pooled.groups

    def central(self) -> Examples | None:
        """The examples of `task.test_file`, else the test examples of the pooled source, or None."""
        if self.settings.test_file is not None:
            return self._test
        return None if self.absent else self.pooled.test

    @cached_property
    def _test_raw(self) -> tuple[Raw, str]:
        """What `task.test_file` names: its test part, if it has one, else all that it holds."""
        path = find(str(self.settings.test_file), "task.test_file", folders=True)
        raw = read(path, self.settings, self.shape)
        if raw.test_inputs is not None:
            raw = Raw(raw.test_inputs, raw.test_labels, classes=raw.classes, columns=raw.columns)
        return raw, str(path)

    @cached_property
    def _test(self) -> Examples:
        raw, source = self._test_raw
        if not self.absent and (told := difference(raw.columns, self.pooled.columns)):
            raise SettingsError(f"task.test_file: {source} {told}; task.file has {listed(self.pooled.columns)}")
        test = self._checked(raw, source)
        return pick(test, drawn(len(test), self.settings.limit, self.seed, "test"))

    def columns(self) -> tuple[str, ...]:
        """The columns of the pooled table, else of the test set's, where the inputs are columns side by side."""
        if self.source is not None:
            return ()
        if not self.absent:
            return self.pooled.columns
        return () if self.settings.test_file is None else self._test_raw[0].columns

    def _checked(self, raw: Raw, source: str) -> Examples:
        """What a source holds as examples of this run's shape and classes."""
        if (names := self.class_names) is not None:
            agree(raw.labels, raw.classes, names, source)
        held = examples_of(raw.inputs, numbered(raw.labels, names, source), self.settings.dtype, source)
        fit(held, self.shape, self.classes, source)
        return held

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client of the plan or, with `file`, all training examples in that site's own file or folder.

        The site's holdout is `partition.holdout` of them, drawn by the seed and the name. Raises SettingsError if the
        file cannot be used, its inputs have another shape than the run's, or its labels are not of the run's classes.
        """
        if file is None:
            return super().client(name)
        path = own_file(file, f"file of client {name!r}", folders=True)
        raw, source = read(path, self.settings, self.shape), str(path)
        own = self._checked(raw, source)
        own = pick(own, drawn(len(own), self.settings.limit, self.seed, name))
        return replace(self.site(name, own), columns=raw.columns)

    def augment(self, batch: Any) -> Any:
        """With `augment` = "crop-flip" random crops and mirror images; see common/models/augment.py."""
        return batch if self.settings.augment == "none" else (crop_flip(batch[0]), *batch[1:])

    def features(self, inputs: Tensor) -> Tensor:
        """Floats, scaled if they were bytes: channels first for networks of images, flat for the mlp.

        Colour images keep their channels last in memory (torch.channels_last), which the convolutions like on CPUs.
        """
        floats = self._floats(inputs)
        if self.kind == "mlp":
            return floats.flatten(1)
        return floats.unsqueeze(1) if floats.ndim == 3 else floats.permute(0, 3, 1, 2)

    def _floats(self, inputs: Tensor) -> Tensor:
        if inputs.dtype != torch.uint8:
            return inputs
        if self._scale is None:
            return inputs.to(self.dtype) / 255
        if inputs.device not in self._scales:
            with torch.inference_mode(False):  # kept beyond an evaluation
                factor, shift = (torch.from_numpy(each).to(inputs.device, self.dtype) for each in self._scale)
            self._scales[inputs.device] = factor, shift
        factor, shift = self._scales[inputs.device]
        # Rows of a whole image's numbers: with three channels as the last dimension it takes ten times as long.
        return torch.addcmul(shift, inputs.flatten(1).to(self.dtype), factor).view(inputs.shape)

    def _normalization(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Factor and shift (h * w * channels,) that take bytes to (x/255 - mean)/std; None: x/255 alone."""
        given, row = self.settings, self.source
        mean, std = given.mean or (row.mean if row else None), given.std or (row.std if row else None)
        if (mean is None) != (std is None):
            raise SettingsError("task.mean and task.std: allowed: both or none")
        if mean is None or std is None:
            return None
        channels = (*self.shape, 1)[2] if len(self.shape) > 1 else 1
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise SettingsError(
                f"task.mean = {given.mean}, task.std = {given.std}: allowed: {channels} numbers each, deviations > 0"
            )
        repeats = int(np.prod(self.shape)) // channels
        factor, shift = 1 / (255 * np.array(std)), -np.array(mean) / np.array(std)
        return np.tile(factor, repeats), np.tile(shift, repeats)

    def model(self) -> nn.Module:
        """Logits (b, classes) from what `features` gives."""
        given = self.settings
        return network(
            self.kind,
            self.shape,
            self.classes,
            width=given.width or WIDTHS[self.kind],
            norm=self.norm,
            groups=given.norm_groups,
            projection=given.projection,
            extractor=given.extractor,
            dropout=0.5 if given.dropout is None else given.dropout,
            dtype=self.dtype,
        )


images = npz = partial(Images, "images")
cifar10 = partial(Images, "cifar10")
cifar100 = partial(Images, "cifar100")
tinyimagenet = partial(Images, "tinyimagenet")
femnist = partial(Images, "femnist")
emnist = partial(Images, "emnist")
mnist = partial(Images, "mnist")
