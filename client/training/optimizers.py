"""The optimizers of local training, over the slices of one flat vector.

torch's own wherever it has them. What differs from a textbook or another library:

sgd         torch.optim.SGD: undamped heavy ball m <- mu m + g.
adam, adamw, amsgrad
            torch.optim.Adam and AdamW; decay is coupled (L2, part of the gradient) in adam and amsgrad, decoupled in
            adamw. `bias_correction = false` is FA-GC's formula (arXiv 2502.02727): w <- w - lr m/(sqrt(v) + eps). With
            moments that start at zero its steps are (1 - b1^k)/sqrt(1 - b2^k) times as long on a constant gradient:
            1.0 at k = 1, 2.1 at k = 10 for b2 = 0.99.
normalized  m <- b1 m + (1-b1) g; w <- w - lr m/(||m|| + eps), one norm over the vector (a norm for each tensor would be
            another method). A bias correction cancels, eps is for 0/0 alone.
muon        torch.optim.Muon, for matrices (a convolution's are (out, rest)): m <- b1 m + (1-b1) g (damped, but the next
            step divides by its size); O = Newton-Schulz of m, or with nesterov of b1 m + (1-b1) g;
            w <- (1 - lr wd) w - lr scale O. Coefficients (3.4445, -4.7750, 2.0315): singular values end in a band
            around 1, not at 1. torch divides by max(||m||_F, 1e-7), the reference code by ||m||_F + 1e-7.
            Newton-Schulz runs in bfloat16 whatever the model's dtype, so O has two to three digits.
soap        pytorch_optimizer.SOAP (Vyas et al., arXiv 2409.11321), for matrices: Adam in the eigenbases of Shampoo's
            L <- b2 L + (1-b2) g g^T and R, refreshed every `precondition_every` steps by one power iteration and QR
            (float32 in any case); a side longer than 10000 keeps the identity. As in the authors' code the first step
            makes the bases and moves no matrix: with moments reset, a round has one matrix step less. Decay decoupled.
            The basis of equal eigenvalues is arbitrary, and a first gradient (rows, columns) leaves |rows - columns| of
            them 0: expect other weights from another machine or library, beyond rounding.

muon and soap leave what is no matrix to Adam with decoupled decay. Its rate `aux_lr` follows the schedule of lr.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from common import portable
from common.arithmetic import ExactRoots, sqrt
from common.errors import SettingsError
from common.experiment import LocalSettings
from common.vector import Slot, State

MUON_SCALE = {"none": "original", "aspect": "original", "rms": "match_rms_adamw"}

MATRIX_OPTIMIZERS = ("muon", "soap")


class LocalOptimizer:
    """The local optimizer of one round over one flat vector (n,) and its gradient (n,), both live, never copied.

    `matrices` are the slots within the vector that muon and soap treat as matrices. `lr` is the round's rate.
    """

    def __init__(
        self, settings: LocalSettings, vector: Tensor, gradient: Tensor, lr: float, matrices: Sequence[Slot] = ()
    ) -> None:
        self._parts: dict[str, torch.optim.Optimizer] = {}
        self._foreign_roots = settings.optimizer == "soap" and portable.active()
        if settings.optimizer not in MATRIX_OPTIMIZERS:
            self._parts["vector"] = _whole(settings, [_leaf(vector, gradient)], lr)
            return
        matrices = sorted(matrices, key=lambda slot: slot.start)
        if matrices:
            views = [(_matrix(slot, vector), _matrix(slot, gradient)) for slot in matrices]
            make = _muon if settings.optimizer == "muon" else _soap
            self._parts["matrices"] = make(settings, views, lr)
        rest = [_leaf(vector[a:b], gradient[a:b]) for a, b in _between(matrices, vector.numel())]
        if rest:
            aux = lr if settings.aux_lr is None else settings.aux_lr * (lr / settings.lr)
            self._parts["rest"] = _adam(settings, rest, aux, decoupled=True)

    @torch.no_grad()
    def step(self) -> None:
        """One step from the present gradient, in place."""
        with ExactRoots() if self._foreign_roots else nullcontext():
            for optimizer in self._parts.values():
                inspect.unwrap(type(optimizer).step)(optimizer)  # torch's wrapper imports torch.compile: see `_bare`

    def decay(self, factor: float) -> None:
        """Multiply the rates of the steps to come."""
        for optimizer in self._parts.values():
            for group in optimizer.param_groups:
                group["lr"] *= factor

    @property
    def lr(self) -> float:
        """The present rate; of the matrices, where there are any."""
        return float(next(iter(self._parts.values())).param_groups[0]["lr"])

    def state(self) -> State:
        """Moments and step counters as of now; the moments are live. Empty without a step, and for plain sgd."""
        entries = {name: value.contiguous() for name, value in self._entries()}
        for part, optimizer in self._parts.items():
            if optimizer.param_groups[0].get("step"):  # SOAP counts for all its matrices at once
                entries[f"{part}.step"] = torch.tensor(optimizer.param_groups[0]["step"])
        return entries

    def load(self, state: State) -> None:
        """Continue from the state of another round, which is copied. Raises ValueError if it does not fit."""
        counters = {}
        for part, optimizer in self._parts.items():
            for leaf in _leaves(optimizer):
                optimizer.state[leaf] = _blank(optimizer, leaf)
            if "Q" in optimizer.state[_leaves(optimizer)[0]]:
                counters[f"{part}.step"] = optimizer.param_groups[0]
        own = dict(self._entries())
        expected = {name: tuple(value.shape) for name, value in own.items()} | dict.fromkeys(counters, ())
        for name in sorted(expected.keys() | state.keys()):
            given = tuple(state[name].shape) if name in state else "missing"
            wanted = expected.get(name, "unknown")
            if given != wanted:
                raise ValueError(f"optimizer state does not fit: {name!r} is {given} there and {wanted} here")
        for name, value in own.items():
            value.copy_(state[name])
        for name, group in counters.items():
            group["step"] = int(state[name])

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the optimizers' states, by "part.leaf.key"."""
        for part, optimizer in self._parts.items():
            for index, leaf in enumerate(_leaves(optimizer)):
                for key, value in optimizer.state[leaf].items():
                    if isinstance(value, Tensor):
                        yield f"{part}.{index}.{key}", value
                    elif isinstance(value, list):
                        for side, matrix in enumerate(value):
                            if isinstance(matrix, Tensor):
                                yield f"{part}.{index}.{key}.{side}", matrix


