"""The pass of a cohort: the gradients of several models on batches of one shape, computed as one batched model's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from client.training.forward import Extra, Forward, LossModule
from common.experiment import LocalSettings
from common.model import FlatModel
from common.tasks.base import Task
from common.vector import PERSONAL, Slot, State


class Wanted:
    """A gradient that a client waits for: of `scale` times its loss on a batch, at its model as it is.

    `key`: what must be alike for one pass (the batch's shapes, the state of the layers); None: cannot be batched.
    """

    def __init__(self, forward: LaneForward, batch: Any, scale: float) -> None:
        self.forward, self.batch, self.scale = forward, batch, scale
        shapes = _shapes(batch)
        self.key: Hashable = None if shapes is None else (shapes, forward.mode())


class LaneForward(Forward):
    """Passes of a client that has a model of its own: `ask` computes a gradient together with those of others, or
    returns None where the client must do it alone."""

    def __init__(
        self, ask: Callable[[Wanted], Tensor | None], task: Task, model: FlatModel, settings: LocalSettings
    ) -> None:
        super().__init__(task, model, settings)
        self.model = model
        self._ask = ask
        self._layers = list(model.module.modules())

    def backward(self, batch: Any, extra: Extra | None = None, scale: float = 1.0) -> Tensor:
        """See `Forward.backward`. A loss with a further term of this client's own is not batched, nor float16's, which
        is scaled by what this client saw overflow."""
        if extra is not None or self._settings.precision == "float16":
            return super().backward(batch, extra, scale)
        if self._settings.sam_rho:
            self._random = self._random_state()
        loss = self._ask(Wanted(self, batch, scale))
        return super().backward(batch, extra, scale) if loss is None else loss

    def mode(self) -> Hashable:
        """The plain attributes of all layers, as their being in training: a pass reads them."""
        plain = (bool, int, float, str)
        return tuple(value for layer in self._layers for value in vars(layer).values() if isinstance(value, plain))


def batched(wanted: Sequence[Wanted]) -> list[Tensor]:
    """Put each gradient where `Forward.backward` puts it, move the buffers, and return the losses.

    All have one key. Nothing is changed if this raises, as it does for what torch.func.vmap cannot do: random numbers
    (dropout), branches on values, some operations.
    """
    models, first = [each.forward.model for each in wanted], wanted[0].forward
    whole = torch.stack([model.whole for model in models])
    parameters = {name: _views(slot, whole).requires_grad_() for name, slot in _slots(first.model)}
    held = [_buffers(model) for model in models]
    stacked = {group: torch.stack([state[group] for state in held]) for group in held[0]}
    layouts = {group: first.model.buffer_layouts[group] for group in stacked}
    # Of their own: BatchNorm under vmap moves a copy of running statistics that lie apart.
    buffers = {
        f"module.{name}": _views(slot, stacked[group]).contiguous()
        for group, layout in layouts.items()
        for name, slot in layout.items()
    }
    loss = LossModule(first)

    def one(parameters: State, buffers: State, batch: Any) -> tuple[Tensor, State]:
        state = {**parameters, **buffers}
        value = torch.func.functional_call(loss, state, (batch,))
        return value, {name: state[name] for name in buffers}

    values, moved = torch.func.vmap(one)(parameters, buffers, _stack([each.batch for each in wanted]))
    total = values
    if any(each.scale != 1.0 for each in wanted):
        total = values * torch.tensor([each.scale for each in wanted], dtype=values.dtype, device=values.device)
    # The models do not meet: the gradient of the sum holds each one's own.
    gradients = torch.autograd.grad(total.sum(), list(parameters.values()), materialize_grads=True)
    rows = torch.cat([gradient.reshape(len(models), -1) for gradient in gradients], 1)
    for model, row in zip(models, rows.unbind(), strict=True):
        model.whole_gradient.copy_(row)
    for group, layout in layouts.items():
        after = torch.cat([moved[f"module.{name}"].reshape(len(models), -1) for name in layout], 1)
        for state, row in zip(held, after.unbind(), strict=True):
            state[group].copy_(row)
    return list(values.detach().unbind())


def _slots(model: FlatModel) -> Iterator[tuple[str, Slot]]:
    """Where all trainable parameters lie in `model.whole`, in order."""
    size = len(model.vector)
    for name, slot in model.layout.items():
        yield f"module.{name}", slot
    for name, slot in model.personal_layout.items():
        yield f"module.{name}", Slot(slot.start + size, slot.stop + size, slot.shape)


def _views(slot: Slot, rows: Tensor) -> Tensor:
    """A named tensor of all models, (s, *shape), from their vectors (s, n)."""
    return rows[:, slot.start : slot.stop].reshape(len(rows), *slot.shape)


def _buffers(model: FlatModel) -> State:
    """The vectors of all buffers, shared and personal."""
    own = {name: value for name, value in model.personal.items() if name != PERSONAL + "parameters"}
    return {**model.buffers, **own}


def _shapes(batch: Any) -> Hashable:
    """Structure, shapes and dtypes of a batch; None if it holds more than tensors."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        parts = [(key, _shapes(value)) for key, value in batch.items()]
        return None if any(shape is None for _, shape in parts) else tuple(parts)
    if type(batch) in (tuple, list):
        inner = tuple(_shapes(value) for value in batch)
        return None if None in inner else inner
    return None


def _stack(batches: Sequence[Any]) -> Any:
    """Batches of one structure as one, each tensor (s, b, ...)."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches))
    if isinstance(first, Mapping):
        return {key: _stack([batch[key] for batch in batches]) for key in first}
    return type(first)(map(_stack, zip(*batches, strict=True)))
