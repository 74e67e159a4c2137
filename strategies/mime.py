"""Mime and MimeLite (Karimireddy et al., arXiv 2008.03606): local steps that mimic a centralized optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.arithmetic import sqrt, sqrt_
from common.errors import SettingsError
from common.experiment import Experiment
from common.vector import State
from strategies.base import FederatedStrategy, Kind, Upload, Work, cohort_mean, hyperparameters, require_sgd


@hyperparameters
class MimeLite(FederatedStrategy):
    """y <- y - eta_l U(g_i(y), s) with s frozen for the round; x <- x + eta_g mean_S(Delta_i), s <- V(mean_S(G_i), s).

    G_i is the gradient over all of client i's examples at the *server model*, taken before training, in evaluation
    mode and unclipped. V moves s alone, never x. All statistics start at zero and stay with the server: made for
    clients that come once. Local momentum and adaptive local optimizers would be a second U: refused.

    base: "sgdm"  U = m' with m' = beta1 m + (1 - beta1) g (damped = true, the paper's) or beta1 m + g (false, as
                  fedjax and torch), V: m <- m' of the mean gradient.
          "adam"  U = m'/(sqrt(v') + eps), m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2; V likewise.
    denominator: "stepped" takes v', as fedjax, whose clients apply one step of the optimizer to the frozen s; with one
      local step on all examples Mime is then centralized Adam. "frozen" takes v, the paper's table; v = 0 in round 1,
      which divides by eps alone.
    bias_correction: as torch's Adam, its counter counts rounds; off in the paper, on in fedjax.
    weights: "uniform" (the paper's) or "data" (fedjax), for Delta_i and G_i alike.

    Raw gradients are clipped, before U. Weight decay and a proximal term act beside U and are no part of G_i.
    FedML takes G_i at the trained model, as a sum over batches, clipped, and moves x by it too.
    """

    weights: Literal["uniform", "data"] = "uniform"
    base: Literal["sgdm", "adam"] = "sgdm"
    damped: bool = True
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    denominator: Literal["stepped", "frozen"] = "stepped"
    bias_correction: bool = False

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector", "gradient": "vector"}

    def init(self, model: Tensor) -> State:
        """m = 0; with Adam v = 0 and the number of rounds that made them."""
        state = {**super().init(model), "momentum": torch.zeros_like(model)}
        if self.base == "adam":
            state |= {"square": torch.zeros_like(model), "rounds": torch.zeros((), dtype=torch.float64)}
        return state

    def broadcast(self, state: State) -> State:
        """x and s."""
        return {name: state[name] for name in ("model", "momentum", "square", "rounds") if name in state}

    def reset(self, state: State) -> State:
        """Nothing here is bound to client memory."""
        return dict(state)

    def local(self, work: Work) -> Upload:
        """G_i, then K steps of U; sends Delta_i and G_i."""
        gradient, s = work.full_gradient(), work.received
        direct = self._adam(s) if self.base == "adam" else self._sgdm(s["momentum"] * self.beta1)
        for each in work.steps(clip="before"):
            direct(each)
        return work.upload(delta=work.delta(), gradient=gradient)

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; s by V from the cohort's mean gradient at the old x."""
        return super().aggregate(state, uploads) | self._statistics(state, cohort_mean(uploads, "gradient"))

    def check(self, experiment: Experiment) -> None:
        """Plain SGD is what carries U out."""
        name, local = experiment.strategy.name, experiment.local
        require_sgd(name, experiment, "its local step is the base optimizer's")
        if local.momentum:
            raise SettingsError(
                f"strategy.name = {name!r} has no meaning with local.momentum = {local.momentum:g}: momentum is among "
                "the server's statistics; set strategy.beta1"
            )
        if self.base == "adam" and not self.damped:
            raise SettingsError("strategy.damped = false belongs to base 'sgdm', not to 'adam'")
        if self.base == "sgdm" and (self.bias_correction or self.denominator == "frozen"):
            raise SettingsError(
                "strategy.bias_correction and strategy.denominator belong to base 'adam', not to 'sgdm'"
            )
        if self.bias_correction and self.denominator == "frozen":
            raise SettingsError("strategy.bias_correction has no meaning with denominator 'frozen': v is 0 at first")

    @property
    def _new(self) -> float:
        """How much of a new gradient enters the momentum."""
        return 1 - self.beta1 if self.damped else 1.0

    def _statistics(self, state: State, gradient: Tensor) -> State:
        """V: the statistics after one more gradient (d,)."""
        after = {"momentum": (state["momentum"] * self.beta1).add_(gradient, alpha=self._new)}
        if self.base == "adam":
            square = (state["square"] * self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
            after |= {"square": square, "rounds": state["rounds"] + 1}
        return after

    def _sgdm(self, held: Tensor) -> Callable[[Tensor], None]:
        """U in place of a gradient: `held` (d,) is all of m' that does not depend on it."""

        def direct(gradient: Tensor) -> None:
            gradient.mul_(self._new).add_(held)

        return direct

    def _adam(self, s: State) -> Callable[[Tensor], None]:
        """U in place of a gradient."""
        count = float(s["rounds"]) + 1
        scale1, scale2 = (1 - beta**count if self.bias_correction else 1.0 for beta in (self.beta1, self.beta2))
        first, new = s["momentum"] * (self.beta1 / scale1), (1 - self.beta1) / scale1
        second, more = s["square"] * (self.beta2 / scale2), (1 - self.beta2) / scale2
        root = sqrt(s["square"]).add_(self.eps)

        def direct(gradient: Tensor) -> None:
            if self.denominator == "stepped":
                torch.addcmul(second, gradient, gradient, value=more, out=root)
                sqrt_(root).add_(self.eps)
            gradient.mul_(new).add_(first).div_(root)

        return direct


@hyperparameters
class Mime(MimeLite):
    """MimeLite with SVRG's correction: y <- y - eta_l U(g_i(y; b) - g_i(x; b) + c, s), c = mean_S(G_i) of this cohort.

    Both gradients are taken on the same batch b, with the same dropout masks and clipping. A round has two exchanges:
    first x goes down and G_i comes up, then training starts. A client keeps nothing in between, so x goes down again.
    With base = "sgdm" the second exchange carries m' = beta1 m + (1 - beta1) c in place of s and c, for
    U = (1 - beta1)(g_i(y) - g_i(x)) + m': 3 vectors down and 2 up, as many as the paper's x, s, c. With "adam" x, m, v
    and c: 5 down. A client that answers only the first exchange has its part in c all the same.
    With one local step on all examples Mime is the centralized base optimizer on the mean gradient.
    Hyperparameters as in MimeLite: base, damped, beta1, beta2, eps, denominator, bias_correction.
    """

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector"}
    survey: ClassVar[Mapping[str, Kind]] = {"gradient": "vector"}

    def look(self, work: Work) -> Upload:
        """G_i."""
        return work.upload(gradient=work.full_gradient())

    def inform(self, state: State, uploads: Sequence[Upload]) -> State:
        """c beside the rest."""
        return state | {"gradient": cohort_mean(uploads, "gradient")}

    def broadcast(self, state: State) -> State:
        """x; in the second exchange also what a step needs of s and c."""
        if "gradient" not in state:
            return {"model": state["model"]}
        if self.base == "adam":
            return super().broadcast(state) | {"gradient": state["gradient"]}
        return {"model": state["model"], **self._statistics(state, state["gradient"])}

    def local(self, work: Work) -> Upload:
        """K corrected steps of U; sends Delta_i."""
        received, adam = work.received, self.base == "adam"
        direct = self._adam(received) if adam else self._sgdm(received["momentum"])
        for gradient in work.steps(clip="before", reference=received["model"]):
            gradient.sub_(work.reference_gradient)
            if adam:
                gradient.add_(received["gradient"])
            direct(gradient)
        return work.upload(delta=work.delta())

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; s by V from c."""
        kept = {name: value for name, value in state.items() if name != "gradient"}
        return FederatedStrategy.aggregate(self, kept, uploads) | self._statistics(state, state["gradient"])

    def check(self, experiment: Experiment) -> None:
        """The correction subtracts like from like."""
        super().check(experiment)
        if experiment.local.sam_rho:
            raise SettingsError(
                f"strategy.name = {experiment.strategy.name!r} has no meaning with local.sam_rho = "
                f"{experiment.local.sam_rho:g}: its correction is a difference of gradients at y and x; use 'mimelite'"
            )
