"""A whole model of a client's own, in its memory beside whatever else an algorithm keeps there."""

from __future__ import annotations

from torch import Tensor

from common.vector import State
from strategies.protocol.work import Work

OWN = "own"
"""Its entry in client memory, (d,); its buffers stand there under their own names."""


def own_model(work: Work) -> tuple[Tensor, State]:
    """A client's own model (d,) and its buffers, as it kept them: before the first time, those received. Read-only.

    Buffers received lie in the live model: call it before anything trains.
    """
    held = work.memory
    if OWN in held:
        return held[OWN], {name: held[name] for name in work.buffers}
    return work.received["model"], {name: value.clone() for name, value in work.buffers.items()}


def keep_own(work: Work, **more: Tensor) -> None:
    """Keep the model as it is now, and `more`."""
    work.keep(**{OWN: work.vector}, **work.buffers, **more)


def load_own(work: Work) -> None:
    """Put the client's own model where the server's is loaded."""
    vector, buffers = own_model(work)
    work.vector.copy_(vector)
    for name, value in buffers.items():
        work.buffers[name].copy_(value)
