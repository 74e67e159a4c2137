"""Local training: batches, loss, clipping, mixed precision, proximal term and optimizer, in one generator.

An algorithm's `local` sees each raw gradient as one flat vector before the optimizer does and changes it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from client.training.batches import (
    batches_per_epoch,
    channels_last,
    epoch_batches,
    has_normalization,
    normalization_frozen,
)
from client.training.forward import Forward
from client.training.optimizers import MATRIX_OPTIMIZERS, LocalOptimizer
from client.training.stepper import Stepper
from common.data.examples import ClientData
from common.experiment import Experiment, LocalSettings
from common.model import FlatModel, matrix_slots
from common.seeds import generator
from common.tasks.base import Task
from common.vector import Layout, State
from strategies.base import Part, Upload
from strategies.protocol.algorithm import Algorithm
from strategies.protocol.messages import TrainHead


class Bench(Protocol):
    """Where clients work: what stays from message to message. `client.session.Session` is one."""

    @property
    def experiment(self) -> Experiment:
        """The run's settings."""

    @property
    def strategy(self) -> Algorithm:
        """The algorithm."""

    @property
    def task(self) -> Task:
        """Loss and batches."""

    @property
    def model(self) -> FlatModel:
        """The model that is trained, the received weights loaded."""

    @property
    def forward(self) -> Callable[[Task, FlatModel, LocalSettings], Forward]:
        """Makes the passes of a round."""


