"""pFedMe (T. Dinh, Tran and Nguyen, NeurIPS 2020, arXiv 2006.08848): personal models as Moreau envelopes."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from common.errors import SettingsError
from common.experiment import Experiment
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters, keep_own, load_own


@hyperparameters
class PFedMe(FederatedStrategy):
    """Client i has w, from the server's, and theta, its own. For each of R batches

        theta ~ argmin f_i(theta; batch) + (lam/2) |theta - w|^2,   by `inner_steps` steps from where theta is,
        w <- w - eta lam (w - theta);

    theta starts at w in each round. The change of w is sent, and x <- (1 - beta) x + beta mean_S(w) is a server step
    with server.lr = beta. A client evaluates the theta that its last accepted round ended with, as the official code.

    lam (lam > 0, default 1; the paper tries 0.1 to 30 and takes 15 for MNIST), inner_steps (K of the paper, default 5).
    eta (default 0.1; eta lam <= 1; the paper's for MNIST is 0.005): the rate of w, in step with local.lr's schedule.
      local.lr is the rate of theta, the paper's "personal learning rate". It must be below 2/(L + lam), L the loss's
      curvature, so that a large lam needs a small one: local.lr lam < 2 at least.

    R is the number of batches that `[local]` says, each augmented once. In the paper all clients train in every round
    and a sample of them is averaged; here those sampled train. Buffers that are sent are those of theta's passes.

    With inner_steps = 1 and eta lam = 1 theta makes one plain step from w and w follows it: FedAvg. Rest on quadratics
    (inner steps to the end): theta = (a e + lam w)/(a + lam), and the envelope's gradient is lam (w - theta), so
    sum_i of a_i lam/(a_i + lam) (w - e_i) = 0 where the clients take equal numbers of short steps.
    """

    weights: Literal["uniform", "data"] = "uniform"
    lam: float = Field(1.0, gt=0)
    inner_steps: int = Field(5, ge=1)
    eta: float = Field(0.1, gt=0)

    memory: ClassVar[Literal["none", "bound", "own"]] = "own"
    personal: ClassVar[bool] = True

    def local(self, work: Work) -> Upload:
        """R batches; sends the change of w, keeps theta."""
        center = work.received["model"].clone()
        apart, taken = torch.empty_like(center), 0
        pull = self.lam * self.eta * (work.lr / work.settings.lr)

        def follow() -> None:
            nonlocal taken
            taken += 1
            if taken % self.inner_steps == 0:
                center.add_(torch.sub(work.vector, center, out=apart), alpha=pull)

        for gradient in work.steps(repeat=self.inner_steps, after=follow):
            gradient.add_(torch.sub(work.vector, center, out=apart), alpha=self.lam)
        keep_own(work)
        return work.upload(delta=center.sub_(work.received["model"]))

    def personalize(self, work: Work) -> None:
        """theta in place of x."""
        load_own(work)

    def check(self, experiment: Experiment) -> None:
        """w must not step over theta."""
        local = experiment.local
        if self.lam * self.eta > 1:
            raise SettingsError(
                f"strategy.eta = {self.eta:g} with strategy.lam = {self.lam:g}: w would step beyond theta; allowed: "
                f"eta <= 1/lam = {1 / self.lam:g}"
            )
        if local.proximal_mu:
            raise SettingsError(
                f"local.proximal_mu = {local.proximal_mu:g} beside strategy.name = 'pfedme', whose term "
                "is strategy.lam: leave it out"
            )

    def caution(self, experiment: Experiment, steps: int) -> str | None:
        """Of a rate at which theta leaves w behind with each step, whatever the loss."""
        local = experiment.local
        if local.adaptive or local.momentum or local.lr * self.lam < 2:
            return None
        return (
            f"pfedme: local.lr = {local.lr:g} with strategy.lam = {self.lam:g} overshoots: theta leaves w further "
            f"behind with each step; below 2/lam = {2 / self.lam:g} it need not"
        )
