"""FedDyn (Acar et al., arXiv 2111.04263): each client's objective is shifted until all agree on one minimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import State
from strategies import server_optimizers
from strategies.base import FederatedStrategy, Kind, Upload, Work, cohort_mean, hyperparameters, tracker_change


@hyperparameters
class FedDyn(FederatedStrategy):
    """Clients minimize f_i(y) - <lambda_i, y> + (alpha/2) |y - x|^2 from y = x, then, with Delta_i = y - x,

        lambda_i <- lambda_i - alpha Delta_i
        h <- h - alpha sum_S q_i Delta_i;   x <- x + sum_S w_i Delta_i - h/alpha.

    w_i = 1/|S|, q_i = 1/N (uniform, the paper's), or w_i = n_i / sum_S n_j, q_i = n_i/n (data). lambda_i and h start at
    zero, so h = sum_i q_i lambda_i over all clients after every round; the server rebuilds it from the Delta_i.

    Rest (full gradients): a client that does not move has no gradient at x, g_i(x) = lambda_i, however many steps it
    takes; then h stays and x moves by -h/alpha alone, so h = sum_i q_i g_i(x) = 0: x minimizes what is averaged. One
    alpha serves both weightings. (The official code weights its data objective by a client's own alpha/(N p_i) in
    unweighted means, which changes the local problems, not the minimizer.) Sampled cohorts, local momentum and weight
    decay (of the regularized objective) rest there too.

    alpha (alpha > 0, default 0.01; the paper tries 0.001 to 0.1): small alpha moves far in a round, as -h/alpha adds
    all that clients moved so far. With many clients and few in a round h grows: larger alpha holds it.
    server: sgd with lr <= 1 alone. x is the minimizer of the server's own problem, and -h/alpha sums all rounds
    already: a further memory has no meaning. Shorter steps have, they rest at the same point. (Clients that solve
    their problems exactly, of one curvature a, approach by alpha/(a + alpha) a round at lr = 1.)

    Clipping bounds the gradient of the whole local objective, so that it is idle at rest. The official code clips
    g - lambda_i - alpha x and adds alpha y as weight decay; it stores -lambda_i/alpha. Its x ("cloud model") is this
    x; the paper's curves show the mean of all clients' last models. Public variants detach the added terms (a gradient
    of zero), halve the linear one or leave out 1/alpha at the server.
    """

    weights: Literal["uniform", "data"] = "uniform"
    alpha: float = Field(0.01, gt=0)

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "increment"}
    trackers: ClassVar[tuple[str, ...]] = ("dual",)
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """h = 0."""
        return {**super().init(model), "dual": torch.zeros_like(model)}

    def local(self, work: Work) -> Upload:
        """K steps on the shifted objective; sends Delta_i, keeps lambda_i."""
        own = work.memory.get("dual")
        work.proximal_mu = self.alpha
        for gradient in work.steps():
            if own is not None:
                gradient -= own
        delta = work.delta()
        work.keep(dual=delta * -self.alpha if own is None else own.sub(delta, alpha=self.alpha))
        return work.upload(delta=delta)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """h by what the uploads add to the average over all clients, then x."""
        dual = state["dual"].sub(tracker_change(uploads, "delta"), alpha=self.alpha)
        change = cohort_mean(uploads, "delta").sub_(dual / self.alpha)
        return state | server_optimizers.step(self.server, state, change) | {"dual": dual}

    def check(self, experiment: Experiment) -> None:
        """One proximal term, and no second memory at the server."""
        local, server = experiment.local, self.server
        if local.proximal_mu:
            raise SettingsError(
                f"local.proximal_mu = {local.proximal_mu} beside strategy.name = 'feddyn': strategy.alpha is its "
                "proximal term; leave local.proximal_mu out"
            )
        if server.optimizer != "sgd" or server.lr > 1:
            raise SettingsError(
                f"server.optimizer = {server.optimizer!r} with server.lr = {server.lr:g} has no meaning with "
                "strategy.name = 'feddyn', whose -h/alpha is the memory of all rounds; allowed: 'sgd' with lr <= 1"
            )
