"""FedExP (Jhunjhunwala, Wang and Joshi, ICLR 2023, arXiv 2301.09604): the server's step from the clients' spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import State, norm
from strategies.base import FederatedStrategy, Upload, Work, cohort_mean, hyperparameters


@hyperparameters
class FedExP(FederatedStrategy):
    """FedAvg with x <- x + eta_g D, D the cohort's mean change of M clients, and

        eta_g = max(1, sum_S |Delta_i|^2 / (2 M (|D|^2 + eps))).

    The more the clients' changes differ, the longer the step; at 1 it is FedAvg's. With weights = "data" both means are
    by examples (the paper's weighted form).

    eps (default 1e-3, in squared units of the model): bounds the step where D vanishes. At rest, with Delta_i that
      cancel, the formula is S/(2 eps): steps are long there, and the paper evaluates the mean of the last two models,
      which nothing here does. A large eps is FedAvg.
    server: sgd with lr = 1 alone, as the formula is the rate.
    """

    weights: Literal["uniform", "data"] = "uniform"
    eps: float = Field(1e-3, gt=0)

    def local(self, work: Work) -> Upload:
        """K local steps."""
        for _ in work.steps():
            pass
        return work.upload(delta=work.delta())

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """A step of the adaptive length."""
        change = cohort_mean(uploads, "delta")
        squares = sum(upload.weight * norm(upload.vectors["delta"]) ** 2 for upload in uploads)
        rate = max(1.0, squares / (2 * (norm(change) ** 2 + self.eps)))
        return state | {"model": state["model"].add(change, alpha=rate)}

    def check(self, experiment: Experiment) -> None:
        """One rate."""
        if (self.server.optimizer, self.server.lr) != ("sgd", 1.0):
            raise SettingsError(
                f"server.optimizer = {self.server.optimizer!r} with server.lr = {self.server.lr:g} beside "
                "strategy.name = 'fedexp', which sets the server's rate itself; allowed: 'sgd' with lr = 1"
            )
