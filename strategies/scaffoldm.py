"""SCAFFOLD-M (Cheng et al., arXiv 2306.16504): SCAFFOLD's control variates with client-level momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import State
from strategies import server_optimizers
from strategies.base import (
    FederatedStrategy,
    Kind,
    Upload,
    Work,
    cohort_mean,
    damped_decay,
    hyperparameters,
    require_sgd,
    tracker_change,
)


@hyperparameters
class ScaffoldM(FederatedStrategy):
    """Local step y <- y - eta (beta (g_i(y) - c_i + c) + (1 - beta) g); then, with Delta_i = y - x,

        c_i <- mean_k g_i(y_k);   c <- c + sum_S q_i dc_i;
        g <- -mean_S Delta_i / (eta K);   x <- x + eta_g mean_S Delta_i.

    q_i = 1/N (uniform, the paper's) or n_i/n (data): over all clients, so that c = sum_i q_i c_i. g is divided by the
    rate of the round in which it was made and by the cohort's mean number of steps K, as FedCM's m: it is the mean
    direction of the last round. g, c and all c_i start at zero, so round 1 moves by beta times a FedAvg round.

    beta (0 < beta <= 1, default 0.1): it multiplies the gradient, so *small* beta is strong momentum and 0.9 nearly
    none. beta = 1 is SCAFFOLD. Identical clients that all take part have c_i = c: that is FedCM with alpha = beta.

    Clients use c and g only in the mix beta c + (1 - beta) g, so x and the mix go down and Delta_i and dc_i up: 4 S
    vectors in a round, as SCAFFOLD. c_i is the mean raw gradient, accumulated. (Of displacements it would be
    (-Delta_i/(eta K) - (1 - beta) g)/beta + c_i - c, right for unclipped plain SGD alone.)

    Rest: x does not move, so g = 0, and g_i(x) = c_i - c for whoever takes part: c = 0, as in SCAFFOLD, the minimizer
    of what is averaged, whatever the steps. The mix is clipped as a whole. g holds all that moves a client: a proximal
    term, and weight decay, which so adds up to 1/beta times its strength against gradients that beta has scaled.
    """

    weights: Literal["uniform", "data"] = "uniform"
    beta: float = Field(0.1, gt=0, le=1)

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector", "control": "increment"}
    trackers: ClassVar[tuple[str, ...]] = ("control",)
    rescales: ClassVar[bool] = True
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """c = 0, g = 0."""
        return {**super().init(model), "control": torch.zeros_like(model), "momentum": torch.zeros_like(model)}

    def broadcast(self, state: State) -> State:
        """x and beta c + (1 - beta) g."""
        return {"model": state["model"], "mix": torch.lerp(state["momentum"], state["control"], self.beta)}

    def local(self, work: Work) -> Upload:
        """K steps along the mix; sends Delta_i and dc_i, keeps c_i^+."""
        own, mix = work.memory.get("control"), work.received["mix"]
        drift = mix if own is None else mix.sub(own, alpha=self.beta)
        seen = torch.zeros_like(drift)
        for gradient in work.steps():
            seen += gradient
            gradient.mul_(self.beta).add_(drift)
        control = seen.div_(work.steps_taken)
        work.keep(control=control)
        return work.upload(delta=work.delta(), control=control if own is None else control - own)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; g from the displacement per local step; c by what the uploads add to the average over all."""
        change = cohort_mean(uploads, "delta")
        steps = sum(u.weight * u.steps for u in uploads)
        return {
            **state,
            **server_optimizers.step(self.server, state, change),
            "momentum": change / (-uploads[0].lr * steps),
            "control": state["control"] + tracker_change(uploads, "control"),
        }

    def check(self, experiment: Experiment) -> None:
        """g must be a mean direction: K steps that count alike."""
        require_sgd("scaffoldm", experiment, "g is the displacement in units of lr times gradient")
        for key, neutral in (("momentum", 0.0), ("step_decay", 1.0)):
            if (value := getattr(experiment.local, key)) != neutral:
                raise SettingsError(
                    f"local.{key} = {value} has no meaning with strategy.name = 'scaffoldm': g is the displacement of "
                    "K equal steps in units of lr; strategy.beta is its momentum"
                )

    def caution(self, experiment: Experiment, steps: int) -> str | None:
        """Weight decay is not scaled by beta, gradients are."""
        return damped_decay("scaffoldm", "beta", self.beta, experiment)
