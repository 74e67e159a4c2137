"""State <-> Flower records: bit for bit, also through Flower's protobuf; what does not fit is refused."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.vector import State, raw_bytes
from server.engines.inprocess import InProcessGrid
from strategies.protocol import wire
from strategies.protocol.wire import DTYPES, RAW, WireError

SHAPES = [(), (0,), (1,), (7,), (0, 3), (2, 3, 4)]


def through_flower(content: RecordDict) -> RecordDict:
    """What arrives on the other side: serialized and read again by Flower."""
    InProcessGrid._identify()
    sent = message_to_proto(Message(content, dst_node_id=1, message_type="train")).SerializeToString()
    return message_from_proto(ProtoMessage.FromString(sent)).content


def round_trip(state: State, flower: bool) -> State:
    content = RecordDict({"state": wire.to_records(state)})
    return wire.from_records((through_flower(content) if flower else content).array_records["state"])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(raw_bytes(a)) == bytes(raw_bytes(b))


def any_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bits as numbers: NaNs with a payload, infinities, denormals and -0.0 among them."""
    count = int(np.prod(shape, dtype=int))
    bits = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype == torch.bool:
        bits %= 2
    return torch.from_numpy(bits).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("flower", [False, True])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_and_shape_bit_for_bit(name: str, flower: bool) -> None:
    """Also bfloat16, which numpy lacks, bool, 0-d and empty tensors; random bits hold NaN payloads."""
    state = {str(shape): any_bits(DTYPES[name], shape, len(shape)) for shape in SHAPES}
    got = round_trip(state, flower)
    assert got.keys() == state.keys()
    assert all(same_bits(state[key], got[key]) for key in state)


@pytest.mark.parametrize("flower", [False, True])
def test_signed_zeros_and_nan_payloads(flower: bool) -> None:
    """-0.0 keeps its sign, a NaN its 22 bits of payload."""
    nan = torch.tensor([0x7FC12345, -4194303], dtype=torch.int32).view(torch.float32)
    assert bool(torch.isnan(nan).all())
    got = round_trip({"zero": torch.tensor([-0.0, 0.0]), "nan": nan}, flower)
    assert got["zero"].view(torch.int32).tolist() == [-(2**31), 0]
    assert got["nan"].view(torch.int32).tolist() == [0x7FC12345, -4194303]


@given(st.binary(max_size=64), st.sampled_from(["float32", "bfloat16", "int64", "uint8"]))
def test_any_bytes_survive(content: bytes, name: str) -> None:
    """Whatever the numbers are."""
    dtype = DTYPES[name]
    whole = content[: len(content) // dtype.itemsize * dtype.itemsize]
    tensor = torch.frombuffer(bytearray(whole), dtype=dtype) if whole else torch.empty(0, dtype=dtype)
    assert bytes(raw_bytes(round_trip({"x": tensor}, True)["x"])) == whole


def test_views_and_live_tensors_are_copied_on_the_way_out() -> None:
    """A transposed or strided view travels as its numbers; what is sent is not the live storage."""
    live = torch.arange(12.0).reshape(3, 4)
    record = wire.to_records({"t": live.T, "s": live[:, ::2], "p": live.requires_grad_()})
    with torch.no_grad():
        live.zero_()
    got = wire.from_records(record)
    assert got["t"].tolist() == torch.arange(12.0).reshape(3, 4).T.tolist()
    assert got["s"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert not got["p"].requires_grad


def test_reading_makes_no_copy() -> None:
    """A received vector lies in the message: reading a large model costs nothing."""
    array = wire.to_array(torch.arange(5.0))
    assert wire.from_array(array).data_ptr() == np.frombuffer(array.data, np.uint8).ctypes.data


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (Array("float32", (2,), RAW, b"1234567"), "7 bytes for shape (2,) of float32"),
        (Array("float32", (), RAW, b""), "0 bytes for shape () of float32"),
        (Array("float32", (0,), RAW, b"1234"), "4 bytes for shape (0,)"),
        (Array("float32", (-1, -1), RAW, b"1234"), "4 bytes for shape (-1, -1)"),
        (Array("float32", (-2,), RAW, b""), "0 bytes for shape (-2,)"),
        (Array("float32", (2**31 - 1, 2**31 - 1, 2**31 - 1, 0), RAW, b""), "shape (2147483647, 2147483647,"),
        (Array("float31", (1,), RAW, b"1234"), "dtype 'float31' is unknown"),
        (Array("object", (1,), RAW, b"12345678"), "dtype 'object' is unknown"),
        (Array("float32", (1,), "pickle", b"1234"), "array of type 'pickle' cannot be read"),
        (Array("float32", (1,), "numpy.ndarray", b"1234"), "array of type 'numpy.ndarray' cannot be read"),
        (Array("float32", (1,), "numpy.ndarray", b""), "array of type 'numpy.ndarray' cannot be read"),
        (Array("float32", (1,), "numpy.ndarray", b"PK\x03\x04"), "array of type 'numpy.ndarray' cannot be read"),
    ],
    ids=lambda value: "" if isinstance(value, Array) else value,
)
def test_what_does_not_fit_is_refused(array: Array, words: str) -> None:
    """Wrong byte counts, unknown dtypes and serializations, negative or absurd shapes: WireError, nothing else."""
    with pytest.raises(WireError) as caught:
        wire.from_array(array)
    assert words in str(caught.value)


def test_a_numpy_header_that_promises_too_much_is_refused() -> None:
    """A header of 200 bytes that announces petabytes costs no memory and no run."""
    buffer = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (2**50,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    with pytest.raises(WireError):
        wire.from_array(Array("float32", (1,), "numpy.ndarray", buffer.getvalue()))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.full((), 3.5),
        np.zeros((0, 2), np.int64),
        np.array([True, False]),
    ],
)
def test_numpy_arrays_of_other_apps_are_read(array: np.ndarray) -> None:
    """Flower's own serialization, also 0-d, empty and Fortran-ordered."""
    got = wire.from_array(Array(array))
    assert got.shape == array.shape
    assert np.array_equal(got.numpy(), array)


def test_objects_are_never_unpickled() -> None:
    """An object array runs code when it is unpickled; here it is refused unread."""
    ran = []

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return ran.append, (1,)

    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
    for content in (buffer.getvalue(), pickle.dumps(Trap())):
        with pytest.raises(WireError):
            wire.from_array(Array("object", (1,), "numpy.ndarray", content))
    with pytest.raises(WireError):
        wire.from_array(Array(np.array([1 + 2j]).astype("U5")))
    assert not ran


def test_size_counts_the_payload() -> None:
    """Arrays by their bytes, a metric as its name and 8, a setting as its name and its text."""
    content = RecordDict(
        {
            "state": ArrayRecord({"x": wire.to_array(torch.zeros(5)), "y": wire.to_array(torch.zeros(()).double())}),
            "metrics": MetricRecord({"loss": 1.0}),
            "head": ConfigRecord({"round": 12}),
        }
    )
    assert wire.size(content) == (20 + 8) + (4 + 8) + (5 + 2)
    assert wire.size(through_flower(content)) == wire.size(content)
