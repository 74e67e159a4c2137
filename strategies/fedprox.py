"""FedProx (Li et al., arXiv 1812.06127)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.errors import SettingsError
from common.experiment import Experiment
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters


@hyperparameters
class FedProx(FederatedStrategy):
    """FedAvg on the local objectives f_i(y) + (mu/2) |y - x|^2: y <- y - eta (g_i(y) + mu (y - x)).

    mu (mu >= 0, default 0.01; the paper tries 0.001 to 1): the gradient carries mu, not mu/2, and x is the model
    that the round started from. The paper samples clients by p_k and averages uniformly; here clients are sampled
    uniformly, so the data-weighted average keeps the paper's objective. mu = 0 is FedAvg.
    """

    weights: Literal["uniform", "data"] = "data"
    mu: float = Field(0.01, ge=0)

    def local(self, work: Work) -> Upload:
        """K local steps with the proximal term, which the work adds to the raw gradient before it clips their sum."""
        work.proximal_mu = self.mu
        for _ in work.steps():
            pass
        return work.upload(delta=work.delta())

    def check(self, experiment: Experiment) -> None:
        """Two proximal terms at once are a mistake."""
        if experiment.local.proximal_mu:
            raise SettingsError(
                f"local.proximal_mu = {experiment.local.proximal_mu} beside strategy.name = 'fedprox': "
                "set strategy.mu alone"
            )
