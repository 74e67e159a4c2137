"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv 2002.07948): a start from which one step suits."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.experiment import Experiment
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters, refuse_sharpness


@hyperparameters
class PerFedAvg(FederatedStrategy):
    """FedAvg on F_i(w) = f_i(w - alpha grad f_i(w)). On three batches D, D', D'' of a client

        y <- y - eta (I - alpha H_i(y; D'')) g_i(y - alpha g_i(y; D); D').

    alpha (alpha >= 0, default 0.01): the rate of the step that a client takes for itself; local.lr is the paper's beta.
    variant: "fo" (default) leaves H_i out; "hf" takes the difference (g_i(y + delta u) - g_i(y - delta u))/(2 delta),
      both on D'', for H_i u, which costs two more gradients a step. Exact on quadratics.
    delta (default 1e-3): of "hf". In float32 a smaller one drowns in rounding.
    adapt_steps (default 1): steps w <- w - alpha g_i(w), each on a batch of its own, before a client evaluates; they
      are forgotten afterwards, and the server's w alone is not evaluated.

    D is the batch of the step, D' and D'' come of an order of their own. Clipping bounds the whole meta-gradient. With
    alpha = 0 it is FedAvg on other batches. Rest on quadratics, equal steps, small eta: sum_i of
    a_i (1 - alpha a_i)^2 (w - e_i) = 0 by coordinate for "hf", of a_i (1 - alpha a_i) (w - e_i) for "fo".

    weights: the paper averages the cohort uniformly.
    """

    weights: Literal["uniform", "data"] = "uniform"
    alpha: float = Field(0.01, ge=0)
    variant: Literal["fo", "hf"] = "fo"
    delta: float = Field(1e-3, gt=0)
    adapt_steps: int = Field(1, ge=0)

    personal: ClassVar[bool] = True

    def local(self, work: Work) -> Upload:
        """K meta-steps; sends the change of w."""
        for gradient in work.steps():
            meta = work.gradient_at(torch.sub(work.vector, gradient, alpha=self.alpha), fresh=True)
            if self.variant == "hf":
                meta = self._curved(work, meta.clone())
            gradient.copy_(meta)
        return work.upload(delta=work.delta())

    def _curved(self, work: Work, meta: Tensor) -> Tensor:
        """(I - alpha H) meta."""
        ahead = work.gradient_at(torch.add(work.vector, meta, alpha=self.delta), fresh=True).clone()
        behind = work.gradient_at(torch.sub(work.vector, meta, alpha=self.delta))
        return meta.sub_(ahead.sub_(behind), alpha=self.alpha / (2 * self.delta))

    def personalize(self, work: Work) -> None:
        """Adapt w to the client."""
        for _ in range(self.adapt_steps):
            work.vector.sub_(work.gradient_at(work.vector.clone(), fresh=True), alpha=self.alpha)

    def check(self, experiment: Experiment) -> None:
        """Its gradients are taken where its formula says."""
        refuse_sharpness("perfedavg", experiment)
