"""FedLWS (Shi et al., arXiv 2503.15111, ICLR 2025): the averaged model is shrunk, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import torch
from pydantic import Field

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import Layout, State, norm, weighted_sum
from strategies import server_optimizers
from strategies.base import FederatedStrategy, Upload, Work, cohort_mean, hyperparameters

# A group of norm zero would be multiplied by 0 and stay there for ever.
ZERO_NORM = 1e-12


@hyperparameters
class FedLWS(FederatedStrategy):
    """Clients as FedAvg. The server, for each group l of parameters, with avg_l = x_l + sum_S w_i Delta_i,l:

        spread_l = (1/|S|) sum_S |Delta_i,l - mean_S Delta_l|      (a plain mean, whatever the weights)
        tau_l = clamp(beta spread_l, tau_min, tau_max)
        gamma_l = |x_l| / (|x_l| + tau_l |avg_l - x_l|);   x_l <- gamma_l avg_l.

    The more clients disagree about a layer, the more it shrinks: weight decay on the server, set from the round
    itself. The change gamma avg - x goes through the server optimizer. A group with |x_l| < 1e-12 does not shrink.

    beta (beta >= 0, default 0.03), tau_min (default 0.01) and tau_max (default 0.2; 0 <= tau_min <= tau_max): the
      official code's. The paper writes gamma = |w| / (|w| + beta tau |eta g|) with tau clamped and beta apart.
      tau_min = tau_max = 0 is FedAvg.
    grouping: "module", each module's own parameters; "bias", the walk of the official code: a group ends with each
      name that has "bias" in it, so that a norm's scale and bias join the convolution before. What follows the last
      bias is a group here; there it is an index error.

    Buffers are averaged and not shrunk (the official code shrinks running statistics, in the group after theirs, and
    lets every client train even where few are selected). Its local momentum lives on across rounds: that is
    `[local] moments = "keep"`. Local weight decay shrinks in addition.
    """

    weights: Literal["uniform", "data"] = "data"
    beta: float = Field(0.03, ge=0)
    tau_min: float = Field(0.01, ge=0)
    tau_max: float = Field(0.2, ge=0)
    grouping: Literal["module", "bias"] = "module"

    def local(self, work: Work) -> Upload:
        """K local steps."""
        for _ in work.steps():
            pass
        return work.upload(delta=work.delta())

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """A server step along gamma avg - x = (1 - s) D - s x with s = 1 - gamma."""
        sizes = group_sizes(uploads[0].layout, self.grouping)
        change = cohort_mean(uploads, "delta")
        spreads = _spreads(uploads, sizes)
        groups = zip(torch.split(state["model"], sizes), torch.split(change, sizes), spreads, strict=True)
        for model, moved, spread in groups:
            length, pull = norm(model), min(max(self.beta * spread, self.tau_min), self.tau_max) * norm(moved)
            if length >= ZERO_NORM:
                shrink = pull / (length + pull)
                moved.mul_(1 - shrink).sub_(model, alpha=shrink)
        return state | server_optimizers.step(self.server, state, change)

    def check(self, experiment: Experiment) -> None:
        """A clamp has its bounds in order."""
        if self.tau_min > self.tau_max:
            raise SettingsError(
                f"strategy.tau_min = {self.tau_min:g} above strategy.tau_max = {self.tau_max:g}: "
                "allowed: tau_min <= tau_max; both 0 is FedAvg"
            )


def group_sizes(layout: Layout, grouping: Literal["module", "bias"]) -> list[int]:
    """How many numbers each group of parameters has; groups lie one after the other."""
    biases = 0
    keys: list[str | int] = []
    for name in layout:
        keys.append(name.rpartition(".")[0] if grouping == "module" else biases)
        biases += "bias" in name
    slots = groupby(zip(keys, layout.values(), strict=True), key=lambda pair: pair[0])
    return [sum(slot.stop - slot.start for _, slot in group) for _, group in slots]


def _spreads(uploads: Sequence[Upload], sizes: list[int]) -> list[float]:
    """Mean distance of the clients' changes from their plain mean, by group."""
    deltas = [upload.vectors["delta"] for upload in uploads]
    mean = weighted_sum(deltas, [1 / len(deltas)] * len(deltas))
    distances = [[norm(part) for part in torch.split(delta - mean, sizes)] for delta in deltas]
    return [sum(each) / len(deltas) for each in zip(*distances, strict=True)]
