"""The image models: ResNet-18, VGG-11, a small convolutional network, a multilayer perceptron."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import nn

from common.errors import SettingsError
from common.models.mixture import Mixture, of_sequences

Norm = Literal["batch", "group", "none"]
Model = Literal["resnet18", "vgg11", "cnn", "mlp"]

REPRESENTATION = 128
"""Numbers between extractors and head of a mixture of cnns or mlps."""

NORMS: dict[str, tuple[Norm, ...]] = {
    "resnet18": ("batch", "group"),
    "vgg11": ("none", "batch", "group"),
    "cnn": ("batch", "group", "none"),
    "mlp": ("none", "batch", "group"),
}
"""Model -> its kinds of normalization, the default first."""

WIDTHS = {"resnet18": 64, "vgg11": 64, "cnn": 32, "mlp": 64}
LEAST = {"resnet18": 8, "vgg11": 32, "cnn": 8}
"""Model -> the least height and breadth of its images."""

VGG11 = (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0)
"""Channels of each convolution in units of the width; 0: pooling."""

CIFAR_STEM = 64
"""ResNet-18 reads images up to this height and breadth at full resolution."""


def network(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    width: int,
    norm: Norm,
    groups: int = 2,
    projection: int | None = None,
    extractor: int | None = None,
    dropout: float = 0.5,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A model of images `shape` = (h, w) or (h, w, channels), or of vectors (d,) for the mlp.

    (b, channels, h, w), for the mlp (b, d), -> logits (b, classes). `groups`: of GroupNorm. With `projection` MOON's
    head stands before the output layer; with `extractor` it is pFedAFM's mixture, whose shared extractor is a cnn (for
    the mlp an mlp) of that width with the same normalization. `dropout`: of vgg11.
    """
    layer = _norm(norm, groups)
    if model == "mlp":
        build: Callable[..., nn.Sequential] = partial(mlp, int(np.prod(shape)), norm=layer)
    else:
        build = partial(cnn, shape, norm=layer)
    if model in ("cnn", "mlp"):
        if extractor is None:
            return build(width, classes, projection=projection).to(dtype)
        # The cnn's own representation is too wide for a shared extractor to be small.
        last = nn.Linear(REPRESENTATION, classes, dtype=dtype)
        full = nn.Sequential(*build(width, REPRESENTATION).to(dtype), nn.ReLU(), last)
        return of_sequences(full, build(extractor, REPRESENTATION).to(dtype))
    large: nn.Module
    if model == "resnet18":
        large = resnet18(shape, classes, layer, projection)
    else:
        large = vgg11(shape, width, classes, layer, projection, dropout)
    return (large if extractor is None else _mixture(large, build, extractor)).to(dtype)


