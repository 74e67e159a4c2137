"""Two algorithms as far as their state goes, for tests of state under faults: gradient tracking and a dual."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common import server_optimizers
from common.seeds import derive
from common.vector import State
from strategies import REGISTRY, Entry
from strategies.base import FederatedStrategy, Kind, Upload, Work, cohort_mean, hyperparameters, tracker_change


@hyperparameters
class Tracking(FederatedStrategy):
    """FA-GC (arXiv 2502.02727): g + y - y_i before the local optimizer; y = sum_i q_i y_i over all clients.

    Only a random half of the cohort refreshes its y_i to the mean raw gradient of the round; the others keep theirs
    and send a change of zero, so that every upload has the same layout.
    """

    weights: Literal["uniform", "data"] = "uniform"
    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector", "tracker": "vector"}
    trackers: ClassVar[tuple[str, ...]] = ("tracker",)
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """y = 0."""
        return {**super().init(model), "tracker": torch.zeros_like(model)}

    def broadcast(self, state: State) -> State:
        """x and y."""
        return {"model": state["model"], "tracker": state["tracker"]}

    def assign(self, state: State, sampled: Sequence[str], round: int) -> Mapping[str, Mapping[str, float]]:
        """Who refreshes: half of the cohort, rounded up."""
        chance = random.Random(derive(0, "refresh", round))
        return {name: {"refresh": 1.0} for name in chance.sample(sorted(sampled), math.ceil(len(sampled) / 2))}

    def local(self, work: Work) -> Upload:
        """Corrected steps; sends Delta_i and dy_i, keeps y_i."""
        own = work.memory.get("tracker", torch.zeros_like(work.received["tracker"]))
        seen, drift = torch.zeros_like(own), work.received["tracker"] - own
        for gradient in work.steps():
            seen += gradient
            gradient += drift
        tracker = seen / work.steps_taken if work.assigned.get("refresh") else own
        work.keep(tracker=tracker)
        return work.upload(delta=work.delta(), tracker=tracker - own)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; y by what the refreshers add to the average over all clients."""
        return super().aggregate(state, uploads) | {"tracker": state["tracker"] + tracker_change(uploads, "tracker")}


@hyperparameters
class Dual(FederatedStrategy):
    """FedDyn (arXiv 2111.04263): f_i(w) - <l_i, w> + alpha/2 |w - x|^2; l_i <- l_i - alpha Delta_i;
    h <- h - alpha sum_S q_i Delta_i, so h = sum_i q_i l_i; x <- mean_S(w_i) - h/alpha."""

    weights: Literal["uniform", "data"] = "uniform"
    alpha: float = Field(0.5, gt=0)

    trackers: ClassVar[tuple[str, ...]] = ("dual",)
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """h = 0."""
        return {**super().init(model), "dual": torch.zeros_like(model)}

    def local(self, work: Work) -> Upload:
        """Steps on the augmented objective; sends Delta_i, keeps l_i."""
        dual = work.memory.get("dual", torch.zeros_like(work.received["model"]))
        work.proximal_mu = self.alpha
        for gradient in work.steps():
            gradient -= dual
        delta = work.delta()
        work.keep(dual=dual - self.alpha * delta)
        return work.upload(delta=delta)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """The server mirrors the duals from the model changes."""
        dual = state["dual"] - self.alpha * tracker_change(uploads, "delta")
        change = cohort_mean(uploads, "delta") - dual / self.alpha
        return state | server_optimizers.step(self.server, state, change) | {"dual": dual}


@contextmanager
def registered() -> Iterator[None]:
    """Both in the registry, as "tracking" and "dual", for as long as a test needs them."""
    added = {"tracking": Entry(Tracking, "arXiv 2502.02727"), "dual": Entry(Dual, "arXiv 2111.04263")}
    REGISTRY.update(added)
    try:
        yield
    finally:
        for name in added:
            del REGISTRY[name]