class UncorrectedAdam(torch.optim.Optimizer):
    """Adam, AdamW and AMSGrad without bias correction: w <- w - lr m/(sqrt(v) + eps), v or its maximum."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for leaf in group["params"]:
                gradient = leaf.grad
                if group["decoupled"]:
                    leaf.mul_(1 - group["lr"] * group["weight_decay"])
                elif group["weight_decay"]:
                    gradient = gradient.add(leaf, alpha=group["weight_decay"])
                state = self.state[leaf] or _blank(self, leaf)
                self.state[leaf] = state
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                if group["amsgrad"]:
                    second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
                leaf.addcdiv_(state["exp_avg"], sqrt(second).add_(group["eps"]), value=-group["lr"])


class NormalizedGradient(torch.optim.Optimizer):
    """m <- b1 m + (1-b1) g; w <- w - lr m/(||m|| + eps)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, without a branch on the norm: a GPU need not wait for it."""
        for group in self.param_groups:
            for leaf in group["params"]:
                state = self.state[leaf] or _blank(self, leaf)
                self.state[leaf] = state
                mean = state["exp_avg"].lerp_(leaf.grad, 1 - group["beta"])
                leaf.addcdiv_(mean, torch.linalg.vector_norm(mean) + group["eps"], value=-group["lr"])


def _leaf(view: Tensor, gradient: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(view)
    leaf.grad = gradient
    return leaf


def _leaves(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [leaf for group in optimizer.param_groups for leaf in group["params"]]


def _matrix(slot: Slot, vector: Tensor) -> Tensor:
    return vector[slot.start : slot.stop].view(slot.shape[0], -1)


def _between(slots: Sequence[Slot], size: int) -> list[tuple[int, int]]:
    """The runs of a vector that no slot covers."""
    starts, stops = [0, *(slot.stop for slot in slots)], [*(slot.start for slot in slots), size]
    return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _bare(kind: type[torch.optim.Optimizer]) -> None:
    """Let torch's optimizers keep off torch.compile without importing it: 3 CPU seconds of every process that trains.

    `torch._disable_dynamo`, which decorates these methods, looks for the attribute first. A torch that does not know it
    imports its compiler as before."""
    for method in (kind.add_param_group, kind.zero_grad, kind.state_dict, kind.load_state_dict):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)


_bare(torch.optim.Optimizer)


def _whole(settings: LocalSettings, leaves: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            leaves,
            lr=lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
            foreach=False,
        )
    if settings.optimizer == "normalized":
        return NormalizedGradient(leaves, {"lr": lr, "beta": settings.betas[0], "eps": settings.eps})
    return _adam(settings, leaves, lr, decoupled=settings.optimizer == "adamw")


def _adam(settings: LocalSettings, leaves: list[nn.Parameter], lr: float, *, decoupled: bool) -> torch.optim.Optimizer:
    given: dict[str, Any] = {
        "lr": lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "amsgrad": settings.optimizer == "amsgrad",
    }
    if not settings.bias_correction:
        return UncorrectedAdam(leaves, given | {"decoupled": decoupled})
    if portable.active():
        given["fused"] = True  # the other way takes torch's square root
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(leaves, foreach=False, **given)


def _muon(settings: LocalSettings, views: list[tuple[Tensor, Tensor]], lr: float) -> torch.optim.Optimizer:
    if views[0][0].dtype == torch.bfloat16 and not settings.nesterov:
        # There torch.optim.Muon (2.14) normalizes the momentum itself in place.
        raise SettingsError("optimizer 'muon' without nesterov needs a model of another dtype than bfloat16")
    if settings.muon_scale == "none":
        # Newton-Schulz commutes with transposition, and torch's factor sqrt(max(1, rows/cols)) is 1 for wide matrices.
        views = [(w.T, g.T) if w.shape[0] > w.shape[1] else (w, g) for w, g in views]
    return torch.optim.Muon(
        [_leaf(*view) for view in views],
        lr=lr,
        weight_decay=settings.weight_decay,
        momentum=settings.betas[0],
        nesterov=settings.nesterov,
        ns_steps=settings.muon_steps,
        adjust_lr_fn=MUON_SCALE[settings.muon_scale],
    )


def _soap(settings: LocalSettings, views: list[tuple[Tensor, Tensor]], lr: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP  # takes seconds

    optimizer: torch.optim.Optimizer = SOAP(
        [_leaf(*view) for view in views],
        lr=lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        precondition_frequency=settings.precondition_every,
        correct_bias=settings.bias_correction,
    )
    return optimizer


def _blank(optimizer: torch.optim.Optimizer, leaf: nn.Parameter) -> dict[str, Any]:
    """What the optimizer keeps for a leaf, under its own names, all zero."""
    group = optimizer.param_groups[0]

    def zeros(*names: str) -> dict[str, Any]:
        return {name: torch.zeros_like(leaf, requires_grad=False) for name in names}

    if isinstance(optimizer, torch.optim.SGD):
        return zeros("momentum_buffer") if group["momentum"] else {}
    if isinstance(optimizer, torch.optim.Muon):
        return zeros("momentum_buffer")
    if isinstance(optimizer, NormalizedGradient):
        return zeros("exp_avg")
    state = zeros("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.Adam):
        state["step"] = torch.zeros(())
    if group.get("amsgrad"):
        state |= zeros("max_exp_avg_sq")
    if hasattr(optimizer, "init_pre_conditioner"):
        _, beta2 = group["betas"]
        optimizer.init_pre_conditioner(leaf.grad, state, group["precondition_frequency"], beta2)
        # By columns, as eigh and qr return them: products are bit-equal only from the same layout.
        state["Q"] = [torch.zeros_like(side).T if isinstance(side, Tensor) else [] for side in state["GG"]]
    return state
