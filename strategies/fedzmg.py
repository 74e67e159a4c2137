"""FedZMG (arXiv 2602.18384): local gradients without their mean."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from common.vector import Layout
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters


@hyperparameters
class FedZMG(FederatedStrategy):
    """FedAvg whose clients step along P g = g - (1/d)(1^T g) 1, the zero-mean part of the gradient.

    P is linear and idempotent and comes before clipping and momentum: the mean of what it acts on never changes, in
    no step and no average. A proximal term keeps that. Weight decay moves the mean, as do optimizers that treat each
    number apart (Adam here or at the server) or that turn matrices (Muon, SOAP).

    scope: what has one mean. The paper writes "the gradient vector" and says that it extends Gradient Centralization
      (arXiv 2004.01461); no code is public.
      "tensor" (default): each tensor of two or more dimensions; biases and scales of norms stay as they are.
      "filter": Gradient Centralization: each output unit of such a tensor, over the remaining axes.
      "global": the whole vector, biases too.
    What would consist of one number stays as it is: without its mean it could never learn. Personal parts of a model
    are not projected.
    """

    weights: Literal["uniform", "data"] = "data"
    scope: Literal["tensor", "filter", "global"] = "tensor"

    def local(self, work: Work) -> Upload:
        """K steps along the projected gradient."""
        for gradient in work.steps():
            project(gradient, work.layout, self.scope)
        return work.upload(delta=work.delta())


def project(gradient: Tensor, layout: Layout, scope: Literal["tensor", "filter", "global"]) -> None:
    """Take the means out of a gradient (d,), in place.

    Tensor by tensor: for ResNet-18 on a CPU that takes 6 ms, a segment reduction over the vector 180 ms.
    """
    if scope == "global":
        blocks = [(0, len(gradient), 1)]
    else:
        tensors = [slot for slot in layout.values() if len(slot.shape) > 1]
        blocks = [(slot.start, slot.stop, slot.shape[0] if scope == "filter" else 1) for slot in tensors]
    for start, stop, rows in blocks:
        if stop - start > rows:
            block = gradient[start:stop].view(rows, -1)
            block.sub_(block.mean(1, keepdim=True))
