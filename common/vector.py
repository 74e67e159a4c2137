"""A model as one flat vector.

The trainable parameters of a module become views into one buffer and their gradients views into another, so one
add corrects a whole model, one array crosses the wire and one reduction averages it. Buffers (BatchNorm statistics,
counters) are vectors of their own, one for each dtype: they never meet an optimizer, a tracker or a compressor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import SettingsError

State = dict[str, Tensor]
"""name -> flat vector of d numbers, or a 0-d scalar: what is kept, sent and saved."""

CHUNK = 1 << 16
BUFFERS = "buffers."
PERSONAL = "personal."


@dataclass(frozen=True)
class Slot:
    """Where a named tensor lies in its flat vector."""

    start: int
    stop: int
    shape: tuple[int, ...]

    def view(self, vector: Tensor) -> Tensor:
        """The named tensor as a view into `vector` (d,)."""
        return vector[self.start : self.stop].view(self.shape)


Layout = dict[str, Slot]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""By name, those that travel and are kept."""


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
    """Slots for the tensors, one after the other in the order given."""
    layout: Layout = {}
    start = 0
    for name, tensor in tensors:
        layout[name] = Slot(start, start + tensor.numel(), tuple(tensor.shape))
        start = layout[name].stop
    return layout


def _adopt(tensors: Sequence[tuple[str, Tensor]], layout: Layout, device: torch.device) -> Tensor:
    """One vector that holds all the tensors; each tensor's storage becomes a view into it."""
    vector = torch.cat([tensor.detach().to(device).reshape(-1) for _, tensor in tensors])
    for name, tensor in tensors:
        tensor.data = layout[name].view(vector)
    return vector


class FlatModel:
    """A module whose trainable parameters, gradients and buffers are views into flat vectors.

    What `personal` names (parameters and buffers) stays with each client: those parameters lie behind the shared ones.

    Attributes: `module`; `whole` (d + k,) all trainable parameters and `whole_gradient`; `vector` (d,) and `gradient`
    (d,) their shared part; `layout` name -> slot in it; `personal_layout` name -> slot in the part behind it;
    `buffers` "buffers.<dtype>" -> vector of the shared ones; `layout_hash` over names, shapes and dtypes of what is
    shared and the values of frozen tensors.

    Raises SettingsError if nothing trainable is shared or the trainable parameters have more than one dtype.
    """

    def __init__(
        self, module: nn.Module, device: torch.device | str = "cpu", personal: Collection[str] = frozenset()
    ) -> None:
        device = torch.device(device)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
        # One of 0 elements has nothing to train: it is as if frozen.
        frozen = [(name, p) for name, p in module.named_parameters() if not (p.requires_grad and p.numel())]
        if not trainable:
            raise SettingsError("the model has no trainable parameters: there is nothing to train")
        dtypes = sorted({dtype_name(p.dtype) for _, p in trainable})
        if len(dtypes) != 1:
            raise SettingsError(f"the trainable parameters must share one dtype, this model has: {dtypes}")
        shared = [(name, p) for name, p in trainable if name not in personal]
        own = [(name, p) for name, p in trainable if name in personal]
        if not shared:
            raise SettingsError("all trainable parameters are personal: there is nothing to share")
        self.module = module
        self.layout, self.personal_layout = layout_of(shared), layout_of(own)
        # Recomputed buffers (`persistent=False`) are no part of a model's state.
        persistent = module.state_dict().keys()
        named = [(name, b) for name, b in module.named_buffers() if name in persistent]
        common = [(name, b) for name, b in module.named_buffers() if name not in personal]
        self.layout_hash = _layout_hash(shared, frozen, common)
        module.to(device)
        self.whole = _adopt([*shared, *own], layout_of([*shared, *own]), device)
        self.whole_gradient = torch.zeros_like(self.whole)
        size = sum(p.numel() for _, p in shared)
        self.vector, self.gradient = self.whole[:size], self.whole_gradient[:size]
        self._parameters = [(p, slot) for (_, p), slot in zip([*shared, *own], self._slots(), strict=True)]
        for parameter, slot in self._parameters:
            parameter.grad = slot.view(self.whole_gradient)
        self.buffer_layouts: dict[str, Layout] = {}
        self.buffers = self._adopt_buffers([each for each in named if each[0] not in personal], BUFFERS, device)
        own_buffers = self._adopt_buffers([each for each in named if each[0] in personal], PERSONAL + BUFFERS, device)
        self.personal: State = {**({PERSONAL + "parameters": self.whole[size:]} if own else {}), **own_buffers}
        self._initial = {name: value.clone() for name, value in self.personal.items()}

    def _slots(self) -> list[Slot]:
        """Where all trainable parameters lie in `whole`."""
        size = max(slot.stop for slot in self.layout.values())
        own = self.personal_layout.values()
        return [*self.layout.values(), *(Slot(slot.start + size, slot.stop + size, slot.shape) for slot in own)]

    def _adopt_buffers(self, named: Sequence[tuple[str, Tensor]], prefix: str, device: torch.device) -> State:
        """One vector for each dtype."""
        state: State = {}
        for dtype in sorted({dtype_name(b.dtype) for _, b in named}):
            group = [(name, b) for name, b in named if dtype_name(b.dtype) == dtype]
            layout = self.buffer_layouts[prefix + dtype] = layout_of(group)
            state[prefix + dtype] = _adopt(group, layout, device)
        return state

    def load(self, vector: Tensor, buffers: State) -> None:
        """Copy the shared parameters (d,) and buffers in; never keeps a reference."""
        self.vector.copy_(vector)
        for name, own in self.buffers.items():
            own.copy_(buffers[name])

    def load_personal(self, state: State) -> None:
        """Copy one client's personal part in; what `state` does not hold is as at the run's start."""
        for name, own in self.personal.items():
            own.copy_(state.get(name, self._initial[name]))

    def check_views(self) -> None:
        """Raise if the module replaced a parameter's storage or gradient, which would train a copy unseen."""
        size = self.whole.element_size()
        for parameter, slot in self._parameters:
            offset = slot.start * size
            grad = parameter.grad
            if parameter.data_ptr() != self.whole.data_ptr() + offset or (
                grad is None or grad.data_ptr() != self.whole_gradient.data_ptr() + offset
            ):
                raise RuntimeError(
                    "the model replaced a parameter's storage or gradient during training (a call of .to(), .half() "
                    "or zero_grad(set_to_none=True) inside forward?): train it in place"
                )

    def named_tensors(self) -> dict[str, Tensor]:
        """Copies of all tensors of `module.state_dict()` on the CPU: they load into the plain torch model."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}


def _layout_hash(trainable: Sequence[Any], frozen: Sequence[Any], buffers: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for kind, named in (("trainable", trainable), ("frozen", frozen), ("buffer", buffers)):
        for name, tensor in named:
            digest.update(f"{kind} {name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)}\n".encode())
    for _, tensor in frozen:
        digest.update(raw_bytes(tensor.detach()))
    return digest.hexdigest()[:16]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The little-endian bytes of a tensor, without a copy if it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def sha256(state: State) -> str:
    """Hash of names, dtypes, shapes and values of all vectors, in name order."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(f"{name} {dtype_name(state[name].dtype)} {tuple(state[name].shape)}\n".encode())
        digest.update(raw_bytes(state[name]))
    return digest.hexdigest()


