"""What a server sent, checked before it is used: torch and the algorithms would take nearly anything."""

from __future__ import annotations

import math

from flwr.app import Message

from client.session import Session
from common.errors import MessageError
from common.vector import State
from strategies.protocol.messages import TrainHead, tensors_of


def receive(
    session: Session, message: Message, memory: State, round: int = 0, digest: str = "", whole: bool = False
) -> State:
    """The broadcast on the session's device, its model, its buffers and the client's personal part loaded.

    `memory`: the client's as of its last accepted upload; `whole`: nothing was left out or compressed, as for an
    evaluation. On the CPU the message's bytes are used as they are: read-only, without a copy.
    Raises MessageError for vectors that do not fit the model, NotHeld if the client cannot rebuild it.
    """
    state, buffers = tensors_of(message.content)
    _check_shapes(session.model.buffers, buffers)
    # Names of state and buffers cannot meet: a buffer's begins with "buffers.".
    staged = session.wire.to_device(state | buffers)
    received = {name: staged[name] for name in state}
    if not whole:
        received = session.downlink.receive(received, memory, session.model.vector, round, digest)
    _check_shapes({"model": session.model.vector}, received)
    for name, value in received.items():
        if value.ndim and value.shape != session.model.vector.shape:
            raise MessageError(
                f"received shape {tuple(value.shape)} as {name}, expected () or {tuple(session.model.vector.shape)}"
            )
    session.model.load(received["model"], {name: staged[name] for name in buffers})
    session.model.load_personal(memory)
    return received


def _check_shapes(expected: State, given: State) -> None:
    """Torch would stretch a vector of another shape without a word."""
    for name, like in expected.items():
        got = given.get(name)
        if got is None or got.shape != like.shape or got.dtype != like.dtype:
            told = "nothing" if got is None else f"{got.dtype} {tuple(got.shape)}"
            raise MessageError(f"received {told} as {name}, expected {like.dtype} {tuple(like.shape)}")


def check_numbers(head: TrainHead) -> None:
    """Raise MessageError for numbers that no round can have."""
    if head.holds not in (0, head.accepted) or bool(head.holds) != bool(head.digest):
        raise MessageError(f"holds {head.holds} with accepted {head.accepted} and digest {head.digest[:64]!r}")
    if head.generation < 1 or head.round < 1 or not 0 <= head.accepted < head.round:
        told = f"generation {head.generation}, round {head.round}, accepted {head.accepted}"
        raise MessageError(f"no such round: {told}")
    if head.epochs < 0 or head.steps < 0:
        raise MessageError(f"epochs {head.epochs} and steps {head.steps} must not be negative")
    if not 0 < head.part < math.inf:
        raise MessageError(f"part {head.part} must be finite and above 0")
    if not (math.isfinite(head.lr) and head.lr >= 0 and 0 <= head.share <= 1):
        raise MessageError(f"lr {head.lr} and share {head.share} must be finite, not negative, and share at most 1")
