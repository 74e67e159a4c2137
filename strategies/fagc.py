"""FA-GC and FA-NT ("Correcting Before Adapting", arXiv 2502.02727; earlier FAdamGC and FAdamET): trackers against the
bias of adaptive local optimizers."""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.seeds import derive
from common.vector import State
from strategies.base import FederatedStrategy, Kind, Upload, Work, hyperparameters, tracker_change


@hyperparameters
class RefreshedTrackers(FederatedStrategy):
    """What both share: trackers y_i on the clients and y on the server, and the correction y - y_i, fixed for a round.

    Server x <- x + eta_g mean_S(Delta_i), y <- y + sum_{S~} q_i dy_i, q_i = 1/N (uniform, the paper's) or n_i/n (data):
    over all clients, so that y = sum_i q_i y_i and the corrections sum to zero after every round. Over 1/|S~| they
    would not. A client of the refresh set S~, a uniform part of S drawn by the server, sends dy_i = y_i^+ - y_i; all
    others of S keep their y_i. So 3 S + S~ vectors cross the wire in a round: 35 for S = 10, S~ = 5, as in the paper.
    y and all y_i start at zero: round 1 is FedAvg, and until its first refresh a client uses y for its correction, a
    bias of that client alone. With N clients all have been refreshed after about N H_N / S~ rounds.

    The local optimizer is any of `[local]`; its state stays on the client and starts anew each round, or is kept
    (`moments`): no source says which. The paper's formulas have no bias correction, so `bias_correction` is off for
    the default, Adam with rate 1e-3 and betas (0.9, 0.99), and for AdamW and AMSGrad, whose rate is the same.
    LocalAdam, to compare with, is FedAvg with the same settings and uniform weights.
    """

    weights: Literal["uniform", "data"] = "uniform"
    refresh: float = Field(0.5, gt=0, le=1)

    payload: ClassVar[Mapping[str, Kind]] = {"delta": "vector", "tracker": "increment"}
    trackers: ClassVar[tuple[str, ...]] = ("tracker",)
    rescales: ClassVar[bool] = True
    memory: ClassVar[Literal["none", "bound", "own"]] = "bound"

    def init(self, model: Tensor) -> State:
        """y = 0."""
        return {**super().init(model), "tracker": torch.zeros_like(model)}

    def broadcast(self, state: State) -> State:
        """x and y."""
        return {"model": state["model"], "tracker": state["tracker"]}

    def assign(self, state: State, sampled: Sequence[str], round: int, seed: int) -> Mapping[str, Mapping[str, float]]:
        """S~: a function of seed, round and sorted names."""
        # The decimal number that was written: in floats 0.07 * 100 is above 7.
        count = math.ceil(Fraction(str(self.refresh)) * len(sampled))
        chance = random.Random(derive(seed, "refresh", round))
        return {name: {"refresh": 1.0} for name in sorted(chance.sample(sorted(sampled), count))}

    def expects(self, assigned: Mapping[str, float]) -> Mapping[str, Kind]:
        """Delta_i, and dy_i from S~ alone."""
        return self.payload if "refresh" in assigned else {"delta": "vector"}

    def local(self, work: Work) -> Upload:
        """K corrected steps; sends Delta_i, and in S~ dy_i; keeps y_i^+, or y_i as it was."""
        own, refreshes = work.memory.get("tracker"), "refresh" in work.assigned
        correction = work.received["tracker"] if own is None else work.received["tracker"] - own
        fresh = self._walk(work, correction, refreshes)
        if fresh is None:
            work.keep(**({} if own is None else {"tracker": own}))
            return work.upload(delta=work.delta())
        work.keep(tracker=fresh)
        return work.upload(delta=work.delta(), tracker=fresh if own is None else fresh - own)

    @abstractmethod
    def _walk(self, work: Work, correction: Tensor, refreshes: bool) -> Tensor | None:
        """The local steps; returns y_i^+ (d,), a new vector, or None without `refreshes`."""

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """x as FedAvg; y by what the refreshed clients add to the average over all."""
        refreshed = [upload for upload in uploads if "tracker" in upload.vectors]
        following = super().aggregate(state, uploads)
        if not refreshed:
            return following
        return following | {"tracker": state["tracker"] + tracker_change(refreshed, "tracker")}


@hyperparameters
class FAGC(RefreshedTrackers):
    """FA-GC: each gradient is corrected before the local optimizer P sees it; K steps of

        ghat = g_i(w) + y - y_i;   m, v of ghat;   w <- w - eta_l P(m, v),       y_i^+ = mean_k g_i(w_k)

    with the raw g: before correction, clipping, weight decay and proximal term. The mean of ghat would hold y - y_i
    once more. Plain SGD with refresh = 1 is SCAFFOLD, bit for bit. On heterogeneous quadratics FA-GC rests near the
    minimizer, where LocalAdam and FA-NT rest where mean *directions* cancel, far from it.

    refresh: S~/S, rounded up (default 1/2; 1 refreshes every client that takes part). S are the clients asked.
    tracker: "path" is that mean (default), "start" one gradient over all examples at x (SCAFFOLD's option I).
    clip: with `clip_norm`, "raw" bounds g before it is corrected (default), "corrected" bounds ghat, as SCAFFOLD here;
    the paper does not say.

    Matrix optimizers (muon, soap) see ghat everywhere: in Shampoo's L and R, in the momentum, and in Adam's moments for
    what is no matrix. LoRA's factors are matrices. soap's first step makes its bases and moves no matrix: one matrix
    step is lost each round with moments = "reset".
    """

    tracker: Literal["path", "start"] = "path"
    clip: Literal["raw", "corrected"] = "raw"

    def _walk(self, work: Work, correction: Tensor, refreshes: bool) -> Tensor | None:
        start = work.full_gradient() if refreshes and self.tracker == "start" else None
        total = torch.zeros_like(correction) if refreshes and start is None else None
        for gradient in work.steps(clip="none" if self.clip == "raw" else "after"):
            if total is not None:
                total += gradient
            if self.clip == "raw":
                work.clip()
            gradient += correction
        return start if total is None else total.div_(work.steps_taken)


@hyperparameters
class FANT(RefreshedTrackers):
    """FA-NT, the ablation of FA-GC: each direction is corrected after the local optimizer; K steps of

        m, v of g_i(w);   d = P(m, v);   w <- w - eta_l (d + y - y_i),           y_i^+ = mean_k d_k

    with the uncorrected d. The sources do not say in which space the trackers live; y - y_i is added to d, so it is
    d's. The corrections cancel over the clients, and mean_i d_i = 0 is not mean_i g_i = 0: it rests where LocalAdam
    does. Plain SGD makes it FA-GC. What the optimizer is given is in d: a proximal term, clipping, coupled decay;
    decoupled decay is outside.

    refresh: as in FA-GC.
    """

    def _walk(self, work: Work, correction: Tensor, refreshes: bool) -> Tensor | None:
        total = torch.zeros_like(correction) if refreshes else None
        for direction in work.steps(yields="direction"):
            if total is not None:
                total += direction
            direction += correction
        return None if total is None else total.div_(work.steps_taken)
