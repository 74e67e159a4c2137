"""FedNova (Wang et al., arXiv 2007.07481): normalized averaging for clients that take unequal steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from common import server_optimizers
from common.experiment import Experiment
from common.vector import State, weighted_sum
from strategies.base import FederatedStrategy, Kind, Upload, Work, hyperparameters, require_sgd


@hyperparameters
class FedNova(FederatedStrategy):
    """d_i = (x - x_i)/(eta a_i), tau_eff = sum p_i a_i, x <- x - eta tau_eff sum p_i d_i (p_i normalized over S).

    In terms of Delta_i = x_i - x the rate cancels: D = tau_eff sum p_i Delta_i / a_i.
    a_i = ||a_i||_1 is the response of the local optimizer to unit gradients. It is found by running the optimizer's
    own recursion on a scalar, so that momentum, proximal term, decayed rates and all of them together are right:
    SGD tau; momentum rho (tau - rho (1 - rho^tau)/(1 - rho))/(1 - rho); proximal with alpha = eta mu
    (1 - (1 - alpha)^tau)/alpha; decay gamma (1 - gamma^tau)/(1 - gamma). The official code counts momentum and
    proximal term twice when both are on, and then uses sum p_i tau_i as tau_eff.
    Weight decay counts as part of the gradient, not of a_i. Adam's steps are not linear in its gradients: refused.
    """

    weights: Literal["uniform", "data"] = "data"
    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector", "response": "scalar"}

    def local(self, work: Work) -> Upload:
        """K local steps; also sends a_i."""
        for _ in work.steps():
            pass
        return work.upload(delta=work.delta(), response=torch.tensor(work.unit_response(), dtype=torch.float64))

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """A server step along D = tau_eff sum p_i Delta_i / a_i."""
        responses = [float(u.vectors["response"]) for u in uploads]
        effective = sum(u.weight * a for u, a in zip(uploads, responses, strict=True))
        scales = [u.weight * effective / a for u, a in zip(uploads, responses, strict=True)]
        change = weighted_sum([u.vectors["delta"] for u in uploads], scales)
        return state | server_optimizers.step(self.server, state, change)

    def check_upload(self, vectors: State) -> None:
        """a_i divides."""
        if not float(vectors["response"]) > 0:
            raise ValueError(f"response a_i = {float(vectors['response'])} is not positive")

    def check(self, experiment: Experiment) -> None:
        """Only optimizers that are linear in the gradients have an a_i."""
        require_sgd("fednova", experiment, "its steps are not linear in the gradients, so ||a_i||_1 is undefined")
