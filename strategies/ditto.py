"""Ditto (Li, Hu, Beirami and Smith, ICML 2021, arXiv 2012.04221): a model of one's own, held near the shared one."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from common.experiment import Experiment
from strategies.base import (
    FederatedStrategy,
    Upload,
    Work,
    hyperparameters,
    keep_own,
    load_own,
    own_model,
    refuse_kept_moments,
)


@hyperparameters
class Ditto(FederatedStrategy):
    """The server's w is FedAvg's. Beside it client i has v_i, and takes K steps a round

        v_i <- v_i - eta (g_i(v_i) + lam (v_i - w)),   w the model that the round started from;

    for f_i(v) + (lam/2) |v - w|^2. v_i stays in the client's memory and is what it evaluates.

    lam (lam >= 0, default 1; the official code chooses among 0.1, 1 and 2): 0 is training alone, large lam the server's
      model. Algorithm 1 begins all v_i at one point: here at the model received the first time.

    Both solve with `[local]`: the same rate, optimizer (new for each of them) and number of steps. First w, then v_i on
    batches of their own (the official code takes one batch for both, v_i first; neither reads what the other became).
    local.proximal_mu acts on w alone. w is FedAvg's to the bit. Rest on quadratics, by coordinate:
    v_i = (a_i e_i + lam w)/(a_i + lam), however many steps.

    weights: the paper's Delta are averaged uniformly.
    """

    weights: Literal["uniform", "data"] = "uniform"
    lam: float = Field(1.0, ge=0)

    passes: ClassVar[int] = 2
    memory: ClassVar[Literal["none", "bound", "own"]] = "own"
    personal: ClassVar[bool] = True

    def local(self, work: Work) -> Upload:
        """K steps on w, whose change is sent, and K on v_i."""
        own = own_model(work)
        for _ in work.steps():
            pass
        with work.beside(*own):
            work.proximal_mu = self.lam
            for _ in work.steps():
                pass
            keep_own(work)
        return work.upload(delta=work.delta())

    def personalize(self, work: Work) -> None:
        """v_i in place of w."""
        load_own(work)

    def check(self, experiment: Experiment) -> None:
        """Two models, one memory of an optimizer."""
        refuse_kept_moments("ditto", experiment)
