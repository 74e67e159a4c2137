"""Compressors: a flat vector u (d,) becomes a few small tensors, its parts, and comes back.

All but random-k with d/k are contractive: |C(u) - u|^2 <= (1 - delta)|u|^2, for random-k in expectation.

    identity           u itself
    top-k              the k = ceil(ratio d) entries of largest magnitude, over the whole model; delta = k/d
    random-k           k entries drawn from a seed that both sides know, so that no index travels; delta = k/d.
                       Without feedback times d/k, which makes it unbiased: E C(u) = u
    sign               sign(u) |u|_1/d_t for each tensor t, one bit an entry, sign(0) = +1; delta >= 1/d_t
    int8               round(u/s) s for each tensor, s = max|u|/127; half to even
    bfloat16, float16  the nearest such number; what is too large becomes the largest, not infinite

Parts come from the network: `decode` checks all of them. It computes entry by entry, so a CPU and a GPU make the same
bits of the same parts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from common.vector import Layout, State, dtype_name

Form = Mapping[str, tuple[torch.dtype, int]]

SAMPLE = 1 << 16


class Compressor(ABC):
    """One way to make a vector (d,) small. Stateless; what is random comes from the seed of a call."""

    lossless: ClassVar[bool] = False
    """decode(encode(u)) is u, bit for bit."""
    absolute: ClassVar[bool] = False
    """Whether it may be applied to a level, such as the model; the others only have meaning for differences."""

    def __init__(self, ratio: float, layout: Layout, unbiased: bool) -> None:
        self._sizes = [slot.stop - slot.start for slot in layout.values() if slot.stop > slot.start]
        self._d = sum(self._sizes)
        # The decimal number that was written: in floats 0.07 * 100 is above 7.
        self._k = math.ceil(Fraction(str(ratio)) * self._d)
        self._factor = self._d / self._k if unbiased else 1.0

    @abstractmethod
    def form(self, dtype: torch.dtype) -> Form:
        """Name -> dtype and length of the parts of a vector of `dtype`."""

    @abstractmethod
    def encode(self, vector: Tensor, seed: int) -> State:
        """The parts of a finite vector (d,), which is not changed but may be one of them."""

    @abstractmethod
    def _decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        """As `decode`, for parts on the right device whose names, dtypes, shapes and finite numbers are checked."""

    def decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        """The vector that the parts stand for, of the shape (d,), dtype and device of `like`; a new one if lossy.

        Raises ValueError, saying what is wrong, for malformed parts.
        """
        form = self.form(like.dtype)
        if parts.keys() != form.keys():
            raise ValueError(f"parts {sorted(parts)}, expected {sorted(form)}")
        here = {}
        for name, (dtype, length) in form.items():
            part = parts[name]
            if part.dtype != dtype or tuple(part.shape) != (length,):
                got = f"{dtype_name(part.dtype)} {tuple(part.shape)}"
                raise ValueError(f"{name} is {got}, expected {dtype_name(dtype)} {(length,)}")
            here[name] = part.to(like.device)
            if dtype.is_floating_point and not finite(here[name]):
                raise ValueError(f"{name} holds NaN or Inf")
        return self._decode(here, like, seed)


class Identity(Compressor):
    """Nothing is lost: for tests, and to count bytes."""

    lossless = absolute = True

    def form(self, dtype: torch.dtype) -> Form:
        return {"values": (dtype, self._d)}

    def encode(self, vector: Tensor, seed: int) -> State:
        return {"values": vector}

    def _decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        return parts["values"]


class TopK(Compressor):
    """The k largest magnitudes; of equal ones those with the smallest index."""

    def form(self, dtype: torch.dtype) -> Form:
        return {"indices": (torch.int32 if self._d < 2**31 else torch.int64, self._k), "values": (dtype, self._k)}

    def encode(self, vector: Tensor, seed: int) -> State:
        near = self._candidates(vector)
        magnitudes = vector[near].abs_()
        least = torch.topk(magnitudes, self._k, sorted=False).values.amin()
        chosen = magnitudes > least
        ties = torch.nonzero(magnitudes == least).view(-1)
        chosen[ties[: self._k - int(chosen.sum())]] = True
        indices = near[chosen]
        return {"indices": indices.to(self.form(vector.dtype)["indices"][0]), "values": vector[indices]}

    def _candidates(self, vector: Tensor) -> Tensor:
        """Ascending indices of all entries above some bound, at least k: to select among all d takes ten times as long.

        A sample suggests the bound, four deviations low; where it is too high after all, all are candidates.
        """
        sample = vector[:: self._d // SAMPLE | 1].abs()
        expected = sample.numel() * self._k / self._d
        rank = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected)) + 1)
        bound = torch.topk(sample, rank, sorted=False).values.amin()
        above = (vector >= bound).logical_or_(vector <= -bound)
        near = torch.nonzero(above).view(-1)
        return near if near.numel() >= self._k else torch.arange(self._d, device=vector.device)

    def _decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        indices = parts["indices"]
        if not bool((indices[1:] > indices[:-1]).all()):
            raise ValueError("indices are not strictly increasing")
        if int(indices[0]) < 0 or int(indices[-1]) >= self._d:
            raise ValueError(f"indices not in 0..{self._d - 1}")
        return torch.zeros_like(like).index_copy_(0, indices.long(), parts["values"])


class RandomK(Compressor):
    """k entries, each set of k equally likely."""

    def form(self, dtype: torch.dtype) -> Form:
        return {"values": (dtype, self._k)}

    def encode(self, vector: Tensor, seed: int) -> State:
        values = vector[self._indices(seed).to(vector.device)]
        return {"values": values if self._factor == 1 else values * self._factor}

    def _decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        return torch.zeros_like(like).index_copy_(0, self._indices(seed).to(like.device), parts["values"])

    def _indices(self, seed: int) -> Tensor:
        """The first k distinct numbers below d of a stream, ascending; the rarer of those taken and those left out.

        From the bits of PCG64, which numpy promises to keep: both sides must agree, whatever their versions.
        """
        rare = min(self._k, self._d - self._k)
        stream, drawn, count = np.random.PCG64(seed), np.zeros(self._d, dtype=np.bool_), 0
        while count < rare:
            drawn[stream.random_raw(rare - count) % self._d] = True
            count = int(np.count_nonzero(drawn))
        return torch.from_numpy(np.flatnonzero(drawn if rare == self._k else ~drawn))


class _PerTensor(Compressor):
    """One scale for each tensor of the model that is not empty."""

    def _scales(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        return torch.promote_types(dtype, torch.float32), len(self._sizes)

    def _split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, self._sizes)

    @staticmethod
    def _check(scales: Tensor, largest: Tensor) -> None:
        """`largest` is what the scales make of the largest code, in the vector's dtype."""
        if bool((scales < 0).any()):
            raise ValueError("scales are negative")
        if not finite(largest):
            raise ValueError(f"scales are too large for {dtype_name(largest.dtype)}")


