"""FedNova (Wang et al., arXiv 2007.07481): normalized averaging for clients that take unequal steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment, LocalSettings
from common.vector import State, weighted_sum
from strategies import server_optimizers
from strategies.base import (
    FederatedStrategy,
    Kind,
    MemoryKind,
    Upload,
    Work,
    cohort_mean,
    hyperparameters,
    require_sgd,
    tracker_change,
)

MOST_STEPS = 2**20
"""a_i takes a recursion as long as the round: no reply may keep the server at it for hours."""


@hyperparameters
class FedNova(FederatedStrategy):
    """d_i = (x - x_i)/(eta a_i), tau_eff = sum p_i a_i, x <- x - eta tau_eff sum p_i d_i (p_i normalized over S).

    In terms of Delta_i = x_i - x the rate cancels: D = tau_eff sum p_i Delta_i / a_i.
    a_i = ||a_i||_1 is the response of the local optimizer to unit gradients (`unit_response`). The server computes it
    from the steps of a reply, the round's rate and `[local]`: as a number that clients sent it would be a factor of
    their choice on everybody's change. It is found by running the optimizer's own recursion on a scalar, so that
    momentum, proximal term, decayed rates and all of them together are right:
    SGD tau; momentum rho (tau - rho (1 - rho^tau)/(1 - rho))/(1 - rho); proximal with alpha = eta mu
    (1 - (1 - alpha)^tau)/alpha; decay gamma (1 - gamma^tau)/(1 - gamma). The official code counts momentum and
    proximal term twice when both are on, and then uses sum p_i tau_i as tau_eff.
    Weight decay counts as part of the gradient, not of a_i. Adam's steps are not linear in its gradients: refused.
    Momentum starts at zero each round, as a_i does; one that is kept would move clients of few steps further than a_i.

    vr: cross-client variance reduction (with local momentum: of the corrected gradients). Each gradient becomes
    g + c_i before the optimizer sees it, c_i = Dbar - D_i fixed for the round, Dbar = sum_i q_i D_i over all clients
    (q_i = n_i/n or 1/N; absent ones keep D_i; zero at first). The weights of d_i add up to 1, so d_i = gbar_i + c_i
    with the path's mean raw gradient gbar_i.

    * "compensated": D_i <- d_i - c_i = gbar_i. Rest: D_i = g_i(x) and Dbar = 0, so every g + c_i is zero: the
      minimizer of what is averaged, whatever the steps, exactly. D_i^+ - D_i = d_i - Dbar, so the server follows
      with Dbar <- Dbar + sum_S q_i (d_i - Dbar): x and Dbar down, d_i up (not Delta_i: in Dbar they add up for ever,
      and what compression still owes must not change with the rate). 3 S vectors in a round. Equal steps of plain SGD
      make it SCAFFOLD.
    * "literal", as printed: D_i <- d_i, which holds c_i once more: D_i^+ = gbar_i + Dbar - D_i. What D_i is off
      changes its sign each round instead of going, and at rest D_i is half of gbar_i: about half of FedNova's drift
      remains (on quadratics d_i = r_i (g_i(x) + c_i), r_i -> 1 as eta -> 0, so it rests where sum p_i r_i/(1 + r_i)
      g_i(x) = 0, "none" where sum p_i r_i g_i(x) = 0). For comparison. Sends d_i - D_i too, 4 S.
    * "none": as the official code, which has no variance reduction. 2 S.
    """

    weights: Literal["uniform", "data"] = "data"
    vr: Literal["none", "compensated", "literal"] = "none"

    trackers: ClassVar[tuple[str, ...]] = ("direction",)

    def init(self, model: Tensor) -> State:
        """With vr Dbar = 0."""
        return super().init(model) | ({} if self.vr == "none" else {"direction": torch.zeros_like(model)})

    def broadcast(self, state: State) -> State:
        """x, and with vr Dbar."""
        return {name: state[name] for name in ("model", "direction") if name in state}

    def expects(self, assigned: Mapping[str, float]) -> Mapping[str, Kind]:
        """With vr d_i; if literal, the change of D_i too."""
        if self.vr == "none":
            return self.payload
        if self.vr == "compensated":
            return {"direction": "increment"}
        return {"direction": "vector", "change": "increment"}

    def memory_kind(self, experiment: Experiment) -> MemoryKind:
        """D_i belongs to Dbar."""
        return super().memory_kind(experiment) if self.vr == "none" else "bound"

    def local(self, work: Work) -> Upload:
        """tau_i local steps; sends Delta_i or d_i, and with vr keeps D_i^+."""
        if self.vr == "none":
            for _ in work.steps():
                pass
            return work.upload(delta=work.delta())
        own, mean = work.memory.get("direction"), work.received["direction"]
        correction = mean if own is None else mean - own
        for gradient in work.steps():
            gradient += correction
        direction = work.delta().div_(-work.lr * unit_response(work.settings, work.lr, work.steps_taken))
        if self.vr == "compensated":
            work.keep(direction=direction - correction)
            return work.upload(direction=direction)
        work.keep(direction=direction)
        change = direction if own is None else direction - own
        return work.upload(direction=direction, change=change)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """A server step along D = tau_eff sum p_i Delta_i / a_i; then Dbar."""
        responses = [unit_response(u.settings, u.lr, u.steps) for u in uploads]
        effective = sum(u.weight * a for u, a in zip(uploads, responses, strict=True))
        if self.vr == "none":
            scales = [u.weight * effective / a for u, a in zip(uploads, responses, strict=True)]
            change = weighted_sum([u.vectors["delta"] for u in uploads], scales)
            return state | server_optimizers.step(self.server, state, change)
        change = cohort_mean(uploads, "direction").mul_(-uploads[0].lr * effective)
        mean = state["direction"]
        if self.vr == "literal":
            mean = mean + tracker_change(uploads, "change")
        else:
            sampled = sum(u.tracker_weight for u in uploads)
            mean = torch.add(tracker_change(uploads, "direction"), mean, alpha=1 - sampled)
        return state | server_optimizers.step(self.server, state, change) | {"direction": mean}

    def check_upload(self, upload: Upload) -> None:
        """a_i can be computed and divides."""
        if upload.steps > MOST_STEPS:
            raise ValueError(f"{upload.steps} local steps, and a_i is computed for {MOST_STEPS} at most")
        response = unit_response(upload.settings, upload.lr, upload.steps)
        if not 0 < response < math.inf:
            raise ValueError(f"a_i = {response} of {upload.steps} local steps is not positive")

    def check(self, experiment: Experiment) -> None:
        """Only optimizers that are linear in the gradients and start anew have an a_i."""
        require_sgd("fednova", experiment, "its steps are not linear in the gradients, so ||a_i||_1 is undefined")
        if experiment.local.moments == "keep":
            raise SettingsError(
                "local.moments = 'keep' has no meaning with strategy.name = 'fednova': a_i is the response of a "
                "momentum that is zero at the round's start; allowed: 'reset'"
            )


@lru_cache(maxsize=4096)
def unit_response(settings: LocalSettings, lr: float, steps: int) -> float:
    """a_i = ||a||_1: how far `steps` steps on gradients of 1 move, in units of the round's rate `lr`.

    torch's own recursion on one float64 number, so that what compounds in training compounds here. Weight decay is
    part of the gradient, not of the response.
    """
    number = torch.zeros(1, dtype=torch.float64)
    optimizer = torch.optim.SGD([number], lr=lr, momentum=settings.momentum, nesterov=settings.nesterov, foreach=False)
    group = optimizer.param_groups[0]
    for _ in range(steps):
        number.grad = torch.ones_like(number).add_(number, alpha=settings.proximal_mu)
        optimizer.step()
        group["lr"] *= settings.step_decay
    return -float(number) / lr
