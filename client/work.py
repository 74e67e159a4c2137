"""Local training: batches, loss, clipping, mixed precision, proximal term and optimizer, in one generator.

An algorithm's `local` sees each raw gradient as one flat vector before the optimizer does and changes it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from client.batches import batches_per_epoch, channels_last, epoch_batches, has_normalization, normalization_frozen
from common.experiment import LocalSettings
from common.seeds import generator
from common.tasks.base import ClientData, Task
from common.vector import FlatModel, Layout, State
from strategies.base import Upload

# Of the loss in float16, as powers of two; doubled after so many steps without an overflow.
FIRST_SCALE, LEAST_SCALE, GROWTH_STEPS = 2.0**16, 2.0**-24, 2000


class LocalWork:
    """One client's work in one round; implements `strategies.base.Work`."""

    def __init__(
        self,
        *,
        task: Task,
        model: FlatModel,
        data: ClientData,
        settings: LocalSettings,
        received: State,
        memory: State,
        seed: int,
        name: str,
        round: int,
        lr: float,
        share: float,
        accepted_last_round: bool,
        assigned: Mapping[str, float],
        watch: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """`watch` is told the number of each step before it is taken, and may raise."""
        self.received = received
        self.memory = memory
        self.kept: State = {}
        self.share = share
        self.num_examples = len(data.train)
        self.lr = lr
        self.round = round
        self.accepted_last_round = accepted_last_round
        self.assigned = assigned
        self.proximal_mu = settings.proximal_mu
        self.steps_taken = 0
        self._task = task
        self._model = model
        self._data = data
        self._settings = settings
        self._watch = watch
        self._scale = FIRST_SCALE
        self._good_steps = 0
        self._order = generator(seed, "batches", name, round)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=model.vector.device)

    @property
    def vector(self) -> Tensor:
        """The local model (d,), live."""
        return self._model.vector

    @property
    def layout(self) -> Layout:
        """Name -> slot and shape of the trainable parameters."""
        return self._model.layout

    @property
    def mean_loss(self) -> float:
        """Mean training loss over the steps taken so far."""
        return float(self._loss_sum) / max(1, self.steps_taken)

    def steps(self, *, clip: Literal["after", "before"] = "after") -> Iterator[Tensor]:
        """See `strategies.base.Work.steps`."""
        model, settings, gradient = self._model, self._settings, self._model.gradient
        leaf = nn.Parameter(model.vector)
        leaf.grad = gradient
        optimizer = make_optimizer(settings, [leaf], self.lr)
        proximal = self.received["model"] if self.proximal_mu else None
        model.module.train()
        for batch, single in self._batches():
            self._watch(self.steps_taken + 1)
            with normalization_frozen(model.module, single):
                loss = self.forward(batch)
                self._backward(loss)
            self._loss_sum += loss.detach()
            del loss  # and the graph with it, before the next batch makes its own
            if clip == "before":
                self._clip(gradient)
            self.steps_taken += 1
            yield gradient
            if proximal is not None:
                gradient.add_(model.vector - proximal, alpha=self.proximal_mu)
            if clip == "after":
                self._clip(gradient)
            optimizer.step()
            if settings.step_decay != 1.0:
                for group in optimizer.param_groups:
                    group["lr"] *= settings.step_decay
        model.check_views()

    def forward(self, batch: Any) -> Tensor:
        """The task's mean loss over a batch, under autocast if the settings say so."""
        if self._settings.precision == "float32":
            return self._task.loss(self._model.module, batch)
        with torch.autocast(self._model.vector.device.type, dtype=getattr(torch, self._settings.precision)):
            return self._task.loss(self._model.module, batch)

    def _backward(self, loss: Tensor) -> None:
        """The gradient of a loss, in place of the one before.

        float16 gradients underflow: there the loss is scaled up by a power of two, which is exact. A scale that
        overflows is halved and the same batch goes backward again, through the same forward pass, so that no
        algorithm sees a gradient that is not finite and none is left out. The scale starts anew each round: a round
        is a function of what it was given. Raises ArithmeticError if the loss itself is not finite.
        """
        gradient = self._model.gradient
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

    def delta(self) -> Tensor:
        """w_local - w_received (d,); it points downhill."""
        return self._model.vector - self.received["model"]

    def full_gradient(self) -> Tensor:
        """The mean gradient over all training examples at the current local model (d,).

        In evaluation mode: it must not move BatchNorm's statistics, nor depend on the batch.
        """
        gradient, data = self._model.gradient, self._data.train
        total = torch.zeros_like(gradient)
        self._model.module.eval()
        for index in torch.split(torch.arange(len(data)), self._settings.batch_size):
            self._watch(self.steps_taken)
            self._backward(self.forward(self._batch(index)) * (len(index) / len(data)))
            total += gradient
        self._model.module.train()
        return total

    def unit_response(self) -> float:
        """a_i of FedNova for the steps taken so far."""
        return unit_response(self._settings, self.proximal_mu, self.lr, self.steps_taken)

    def keep(self, **state: Tensor) -> None:
        """The memory to save with this round."""
        self.kept = {name: self._own(value) for name, value in state.items()}

    def upload(self, **vectors: Tensor) -> Upload:
        """Wrap what is to be sent, with the buffers as training left them."""
        return Upload(
            vectors=vectors,
            examples=self.num_examples,
            steps=self.steps_taken,
            lr=self.lr,
            buffers=self._model.buffers,
            metrics={"loss": self.mean_loss},
        )

    def _own(self, value: Tensor) -> Tensor:
        """`value` where it is, apart from the live model, whose storage the next client overwrites."""
        live = (self._model.vector, self._model.gradient, *self._model.buffers.values())
        shared = any(value.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() for v in live)
        return value.detach().clone() if shared else value.detach()

    def _batch(self, index: Tensor) -> Any:
        batch = self._data.train.batch(index)
        return channels_last(batch) if self._settings.channels_last else batch

    def _clip(self, gradient: Tensor) -> None:
        bound = self._settings.clip_norm
        if bound is not None:
            # Without a branch on the norm, so that a GPU need not wait for it.
            gradient.mul_((bound / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp_(max=1.0))

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """The round's batches, each with whether BatchNorm could not take it (one example)."""
        settings, count = self._settings, len(self._data.train)
        has_norm = has_normalization(self._model.module)
        wanted = self._data.steps or settings.steps
        taken = 0
        while wanted is None or taken < wanted:
            for index in epoch_batches(count, settings.batch_size, self._order, merge_single=has_norm):
                yield self._batch(index), has_norm and len(index) == 1
                taken += 1
                if taken == wanted:
                    return
            if wanted is None and taken >= settings.epochs * batches_per_epoch(count, settings.batch_size, has_norm):
                return


def local_steps(data: ClientData, settings: LocalSettings) -> int:
    """How many local steps a client takes a round (with a last batch of one counted as its own)."""
    given = data.steps or settings.steps
    return given or settings.epochs * batches_per_epoch(len(data.train), settings.batch_size, False)


def make_optimizer(settings: LocalSettings, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """A fresh local optimizer: its moments live for one round."""
    common: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay, "foreach": False}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, nesterov=settings.nesterov, **common)
    common |= {"betas": settings.betas, "eps": settings.eps}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **common)
    return torch.optim.Adam(parameters, amsgrad=settings.optimizer == "amsgrad", **common)


@lru_cache(maxsize=4096)
def unit_response(settings: LocalSettings, proximal_mu: float, lr: float, steps: int) -> float:
    """||a||_1: the displacement, in units of lr, after `steps` steps on the gradient 1.

    Runs the optimizer's own recursion on one float64 number, so momentum, proximal term and decayed rates compound
    as they do in training. Weight decay is part of the gradient, not of the response.
    """
    leaf = nn.Parameter(torch.zeros((), dtype=torch.float64))
    leaf.grad = torch.zeros_like(leaf)
    optimizer = make_optimizer(settings.model_copy(update={"weight_decay": 0.0}), [leaf], lr)
    for _ in range(steps):
        leaf.grad.fill_(1.0).add_(leaf.detach(), alpha=proximal_mu)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= settings.step_decay
    return -float(leaf.detach()) / lr
