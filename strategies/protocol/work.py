"""Between an algorithm's client half and the client: the work that is offered, and the upload that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from common.experiment import LocalSettings
from common.vector import Layout, State

Part = Literal["all", "shared", "personal"]


@dataclass
class Upload:
    """What one client sends, and how much it counts.

    `weight` adds up to 1 over the accepted uploads of a round (for averages over the cohort); `tracker_weight` is
    1/N under uniform weighting and n_i/n under data weighting (for averages over all clients). `vectors` are
    read-only on the server: they lie in the received message.
    """

    vectors: State
    name: str = ""
    examples: int = 0
    steps: int = 0
    lr: float = 0.0
    weight: float = 0.0
    tracker_weight: float = 0.0
    buffers: State = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    """On the server: L2 norm of each vector and buffer, by which uploads are held against each other."""
    copies: State = field(default_factory=dict)
    """What the server holds of this client's uploads, for differences to it (EF21)."""
    layout: Layout = field(default_factory=dict)
    """On the server: name -> slot and shape of the model, for layer-wise methods."""
    settings: LocalSettings = field(default_factory=LocalSettings)
    """On the server: `[local]`, which the steps were taken with."""


class Work(Protocol):
    """What a client offers to `local`: its data, one optimizer loop and its memory. See `client/training/work.py`.

    "The model" is what is shared (d,). Parts that `[personal]` leaves with the client train along unseen.
    """

    received: State
    """The broadcast; "model" (d,) is loaded already. Read-only."""
    memory: State
    """This client's own state as of its last accepted upload; empty before the first. Read-only."""
    share: float
    """p_i = n_i / n: this client's part of all training examples."""
    num_examples: int
    lr: float
    """eta_l of this round, before any decay within the round."""
    settings: LocalSettings
    """`[local]`."""
    round: int
    """t, from 1."""
    steps_taken: int
    accepted_last_round: bool
    """Whether this client's upload of round t-1 entered the aggregate."""
    assigned: Mapping[str, float]
    """Scalars for this client alone, from `assign`."""
    proximal_mu: float
    """mu of a proximal term (mu/2)|w - w_start|^2, added after the generator's yield; may be set before `steps`."""
    reference_gradient: Tensor
    """(d,): with `steps(reference=...)`, the gradient there on the present batch."""

    @property
    def vector(self) -> Tensor:
        """The local model (d,), live."""

    @property
    def buffers(self) -> State:
        """The local model's buffers, live."""

    @property
    def module(self) -> nn.Module:
        """The torch model whose parameters `vector` holds."""

    @property
    def layout(self) -> Layout:
        """Name -> slot and shape, for layer-wise methods."""

    @property
    def personal_layout(self) -> Layout:
        """The same of the personal part."""

    @property
    def mean_loss(self) -> float:
        """Mean training loss over the steps taken so far."""

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
        """Run the local steps, yielding each raw gradient (d,) before the optimizer sees it; change it in place.

        With `clip="before"` the gradient is clipped before it is yielded, else after; with "none" only where `clip()`
        is called. The proximal term is added after the yield in any case. With `yields="direction"` the optimizer comes
        first and its direction d (d,) of the step w <- w - lr d is yielded. With `part` only that part of the model
        moves, and its gradient is yielded.

        extra: called with the input of the model's output layer (b, r) and the batch; its value joins the loss.
        reference: a model (d,); `reference_gradient` is the gradient there, on the same batch and dropout masks, with
          `clip="before"` clipped too.
        reference_buffers: that model's own buffers, which its passes read and move; without them it reads this model's
          and moves none.
        after: called after each step.
        repeat: how many steps are taken on each batch, one after the other; `steps_taken` counts batches.
        """

    def clip(self) -> None:
        """Bound the gradient just yielded by `clip_norm`, in place."""

    def delta(self) -> Tensor:
        """w_local - w_received, a new vector (d,); it points downhill."""

    def gradient_at(self, point: Tensor, *, fresh: bool = False) -> Tensor:
        """The mean gradient (d,) at another model (d,) on the batch in hand, that of the present step; with `fresh`
        another one is taken in hand first, from an order of its own. In a vector that the next call writes anew.
        Nothing else changes: not the model, nor its buffers, nor the gradient that was yielded."""

    def beside(self, vector: Tensor, buffers: State) -> AbstractContextManager[None]:
        """Inside, `vector` and `buffers` of the work are another model's, a copy of these (d,), and `steps` trains it.
        Afterwards they are as they were before."""

    def optimizer(self, vector: Tensor, gradient: Tensor) -> Callable[[], None]:
        """The local optimizer, new, on another model (d,) and its gradient (d,), both live: each call is a step."""

    def full_gradient(self) -> Tensor:
        """The mean gradient over all training examples at the current local model, a new vector (d,)."""

    def representation(self, vector: Tensor, buffers: State) -> Callable[[Any], Tensor]:
        """Of another model (d,) and its buffers, frozen and in evaluation mode: batch -> input of its output layer
        (b, r)."""

    def keep(self, **state: Tensor) -> None:
        """The memory to save with this round; it counts once the server accepts the upload."""

    def upload(self, **vectors: Tensor) -> Upload:
        """Wrap what is to be sent."""
