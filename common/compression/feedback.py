"""Error feedback around a compressor (`compressors.py`), which makes compression exact in the long run.

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

Scalars pass unchanged; buffers (BatchNorm statistics, counters) never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from common.compression.compressors import create, finite
from common.experiment import CompressionSettings
from common.vector import Layout, State

Kind = Literal["vector", "increment", "scalar"]
"""What a client sends under a name: a vector (d,), a vector that the receiver adds up for ever, or a 0-d scalar."""


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


def _checked(group: str, vector: Tensor) -> Tensor:
    if not finite(vector):
        raise ArithmeticError(f"the vector {group!r} to be sent holds NaN or Inf")
    return vector
