"""Compression of the vectors that cross the wire, and the error feedback that makes it exact in the long run.

A compressor C turns a flat vector u (d,) into a few small tensors, its parts, and back. All but random-k with d/k are
contractive: |C(u) - u|^2 <= (1 - delta)|u|^2, for random-k in expectation.

    identity           u itself
    top-k              the k = ceil(ratio d) entries of largest magnitude, over the whole model; delta = k/d
    random-k           k entries drawn from a seed that both sides know, so that no index travels; delta = k/d.
                       Without feedback times d/k, which makes it unbiased: E C(u) = u
    sign               sign(u) |u|_1/d_t for each tensor t, one bit an entry, sign(0) = +1; delta >= 1/d_t
    int8               round(u/s) s for each tensor, s = max|u|/127; half to even
    bfloat16, float16  the nearest such number; what is too large becomes the largest, not infinite

Client i sends the vector v (its change of the model, say), t a round in which it takes part.

    none    sends C(v)
    ef14    u = decay e_i + v;  sends C(u);  e_i <- u - C(u).  v is made with the learning rate in it, so the rate is
            *inside* the memory: when it falls, e_i keeps the old scale. That is meant: it is distance still owed.
            Without decay sum_t sent = sum_t v - e_i: what a receiver adds up for ever (the trackers' dc_i, kind
            "increment", of which nothing decays) is behind by e_i and no more. (Seide et al. 2014; Karimireddy et al.,
            arXiv 1901.09847; with local steps Qsparse-local-SGD, arXiv 1906.02367, and FedCAMS, arXiv 2205.02719; decay
            as MuLoCo's code.)
    ef21    h_i <- h_i + C(v - h_i) on both sides, and h_i stands for v; h_i = v at first, sent whole. C(v - h_i) -> 0
            where v settles, as e_i does not. (Richtarik et al., arXiv 2106.05203.) It costs the server a vector for
            each client and each vector that it sends. Increments take ef14: they have nothing to settle at.

Each vector that a client sends has a memory of its own. A client that is absent keeps e_i and h_i as they are.
Under partial participation the mean is taken over the h_i of those present. EF21-PP moves x along the mean of all n
instead; for model changes, which unlike gradients are steps already taken, that would apply those of absent clients
again each round.

Scalars pass unchanged; buffers (BatchNorm statistics, counters) never come here. Parts come from the network: `decode`
checks all of them. It computes entry by entry, so a CPU and a GPU make the same bits of the same parts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from common.experiment import CompressionSettings
from common.vector import Layout, State, dtype_name

Kind = Literal["vector", "increment", "scalar"]
"""What a client sends under a name: a vector (d,), a vector that the receiver adds up for ever, or a 0-d scalar."""

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
            if dtype.is_floating_point and not _finite(here[name]):
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
        if not _finite(largest):
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
        if not _finite(means):  # a mean is no larger than the largest entry, but a sum of float64 may be infinite
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


class Codec:
    """What a client sends, compressed as `settings.up` says and with error feedback; the same object on both sides.

    Client memory: "residual.<group>" is e_i and "copy.<group>" is h_i of the vector sent under that name.
    """

    def __init__(self, settings: CompressionSettings, layout: Layout) -> None:
        feedback, self._decay = settings.feedback, settings.decay
        self.active = settings.up != "none"
        """Whether anything is compressed."""
        name = settings.up if self.active else "identity"
        self._compressor = create(name, settings.ratio, layout, unbiased=feedback == "none")
        self._whole = create("identity", 1.0, layout)
        self.remembers = feedback != "none" and not self._compressor.lossless
        """Whether clients need memory for it."""
        self.binds = self.remembers and feedback == "ef21"
        """Whether that memory belongs to server state: to the server's copies."""

    def encode(
        self, vectors: State, kinds: Mapping[str, Kind], memory: State, seed: Callable[[str], int]
    ) -> tuple[State, State]:
        """What is sent, "group/part" -> tensor and scalars as they are, and the memory to keep. On the client.

        `vectors` group -> v (d,) or scalar; `memory` of the last accepted round, without what is not there yet;
        `seed` group -> seed of this round, the same as in `decode`. Nothing given is changed; results may share its
        storage. Raises ArithmeticError for a vector with NaN or Inf.
        """
        if not self.active:
            return dict(vectors), {}
        sent: State = {}
        kept: State = {}
        if self.remembers:  # also of what is not sent in this round
            kept |= {name: value for name, value in memory.items() if name.startswith(("residual.", "copy."))}
        for group, vector in vectors.items():
            if kinds[group] == "scalar":
                sent[group] = vector
                continue
            parts, keep = self._encode(group, vector, kinds[group], memory, seed(group))
            sent |= {f"{group}/{name}": part for name, part in parts.items()}
            kept |= keep
        return sent, kept

    def _encode(self, group: str, vector: Tensor, kind: Kind, memory: State, seed: int) -> tuple[State, State]:
        residual, copy = f"residual.{group}", f"copy.{group}"
        if self._tracks(kind) and copy not in memory:
            return self._whole.encode(_checked(group, vector), seed), {copy: vector}
        if self._tracks(kind):
            vector = vector - memory[copy]
        elif self.remembers and residual in memory:
            vector = vector.add(memory[residual], alpha=1.0 if kind == "increment" else self._decay)
        parts = self._compressor.encode(_checked(group, vector), seed)
        if not self.remembers:
            return parts, {}
        arrived = self._compressor.decode(parts, vector, seed)
        if self._tracks(kind):
            return parts, {copy: arrived.add_(memory[copy])}
        return parts, {residual: torch.sub(vector, arrived, out=arrived)}

    def decode(
        self, sent: State, kinds: Mapping[str, Kind], like: Tensor, copies: State, seed: Callable[[str], int]
    ) -> tuple[State, State]:
        """The vectors that `sent` stands for, by group, and the new copies of this client. On the server.

        `like` a vector (d,), the model; `copies` those of this client's last accepted round. The copies count once
        the upload is accepted, as the client's memory does. Raises ValueError, saying what is wrong, for missing or
        further groups and for malformed parts. Left to the caller: whether scalars are, and whether a copy overflowed.
        """
        if not self.active:
            return dict(sent), {}
        parts: dict[str, State] = {}
        for name, tensor in sent.items():
            group, _, part = (name, "", "") if kinds.get(name) == "scalar" else name.rpartition("/")
            parts.setdefault(group, {})[part] = tensor
        if parts.keys() != kinds.keys():
            raise ValueError(f"groups {sorted(parts)}, expected {sorted(kinds)}")
        vectors: State = {}
        kept: State = {}
        for group, kind in kinds.items():
            if kind == "scalar":
                vectors[group] = _alone(group, parts[group])
                continue
            try:
                vectors[group] = self._decode(group, parts[group], kind, like, copies, seed(group))
            except ValueError as error:
                raise ValueError(f"{group}: {error}") from None
            if self._tracks(kind):
                kept[f"copy.{group}"] = vectors[group]
        return vectors, kept

    def _decode(self, group: str, parts: State, kind: Kind, like: Tensor, copies: State, seed: int) -> Tensor:
        if not self._tracks(kind):
            return self._compressor.decode(parts, like, seed)
        copy = copies.get(f"copy.{group}")
        if copy is None:
            return self._whole.decode(parts, like, seed)
        return self._compressor.decode(parts, like, seed).add_(copy)

    def _tracks(self, kind: Kind) -> bool:
        """Whether both sides hold a copy of what is sent under a name of this kind."""
        return self.binds and kind == "vector"


def _alone(group: str, parts: State) -> Tensor:
    """The scalar that came under its own name."""
    if parts.keys() != {""}:
        raise ValueError(f"{group}: parts {sorted(parts)}, expected a scalar")
    return parts[""]


def _finite(values: Tensor) -> bool:
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


def _checked(group: str, vector: Tensor) -> Tensor:
    if not _finite(vector):
        raise ArithmeticError(f"the vector {group!r} to be sent holds NaN or Inf")
    return vector
