"""Every client trains alone: what a federation has to be better than."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import State
from strategies.base import FederatedStrategy, Kind, Upload, Work, hyperparameters, keep_own, load_own, own_model


@hyperparameters
class LocalOnly(FederatedStrategy):
    """v_i <- v_i after K local steps on f_i, from the common start; the server's model stays the start.

    v_i lies in the client's memory and is what it evaluates; nothing of it leaves the site, neither weights nor
    BatchNorm statistics. What is sent is a reply without vectors: the number of steps and the training loss. A client
    trains in the rounds in which it is sampled, with the batches and random numbers of FedAvg: a federation of one
    client is FedAvg, to the rounding of x + (y - x). After the loss of its memory a client begins again.

    One who was never sampled evaluates the start. weights has no meaning here, as nothing is averaged.
    """

    weights: Literal["uniform", "data"] = "data"

    payload: ClassVar[Mapping[str, Kind]] = {}
    memory: ClassVar[Literal["none", "bound", "own"]] = "own"
    personal: ClassVar[bool] = True

    def local(self, work: Work) -> Upload:
        """K steps on the client's own model."""
        with work.beside(*own_model(work)):
            for _ in work.steps():
                pass
            keep_own(work)
        return work.upload()

    def personalize(self, work: Work) -> None:
        """v_i in place of the start."""
        load_own(work)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """As it was."""
        return dict(state)

    def check(self, experiment: Experiment) -> None:
        """The server does nothing."""
        if (self.server.optimizer, self.server.lr) != ("sgd", 1.0):
            raise SettingsError("[server] beside strategy.name = 'local-only', whose server does nothing: leave it out")
