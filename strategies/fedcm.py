"""FedCM (Xu et al., arXiv 2106.10874), which is also the FedAvg-M of Cheng et al. (arXiv 2306.16504)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import State
from strategies import server_optimizers
from strategies.base import (
    FederatedStrategy,
    Upload,
    Work,
    cohort_mean,
    damped_decay,
    hyperparameters,
    require_sgd,
)


@hyperparameters
class FedCM(FederatedStrategy):
    """Client-level momentum: y <- y - eta (alpha g_i(y) + (1 - alpha) m); m <- mean_S (x - y_i)/(eta K).

    alpha (0 < alpha <= 1, default 0.1): *small* alpha is strong momentum; Cheng et al. call it beta. alpha = 1 is
    FedAvg. m = 0 at the start, so round 1 moves by alpha times a FedAvg round. m is divided by the rate of the round
    in which it was made and by the cohort's mean number of steps K. FL-Simulator mixes before clipping, as here;
    FedAdamW's repository clips first.
    """

    weights: Literal["uniform", "data"] = "uniform"
    alpha: float = Field(0.1, gt=0, le=1)

    def init(self, model: Tensor) -> State:
        """m = 0."""
        return {**super().init(model), "momentum": torch.zeros_like(model)}

    def broadcast(self, state: State) -> State:
        """x and m."""
        return {"model": state["model"], "momentum": state["momentum"]}

    def local(self, work: Work) -> Upload:
        """K steps along the mix of the gradient and m."""
        momentum = work.received["momentum"] * (1 - self.alpha)
        for gradient in work.steps():
            gradient.mul_(self.alpha).add_(momentum)
        return work.upload(delta=work.delta())

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; m from the displacement per local step."""
        change = cohort_mean(uploads, "delta")
        steps = sum(u.weight * u.steps for u in uploads)
        momentum = change / (-uploads[0].lr * steps)
        return state | server_optimizers.step(self.server, state, change) | {"momentum": momentum}

    def check(self, experiment: Experiment) -> None:
        """m is recovered from displacements in units of lr: local momentum would make it 1/(1 - rho) times longer."""
        require_sgd("fedcm", experiment, "its momentum is the displacement in units of lr times gradient")
        if (decay := experiment.local.step_decay) != 1.0:
            raise SettingsError(
                f"local.step_decay = {decay} has no meaning with strategy.name = 'fedcm': m is the displacement of "
                "K equal steps in units of lr; allowed: 1.0"
            )
        if experiment.local.momentum:
            raise SettingsError(
                f"local.momentum = {experiment.local.momentum} beside strategy.name = 'fedcm', which is momentum: the "
                "one feeds the other and both grow; allowed: 0"
            )

    def caution(self, experiment: Experiment, steps: int) -> str | None:
        """Weight decay is not scaled by alpha, gradients are."""
        return damped_decay("fedcm", "alpha", self.alpha, experiment)
