"""FedAvg (McMahan et al., arXiv 1602.05629) and, with a server optimizer, the family of FedOpt."""

from __future__ import annotations

from typing import Literal

from strategies.base import FederatedStrategy, Upload, Work, hyperparameters


@hyperparameters
class FedAvg(FederatedStrategy):
    """x <- ServerOptimizer(x, D), D = sum_S n_i Delta_i / sum_S n_i, Delta_i = x_i^K - x after K local steps.

    With `[server] optimizer = "sgd"`: x + eta_g D. With "momentum" it is FedAvgM (Hsu et al., arXiv 1909.06335,
    undamped), with "adagrad" | "adam" | "yogi" FedOpt (Reddi et al., arXiv 2003.00295), with "ams" FedAMS
    (arXiv 2205.02719). Any local optimizer; with "adam" it is LocalAdam, its moments fresh in every round.
    Fixed point with unequal steps tau_i on quadratics: not the minimizer but sum(p tau a e) / sum(p tau a).
    """

    weights: Literal["uniform", "data"] = "data"

    def local(self, work: Work) -> Upload:
        """K plain local steps."""
        for _ in work.steps():
            pass
        return work.upload(delta=work.delta())
