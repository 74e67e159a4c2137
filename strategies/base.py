"""The one abstraction: an algorithm is a Flower `Strategy` whose whole mathematics is four pure methods.

`init`, `broadcast` and `aggregate` run on the server, `local` on the client. Instances hold hyperparameters only;
everything that changes is in a `State`, so a checkpoint is a file of tensors and a round is a pure function.
Carrying them over messages is written once: `strategies/course.py`, and below for Flower's own loop.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, dataclass_transform

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn

from common import server_optimizers
from common.compression import Kind
from common.errors import SettingsError
from common.experiment import Experiment, ServerSettings
from common.tasks.base import Task
from common.vector import Layout, State, norm, weighted_sum

if TYPE_CHECKING:
    from strategies.flower_loop import FlowerLoop

C = TypeVar("C")
MemoryKind = Literal["none", "bound", "own"]
Part = Literal["all", "shared", "personal"]


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
def hyperparameters(cls: type[C]) -> type[C]:
    """Make an algorithm's class a strict dataclass: fields are hyperparameters, checked and never coerced silently."""
    return pydantic_dataclass(kw_only=True, config=ConfigDict(extra="forbid", strict=True))(cls)  # type: ignore[return-value]


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
    copies: State = field(default_factory=dict)
    """What the server holds of this client's uploads, for differences to it (EF21)."""
    layout: Layout = field(default_factory=dict)
    """On the server: name -> slot and shape of the model, for layer-wise methods."""


