"""Forward and backward passes of one client's model: mixed precision, other points of the weight space, features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from common.experiment import LocalSettings
from common.model import FlatModel
from common.tasks.base import Task
from common.vector import PERSONAL, State

# Of the loss in float16, as powers of two; doubled after so many steps without an overflow.
FIRST_SCALE, LEAST_SCALE, GROWTH_STEPS = 2.0**16, 2.0**-24, 2000

Extra = Callable[[Tensor, Any], Tensor]


class Forward:
    """The passes of one round. Gradients land in the model's flat gradient, in place of what was there."""

    def __init__(self, task: Task, model: FlatModel, settings: LocalSettings) -> None:
        self._task = task
        self._model = model
        self._settings = settings
        self._device = model.vector.device
        self._scale = FIRST_SCALE
        self._good_steps = 0
        # The random numbers of dropout, before the present batch's first pass.
        self._random: Tensor | None = None
        # Held once: what a pass elsewhere puts aside, and what it finds there.
        self._aside: list[Tensor] = []
        self._there: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        """The task's mean loss over a batch, under autocast if the settings say so."""
        if self._settings.precision == "float32":
            return self._task.loss(self._model.module, batch)
        with torch.autocast(self._device.type, dtype=getattr(torch, self._settings.precision)):
            return self._task.loss(self._model.module, batch)

    def backward(self, batch: Any, extra: Extra | None = None, scale: float = 1.0) -> Tensor:
        """The gradient of `scale` times the loss, plus `extra` of the output layer's input. Returns the task's loss,
        without a graph."""
        if self._settings.sam_rho:
            self._random = self._random_state()
        if extra is None:
            total = loss = self.loss(batch)
        else:
            with self._observed() as seen:
                loss = self.loss(batch)
            total = loss + extra(seen[0], batch)
        self._backward(total if scale == 1.0 else total * scale)
        return loss.detach()

    def _backward(self, loss: Tensor) -> None:
        """The gradient of a loss.

        float16 gradients underflow: there the loss is scaled up by a power of two, which is exact. A scale that
        overflows is halved and the same batch goes backward again, through the same forward pass, so that no
        algorithm sees a gradient that is not finite and none is left out. The scale starts anew each round: a round
        is a function of what it was given. Raises ArithmeticError if the loss itself is not finite.
        """
        gradient = self._model.whole_gradient
        gradient.zero_()
        if self._settings.precision != "float16":
            loss.backward()  # type: ignore[no-untyped-call]
            return
        while True:
            (loss * self._scale).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            gradient.div_(self._scale)
            if bool(torch.isfinite(gradient).all()):
                break
            if self._scale <= LEAST_SCALE or not bool(torch.isfinite(loss)):
                raise ArithmeticError(f"the loss {float(loss.detach())} has no finite gradient in float16")
            self._scale, self._good_steps = self._scale / 2, 0
            gradient.zero_()
        self._good_steps += 1
        if self._good_steps == GROWTH_STEPS:
            self._scale, self._good_steps = min(self._scale * 2, FIRST_SCALE), 0

    def gradient_at(self, point: Tensor, batch: Any, buffers: State | None = None) -> Tensor:
        """The gradient (d + k,) at another shared model (d,), in a vector that the next call writes anew. Buffers and
        random numbers stay as they are, so that the pass that follows draws the same dropout masks; `buffers` are
        those of the other model, and move."""
        start = self._random_state()
        with self._elsewhere():
            self._model.vector.copy_(point)
            for name, value in (buffers or {}).items():
                self._model.buffers[name].copy_(value)
            self.backward(batch)
            for name, value in (buffers or {}).items():
                value.copy_(self._model.buffers[name])
        self._set_random_state(start)
        if self._there is None:
            self._there = torch.empty_like(self._model.whole_gradient)
        return self._there.copy_(self._model.whole_gradient)

    def sharpen(self, batch: Any, extra: Extra | None, gradient: Tensor) -> None:
        """In place of the gradient g of the part in training, the one at w + rho g / |g| (SAM), with the same dropout
        masks; where g = 0 it stays 0 or what the loss gives there. BatchNorm's statistics move once."""
        model, start = self._model, self._random
        offset = (gradient.data_ptr() - model.whole_gradient.data_ptr()) // gradient.element_size()
        part = model.whole[offset : offset + len(gradient)]
        assert start is not None
        with self._elsewhere():
            norm = torch.linalg.vector_norm(gradient)
            tiny = torch.finfo(norm.dtype).tiny
            # Not times rho / tiny, which overflows where the gradient is zero.
            part.add_(gradient / norm.clamp_min(tiny), alpha=self._settings.sam_rho)
            self._set_random_state(start)
            self.backward(batch, extra)

    def representation(self, vector: Tensor, buffers: State) -> Callable[[Any], Tensor]:
        """See `strategies.base.Work.representation`. The personal part is as it is now."""
        model, loss = self._model, LossModule(self)
        frozen = {"": vector, **buffers, **{name: value.clone() for name, value in model.personal.items()}}
        layouts = {"": model.layout, PERSONAL + "parameters": model.personal_layout, **model.buffer_layouts}
        state = {
            f"module.{name}": slot.view(value)
            for group, value in frozen.items()
            for name, slot in layouts[group].items()
        }

        def represent(batch: Any) -> Tensor:
            with torch.no_grad(), _evaluating(model.module), self._observed() as seen:
                torch.func.functional_call(loss, state, (batch,))
            return seen[0]

        return represent

    @contextmanager
    def _observed(self) -> Iterator[list[Tensor]]:
        """Catch what enters the model's output layer."""
        layer, seen = self._task.output_layer(self._model.module), []
        if layer is None:
            raise ValueError("this task's model has no output layer: it must say so by `output_layer`")
        hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        try:
            yield seen
        finally:
            hook.remove()

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Weights and buffers may change inside; afterwards they are as they were."""
        model = self._model
        own = [value for name, value in model.personal.items() if "buffers." in name]
        held = [model.whole, *model.buffers.values(), *own]
        if not self._aside:
            self._aside = [torch.empty_like(value) for value in held]
        for before, value in zip(self._aside, held, strict=True):
            before.copy_(value)
        try:
            yield
        finally:
            for value, before in zip(held, self._aside, strict=True):
                value.copy_(before)

    def _random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _set_random_state(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


class LossModule(nn.Module):
    """The task's loss as a module whose part `module` is the model, for torch.func."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.module = forward._model.module
        self._compute = forward.loss

    def forward(self, batch: Any) -> Tensor:
        return self._compute(batch)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each layer is in the mode that it was in."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
