"""Server optimizers: pure functions on a State that turn the mean client change D into the next model.

D points downhill, so every update adds. Moments never meet buffers, stay on the server for ever and keep the model's
dtype. The adaptive family follows Reddi et al. (arXiv 2003.00295): second moments of D (not of the first moment), no
bias correction, v_0 = tau^2, and tau outside the root. Torch's and FedCAMS' code correct the bias; the paper does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.arithmetic import sqrt
from common.experiment import ServerSettings
from common.vector import State

FIRST, SECOND, LARGEST = "server.m", "server.v", "server.v_max"

_KEPT = {
    "sgd": (),
    "momentum": (FIRST,),
    "nesterov": (FIRST,),
    "adagrad": (FIRST, SECOND),
    "adam": (FIRST, SECOND),
    "yogi": (FIRST, SECOND),
    "ams": (FIRST, SECOND, LARGEST),
}


def start(settings: ServerSettings, model: Tensor) -> State:
    """The optimizer's entries of the server state: m = 0, v = tau^2 (float, the model's dtype)."""
    fill = {FIRST: 0.0, SECOND: settings.tau**2, LARGEST: settings.tau**2}
    return {name: torch.full_like(model, fill[name]) for name in _KEPT[settings.optimizer]}


def step(settings: ServerSettings, state: State, change: Tensor) -> State:
    """The entries "model" and moments after one step along `change` = D (d,); `state` itself is not touched.

    sgd:       x + eta D
    momentum:  m <- beta m + D (undamped);            x + eta m               (FedAvgM, arXiv 1909.06335)
    nesterov:  m <- beta m + D;                       x + eta (beta m + D)
    adagrad:   v <- v + D^2;                          x + eta m / (sqrt(v) + tau), m <- beta1 m + (1 - beta1) D
    adam:      v <- beta2 v + (1 - beta2) D^2
    yogi:      v <- v - (1 - beta2) D^2 sign(v - D^2)
    ams:       v as adam, v_max <- max(v_max, v);     x + eta m / sqrt(v_max) (FedAMS, arXiv 2205.02719, max form)
    """
    eta, name, model = settings.lr, settings.optimizer, state["model"]
    if name == "sgd":
        return {"model": model.add(change, alpha=eta)}
    if name in ("momentum", "nesterov"):
        beta = settings.momentum
        first = state[FIRST].mul(beta).add_(change)
        ahead = first if name == "momentum" else first.mul(beta).add_(change)
        return {"model": model.add(ahead, alpha=eta), FIRST: first}
    first = state[FIRST].mul(settings.beta1).add_(change, alpha=1 - settings.beta1)
    square = change.square()
    if name == "adagrad":
        second = state[SECOND].add(square)
    elif name == "yogi":
        sign = torch.sign(state[SECOND] - square)
        second = state[SECOND].sub(square.mul_(sign), alpha=1 - settings.beta2)
    else:
        second = state[SECOND].mul(settings.beta2).add_(square, alpha=1 - settings.beta2)
    if name == "ams":
        largest = torch.maximum(state[LARGEST], second)
        model = model.addcdiv(first, sqrt(largest), value=eta)
        return {"model": model, FIRST: first, SECOND: second, LARGEST: largest}
    return {
        "model": model.addcdiv(first, sqrt(second).add_(settings.tau), value=eta),
        FIRST: first,
        SECOND: second,
    }
