"""An algorithm: four pure methods, and the declarations and checks beside them.

`init`, `broadcast` and `aggregate` run on the server, `local` on the client. Instances hold hyperparameters only;
everything that changes is in a `State`, so a checkpoint is a file of tensors and a round is a pure function. Nothing
here knows of messages: carrying the four methods over them is written once, in `coordinator.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor, nn

from common.compression.feedback import Kind
from common.experiment import Experiment, ServerSettings
from common.tasks.base import Task
from common.vector import State, norm, weighted_sum
from strategies import server_optimizers
from strategies.protocol.work import Upload, Work

C = TypeVar("C")
MemoryKind = Literal["none", "bound", "own"]


CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
def hyperparameters(cls: type[C]) -> type[C]:
    """Make an algorithm's class a strict dataclass: fields are hyperparameters, checked and never coerced silently."""
    return pydantic_dataclass(kw_only=True, config=CONFIG)(cls)  # type: ignore[return-value]


@hyperparameters
class Algorithm(ABC):
    """Base of all algorithms, whatever carries them.

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
    """The same of a first exchange within the round (Mime), under names of its own; empty: there is none. See `look`
    and `inform`."""
    trackers: ClassVar[tuple[str, ...]] = ()
    """Entries of the server state that are averages over *all* clients' memories."""
    rescales: ClassVar[bool] = False
    """Whether each tracker is moved by uploads of its own name through `tracker_change`, and by nothing else: then it
    can follow a client whose number of examples changes (`Coordinator.admit`)."""
    passes: ClassVar[int] = 1
    """How often `local` goes through the local steps. A reply of more steps is refused: they may divide."""
    memory: ClassVar[MemoryKind] = "none"
    """"bound": client memory belongs to server state (trackers, duals), losing it starts a new generation;
    "own": it is the client's own affair and starts empty when lost."""

    simulated: ClassVar[bool] = False
    """Whether it needs all clients' data in one place (see `arrange`): sites cannot run it."""
    personal: ClassVar[bool] = False
    """Whether each client has a whole model of its own, kept in its memory or made of the server's by `personalize`: it
    is what a client evaluates, and the server's alone is not."""

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

    def assign(self, state: State, sampled: Sequence[str], round: int, seed: int) -> Mapping[str, Mapping[str, float]]:
        """Scalars that differ by client: name -> {key: value}. A function of its arguments alone; `seed` is the
        run's."""
        return {}

    def expects(self, assigned: Mapping[str, float]) -> Mapping[str, Kind]:
        """`payload` of a client that was assigned these scalars."""
        return self.payload

    def describe(self, state: State) -> Mapping[str, float]:
        """Scalars of its own about the state after a round, by name: in the history as "strategy", in trackers and the
        report. A function of its argument alone; it changes nothing."""
        return {}

    def personalize(self, work: Work) -> None:
        """With `personal`, on a client before it evaluates: make the loaded model, the server's, its own. Nothing is
        kept or sent. Not called where there is no training example, so no memory either."""

    def look(self, work: Work) -> Upload:
        """The client's part of a first exchange: what `survey` names, before any training. A function of the work
        alone: a client whose compression remembers does it again in the second exchange, as it kept nothing.
        """
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
        lossy = experiment.compression.lossy
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

    def own_models(self, experiment: Experiment) -> bool:
        """Whether clients evaluate models of their own, with all of an experiment's settings."""
        return self.personal or experiment.personal.active

    def settle(self, experiment: Experiment) -> Experiment:
        """The experiment with the settings that the algorithm derives from others written out. A function of its
        argument and the hyperparameters; what is settled stays as it is."""
        return experiment

    def check(self, experiment: Experiment) -> None:
        """Raise SettingsError for a pair of settings without meaning."""

    def arrange(self, task: Task, experiment: Experiment) -> Task:
        """The task of a settled experiment as this algorithm trains it, on the server and on every client: usually
        itself. Raises SettingsError for one that it cannot train."""
        return task

    def check_model(self, task: Task, model: nn.Module) -> None:
        """Raise SettingsError for a model that the algorithm cannot train."""

    def check_upload(self, upload: Upload) -> None:
        """Raise ValueError for an upload that has no meaning, beyond names, shapes, dtypes, finite values and the bound
        of its steps: that client is dropped for the round."""

    def caution(self, experiment: Experiment, steps: int) -> str | None:
        """A warning to show before round 1; `steps` is the largest number of local steps that a client announced."""
        return None


def cohort_mean(uploads: Sequence[Upload], name: str) -> Tensor:
    """Mean of an uploaded vector over the cohort, in name order, accumulated in float64."""
    return weighted_sum([u.vectors[name] for u in uploads], [u.weight for u in uploads])


def tracker_change(uploads: Sequence[Upload], name: str) -> Tensor:
    """What the uploads add to an average over all clients: sum of tracker_weight_i * vector_i."""
    return weighted_sum([u.vectors[name] for u in uploads], [u.tracker_weight for u in uploads])


def all_finite(state: State) -> bool:
    """Whether every number of a state is finite."""
    return all(math.isfinite(norm(value)) for value in state.values())