def weighted_sum(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i weights_i * vectors_i in the order given, accumulated in float64, in the vectors' dtype.

    Chunked so that the float64 accumulator stays in the cache; elementwise, so it does not depend on threads.
    Scalars (0-d) give a 0-d result.
    """
    if not vectors or len(vectors) != len(weights):
        raise ValueError(f"{len(vectors)} vectors with {len(weights)} weights")
    total = torch.empty_like(vectors[0], memory_format=torch.contiguous_format)
    flat = [vector.reshape(-1) for vector in vectors]
    out = total.view(-1)
    accumulator = torch.empty(min(CHUNK, out.numel()), dtype=torch.float64, device=out.device)
    term = torch.empty_like(accumulator)
    for start, stop in _chunks(out.numel()):
        acc, wide = accumulator[: stop - start].zero_(), term[: stop - start]
        for vector, weight in zip(flat, weights, strict=True):
            wide.copy_(vector[start:stop])
            acc.add_(wide, alpha=weight)
        out[start:stop].copy_(acc)
    return total


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


def norm(vector: Tensor) -> float:
    """The L2 norm, chunks summed in float64: not finite exactly if an entry of a float32 vector is not."""
    flat = vector.reshape(-1)
    return math.sqrt(sum(_squares(flat[start:stop]) for start, stop in _chunks(flat.numel())))


def _squares(part: Tensor) -> float:
    """Sum of squares. In the vector's own precision where that can hold it, which is three times as fast."""
    total = float(torch.dot(part, part)) if part.dtype in (torch.float32, torch.float64) else math.inf
    if math.isfinite(total):
        return total
    wide = part.double()
    return float(torch.dot(wide, wide))


def mean_pairwise_cosine(vectors: Sequence[Tensor], norms: Sequence[float]) -> float | None:
    """Mean of cos(u_i, u_j) over i < j: 1 where clients agree, about 0 where they pull apart. None for one vector.

    With S unit vectors e_i it is (|sum e_i|^2 - S) / (S (S - 1)). Vectors of norm 0 are left out.
    """
    scaled = [(v.reshape(-1), 1.0 / n) for v, n in zip(vectors, norms, strict=True) if n > 0]
    if len(scaled) < 2:
        return None
    squared = 0.0
    for start, stop in _chunks(scaled[0][0].numel()):
        total = torch.zeros(stop - start, dtype=vectors[0].dtype, device=vectors[0].device)
        for vector, scale in scaled:
            total.add_(vector[start:stop], alpha=scale)
        squared += float(torch.dot(total, total))
    count = len(scaled)
    return (squared - count) / (count * (count - 1))
