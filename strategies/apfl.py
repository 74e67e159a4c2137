"""APFL (Deng, Kamani and Mahdavi, arXiv 2003.13461): each client's model is a mixture of the shared one and its own."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from common.experiment import Experiment
from strategies.base import (
    OWN,
    FederatedStrategy,
    Upload,
    Work,
    hyperparameters,
    own_model,
    refuse_kept_moments,
    refuse_sharpness,
)

ALPHA = "alpha"


@hyperparameters
class APFL(FederatedStrategy):
    """Client i has w, from the server's, v_i and alpha_i; its model is m = alpha_i v_i + (1 - alpha_i) w. On each batch

        w <- w - eta g_i(w);   v_i <- v_i - eta alpha_i g_i(m),

    both gradients on the same batch and dropout masks; w is averaged as in FedAvg, to the bit. In a round's first step
    alpha_i <- alpha_i - eta <v_i - w, g_i(m)>, clamped to [0, 1], from what that step starts with.

    alpha (0 to 1, default 0.5): alpha_i at first. adaptive (default true): whether it is learnt; the paper has both.

    v_i and alpha_i stay in the client's memory; it evaluates alpha_i v_i + (1 - alpha_i) w with the server's new w, and
    the BatchNorm statistics of m. v_i starts at the model received the first time. v_i has an optimizer of its own with
    the settings of w's; gradients are clipped before alpha_i scales them. The official code mixes two gradients instead
    of taking the one at m, and adds 0.02 alpha_i to alpha_i's; neither stands in the paper.

    alpha = 1 without adaptive is training alone, alpha = 0 is FedAvg. weights: the paper averages w uniformly.
    """

    weights: Literal["uniform", "data"] = "uniform"
    alpha: float = Field(0.5, ge=0, le=1)
    adaptive: bool = True

    memory: ClassVar[Literal["none", "bound", "own"]] = "own"
    personal: ClassVar[bool] = True

    def local(self, work: Work) -> Upload:
        """K steps of both; sends the change of w, keeps v_i, alpha_i and the buffers of m."""
        vector, held = own_model(work)
        own, buffers = vector.clone(), {name: value.clone() for name, value in held.items()}
        alpha = self._alpha(work)
        mixed, gradient = torch.lerp(work.vector, own, alpha), torch.zeros_like(own)
        step, lr, first = work.optimizer(own, gradient), work.lr, True

        def mix() -> None:
            torch.lerp(work.vector, own, alpha, out=mixed)

        for _ in work.steps(clip="before", reference=mixed, reference_buffers=buffers, after=mix):
            torch.mul(work.reference_gradient, alpha, out=gradient)
            if first and self.adaptive:
                slope = float(torch.dot(own - work.vector, work.reference_gradient))
                alpha = min(max(alpha - lr * slope, 0.0), 1.0)
            first = False
            step()
        work.keep(**{OWN: own, ALPHA: torch.tensor(alpha, dtype=torch.float64)}, **buffers)
        return work.upload(delta=work.delta())

    def personalize(self, work: Work) -> None:
        """m in place of w."""
        own, buffers = own_model(work)
        work.vector.lerp_(own, self._alpha(work))
        for name, value in buffers.items():
            work.buffers[name].copy_(value)

    def check(self, experiment: Experiment) -> None:
        """Two models, one memory of an optimizer; gradients at two points."""
        refuse_kept_moments("apfl", experiment)
        refuse_sharpness("apfl", experiment)

    def _alpha(self, work: Work) -> float:
        return float(work.memory[ALPHA]) if ALPHA in work.memory else self.alpha
