"""FedSplit (Pathak and Wainwright, NeurIPS 2020, arXiv 2005.05238): Peaceman-Rachford splitting of the consensus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import State, weighted_sum
from strategies.base import FederatedStrategy, Kind, Upload, Work, hyperparameters


@hyperparameters
class FedSplit(FederatedStrategy):
    """Each client holds z_i, the server their mean x. With prox_i(u) = argmin f_i(v) + |v - u|^2/(2 step):

        v_i = prox_i(2 x - z_i);   z_i <- z_i + 2 (v_i - x);   x <- mean_i(z_i).

    prox_i is approximated by the K local steps of `[local]` *from x* on f_i(v) + |v - (2 x - z_i)|^2/(2 step). Rest: a
    client that does not move has z_i = x - step g_i(x), however few steps it takes, and x = mean z_i makes the mean
    gradient 0: exact on convex problems. Begun at 2 x - z_i, few steps would rest elsewhere. With steps to the end the
    prox is exact, and on quadratics of one curvature a in all clients x - x* shrinks by (1 - step a)/(1 + step a) a
    round: step = 1/sqrt(l L) is the paper's choice for curvatures from l to L.

    step (step > 0, default 1): s of the paper.

    x is the mean over all clients that took part, not over the cohort: absent ones keep z_i, a new one begins at the x
    that it receives, which moves no mean. The paper has all clients in every round, and so its rates; with a part of
    them the rest is the same (convergence is known for random blocks of contractions). Weighted by examples with
    weights = "data". server: sgd with lr = 1 alone, for x is a mean.
    """

    weights: Literal["uniform", "data"] = "uniform"
    step: float = Field(1.0, gt=0)

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "increment", "new": "scalar"}
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """Nobody's z_i is in x yet."""
        return {**super().init(model), "mass": torch.zeros((), dtype=torch.float64)}

    def local(self, work: Work) -> Upload:
        """v_i by K steps; sends 2 (v_i - x), keeps z_i."""
        x, own = work.received["model"], work.memory.get("own")
        target = x if own is None else torch.sub(x, own).add_(x)
        apart = torch.empty_like(x)
        for gradient in work.steps():
            gradient.add_(torch.sub(work.vector, target, out=apart), alpha=1 / self.step)
        delta = work.delta().mul_(2)
        work.keep(own=delta + (x if own is None else own))
        return work.upload(delta=delta, new=torch.tensor(float(own is None), dtype=torch.float64))

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x by the changes of the z_i, each with its share of all that are in the mean."""
        counts = [1.0 if self.weights == "uniform" else float(upload.examples) for upload in uploads]
        new = sum(count for count, upload in zip(counts, uploads, strict=True) if float(upload.vectors["new"]))
        mass = max(float(state["mass"]) + new, sum(counts))
        change = weighted_sum([upload.vectors["delta"] for upload in uploads], [count / mass for count in counts])
        return state | {"model": state["model"] + change, "mass": torch.tensor(mass, dtype=torch.float64)}

    def check_upload(self, upload: Upload) -> None:
        """A client is in the mean already, or is not."""
        if float(upload.vectors["new"]) not in (0.0, 1.0):
            raise ValueError(f"new = {float(upload.vectors['new'])}; allowed: 0 or 1")

    def check(self, experiment: Experiment) -> None:
        """x is a mean by fixed weights, and each client has one proximal term."""
        if (self.server.optimizer, self.server.lr) != ("sgd", 1.0):
            raise SettingsError(
                f"server.optimizer = {self.server.optimizer!r} with server.lr = {self.server.lr:g} beside "
                "strategy.name = 'fedsplit', whose model is a mean; allowed: 'sgd' with lr = 1"
            )
        if experiment.local.proximal_mu:
            raise SettingsError(
                f"local.proximal_mu = {experiment.local.proximal_mu:g} beside strategy.name = 'fedsplit', whose "
                "term is 1/strategy.step: leave it out"
            )
        if self.weights == "data" and (experiment.data.may_grow or experiment.round.most_share is not None):
            raise SettingsError(
                "data.may_grow and round.most_share change weights, and strategy.name = 'fedsplit' adds up changes of "
                "a mean; allowed: strategy.weights = 'uniform'"
            )
