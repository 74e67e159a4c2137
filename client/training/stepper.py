"""The local optimizer on one part of a client's model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from client.training.optimizers import MATRIX_OPTIMIZERS, LocalOptimizer
from common.experiment import LocalSettings
from common.model import FlatModel, matrix_slots
from common.tasks.base import Task
from common.vector import State
from strategies.base import Part

OPTIMIZER = "optimizer."
"""Prefix in client memory of a kept optimizer's state."""


class Stepper:
    """The local optimizer on one part of the model, from a kept state if there is one.

    With `yields` = "direction" it works on a displacement that starts at 0 in each step, so that nothing is lost in
    w - (w - lr d); weight decay is then applied here, outside the direction where it is decoupled.
    """

    def __init__(
        self,
        settings: LocalSettings,
        task: Task,
        model: FlatModel,
        lr: float,
        part: Part,
        yields: Literal["gradient", "direction"],
        memory: State,
    ) -> None:
        size = len(model.vector)
        span = {"all": slice(None), "shared": slice(size), "personal": slice(size, None)}[part]
        self.vector, self.gradient = model.whole[span], model.whole_gradient[span]
        if not len(self.vector):
            raise ValueError(f"this model has no {part} part")
        self._moved = torch.zeros_like(self.vector) if yields == "direction" else None
        # Direction space is that of the shared part.
        self._shown = None if self._moved is None else self._moved[:size] if part == "all" else self._moved
        self._prefix = f"{OPTIMIZER}{part}."
        self._decay = settings.weight_decay if yields == "direction" else 0.0
        self._coupled = settings.optimizer in ("sgd", "adam", "amsgrad")
        if self._decay:
            settings = settings.model_copy(update={"weight_decay": 0.0})
        target = self.vector if self._moved is None else self._moved
        # To look for them takes a walk through the model's modules.
        matrices = matrix_slots(task, model, part) if settings.optimizer in MATRIX_OPTIMIZERS else []
        self.optimizer = LocalOptimizer(settings, target, self.gradient, lr, matrices)
        held = {k.removeprefix(self._prefix): v for k, v in memory.items() if k.startswith(self._prefix)}
        if held and settings.moments == "keep":
            self.optimizer.load(held)

    def state(self) -> State:
        """The optimizer's, as entries of client memory."""
        return {self._prefix + name: value for name, value in self.optimizer.state().items()}

    def step(self) -> Iterator[Tensor]:
        """One step; yields the direction (d,) if it was asked for."""
        if self._moved is None or self._shown is None:
            self.optimizer.step()
            return
        lr = self.optimizer.lr
        if self._decay and self._coupled:
            self.gradient.add_(self.vector, alpha=self._decay)
        self._moved.zero_()
        self.optimizer.step()
        yield self._shown.div_(-lr)
        self._shown.mul_(-lr)
        if self._decay and not self._coupled:
            self.vector.mul_(1 - lr * self._decay)
        self.vector.add_(self._moved)