def _mixture(large: nn.Module, build: Callable[..., nn.Sequential], extractor: int) -> Mixture:
    """`large` without its output layer as F, that layer as H, a small cnn as G."""
    head = output_layer(large)
    assert isinstance(head, nn.Linear)
    for parent in large.modules():
        for name, child in parent.named_children():
            if child is head:
                setattr(parent, name, nn.Identity())
    shared = nn.Sequential(*build(extractor, head.in_features), nn.ReLU())
    return Mixture(large, shared, head, head.in_features, head.weight.dtype)


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The last linear layer of a sequence, of torchvision's `fc` or `classifier`, or a mixture's head."""
    if isinstance(model, Mixture):
        model = model.head
    while not isinstance(model, nn.Linear):
        inner = model[-1] if isinstance(model, nn.Sequential) else getattr(model, "fc", None)
        inner = inner if inner is not None else getattr(model, "classifier", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model


def check_network(
    model: str,
    shape: tuple[int, ...],
    norm: str,
    groups: int,
    width: int | None,
    projection: int | None,
    extractor: int | None,
    dropout: float | None,
) -> None:
    """Raise SettingsError, naming the key of `[task]`, for a model that cannot be built."""
    check_heads(projection, extractor)
    size = min(shape[:2]) if len(shape) > 1 else 0
    if size < LEAST.get(model, 0):
        least = LEAST[model]
        fitting = [name for name in WIDTHS if LEAST.get(name, 0) <= size]
        raise SettingsError(
            f"task.model = {model!r} needs images of at least {least}x{least}; one input is {shape}; "
            f"allowed: {', '.join(fitting)}"
        )
    if norm not in NORMS[model]:
        raise SettingsError(f"task.norm = {norm!r} with task.model = {model!r}; allowed: {', '.join(NORMS[model])}")
    if dropout is not None and model != "vgg11":
        raise SettingsError(f"task.dropout = {dropout} with task.model = {model!r}; allowed: with 'vgg11'")
    if width is not None and model == "resnet18":
        raise SettingsError(f"task.width = {width} with task.model = 'resnet18', whose widths are fixed; leave it out")
    widths = [width or WIDTHS[model], *([extractor] if extractor else [])]
    for each in widths if norm == "group" else []:
        if each % groups:
            raise SettingsError(f"task.norm_groups = {groups}: {each} channels are no multiple of it")


def _norm(norm: Norm, groups: int) -> Callable[[int], nn.Module] | None:
    """Channels -> a layer; None without normalization. BatchNorm of vectors is another class."""
    if norm == "none":
        return None
    return nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)


def resnet18(
    shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module] | None, projection: int | None
) -> nn.Module:
    """torchvision's ResNet-18. Images up to 64x64 meet CIFAR's stem: a 3x3 convolution of stride 1 and no max-pooling.

    With that stem 11,173,962 parameters for RGB and 10 classes, 11,220,132 for 100, 11,271,432 for 200. (The 11.7 M
    of FA-GC's tables are those of the model for ImageNet, 11,689,512: its 7x7 stem and 1,000 outputs.)
    """
    from torchvision.models import resnet18 as build  # slow to import

    model: nn.Module = build(weights=None, num_classes=classes, norm_layer=norm)
    channels = (*shape, 1)[2]
    small = max(shape[:2]) <= CIFAR_STEM
    if small or channels != 3:
        kernel, stride = (3, 1) if small else (7, 2)
        model.conv1 = nn.Conv2d(channels, 64, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's
    if small:
        model.maxpool = nn.Identity()
    if projection is not None:
        model.fc = nn.Sequential(*head(512, classes, projection))
    return model


def vgg11(
    shape: tuple[int, ...],
    width: int,
    classes: int,
    norm: Callable[[int], nn.Module] | None,
    projection: int | None,
    dropout: float,
) -> nn.Sequential:
    """VGG-11 as FedNova trains it (arXiv 2007.07481, official code): eight 3x3 convolutions, five poolings, two hidden
    layers of 512 behind dropout; no normalization. 9,750,922 parameters for 32x32 RGB and 10 classes.

    `width`: channels of the first convolution, 64 in the paper; everything else is in proportion.
    """
    height, breadth, channels = (*shape, 1)[:3]
    layers: list[nn.Module] = []
    for factor in VGG11:
        if not factor:
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, factor * width, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        channels = factor * width
        layers += [convolution, *([norm(channels)] if norm else []), nn.ReLU()]
    hidden = 8 * width
    classifier = [nn.Dropout(dropout), nn.Linear(hidden * (height // 32) * (breadth // 32), hidden), nn.ReLU()]
    classifier += [nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(), *head(hidden, classes, projection)]
    parts = (nn.Sequential(*layers), nn.Flatten(), nn.Sequential(*classifier))
    return nn.Sequential(OrderedDict(zip(("features", "flatten", "classifier"), parts, strict=True)))


def mlp(
    inputs: int,
    hidden: int,
    outputs: int,
    projection: int | None = None,
    norm: Callable[[int], nn.Module] | None = None,
) -> nn.Sequential:
    """One hidden layer with ReLU, then the output of `head`: (b, inputs) -> logits (b, outputs)."""
    layer = nn.BatchNorm1d if norm is nn.BatchNorm2d else norm
    middle = [layer(hidden)] if layer else []
    return nn.Sequential(nn.Linear(inputs, hidden), *middle, nn.ReLU(), *head(hidden, outputs, projection))


def cnn(
    shape: tuple[int, ...],
    width: int,
    classes: int,
    projection: int | None = None,
    norm: Callable[[int], nn.Module] | None = nn.BatchNorm2d,
) -> nn.Sequential:
    """Two blocks of convolution, normalization, ReLU and pooling, then the output of `head`.

    `shape` is (h, w) or (h, w, channels), h, w >= 8; (b, channels, h, w) -> logits (b, classes).
    """
    height, breadth, channels = (*shape, 1)[:3]
    layers: list[nn.Module] = []
    for before, after in ((channels, width), (width, 2 * width)):
        # No bias before a normalization: it takes the mean out again.
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=norm is None))
        layers += [*([norm(after)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    features = 2 * width * (height // 4) * (breadth // 4)
    return nn.Sequential(*layers, nn.Flatten(), *head(features, classes, projection))


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
