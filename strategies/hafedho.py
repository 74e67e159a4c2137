"""HaFedHo: harmonizing heterogeneous clients by objective rectification (Algorithm 1). See docs/hafedho.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.experiment import Experiment
from common.vector import State, weighted_sum
from strategies import server_optimizers
from strategies.base import FederatedStrategy, Kind, Upload, Work, cohort_mean, hyperparameters, require_sgd


@hyperparameters
class HaFedHo(FederatedStrategy):
    """Clients minimize phi_i(w) = f_i(w) + mu (fhat + h^T (w - w^t)); the server steps w^{t+1} = w^t - eta g^t.

    h = g^{t-1} - q_i g_i^{t-1} and fhat = fhat^{t-1} - q_i fhat_i^{t-1} if this client's upload of round t-1 was
    accepted, else g^{t-1} and fhat^{t-1}. fhat_i is the mean local loss, g_i a *sum* over the lambda local steps;
    g^t and fhat^t are their means over the cohort (uniform, Algorithm 1; its section 4.2 writes p_i). All start at
    zero: round 1 is FedAvg.

    mu (mu >= 0, default 0.01): beta = mu lambda acts as undamped momentum, so flat directions need mu lambda < 1.
    mu_schedule: "constant", or "inverse" for mu/t, which the paper's theory allows.
    rectification: "objective" adds grad(mu h^T w) = mu h to the loss gradient before clipping, as autograd does;
      "gradient" adds it after clipping. Without clipping they are one and the same (the paper reports a difference).
    upload: "phi" g_i = sum grad phi_i (Algorithm 1), each as clipping left it, so that the server steps along what the
      clients did; "displacement" (w^t - w_i)/eta, which differs from phi only by weight decay, momentum, a proximal
      term or decayed rates: these move a client and no grad phi_i holds them, so that with phi the server leaves them
      out (`caution`); "raw" sum grad f_i before clipping, which removes the recursion and follows FedAvg.
      With phi under "objective" clipping bounds grad phi_i, and a proximal term comes after it.
    downlink: "gradient": a client whose upload of round t-1 was accepted still holds w^{t-1} and is sent g^{t-1} alone,
      from which it makes w^t to the bit (one vector down instead of two, one more in its memory); "model": always both.
    own_share: q_i = "data" p_i = n_i/n (Algorithm 1); "cohort" the weight that g_i really had in g^{t-1}; "none" 0.
    """

    weights: Literal["uniform", "data"] = "uniform"
    mu: float = Field(0.01, ge=0)
    mu_schedule: Literal["constant", "inverse"] = "constant"
    rectification: Literal["objective", "gradient"] = "objective"
    upload: Literal["phi", "displacement", "raw"] = "phi"
    own_share: Literal["data", "cohort", "none"] = "data"
    downlink: Literal["gradient", "model"] = "gradient"

    payload: ClassVar[Mapping[str, Kind]] = {"gradient": "vector", "loss": "scalar"}
    memory: ClassVar[Literal["none", "bound", "own"]] = "own"

    def init(self, model: Tensor) -> State:
        """g = 0, fhat = 0, the total weight of the last cohort (in clients or in examples) and the eta of its round."""
        zero = torch.zeros((), dtype=torch.float64)
        return {
            **super().init(model),
            "gradient": torch.zeros_like(model),
            "loss": zero,
            "cohort": zero.clone(),
            "rate": zero.clone(),
        }

    def broadcast(self, state: State) -> State:
        """w^t, g^{t-1}, fhat^{t-1}, the size of the last cohort and eta^{t-1}."""
        return {name: state[name] for name in ("model", "gradient", "loss", "cohort", "rate")}

    def lean(self) -> tuple[str, ...]:
        """w^t, unless a server optimizer with moments made it."""
        return ("model",) if self.downlink == "gradient" and self.server.optimizer == "sgd" else ()

    def restore(self, held: State, received: State) -> State:
        """w^t = w^{t-1} - eta_g eta^{t-1} g^{t-1}, by the operations of `aggregate`."""
        change = received["gradient"] * -float(received["rate"])
        return server_optimizers.step(self.server, held, change)

    def local(self, work: Work) -> Upload:
        """lambda steps on phi_i."""
        own, loss = self._own_share(work), float(work.received["loss"])
        mu = self.mu / work.round if self.mu_schedule == "inverse" else self.mu
        correction = mu * work.received["gradient"]
        if own:
            correction.sub_(work.memory["gradient"], alpha=mu * own)
            loss -= own * float(work.memory["loss"])
        total = torch.zeros_like(correction)
        for gradient in work.steps(clip=self._clip):
            if self.upload == "raw":
                total += gradient
            gradient += correction
            if self._clip == "none":
                work.clip()
            if self.upload == "phi":
                total += gradient
        if self.upload == "displacement":
            total = work.delta().div_(-work.lr)
        mean_loss = torch.tensor(work.mean_loss, dtype=torch.float64)
        work.keep(gradient=total, loss=mean_loss)
        sent = work.upload(gradient=total, loss=mean_loss)
        # The constant mu fhat never reaches a gradient; this mean of phi_i, but for its linear part, is for the record.
        sent.metrics["objective"] = work.mean_loss + mu * loss
        return sent

    @property
    def _clip(self) -> Literal["after", "before", "none"]:
        """When the work clips by itself: after grad phi_i has been summed up would be too late."""
        if self.rectification == "gradient":
            return "before"
        return "none" if self.upload == "phi" else "after"

    def _own_share(self, work: Work) -> float:
        if self.own_share == "none" or not work.accepted_last_round or "gradient" not in work.memory:
            return 0.0
        if self.own_share == "data":
            return work.share
        return (1.0 if self.weights == "uniform" else work.num_examples) / float(work.received["cohort"])

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """g and fhat are cohort means; the model takes a server step along -eta g with the eta of this round."""
        gradient = cohort_mean(uploads, "gradient")
        loss = weighted_sum([u.vectors["loss"] for u in uploads], [u.weight for u in uploads])
        size = len(uploads) if self.weights == "uniform" else sum(u.examples for u in uploads)
        change = gradient * -uploads[0].lr
        cohort, rate = (torch.tensor(float(value), dtype=torch.float64) for value in (size, uploads[0].lr))
        kept = {"gradient": gradient, "loss": loss, "cohort": cohort, "rate": rate}
        return state | server_optimizers.step(self.server, state, change) | kept

    def check(self, experiment: Experiment) -> None:
        """Gradients must be in units of displacement over lr."""
        require_sgd("hafedho", experiment, "the server rebuilds the model from gradients in units of lr")

    def caution(self, experiment: Experiment, steps: int) -> str | None:
        """beta = mu lambda >= 1 along flat directions, and what moves clients and is no part of what they send."""
        found = [each for each in (self._unstable(experiment, steps), self._left_out(experiment)) if each]
        return f"hafedho: {'; '.join(found)}" if found else None

    def _unstable(self, experiment: Experiment, steps: int) -> str | None:
        if self.mu * steps < 1 or self.mu_schedule == "inverse" or self.upload == "raw":
            return None
        text = f"strategy.mu x local steps = {self.mu} x {steps} = {self.mu * steps:g} >= 1 is undamped momentum that "
        if experiment.local.clip_norm is not None and self.rectification == "objective":
            text += "goes on along flat directions, at the speed that clipping allows"
        else:
            text += "diverges along flat directions"
        return f"{text}; mu < {1 / steps:.3g} is stable"

    def _left_out(self, experiment: Experiment) -> str | None:
        if self.upload == "displacement":
            return None
        local = experiment.local
        moves = {
            "weight_decay": local.weight_decay,
            "momentum": local.momentum,
            "proximal_mu": local.proximal_mu,
            "step_decay": local.step_decay if local.step_decay != 1 else 0.0,
            "clip_norm": local.clip_norm if self.upload == "raw" else None,
        }
        named = [f"local.{key} = {value:g}" for key, value in moves.items() if value]
        if not named:
            return None
        return (
            f"strategy.upload = {self.upload!r} sends sums of gradients, and what else moves a client never reaches "
            f"the server's model: {', '.join(named)}; upload = 'displacement' sends all of it"
        )
