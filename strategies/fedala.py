"""FedALA (Zhang et al., AAAI 2023, arXiv 2212.01197): each client learns how much of the server's model it takes."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from strategies.base import OWN, FederatedStrategy, Upload, Work, hyperparameters

MIX = "mix"


@hyperparameters
class FedALA(FederatedStrategy):
    """FedAvg whose clients begin a round not at x but, in the last `layers` of the model, between their own and x:

        start_i = v_i + (x - v_i) * W_i,   W_i in [0, 1] for each number;   below these layers start_i = x.

    v_i is the client's model at the end of its last accepted round. W_i is learnt before the round with v_i and x
    fixed, W_i <- clamp(W_i - eta g_i(start_i) * (x - v_i)), on batches of `share` of an epoch, and kept. It starts at
    1. A client without v_i begins at x. It evaluates the start_i that its next round would begin with.

    layers (default 1): modules with parameters of their own, from the model's end; 0 is FedAvg. (The official code
      counts tensors: 2 are a linear layer's.)
    eta (default 1), share (0 < share <= 1, default 0.8): the paper's.
    start_epochs (default 10): how often the first learning of W_i goes through its batches, later ones go once. The
      official code goes on until the last ten losses deviate by less than a threshold, and its README warns that it
      may never end; here the work is bounded and a function of the settings.

    The loss is the task's, in training mode; buffers are the server's and do not move. W_i = 1 (eta = 0) is FedAvg.
    On quadratics W_i leads to the minimizer of f_i between v_i and x, coordinate by coordinate, where
    eta (x - v_i)^2 a_i < 2.
    """

    weights: Literal["uniform", "data"] = "data"
    layers: int = Field(1, ge=0)
    eta: float = Field(1.0, ge=0)
    share: float = Field(0.8, gt=0, le=1)
    start_epochs: int = Field(10, ge=1)

    memory: ClassVar[Literal["none", "bound", "own"]] = "own"
    personal: ClassVar[bool] = True

    def local(self, work: Work) -> Upload:
        """W_i, then K steps; sends what leads from x to the end, keeps the end's last layers and W_i."""
        mix = self._begin(work)
        for _ in work.steps():
            pass
        if self.layers:
            work.keep(**{OWN: work.vector[self._first(work) :]}, **({} if mix is None else {MIX: mix}))
        return work.upload(delta=work.delta())

    def personalize(self, work: Work) -> None:
        """start_i in place of x."""
        self._begin(work)

    def _begin(self, work: Work) -> Tensor | None:
        """Learn W_i and load start_i; None for a client that has no model of its own yet."""
        if not self.layers or OWN not in work.memory:
            return None
        first, own = self._first(work), work.memory[OWN]
        point = work.received["model"].clone()
        start, apart = point[first:], work.received["model"][first:] - own
        again = MIX in work.memory
        mix = work.memory[MIX].clone() if again else torch.ones_like(own)
        torch.addcmul(own, apart, mix, out=start)
        batches = math.ceil(self.share * math.ceil(work.num_examples / work.settings.batch_size))
        for _ in range(batches if again else batches * self.start_epochs):
            gradient = work.gradient_at(point, fresh=True)[first:]
            mix.addcmul_(gradient, apart, value=-self.eta).clamp_(0, 1)
            torch.addcmul(own, apart, mix, out=start)
        work.vector.copy_(point)
        return mix

    def _first(self, work: Work) -> int:
        """Where the last `layers` begin in the vector."""
        modules = {name: name.rpartition(".")[0] for name in work.layout}
        last = list(dict.fromkeys(modules.values()))[-self.layers :]
        return min(slot.start for name, slot in work.layout.items() if modules[name] in last)
