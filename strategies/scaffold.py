"""SCAFFOLD (Karimireddy et al., arXiv 1910.06378): control variates against client drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.vector import State, norm
from strategies.base import FederatedStrategy, Kind, Upload, Work, hyperparameters, tracker_change


@hyperparameters
class Scaffold(FederatedStrategy):
    """Local step y <- y - eta_l (g_i(y) - c_i + c); server x <- x + eta_g mean_S(Delta_i), c <- c + sum_S q_i dc_i.

    q_i = 1/N (uniform, the paper's) or n_i/n (data): over all clients, not over the cohort, so that
    c = sum_i q_i c_i after every round. c and all c_i start at zero: round 1 is FedAvg.
    c_i^+ is the mean raw gradient along the local path. With plain SGD that is the paper's option II,
    c_i - c + (x - y)/(K eta_l); accumulated instead of derived it stays right under momentum, decay, clipping and
    adaptive local optimizers, where option II is inflated or meaningless.
    The correction enters the gradient before clipping and before the optimizer; buffers are never corrected.
    """

    weights: Literal["uniform", "data"] = "uniform"
    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector", "control": "increment"}
    trackers: ClassVar[tuple[str, ...]] = ("control",)
    rescales: ClassVar[bool] = True
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """c = 0."""
        return {**super().init(model), "control": torch.zeros_like(model)}

    def broadcast(self, state: State) -> State:
        """x and c."""
        return {"model": state["model"], "control": state["control"]}

    def local(self, work: Work) -> Upload:
        """K corrected steps; sends Delta_i and dc_i, keeps c_i^+."""
        own = work.memory.get("control")
        drift = work.received["control"] if own is None else work.received["control"] - own
        seen = torch.zeros_like(drift)
        for gradient in work.steps():
            seen += gradient
            gradient += drift
        control = seen.div_(work.steps_taken)
        work.keep(control=control)
        return work.upload(delta=work.delta(), control=control if own is None else control - own)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; c by what the uploads add to the average over all clients."""
        return super().aggregate(state, uploads) | {"control": state["control"] + tracker_change(uploads, "control")}

    def describe(self, state: State) -> Mapping[str, float]:
        """|c|: at rest it is the norm of the mean gradient, which is then zero."""
        return {"control norm": norm(state["control"])}