class Sign(_PerTensor):
    """A bit for each entry, entry 8 i + j in bit j of byte i, and the mean magnitude of each tensor."""

    def form(self, dtype: torch.dtype) -> Form:
        return {"signs": (torch.uint8, -(-self._d // 8)), "scales": self._scales(dtype)}

    def encode(self, vector: Tensor, seed: int) -> State:
        wide, _ = self._scales(vector.dtype)
        positive = torch.zeros(-(-self._d // 8) * 8, dtype=torch.bool, device=vector.device)
        torch.ge(vector, 0, out=positive[: self._d])
        bits = positive.view(torch.uint8)
        signs = bits[::8].clone()
        for place in range(1, 8):
            signs |= bits[place::8] << place
        return {"signs": signs, "scales": self._means(vector).to(wide)}

    def _means(self, vector: Tensor) -> Tensor:
        """|u|_1/d_t of each tensor, in float64."""
        parts = self._split(vector)
        sizes = torch.tensor(self._sizes, dtype=torch.float64, device=vector.device)
        means = torch.stack([part.abs().sum(dtype=torch.float64) for part in parts]) / sizes
        if not finite(means):  # a mean is no larger than the largest entry, but a sum of float64 may be infinite
            means = torch.stack([(part.abs().double() / part.numel()).sum() for part in parts])
        return means.clamp_(max=torch.finfo(vector.dtype).max)

    def _decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        scales = parts["scales"].to(like.dtype)
        self._check(parts["scales"], scales)
        places = torch.arange(8, dtype=torch.uint8, device=like.device)
        bits = ((parts["signs"].unsqueeze(1) >> places) & 1).view(-1)
        if bool(bits[self._d :].any()):
            raise ValueError("signs have bits beyond the last entry")
        out = bits[: self._d].to(like.dtype).mul_(2).sub_(1)
        for part, scale in zip(self._split(out), scales, strict=True):
            part.mul_(scale)
        return out


class Int8(_PerTensor):
    """Whole multiples from -127 to 127 of a step for each tensor."""

    absolute = True

    def form(self, dtype: torch.dtype) -> Form:
        return {"values": (torch.int8, self._d), "scales": self._scales(dtype)}

    def encode(self, vector: Tensor, seed: int) -> State:
        wide, _ = self._scales(vector.dtype)
        largest = torch.stack([part.abs().amax() for part in self._split(vector)])
        # 127 times the step of the largest float would round up to infinity.
        limit = torch.nextafter(torch.tensor(torch.finfo(wide).max, dtype=wide) / 127, torch.zeros((), dtype=wide))
        scales = (largest.to(wide) / 127).clamp_(max=float(limit))
        values = torch.empty_like(vector, dtype=torch.int8)
        for code, part, scale in zip(self._split(values), self._split(vector), scales, strict=True):
            code.copy_(part.to(wide).div(torch.where(scale > 0, scale, 1)).round_().clamp_(-127, 127))
        return {"values": values, "scales": scales}

    def _decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        values, scales = parts["values"], parts["scales"]
        self._check(scales, (scales * 127).to(like.dtype))
        if int(values.amin()) < -127:
            raise ValueError("values hold -128")
        out = torch.empty_like(like)
        for part, code, scale in zip(self._split(out), self._split(values), scales, strict=True):
            torch.mul(code, scale, out=part)
        return out


class _Cast(Compressor):
    absolute = True
    dtype: ClassVar[torch.dtype]

    def form(self, dtype: torch.dtype) -> Form:
        return {"values": (self.dtype, self._d)}

    def encode(self, vector: Tensor, seed: int) -> State:
        # Clamped after the cast: before it, the bound itself may have no value in the vector's dtype.
        most = torch.finfo(self.dtype).max
        return {"values": vector.to(self.dtype).clamp(-most, most)}

    def _decode(self, parts: State, like: Tensor, seed: int) -> Tensor:
        # The largest float16 rounds up in bfloat16, to what float16 cannot hold.
        most = torch.finfo(like.dtype).max
        return parts["values"].to(like.dtype, copy=True).clamp_(-most, most)


class BFloat16(_Cast):
    """8 bits of precision, float32's range."""

    dtype = torch.bfloat16


class Float16(_Cast):
    """11 bits of precision, up to 65504; below 6e-8 all is zero."""

    dtype = torch.float16


COMPRESSORS: Mapping[str, type[Compressor]] = {
    "identity": Identity,
    "top-k": TopK,
    "random-k": RandomK,
    "sign": Sign,
    "int8": Int8,
    "bfloat16": BFloat16,
    "float16": Float16,
}


def create(name: str, ratio: float, layout: Layout, unbiased: bool = False) -> Compressor:
    """The compressor of `CompressionSettings.up` or `.down` for vectors of this layout.

    `unbiased`: random-k multiplies by d/k, for use without error feedback. Raises ValueError for unknown names and
    for "none", which is no compressor.
    """
    if name not in COMPRESSORS:
        raise ValueError(f"compressor {name!r} is unknown; allowed: {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name](ratio, layout, unbiased)


def finite(values: Tensor) -> bool:
    """Whether no entry is NaN or Inf; in one pass."""
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())
