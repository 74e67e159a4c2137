"""The metrics that an experiment may name: `[evaluate] metrics = ["f1", "auroc"]`. Formulas are torchmetrics'."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from common.errors import SettingsError, not_one_of
from common.metrics.metric import Metric, of_torchmetrics

Kind = Literal["classes", "labels", "numbers", "tokens", ""]
"""What a task's outputs and targets are, so that a metric can be named:

classes: logits (b, c) or (b, c, ...) and class numbers (b,) or (b, ...), -100 where there is none;
labels: logits (b, l) and which labels hold, 0 or 1 (b, l);
numbers: values (b,) or (b, k) and targets of that shape;
tokens: logits (b, t, v) and the tokens that follow (b, t), -100 where there is none;
"": none of these."""

THRESHOLDS = 200
"""Bins of auroc and average-precision: their curves are known at so many probabilities only. The area is exact for
scores rounded to 1/199; a denser score moves it by less than the share of pairs that fall into one bin."""

PARTS = 32
"""A metric by class tells each class up to so many."""

NONE = -100
"""A target that is none."""

_TOP = re.compile(r"(?:top-|recall@)([1-9]\d{0,4})")

_CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "f1": ("F1Score", {"average": "macro"}, "hard"),
    "f1-micro": ("F1Score", {"average": "micro"}, "hard"),
    "f1-weighted": ("F1Score", {"average": "weighted"}, "hard"),
    "precision": ("Precision", {"average": "macro"}, "hard"),
    "recall": ("Recall", {"average": "macro"}, "hard"),
    "auroc": ("AUROC", {"thresholds": THRESHOLDS}, "soft"),
    "average-precision": ("AveragePrecision", {"thresholds": THRESHOLDS}, "soft"),
    "iou": ("JaccardIndex", {"average": "macro"}, "hard"),
    "dice": ("F1Score", {"average": "macro"}, "hard"),
}
_MORE_OF_CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mcc": ("MatthewsCorrCoef", {}, "hard"),
    "kappa": ("CohenKappa", {}, "hard"),
}
_NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mae": ("MeanAbsoluteError", {}),
    "mse": ("MeanSquaredError", {}),
    "rmse": ("MeanSquaredError", {"squared": False}),
    "mape": ("MeanAbsolutePercentageError", {}),
    "r2": ("R2Score", {}),
    "explained-variance": ("ExplainedVariance", {}),
}
BY_CLASS = ("iou", "dice")
LABELS = (*(name for name in _CLASSES if name != "dice"), "exact-match")
ALLOWED: dict[str, tuple[str, ...]] = {
    "classes": (*_CLASSES, *_MORE_OF_CLASSES, "top-K", "recall@K"),
    "labels": LABELS,
    "numbers": tuple(_NUMBERS),
    "tokens": ("perplexity", "top-K"),
    "": (),
}


def ready(name: str, kind: Kind, width: Callable[[], int | None]) -> Metric:
    """The metric called `name` for outputs of a kind; `width`: how many classes, labels, numbers or tokens there are.

    Raises SettingsError for a name that this kind has not, naming those that it has.
    """
    if kind == "" or (name not in ALLOWED[kind] and not (_TOP.fullmatch(name) and kind in ("classes", "tokens"))):
        if kind == "":
            raise SettingsError(
                f"evaluate.metrics: {name!r}: this task does not say what its outputs are (Task.metric_kind); allowed: "
                "package.module:name of a Metric of your own"
            )
        raise not_one_of("evaluate.metrics", name, [*ALLOWED[kind], "package.module:name"])
    count = width()
    if count is None:
        raise SettingsError(
            f"evaluate.metrics: {name!r}: this task's model does not say how many outputs it has (Task.output_size)"
        )
    return replace(_MAKE[kind](name, count), reveals=_reveals(name, kind))


def _reveals(name: str, kind: Kind) -> str:
    """Of true and false answers by class the classes' sizes are a sum; of squares a mean and a deviation."""
    if kind == "numbers":
        return "mean and deviation of the targets" if name in ("r2", "explained-variance") else ""
    plain = kind == "tokens" or name in ("f1-micro", "exact-match") or _TOP.fullmatch(name)
    return "" if plain else "class counts"


def _of_classes(name: str, count: int) -> Metric:
    import torchmetrics.classification as made  # seconds, which only this metric waits for

    top = _TOP.fullmatch(name)
    if top is not None:
        if int(top[1]) > count:
            raise SettingsError(f"evaluate.metrics: {name!r}: there are {count} classes")
        one = made.MulticlassAccuracy(count, top_k=int(top[1]), average="micro", ignore_index=NONE)
        return of_torchmetrics(name, one, prepare=_logits)
    kind, given, how = (_CLASSES | _MORE_OF_CLASSES)[name]
    make = partial(getattr(made, f"Multiclass{kind}"), count, ignore_index=NONE, validate_args=False)
    parts = make(average="none") if name in BY_CLASS and count <= PARTS else None
    return of_torchmetrics(name, make(**given), prepare=_soft if how == "soft" else _hard, parts=parts, higher=True)


def _of_labels(name: str, count: int) -> Metric:
    import torchmetrics.classification as made  # seconds, which only this metric waits for

    if name == "exact-match":
        return of_torchmetrics(name, made.MultilabelExactMatch(count), prepare=_labels, higher=True)
    kind, given, _ = _CLASSES[name]
    make = partial(getattr(made, f"Multilabel{kind}"), count, validate_args=False)
    parts = make(average="none") if name in BY_CLASS and count <= PARTS else None
    return of_torchmetrics(name, make(**given), prepare=_labels, parts=parts, higher=True)


def _of_numbers(name: str, count: int) -> Metric:
    import torchmetrics.regression as made  # seconds, which only this metric waits for

    kind, given = _NUMBERS[name]
    higher = kind in ("R2Score", "ExplainedVariance")
    # Their states take the shape of the first batch.
    example = (torch.zeros(2, count), torch.zeros(2, count)) if higher and count > 1 else None
    return of_torchmetrics(name, getattr(made, kind)(**given), prepare=_numbers, higher=higher, example=example)


def _of_tokens(name: str, count: int) -> Metric:
    if _TOP.fullmatch(name):
        return _of_classes(name, count)
    from torchmetrics.text import Perplexity  # seconds, which only this metric waits for

    return of_torchmetrics(name, Perplexity(ignore_index=NONE), prepare=_tokens, higher=False)


def _logits(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """With the classes last, flat: (m, c) and (m,)."""
    if outputs.ndim > 2 and outputs.shape[:-1] != targets.shape:
        outputs = outputs.movedim(1, -1)
    return outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)


def _hard(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits, flat = _logits(outputs, targets)
    return logits.argmax(1), flat


def _soft(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits, flat = _logits(outputs, targets)
    return logits.double().softmax(1), flat


def _labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.double().sigmoid(), targets.long()


def _numbers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    given, wanted = outputs.double(), targets.double()
    return given.reshape(wanted.shape), wanted


def _tokens(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.double(), targets


_MAKE: dict[str, Callable[[str, int], Metric]] = {
    "classes": _of_classes,
    "labels": _of_labels,
    "numbers": _of_numbers,
    "tokens": _of_tokens,
}
