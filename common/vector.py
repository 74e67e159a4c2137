"""A model as one flat vector.

The trainable parameters of a module become views into one buffer and their gradients views into another, so one
add corrects a whole model, one array crosses the wire and one reduction averages it. Buffers (BatchNorm statistics,
counters) are vectors of their own, one for each dtype: they never meet an optimizer, a tracker or a compressor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
