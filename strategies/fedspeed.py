"""FedSpeed (Sun et al., ICLR 2023, arXiv 2302.10429): a proximal term that is corrected, on perturbed gradients."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters, refuse_sharpness


@hyperparameters
class FedSpeed(FederatedStrategy):
    """Clients hold c_i, 0 at first. K steps from y = x, with g1 = g_i(y) and g2 = g_i(y + rho g1) on the same batch:

        y <- y - eta ((1 - alpha) g1 + alpha g2 - c_i + (y - x)/lam);   then
        c_i <- c_i - (y - x)/lam,   and y - lam c_i is sent;   x <- mean_S(y - lam c_i).

    So the proximal term's pull towards x is taken back over the rounds: who does not move has c_i = its gradient at x.

    lam (lam > 0, default 10, so that 1/lam = 0.1 as in the official code).
    alpha (0 to 1, default 1, the code's): how much of the perturbed gradient. rho (rho >= 0, default 0.1); rho = 0 or
      alpha = 0 needs no second gradient.
    perturbation: "normalized" (default), rho/|g1| in place of rho, as the code and the paper's experiments; "raw", the
      algorithm as printed.

    The mean is over the cohort, as in Algorithm 1; the official code instead adds the mean of -lam c_i over *all*
    clients to the cohort's mean y, which is FedDyn's server. Rest (all clients, full gradients, however many steps):
    y = x and sum_i w_i c_i = 0, so the weighted mean of (1 - alpha) g1 + alpha g2 is 0: the minimizer for rho = 0; on
    quadratics with "raw", sum_i w_i a_i (1 + alpha rho a_i)(x - e_i) = 0.
    """

    weights: Literal["uniform", "data"] = "uniform"
    lam: float = Field(10.0, gt=0)
    alpha: float = Field(1.0, ge=0, le=1)
    rho: float = Field(0.1, ge=0)
    perturbation: Literal["normalized", "raw"] = "normalized"

    memory: ClassVar[Literal["none", "bound", "own"]] = "own"

    def local(self, work: Work) -> Upload:
        """K steps; sends y - lam c_i as a change of x, keeps c_i."""
        own = work.memory.get("correction")
        work.proximal_mu = 1 / self.lam
        for gradient in work.steps():
            if self.rho and self.alpha:
                there = work.gradient_at(self._ahead(work.vector, gradient))
                gradient.mul_(1 - self.alpha).add_(there, alpha=self.alpha)
            if own is not None:
                gradient.sub_(own)
        delta = work.delta()
        correction = delta / -self.lam if own is None else own.sub(delta, alpha=1 / self.lam)
        work.keep(correction=correction)
        return work.upload(delta=delta.sub_(correction, alpha=self.lam))

    def _ahead(self, point: Tensor, gradient: Tensor) -> Tensor:
        """Where the second gradient is taken."""
        if self.perturbation == "raw":
            return torch.add(point, gradient, alpha=self.rho)
        length = torch.linalg.vector_norm(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        return torch.add(point, gradient / length, alpha=self.rho)

    def check(self, experiment: Experiment) -> None:
        """One proximal term and one perturbation."""
        refuse_sharpness("fedspeed", experiment)
        if experiment.local.proximal_mu:
            raise SettingsError(
                f"local.proximal_mu = {experiment.local.proximal_mu:g} beside strategy.name = 'fedspeed', whose "
                "term is 1/strategy.lam: leave it out"
            )