class LocalWork:
    """One client's work in one round; implements `strategies.base.Work`."""

    def __init__(
        self,
        bench: Bench,
        head: TrainHead,
        data: ClientData,
        received: State,
        memory: State,
        assigned: Mapping[str, float] | None = None,
        watch: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """`head`: what the server asks of this client in this round. `watch` is told the number of each step before it
        is taken, and may raise."""
        settings, model = bench.experiment.local, bench.model
        self.received = received
        self.memory = memory
        self.kept: State = {}
        self.share = head.share
        self._part, self._trackers = head.part, set(bench.strategy.trackers)
        self.num_examples = len(data.train)
        self.lr = head.lr
        self.settings = settings
        self.round = head.round
        self.accepted_last_round = 0 < head.accepted == head.round - 1
        self.assigned = assigned or {}
        self.proximal_mu = settings.proximal_mu
        self.steps_taken = 0
        self.reference_gradient = model.gradient[:0]
        self._task = bench.task
        self._model = model
        self._data = data
        self._head_steps = bench.experiment.personal.head_steps
        self._merges = has_normalization(model.module)
        self._planned = local_steps(data, settings, head.epochs, head.steps, self._merges)
        self._watch = watch
        self._watched = 0
        self._forward = bench.forward(bench.task, model, settings)
        self._optimizer_state: State = {}
        self._clippable = model.gradient[:0]
        self._order = generator(bench.experiment.seed, "batches", head.client, head.round)
        self._present: tuple[Any, bool] = (None, False)
        self._fresh: Iterator[tuple[Any, bool]] | None = None
        self._fresh_order = partial(generator, bench.experiment.seed, "fresh batches", head.client, head.round)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=model.vector.device)

    @property
    def vector(self) -> Tensor:
        """The local model (d,), live."""
        return self._model.vector

    @property
    def buffers(self) -> State:
        """The local model's buffers, live."""
        return self._model.buffers

    @property
    def module(self) -> nn.Module:
        """The torch model whose parameters `vector` holds."""
        return self._model.module

    @property
    def layout(self) -> Layout:
        """Name -> slot and shape of the shared trainable parameters."""
        return self._model.layout

    @property
    def personal_layout(self) -> Layout:
        """Name -> slot and shape of the personal ones."""
        return self._model.personal_layout

    @property
    def mean_loss(self) -> float:
        """Mean training loss over the steps taken so far."""
        return float(self._loss_sum) / max(1, self._watched)

    def steps(
        self,
        *,
        clip: Literal["after", "before", "none"] = "after",
        yields: Literal["gradient", "direction"] = "gradient",
        part: Part = "all",
        extra: Callable[[Tensor, Any], Tensor] | None = None,
        reference: Tensor | None = None,
        reference_buffers: State | None = None,
        after: Callable[[], None] | None = None,
        repeat: int = 1,
    ) -> Iterator[Tensor]:
        """See `strategies.base.Work.steps`."""
        if part == "all" and self._head_steps:
            for _ in self._run("personal", self._head_steps):
                pass
            part = "shared"
        run = self._run(part, None, clip, yields, extra, reference, after, reference_buffers, repeat)
        for number, gradient in enumerate(run):
            self.steps_taken += number % repeat == 0
            yield gradient

    def tune(self, steps: int) -> None:
        """Take some plain steps: what a client does before it evaluates its own model."""
        for _ in self._run("all", steps):
            pass

    def _run(
        self,
        part: Part,
        budget: int | None,
        clip: Literal["after", "before", "none"] = "after",
        yields: Literal["gradient", "direction"] = "gradient",
        extra: Callable[[Tensor, Any], Tensor] | None = None,
        reference: Tensor | None = None,
        after: Callable[[], None] | None = None,
        reference_buffers: State | None = None,
        repeat: int = 1,
    ) -> Iterator[Tensor]:
        """`budget` steps, or as many as the settings say, on one part of the model."""
        model, settings, forward = self._model, self.settings, self._forward
        stepper = Stepper(settings, self._task, model, self.lr, part, yields, self.memory)
        shown = model.gradient if part == "all" else stepper.gradient
        self._clippable = stepper.gradient
        proximal = self.received["model"] if self.proximal_mu and part != "personal" else None
        # Held once: a vector of the model's size a step costs more than the sum.
        apart = torch.empty_like(model.vector) if proximal is not None else model.vector[:0]
        model.module.train()
        for batch, single in self._batches(self._planned if budget is None else budget, repeat):
            self._present = batch, single
            self._watched += 1
            self._watch(self._watched)
            with normalization_frozen(model.module, single):
                if reference is not None:
                    there = forward.gradient_at(reference, batch, reference_buffers)[: len(stepper.gradient)]
                    if clip == "before":
                        self._bound(there)
                    self.reference_gradient = there[: len(model.vector)]
                self._loss_sum += forward.backward(batch, extra)
                if settings.sam_rho:
                    forward.sharpen(batch, extra, stepper.gradient)
            if clip == "before":
                self.clip()
            if yields == "gradient":
                yield shown
            if proximal is not None:
                model.gradient.add_(torch.sub(model.vector, proximal, out=apart), alpha=self.proximal_mu)
            if clip == "after":
                self.clip()
            yield from stepper.step()
            if settings.step_decay != 1.0:
                stepper.optimizer.decay(settings.step_decay)
            if after is not None:
                after()
        model.check_views()
        if settings.moments == "keep":
            self._optimizer_state |= stepper.state()

    def clip(self) -> None:
        """Bound the gradient just yielded, with that of the personal part in training, by `clip_norm`."""
        self._bound(self._clippable)

    def _bound(self, gradient: Tensor) -> None:
        bound = self.settings.clip_norm
        if bound is not None:
            # Without a branch on the norm, so that a GPU need not wait for it.
            gradient.mul_((bound / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp_(max=1.0))

    def delta(self) -> Tensor:
        """w_local - w_received (d,); it points downhill."""
        return self._model.vector - self.received["model"]

    def gradient_at(self, point: Tensor, *, fresh: bool = False) -> Tensor:
        """See `strategies.base.Work.gradient_at`."""
        if fresh and self._fresh is None:
            self._fresh = self._batches(None, order=self._fresh_order())
        if fresh and self._fresh is not None:
            self._present = next(self._fresh)
        batch, single = self._present
        held, model = self._model.whole_gradient.clone(), self._model
        model.module.train()
        self._watch(self._watched)
        with normalization_frozen(model.module, single):
            there = self._forward.gradient_at(point, batch)[: len(model.vector)]
        model.whole_gradient.copy_(held)
        return there

    @contextmanager
    def beside(self, vector: Tensor, buffers: State) -> Iterator[None]:
        """See `strategies.base.Work.beside`."""
        model = self._model
        held = model.vector.clone(), {name: value.clone() for name, value in model.buffers.items()}
        model.load(vector, buffers)
        try:
            yield
        finally:
            model.load(*held)

    def optimizer(self, vector: Tensor, gradient: Tensor) -> Callable[[], None]:
        """See `strategies.base.Work.optimizer`."""
        settings = self.settings
        matrices = matrix_slots(self._task, self._model, "shared") if settings.optimizer in MATRIX_OPTIMIZERS else []
        optimizer = LocalOptimizer(settings, vector, gradient, self.lr, matrices)

        def step() -> None:
            optimizer.step()
            if settings.step_decay != 1.0:
                optimizer.decay(settings.step_decay)

        return step

    def full_gradient(self) -> Tensor:
        """The mean gradient over all training examples at the current local model (d,).

        In evaluation mode: it must not move BatchNorm's statistics, nor depend on the batch.
        """
        gradient, data = self._model.gradient, self._data.train
        total = torch.zeros_like(gradient)
        self._model.module.eval()
        for index in torch.split(torch.arange(len(data), device=gradient.device), self.settings.batch_size):
            self._watch(self._watched)
            self._forward.backward(self._batch(index), scale=len(index) / len(data))
            total += gradient
        self._model.module.train()
        return total

    def representation(self, vector: Tensor, buffers: State) -> Callable[[Any], Tensor]:
        """See `strategies.base.Work.representation`."""
        return self._forward.representation(vector, buffers)

    def keep(self, **state: Tensor) -> None:
        """The memory to save with this round."""
        self.kept = {name: self.own(value) for name, value in state.items()}

    def remembered(self) -> State:
        """All that this round leaves for the next: what the algorithm keeps, a kept optimizer's state and the personal
        part of the model."""
        return {**self.kept, **self._optimizer_state, **{k: v.clone() for k, v in self._model.personal.items()}}

    def upload(self, **vectors: Tensor) -> Upload:
        """Wrap what is to be sent, with the buffers as training left them."""
        if self._part != 1:  # this client's number of examples changed: see `Coordinator.admit`
            for name in self._trackers & vectors.keys() & self.memory.keys():
                vectors[name] = torch.add(vectors[name], self.memory[name], alpha=1 - self._part)
        return Upload(
            vectors=vectors,
            examples=self.num_examples,
            steps=self.steps_taken,
            lr=self.lr,
            buffers=self._model.buffers,
            metrics={"loss": self.mean_loss},
        )

    def own(self, value: Tensor) -> Tensor:
        """`value` where it is, apart from the live model, whose storage the next client overwrites."""
        live = (self._model.whole, self._model.whole_gradient, *self._model.buffers.values())
        shared = any(value.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() for v in live)
        return value.detach().clone() if shared else value.detach()

    def _batch(self, index: Tensor) -> Any:
        batch = self._data.train.batch(index)
        return channels_last(batch) if self.settings.channels_last else batch

    def _batches(
        self, most: int | None, repeat: int = 1, order: torch.Generator | None = None
    ) -> Iterator[tuple[Any, bool]]:
        """So many batches, or without end, each with whether BatchNorm could not take it (one example)."""
        taken, merges = 0, self._merges
        while most is None or taken < most:
            given = len(self._data.train), self.settings.batch_size, order or self._order, merges
            for index in epoch_batches(*given, self._model.vector.device)[: None if most is None else most - taken]:
                batch = self._task.augment(self._batch(index))
                for _ in range(repeat):
                    yield batch, merges and len(index) == 1
                taken += 1


def local_steps(
    data: ClientData, settings: LocalSettings, epochs: int = 0, most: int = 0, merge_single: bool = False
) -> int:
    """How many local steps a client takes in a round: those of the settings, or of so many `epochs`; at most `most`.

    By default a last batch of one counts as its own, as it does without BatchNorm.
    """
    given = None if epochs else data.steps or settings.steps  # never 0
    per_epoch = batches_per_epoch(len(data.train), settings.batch_size, merge_single)
    whole = given or (epochs or settings.epochs) * per_epoch
    return min(whole, most) if most else whole