class Work(Protocol):
    """What a client offers to `local`: its data, one optimizer loop and its memory. See `client/work.py`.

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
        after: Callable[[], None] | None = None,
    ) -> Iterator[Tensor]:
        """Run the local steps, yielding each raw gradient (d,) before the optimizer sees it; change it in place.

        With `clip="before"` the gradient is clipped before it is yielded, else after; with "none" only where `clip()`
        is called. The proximal term is added after the yield in any case. With `yields="direction"` the optimizer comes
        first and its direction d (d,) of the step w <- w - lr d is yielded. With `part` only that part of the model
        moves, and its gradient is yielded.

        extra: called with the input of the model's output layer (b, r) and the batch; its value joins the loss.
        reference: a model (d,); `reference_gradient` is the gradient there, on the same batch and dropout masks, with
          `clip="before"` clipped too.
        after: called after each step.
        """

    def clip(self) -> None:
        """Bound the gradient just yielded by `clip_norm`, in place."""

    def delta(self) -> Tensor:
        """w_local - w_received, a new vector (d,); it points downhill."""

    def full_gradient(self) -> Tensor:
        """The mean gradient over all training examples at the current local model, a new vector (d,)."""

    def representation(self, vector: Tensor, buffers: State) -> Callable[[Any], Tensor]:
        """Of another model (d,) and its buffers, frozen and in evaluation mode: batch -> input of its output layer
        (b, r)."""

    def unit_response(self) -> float:
        """a_i: how far the local optimizer moves, in units of lr, when every gradient is 1 (FedNova's ||a_i||_1)."""

    def keep(self, **state: Tensor) -> None:
        """The memory to save with this round; it counts once the server accepts the upload."""

    def upload(self, **vectors: Tensor) -> Upload:
        """Wrap what is to be sent."""


@hyperparameters
class FederatedStrategy(Strategy):
    """Base of all algorithms.

    weights: "data" averages model changes by n_i over the cohort and trackers by n_i/n, for the data-weighted
    objective; "uniform" by 1/|S| and 1/N, for the plain mean over clients. One weighting for both: mixing them moves
    the fixed point away from both minimizers.
    server: the optimizer that takes the averaged change.
    """

    weights: Literal["uniform", "data"] = "data"
    server: ServerSettings = ServerSettings()

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector"}
    """Name -> kind of all that a client uploads; a reply that differs is refused. "increment": a vector that is added
    up for ever, as the change of a tracker is."""
    survey: ClassVar[Mapping[str, Kind]] = {}
    """The same of a first exchange within the round (Mime); empty: there is none. See `look` and `inform`."""
    trackers: ClassVar[tuple[str, ...]] = ()
    """Entries of the server state that are averages over *all* clients' memories."""
    memory: ClassVar[MemoryKind] = "none"
    """"bound": client memory belongs to server state (trackers, duals), losing it starts a new generation;
    "own": it is the client's own affair and starts empty when lost."""

    def init(self, model: Tensor) -> State:
        """The server state before round 1 for initial weights (d,)."""
        return {"model": model, **server_optimizers.start(self.server, model)}

    def broadcast(self, state: State) -> State:
        """What every sampled client receives."""
        return {"model": state["model"]}

    @abstractmethod
    def local(self, work: Work) -> Upload:
        """One client's round."""

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """The next server state; `state` is not changed. Default: a server step along the mean of "delta"."""
        return state | server_optimizers.step(self.server, state, cohort_mean(uploads, "delta"))

    def assign(self, state: State, sampled: Sequence[str], round: int) -> Mapping[str, Mapping[str, float]]:
        """Scalars that differ by client: name -> {key: value}. A function of its arguments and the seed in the state
        alone."""
        return {}

    def expects(self, assigned: Mapping[str, float]) -> Mapping[str, Kind]:
        """`payload` of a client that was assigned these scalars."""
        return self.payload

    def look(self, work: Work) -> Upload:
        """The client's part of a first exchange: what `survey` names, before any training."""
        raise NotImplementedError

    def inform(self, state: State, uploads: Sequence[Upload]) -> State:
        """The server state of this round after the first exchange; `broadcast` and `aggregate` then see it."""
        raise NotImplementedError

    def lean(self) -> tuple[str, ...]:
        """Entries of the broadcast that a client which holds the last one need not be sent; see `restore`."""
        return ()

    def restore(self, held: State, received: State) -> State:
        """On a client: the entries `lean` of this broadcast, to the bit, from those of the last one (`held`) and from
        what was sent of this one. A checksum guards it."""
        raise NotImplementedError

    def reset(self, state: State) -> State:
        """The state of a new generation: model and server moments stay, all that is bound to client memory is zero."""
        kept = {name: value for name, value in state.items() if name == "model" or name.startswith("server.")}
        return self.init(state["model"]) | kept

    def memory_kind(self, experiment: Experiment) -> MemoryKind:
        """What client memory is with all of an experiment's settings: the algorithm's own, and what compression, a kept
        optimizer and personal parts remember."""
        lossy = experiment.compression.up not in ("none", "identity")
        feedback = experiment.compression.feedback
        if self.memory == "bound" or (lossy and feedback == "ef21"):
            return "bound"
        own = (
            self.memory == "own",
            lossy and feedback == "ef14",
            experiment.local.moments == "keep",
            bool(experiment.personal.parts),
            bool(self.lean()) or experiment.compression.down in ("top-k", "random-k", "sign"),
        )
        return "own" if any(own) else "none"

    def settle(self, experiment: Experiment) -> Experiment:
        """The experiment with the settings that the algorithm derives from others written out."""
        return experiment

    def check(self, experiment: Experiment) -> None:
        """Raise SettingsError for a pair of settings without meaning."""

    def check_model(self, task: Task, model: nn.Module) -> None:
        """Raise SettingsError for a model that the algorithm cannot train."""

    def check_upload(self, vectors: State) -> None:
        """Raise ValueError for an upload that has no meaning, beyond names, shapes, dtypes and finite values: that
        client is dropped for the round."""

    def caution(self, experiment: Experiment, steps: int) -> str | None:
        """A warning to show before round 1; `steps` is the largest number of local steps that a client announced."""
        return None

    # Flower's own loop, `strategy.start(grid, arrays, train_config=config_of(experiment))`. Our loop,
    # `server/rounds.py`, uses the same course and adds quorum, deadline and checkpoints.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and address them."""
        if server_round == 1:
            self.__dict__.pop("_loop", None)
        return self._flower(config, arrays, grid).open_round(server_round, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and make the next model; without a valid reply the model stays."""
        return self._flower().close_round(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all clients that hold evaluation examples."""
        return self._flower().open_evaluation(server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Example-weighted means of the clients' metrics."""
        return self._flower().close_evaluation(replies)

    def summary(self) -> None:
        """Print the hyperparameters."""
        print(self)

    def _flower(
        self, config: ConfigRecord | None = None, arrays: ArrayRecord | None = None, grid: Grid | None = None
    ) -> FlowerLoop:
        """The course that Flower's loop drives; a strategy instance itself holds no state of a run."""
        from strategies.flower_loop import FlowerLoop

        if "_loop" not in self.__dict__:
            if config is None or arrays is None or grid is None:
                raise RuntimeError("configure_train comes before the other steps of a round")
            self.__dict__["_loop"] = FlowerLoop.begin(self, config, arrays, grid)
        loop: FlowerLoop = self.__dict__["_loop"]
        return loop


def cohort_mean(uploads: Sequence[Upload], name: str) -> Tensor:
    """Mean of an uploaded vector over the cohort, in name order, accumulated in float64."""
    return weighted_sum([u.vectors[name] for u in uploads], [u.weight for u in uploads])


def tracker_change(uploads: Sequence[Upload], name: str) -> Tensor:
    """What the uploads add to an average over all clients: sum of tracker_weight_i * vector_i."""
    return weighted_sum([u.vectors[name] for u in uploads], [u.tracker_weight for u in uploads])


def require_sgd(algorithm: str, experiment: Experiment, why: str) -> None:
    """Refuse adaptive local optimizers."""
    if experiment.local.adaptive:
        raise SettingsError(
            f"strategy.name = {algorithm!r} has no meaning with local.optimizer = "
            f"{experiment.local.optimizer!r}: {why}; allowed: 'sgd' (with momentum, nesterov, proximal_mu, step_decay)"
        )


def all_finite(state: State) -> bool:
    """Whether every number of a state is finite."""
    return all(math.isfinite(norm(value)) for value in state.values())


__all__ = [
    "FederatedStrategy",
    "Kind",
    "MemoryKind",
    "Part",
    "Upload",
    "Work",
    "all_finite",
    "cohort_mean",
    "hyperparameters",
    "require_sgd",
    "tracker_change",
]
