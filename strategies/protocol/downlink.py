"""The way of a broadcast to clients: whole, without what a client can rebuild, or compressed.

"whole" sends all of it. "lean" leaves out, for a client whose upload of the last round was accepted and that so holds
the last broadcast, what the algorithm can restore from it (HaFedHo's model). With `[compression] down`, "absolute"
(int8, bfloat16, float16) compresses each vector anew, for every client alike; "differences" (top-k, random-k, sign)
lets all clients follow a copy: v' <- v' + C(v - v') after every round (EF21-P), of which a client that holds the last
v' is sent only C(...), every other one v' itself. Both sides compute v' with the same operations; a hash of the result
goes along, and a client that misses it is sent everything next time. Scalars and buffers always go whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from common.compression import compressors
from common.errors import MessageError, Sayable
from common.experiment import Experiment
from common.seeds import derive
from common.vector import Layout, State, sha256
from strategies.protocol.algorithm import Algorithm

HELD = "held."
"""Prefix in client memory of what was received."""


class NotHeld(LookupError, Sayable):
    """A client does not hold what a message builds upon."""


class Downlink:
    """Both ends of the way. `mode` as in the module's text; the server's copies are a State of their own."""

    def __init__(self, strategy: Algorithm, experiment: Experiment, layout: Layout) -> None:
        self._strategy, self._seed = strategy, experiment.seed
        settings = experiment.compression
        self._coder = None
        self.mode: Literal["whole", "lean", "absolute", "differences"] = "lean" if strategy.lean() else "whole"
        if settings.down != "none":
            self._coder = compressors.create(settings.down, settings.ratio, layout)
            self.mode = "absolute" if self._coder.absolute else "differences"

    # The server's end.

    def start(self, broadcast: State) -> State:
        """The copies before round 1 and in a new generation: exact."""
        return self._vectors(broadcast) if self.mode == "differences" else {}

    def follow(self, copies: State, broadcast: State, round: int) -> State:
        """The copies for `round`, with what leads to them from the last ones ("name/part")."""
        following: State = {}
        for name, value in self._vectors(broadcast).items() if self.mode == "differences" else ():
            assert self._coder is not None
            seed = derive(self._seed, "downlink", name, round)
            parts = self._coder.encode(value - copies[name], seed)
            following[name] = copies[name] + self._coder.decode(parts, value, seed)
            following |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
        return following

    def whole(self, broadcast: State, copies: State) -> State:
        """What a client that holds nothing is sent."""
        if self.mode == "absolute":
            assert self._coder is not None
            sent = {name: value for name, value in broadcast.items() if not value.ndim}
            for name, value in self._vectors(broadcast).items():
                sent |= {f"{name}/{part}": tensor for part, tensor in self._coder.encode(value, 0).items()}
            return sent
        return broadcast | {name: value for name, value in copies.items() if name in broadcast}

    def rest(self, broadcast: State, copies: State) -> tuple[State, str]:
        """What one that holds the last broadcast is sent instead, and the hash of what it has to rebuild."""
        names = self._rebuilt(broadcast, copies)
        truth = {name: copies.get(name, broadcast[name]) for name in names}
        sent = {name: value for name, value in broadcast.items() if name not in names}
        sent |= {name: value for name, value in copies.items() if "/" in name and name.partition("/")[0] in names}
        return sent, sha256(truth)

    def _rebuilt(self, broadcast: State, copies: State) -> list[str]:
        held = self._strategy.lean() if self.mode == "lean" else [name for name in copies if "/" not in name]
        return [name for name in held if name in broadcast]

    @property
    def saves(self) -> bool:
        """Whether a client that holds the last broadcast is sent less."""
        return self.mode in ("lean", "differences")

    # The client's end.

    def receive(self, sent: State, memory: State, like: Tensor, round: int, digest: str) -> State:
        """The whole broadcast. `memory`: the client's of the last round, needed if there is a `digest`; `like` has the
        model's shape, dtype and device.

        Raises NotHeld if the client cannot rebuild it and MessageError for parts that do not fit.
        """
        received = {name: value for name, value in sent.items() if "/" not in name}
        rebuilt: State = {}
        for name, parts in _grouped(sent).items():
            if self._coder is None:
                raise MessageError(f"received {name} in parts {sorted(parts)}, but compression.down is 'none'")
            seed = derive(self._seed, "downlink", name, round) if digest else 0
            value = self._coder.decode(parts, like, seed)
            if digest:
                rebuilt[name] = value = self._held(memory, name, like) + value
            received[name] = value
        if digest and self.mode == "lean":
            held = {name: self._held(memory, name, like) for name in self._strategy.lean()}
            rebuilt = self._strategy.restore(held, received)
            received |= rebuilt
        if digest and sha256(rebuilt) != digest:
            raise NotHeld("what was rebuilt is not what the server holds")
        return received

    def remember(self, received: State) -> State:
        """What a client keeps of a broadcast to hold it next time."""
        if not self.saves:
            return {}
        names: Iterable[str] = self._strategy.lean() if self.mode == "lean" else self._vectors(received)
        return {HELD + name: received[name] for name in names}

    @staticmethod
    def _held(memory: State, name: str, like: Tensor) -> Tensor:
        value = memory.get(HELD + name)
        if value is None or value.shape != like.shape or value.dtype != like.dtype:
            raise NotHeld(f"no {name} of the last round in this client's memory")
        return value

    @staticmethod
    def _vectors(state: State) -> State:
        return {name: value for name, value in state.items() if value.ndim}


def _grouped(sent: State) -> dict[str, State]:
    """name -> part -> tensor of all that came in parts."""
    groups: dict[str, State] = {}
    for key, value in sent.items():
        name, slash, part = key.partition("/")
        if slash:
            groups.setdefault(name, {})[part] = value
    return groups


__all__ = ["HELD", "Downlink", "NotHeld"]
