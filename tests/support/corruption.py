"""What bad hardware, bad software or a liar may make of a message. All of it must be noticed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from strategies.protocol import wire
from strategies.protocol.messages import HEAD, METRICS, STATE

Change = Callable[[RecordDict], None]


def arrays(change: Callable[[Array], Array]) -> Change:
    """Change the model, or the first array of a state without one."""

    def changed(content: RecordDict) -> None:
        if STATE in content.array_records:
            record = content.array_records[STATE]
            name = "model" if "model" in record else sorted(record)[0]
            content[STATE] = ArrayRecord({**record, name: change(record[name])})

    return changed


def tensor(change: Callable[[Tensor], Tensor]) -> Change:
    """Change the first tensor of the state."""
    return arrays(lambda array: wire.to_array(change(wire.from_array(array).clone())))


def head(**values: object) -> Change:
    """Change settings; a function gets the present value."""

    def changed(content: RecordDict) -> None:
        record = dict(content.config_records[HEAD])
        for key, value in values.items():
            record[key] = value(record[key]) if callable(value) else value  # type: ignore[assignment]
        content[HEAD] = ConfigRecord(record)

    return changed


def without(name: str) -> Change:
    def changed(content: RecordDict) -> None:
        content.pop(name, None)

    return changed


def group(content: RecordDict) -> None:
    """A group more than expected."""
    content[STATE] = ArrayRecord({**content.array_records.get(STATE, {}), "more": wire.to_array(torch.zeros(2))})


def nan_bits(array: Array) -> Array:
    """Bits flipped so that a number that still parses is NaN: all of the exponent's, and one of the fraction's."""
    data = bytearray(array.data)
    data[6], data[7] = data[6] | 0xF8, data[7] | 0x7F
    return Array(array.dtype, array.shape, array.stype, bytes(data))


NOISE: dict[str, Change] = {
    "NaN": arrays(nan_bits),
    "infinite": tensor(lambda value: value + math.inf),
    "truncated": arrays(lambda array: Array(array.dtype, array.shape, array.stype, array.data[:-3])),
    "shape": tensor(lambda value: value.reshape(1, -1)),
    "length": tensor(lambda value: torch.cat([value.reshape(-1)] * 2)),
    "dtype": tensor(lambda value: value.float()),
    "unknown dtype": arrays(lambda array: Array("float80", array.shape, array.stype, array.data)),
    "no arrays": without(STATE),
    "no head": without(HEAD),
    "type": head(round="2"),
    "client": head(client="somebody"),
    "layout": head(layout="0123456789abcdef"),
}
"""Of either direction."""

MESSAGE: dict[str, Change] = NOISE
REPLY: dict[str, Change] = NOISE | {
    "another client": head(client=lambda name: "1" if name == "0" else "0"),
    "later round": head(round=lambda t: t + 1),
    "earlier round": head(round=lambda t: t - 1),
    "generation": head(generation=lambda g: g + 1),
    "run": head(run="another"),
    "no examples": head(examples=0),
    "negative examples": head(examples=-3),
    "too many examples": head(examples=10**9),
    "no steps": head(steps=0),
    "rate": head(lr=lambda lr: lr * 2),
    "status": head(status="fine"),
    "group": group,
    "loss": lambda content: content.__setitem__(METRICS, MetricRecord({"loss": math.nan})),
    "list": lambda content: content.__setitem__(METRICS, MetricRecord({"loss": [1.0, 2.0]})),
}


def corrupted(message: Message, change: Change) -> Message:
    """The message with a changed content: it shares its parts with others, which stay as they are."""
    content = RecordDict(dict(message.content))
    change(content)
    return Message(content=content, metadata=message.metadata)
