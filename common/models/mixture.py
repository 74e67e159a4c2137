"""A model of two extractors, one private and one shared, whose representations are mixed before a private head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PRIVATE = ["private.*", "head.*", "alpha"]
"""Patterns of what stays with each client, parameters and buffers; what is left is `shared`."""


class Mixture(nn.Module):
    """logits = H(alpha * F(x) + (1 - alpha) * G(x)) with alpha (r,), 1 at first; F, H and alpha are private.

    private: F, inputs (b, ...) -> (b, r). Clients may differ in it: only G must be alike in a run.
    shared: G, the same inputs -> (b, r).
    head: H, (b, r) -> logits (b, c).
    """

    def __init__(self, private: nn.Module, shared: nn.Module, head: nn.Module, width: int, dtype: torch.dtype) -> None:
        """`width` is r."""
        super().__init__()
        self.private, self.shared, self.head = private, shared, head
        self.alpha = nn.Parameter(torch.ones(width, dtype=dtype))
        self._mixing = True

    def forward(self, x: Tensor) -> Tensor:
        """Logits (b, c)."""
        representation: Tensor = self.shared(x)
        if self._mixing:
            representation = self.alpha * self.private(x) + (1 - self.alpha) * representation
        logits: Tensor = self.head(representation)
        return logits

    def clamp(self) -> None:
        """alpha back into [0, 1]."""
        self.alpha.data.clamp_(0, 1)

    @contextmanager
    def unmixed(self) -> Iterator[None]:
        """Inside, logits = H(G(x)): alpha = 0, without F."""
        self._mixing = False
        try:
            yield
        finally:
            self._mixing = True


def of_sequences(full: nn.Sequential, small: nn.Sequential) -> Mixture:
    """`full` but for its last layer, a linear one, as F; that layer as H; `small`, whose outputs are as many as H has
    inputs, with ReLU as G."""
    head = full[-1]
    assert isinstance(head, nn.Linear)
    return Mixture(full[:-1], nn.Sequential(*small, nn.ReLU()), head, head.in_features, head.weight.dtype)
