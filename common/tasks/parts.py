"""Parts of a named task that are the user's own: `task.model`, `task.loss`, `task.class_weights`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from common.errors import Sayable, SettingsError
from common.own import cause, load
from common.settings import Section, checked
from common.tasks.base import Task
from common.tasks.classification import Classification
from common.tasks.supervised import Supervised

OWN = "model_args", "class_weights", "start"
"""Keys of `[task]` that every named task takes, beside `model` and `loss` as package.module:name."""


class Parts(Section):
    """What is the user's own. `model`, `loss`: package.module:name."""

    model: str | None = None
    model_args: dict[str, Any] = Field({}, description="arguments of the class or function that `model` names")
    loss: str | None = Field(None, description="a function (outputs, targets) -> the mean loss over the batch")
    start: str | None = Field(
        None, description="safetensors file whose weights the run begins from; the server reads it"
    )
    class_weights: str | list[Annotated[float, Field(ge=0)]] | None = Field(
        None, description="of the loss: one a class, or 'balanced', n / (classes * n_c) over the training examples"
    )


def taken(options: dict[str, Any]) -> tuple[dict[str, Any], Parts]:
    """The keys that belong to the task, and those that are taken out of it. Raises SettingsError."""
    own = {key: options[key] for key in OWN if key in options}
    own |= {key: options[key] for key in ("model", "loss") if ":" in str(options.get(key, ""))}
    parts = checked(Parts, own, "[task]")
    if parts.model_args and parts.model is None:
        raise SettingsError("task.model_args belongs to task.model = 'package.module:name'")
    return {key: value for key, value in options.items() if key not in own}, parts


def fitted(task: Task, parts: Parts) -> Task:
    """The task with the parts in place of its own. Raises SettingsError, and Denied where a site allows no such
    code."""
    if parts.model is not None:
        build = load(parts.model, "task.model", "class or function")
        task.model = partial(_built, build, parts, task.dtype)  # type: ignore[method-assign]
    if parts.loss is None and parts.class_weights is None:
        return task
    key = "loss" if parts.loss is not None else "class_weights"
    if not isinstance(task, Supervised) or not task.takes_loss:
        raise SettingsError(f"task.{key}: the loss of this {type(task).__name__} is its own; leave it out")
    if parts.loss is not None and parts.class_weights is not None:
        raise SettingsError("task.class_weights beside task.loss; allowed: one of them")
    if parts.loss is not None:
        own = _checked(load(parts.loss, "task.loss", "function"), parts.loss)
    else:
        own = _weighted(task, parts.class_weights or [])
    task.error = own  # type: ignore[assignment,method-assign]
    return task


def _built(build: Callable[..., Any], parts: Parts, dtype: torch.dtype) -> nn.Module:
    what = f"task.model = {parts.model!r}"
    try:
        found = build(**parts.model_args)
    except Sayable:
        raise
    except Exception as error:
        raise SettingsError(f"{what} with {parts.model_args} failed: {cause(error)}") from error
    if not isinstance(found, nn.Module):
        raise SettingsError(f"{what} gives a {type(found).__name__}; allowed: a torch.nn.Module")
    return found.to(dtype)


def _checked(function: Any, named: str) -> Callable[[Any, Any], Tensor]:
    if not callable(function):
        raise SettingsError(f"task.loss = {named!r} is a {type(function).__name__}; allowed: a function")
    loss: Callable[[Any, Any], Tensor] = function
    return loss


def _weighted(task: Task, given: str | list[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean over the batch of w_y times the cross entropy: not divided by the sum of the weights, so that a client's
    batches and the federated sum weigh each example alike."""
    what = f"task.class_weights = {given!r}"
    if not isinstance(task, Classification):
        raise SettingsError(f"{what}: {type(task).__name__} is no task of classes")
    if isinstance(given, str):
        if given != "balanced":
            raise SettingsError(f"{what}; allowed: 'balanced', or a number a class")
        if task.absent:
            raise SettingsError(f"{what}: every client brings its own data, which nobody has counted; allowed: numbers")
        if (labels := task.labels()) is None:
            raise SettingsError(f"{what}: this task has no classes")
        counts = torch.bincount(torch.from_numpy(labels)).double()
        weights = torch.where(counts > 0, counts.sum() / (len(counts) * counts), 0.0)
    else:
        weights = torch.tensor(given, dtype=torch.float64)

    def error(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[1] != len(weights):
            raise SettingsError(f"{what}: {len(weights)} weights for {outputs.shape[1]} classes")
        chosen = weights.to(outputs.device, outputs.dtype)[targets]
        return (chosen * functional.cross_entropy(outputs, targets, reduction="none")).mean()

    return error
