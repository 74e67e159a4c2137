"""PAdaMFed ("Problem-Parameter-Free Federated Learning", ICLR 2025): SCAFFOLD-M with normalized local steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from common.errors import SettingsError
from common.experiment import Experiment, StrategySettings
from common.vector import State
from strategies.base import FederatedStrategy, Kind, Upload, Work, cohort_mean, hyperparameters, tracker_change

EPS = 1e-12


@hyperparameters
class PAdaMFed(FederatedStrategy):
    """Local step y <- y - eta q/||q||, one norm over all that is shared, with

        q = beta (g_i(y) - c_i + c) + (1 - beta) g,                  or with vr, both gradients on one batch,
        q = g_i(y) - (1 - beta) g_i(x_prev) - beta (c_i - c) + (1 - beta) g;

    x_prev is the server model of the round before (of round 1: x itself). Then

        c_i <- mean_k g_i(y_k);   g <- beta (mean_S dc_i + c) + (1 - beta) g, with the old c;
        c <- c + sum_S q_i dc_i;   x <- x + eta_g mean_S Delta_i.

    q_i = 1/N (uniform, the paper's) or n_i/n (data): over all clients, so that c = sum_i q_i c_i. Normalized
    displacements do not show g; without vr this one is the cohort's mean of q. g, c and all c_i start at zero (public
    code starts them from a first pass); absent clients keep theirs.

    beta (0 < beta <= 1, default 0.1): it multiplies the gradient, so *small* beta is strong momentum.
    vr: variance reduction, two gradients a step.
    momentum: with vr, "controls" is the g above, as in public code; it lags behind as without vr. "storm" adds
      (1 - beta) mean_S,k (g_i(y_k) - g_i(x_prev)): the mean of q again, STORM's recursion, and the smaller error.
    rates: "tuned" takes eta, eta_g and beta as given. "free" derives them from the numbers of rounds T, clients a
      round S and local steps K, with gamma = eta_g eta K in x <- x + gamma mean_S Delta_i/(eta K):
      beta = sqrt(SK/T), gamma = (SK)^(1/4)/T^(3/4), eta = 1/(K sqrt(T)) (the order is the paper's, the constant ours);
      with vr beta = gamma = (SK)^(1/3)/T^(2/3), eta = 1/(KT). beta is at most 1.

    Every step has length eta whatever the gradient (none where q is zero; under local.step_decay = r the k-th has
    eta r^k): clients never stop, so eta has to fall over the rounds, or with T. Personal parts of a model are outside
    the norm and take plain steps of eta times their gradient. c and g are used only in the mix beta c + (1 - beta) g:
    x and the mix go down, Delta_i and dc_i up. That is 40 vectors in a round of 10 clients (vr 50, x_prev down; storm
    60, one more up) where Chen et al. (arXiv 2502.02727) count 60. With unequal K, eta_g mean_S Delta_i weights a
    client by its steps; public code divides by K_i.
    """

    weights: Literal["uniform", "data"] = "uniform"
    beta: float = Field(0.1, gt=0, le=1)
    vr: bool = False
    momentum: Literal["controls", "storm"] = "controls"
    rates: Literal["tuned", "free"] = "tuned"

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector", "control": "increment"}
    trackers: ClassVar[tuple[str, ...]] = ("control",)
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """c = 0, g = 0 and x_prev = x."""
        state = {**super().init(model), "control": torch.zeros_like(model), "momentum": torch.zeros_like(model)}
        return state | ({"previous": model.clone()} if self.vr else {})

    def broadcast(self, state: State) -> State:
        """x, beta c + (1 - beta) g and x_prev."""
        mix = torch.lerp(state["momentum"], state["control"], self.beta)
        return {"model": state["model"], "mix": mix} | ({"previous": state["previous"]} if self.vr else {})

    def expects(self, assigned: Mapping[str, float]) -> Mapping[str, Kind]:
        """Delta_i and dc_i; for storm mean_k (g_i(y_k) - g_i(x_prev))."""
        return {**self.payload, "shift": "vector"} if self.momentum == "storm" else self.payload

    def local(self, work: Work) -> Upload:
        """K steps of length eta; keeps c_i^+."""
        own, mix = work.memory.get("control"), work.received["mix"]
        drift = mix if own is None else mix.sub(own, alpha=self.beta)
        seen, before = torch.zeros_like(drift), torch.zeros_like(drift) if self.momentum == "storm" else None
        for gradient in work.steps(reference=work.received["previous"] if self.vr else None):
            seen += gradient
            if self.vr:
                gradient.sub_(work.reference_gradient, alpha=1 - self.beta).add_(drift)
            else:
                gradient.mul_(self.beta).add_(drift)
            if before is not None:
                before += work.reference_gradient
            # Without a branch on the norm, so that a GPU need not wait for it.
            gradient.div_(torch.linalg.vector_norm(gradient).clamp_min_(EPS))
        control = seen.div_(work.steps_taken)
        work.keep(control=control)
        sent = {"delta": work.delta(), "control": control if own is None else control - own}
        if before is not None:
            sent["shift"] = torch.sub(control, before.div_(work.steps_taken), out=before)
        return work.upload(**sent)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; g from the cohort's means; c by what the uploads add to the average over all."""
        control = state["control"]
        momentum = torch.lerp(state["momentum"], cohort_mean(uploads, "control").add_(control), self.beta)
        if self.momentum == "storm":
            momentum.add_(cohort_mean(uploads, "shift"), alpha=1 - self.beta)
        following = super().aggregate(state, uploads)
        following |= {"momentum": momentum, "control": control + tracker_change(uploads, "control")}
        return following | ({"previous": state["model"]} if self.vr else {})

    def settle(self, experiment: Experiment) -> Experiment:
        """With the rates that are functions of T, S and K written out."""
        if self.rates == "tuned":
            return experiment
        local, server, strategy = experiment.local, experiment.server, experiment.strategy
        steps, sampled = local.steps, experiment.round.sample
        if steps is None or sampled is None:
            missing = " and ".join(k for k, v in (("local.steps", steps), ("round.sample", sampled)) if v is None)
            raise SettingsError(
                f"strategy.rates = 'free' derives the rates from rounds, round.sample and local.steps; give {missing}"
            )
        free = free_rates(experiment.rounds, sampled, steps, self.vr)
        lr = _derived("local.lr", local.lr if "lr" in local.model_fields_set else None, free.lr)
        server_lr = _derived("server.lr", server.lr if "lr" in server.model_fields_set else None, free.server_lr)
        beta = _derived("strategy.beta", strategy.options.get("beta"), free.beta)
        settled = {
            "local": local.model_copy(update={"lr": lr}),
            "server": server.model_copy(update={"lr": server_lr}),
            "strategy": StrategySettings(name=strategy.name, **(strategy.options | {"beta": beta})),
        }
        return experiment.model_copy(update=settled)

    def check(self, experiment: Experiment) -> None:
        """A step is -eta q/||q|| and nothing else."""
        local, named = experiment.local, "strategy.name = 'padamfed'"
        if local.adaptive:
            raise SettingsError(
                f"{named} has no meaning with local.optimizer = {local.optimizer!r}: its steps are normalized already; "
                "allowed: 'sgd'"
            )
        for key in ("momentum", "weight_decay", "proximal_mu", "clip_norm"):
            if value := getattr(local, key):
                raise SettingsError(
                    f"local.{key} = {value} has no meaning with {named}: every step has the length lr; leave it out"
                )
        if self.rates == "free" and local.step_decay != 1.0:
            raise SettingsError(
                f"local.step_decay = {local.step_decay} has no meaning with strategy.rates = 'free', whose eta is the "
                "length of each of K equal steps; allowed: 1.0"
            )
        if self.vr and local.sam_rho:
            raise SettingsError(
                f"local.sam_rho = {local.sam_rho} has no meaning with strategy.vr = true: the gradient at the previous "
                "model, which cancels, is not sharpened"
            )
        if self.momentum == "storm" and not self.vr:
            raise SettingsError("strategy.momentum = 'storm' needs the second gradient of strategy.vr = true")
        if self.rates == "free" and self.server.optimizer not in ("sgd", "momentum", "nesterov"):
            raise SettingsError(
                f"server.optimizer = {self.server.optimizer!r} has no meaning with strategy.rates = 'free', where "
                "server.lr is a factor of the mean change; allowed: 'sgd', 'momentum', 'nesterov'"
            )


class Rates(NamedTuple):
    """eta, eta_g = gamma/(eta K) and beta."""

    lr: float
    server_lr: float
    beta: float


def free_rates(rounds: int, sampled: int, steps: int, vr: bool) -> Rates:
    """Of T rounds with S clients of K steps."""
    taken = sampled * steps
    if vr:
        lr, gamma = 1 / (steps * rounds), taken ** (1 / 3) / rounds ** (2 / 3)
        return Rates(lr, gamma / (lr * steps), min(1.0, gamma))
    lr, gamma = 1 / (steps * math.sqrt(rounds)), taken ** (1 / 4) / rounds ** (3 / 4)
    return Rates(lr, gamma / (lr * steps), min(1.0, math.sqrt(taken / rounds)))


def _derived(key: str, given: float | None, value: float) -> float:
    """What is written out already, up to another machine's rounding, or the derived value."""
    if given is None:
        return value
    if not math.isclose(given, value, rel_tol=1e-9):
        raise SettingsError(
            f"{key} = {given} contradicts strategy.rates = 'free', which makes it {value}; leave it out"
        )
    return given
