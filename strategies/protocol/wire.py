"""State <-> Flower records. A vector is one array of raw little-endian bytes; nothing is pickled."""

from __future__ import annotations

import math
import warnings

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from common.errors import MessageError
from common.vector import DTYPES, State, dtype_name, raw_bytes

RAW = "fedkeel.raw"
"""Serialization type of an array that holds raw bytes: numpy's format has no bfloat16 and costs two copies more."""

# Received arrays are wrapped without a copy and treated as read-only; torch warns about that once.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class WireError(MessageError):
    """A record that does not hold what it says."""


def to_array(tensor: Tensor) -> Array:
    """One tensor as a Flower array: dtype, shape and raw bytes (one copy)."""
    return Array(dtype_name(tensor.dtype), tuple(tensor.shape), RAW, bytes(raw_bytes(tensor)))


def from_array(array: Array) -> Tensor:
    """The tensor that an array holds, without a copy: treat it as read-only.

    Also reads numpy arrays of other Flower apps. Raises WireError if dtype, shape and bytes do not fit together.
    """
    if array.stype != RAW:
        try:
            return torch.from_numpy(array.numpy())
        except Exception as error:  # from bytes of the network numpy raises nearly anything, MemoryError too
            raise WireError(f"array of type {array.stype!r} cannot be read: {error}") from None
    dtype = DTYPES.get(array.dtype)
    if dtype is None:
        raise WireError(f"dtype {array.dtype!r} is unknown")
    count = math.prod(array.shape)
    if min(array.shape, default=0) < 0 or len(array.data) != count * dtype.itemsize:
        raise WireError(f"{len(array.data)} bytes for shape {array.shape} of {array.dtype}")
    flat = torch.frombuffer(array.data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
    try:
        return flat.view(array.shape)
    except RuntimeError as error:  # (2**31, 2**31, 0): no bytes, and yet too large
        raise WireError(f"shape {array.shape}: {error}") from None


def to_records(state: State) -> ArrayRecord:
    """All of a state as one record, in name order. A 0-d scalar is an array of shape ()."""
    return ArrayRecord({name: to_array(state[name]) for name in sorted(state)})


def from_records(record: ArrayRecord) -> State:
    """The state that a record holds; vectors are read-only views of the message."""
    return {name: from_array(array) for name, array in record.items()}


def size(content: RecordDict) -> int:
    """Bytes of payload in a message: arrays, and metrics and settings with their names; without Flower's framing."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    numbers = (item for record in content.metric_records.values() for item in record.items())
    metrics = sum(len(key) + 8 * (len(value) if isinstance(value, list) else 1) for key, value in numbers)
    settings = (item for record in content.config_records.values() for item in record.items())
    return arrays + metrics + sum(len(key) + len(str(value)) for key, value in settings)


__all__ = [
    "ArrayRecord",
    "ConfigRecord",
    "MetricRecord",
    "RecordDict",
    "WireError",
    "from_array",
    "from_records",
    "size",
    "to_array",
    "to_records",
]
