"""Compressors by hand, what they promise, what they refuse, and the two memories of error feedback."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.compression import compressors
from common.compression.compressors import COMPRESSORS, create
from common.compression.feedback import Codec, Kind
from common.experiment import CompressionSettings
from common.vector import Layout, State, layout_of

LOSSY = sorted(set(COMPRESSORS) - {"identity"})
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUMBERS = st.one_of(st.just(0.0), st.floats(2**-10, 2**10, width=32), st.floats(-(2**10), -(2**-10), width=32))
VECTOR: dict[str, Kind] = {"delta": "vector"}


def layout(*sizes: int) -> Layout:
    """Tensors of these sizes, one after the other."""
    return layout_of((f"t{i}", torch.empty(size)) for i, size in enumerate(sizes))


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def codec(up: Any, feedback: Any = "ef14", sizes: tuple[int, ...] = (3, 2), **more: Any) -> Codec:
    return Codec(CompressionSettings(up=up, feedback=feedback, **more), layout(*sizes))


def there_and_back(name: str, vector: Tensor, ratio: float = 0.4, sizes: tuple[int, ...] = (), seed: int = 1) -> Tensor:
    """decode(encode(u)), both checked not to change what they are given."""
    compressor = create(name, ratio, layout(*(sizes or (vector.numel(),))))
    before = vector.clone()
    parts = compressor.encode(vector, seed)
    assert same(vector, before)
    copies = {key: part.clone() for key, part in parts.items()}
    result = compressor.decode(parts, torch.empty_like(vector), seed)
    assert all(same(parts[key], copies[key]) for key in copies)
    assert (result.dtype, result.shape) == (vector.dtype, vector.shape)
    return result


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN and the sign of zero included."""
    return a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


# --- each compressor by hand -----------------------------------------------------------------------------------------


def test_top_k_by_hand() -> None:
    """ceil(0.4 * 5) = 2 of (1, -4, 2, 3, 8): -4 and 8, in the order of their places."""
    compressor = create("top-k", 0.4, layout(3, 2))
    parts = compressor.encode(f64(1, -4, 2, 3, 8), 0)
    assert parts["indices"].tolist() == [1, 4]
    assert parts["indices"].dtype == torch.int32
    assert parts["values"].tolist() == [-4, 8]
    assert compressor.decode(parts, torch.empty(5).double(), 0).tolist() == [0, -4, 0, 0, 8]


@pytest.mark.parametrize(
    ("ratio", "d", "k"), [(0.07, 100, 7), (0.1, 30, 3), (0.01, 701, 8), (1e-5, 50, 1), (1.0, 7, 7), (0.5, 7, 4)]
)
def test_k_is_the_ceiling_of_the_written_ratio(ratio: float, d: int, k: int) -> None:
    """0.07 * 100 = 7.000000000000001 in floats; the 0.07 of the file is 7/100. Never less than one entry."""
    for name in ("top-k", "random-k"):
        assert create(name, ratio, layout(d)).encode(torch.ones(d), 3)["values"].numel() == k


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.floats(0.01, 1),
    st.sampled_from([1, 2, 5, 1000]),
    st.sampled_from(DTYPES),
)
def test_top_k_is_a_stable_sort(numbers: list[int], ratio: float, sample: int, dtype: torch.dtype) -> None:
    """The first k by magnitude, then place, however little the sample of the bound saw of the vector."""
    k = math.ceil(Fraction(str(ratio)) * len(numbers))
    wanted = sorted(sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i]), i))[:k])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressors, "SAMPLE", sample)
        parts = create("top-k", ratio, layout(len(numbers))).encode(torch.tensor(numbers, dtype=dtype), 0)
    assert parts["indices"].tolist() == wanted
    assert parts["values"].tolist() == [numbers[i] for i in wanted]


@pytest.mark.parametrize("kind", ["normal", "misleading", "equal", "sparse"])
def test_top_k_of_many(kind: str) -> None:
    """Of more entries than the sample holds: also if it sees only the largest, so that its bound is too high."""
    d = 5 * compressors.SAMPLE + 3
    vector = torch.randn(d, generator=torch.Generator().manual_seed(1))
    if kind == "misleading":
        vector[::5] += 100
    if kind == "equal":
        vector = vector.sign()
    if kind == "sparse":
        vector[vector.abs() < 4] = 0
    order = torch.sort(vector.abs(), descending=True, stable=True).indices
    for ratio in (1e-4, 0.01, 0.5):
        parts = create("top-k", ratio, layout(d)).encode(vector, 0)
        wanted = order[: math.ceil(Fraction(str(ratio)) * d)].sort().values
        assert torch.equal(parts["indices"].long(), wanted)
        assert torch.equal(parts["values"], vector[wanted])


def test_sign_by_hand() -> None:
    """Means of |(1, -3, 2)| and |(-0, 6)| are 2 and 3; sign(-0) = +1. Bits 1, 0, 1, 1, 1 from the lowest: 29."""
    compressor = create("sign", 1.0, layout(3, 2))
    parts = compressor.encode(f64(1, -3, 2, -0.0, 6), 0)
    assert parts["signs"].tolist() == [0b11101]
    assert parts["scales"].tolist() == [2, 3]
    assert parts["scales"].dtype == torch.float64
    assert compressor.decode(parts, torch.empty(5).double(), 0).tolist() == [2, -2, 2, 3, 3]
    assert create("sign", 1.0, layout(5)).encode(torch.ones(5), 0)["scales"].dtype == torch.float32


def test_the_mean_of_magnitudes_whose_sum_overflows() -> None:
    """(1.5e308 + 1.5e308 + 0)/3 = 1e308, though 3e308 is no float64."""
    assert there_and_back("sign", f64(1.5e308, -1.5e308, 0)).tolist() == pytest.approx([1e308, -1e308, 1e308])


@pytest.mark.parametrize("d", [1, 7, 8, 9, 16, 17, 100])
def test_bits_of_any_number_of_entries(d: int) -> None:
    """Entry 8 i + j is bit j of byte i; the bits beyond the last entry are 0."""
    vector = torch.randn(d, generator=torch.Generator().manual_seed(d)).sign()
    compressor = create("sign", 1.0, layout(d))
    parts = compressor.encode(vector, 0)
    number = int.from_bytes(bytes(parts["signs"].tolist()), "little")
    assert number == sum(1 << i for i in range(d) if vector[i] > 0)
    assert torch.equal(compressor.decode(parts, vector, 0), vector)


def test_int8_by_hand() -> None:
    """Steps 127/127 = 1 and 254/127 = 2. Half to even: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, and 3/2 -> 2, 5/2 -> 2."""
    compressor = create("int8", 1.0, layout(4, 3, 2))
    parts = compressor.encode(f64(127, 0.5, 1.5, -2.5, -254, 3, 5, 0, 0), 0)
    assert parts["values"].tolist() == [127, 0, 2, -2, -127, 2, 2, 0, 0]
    assert parts["scales"].tolist() == [1, 2, 0]
    assert compressor.decode(parts, torch.empty(9).double(), 0).tolist() == [127, 0, 2, -2, -254, 4, 4, 0, 0]


def test_int8_of_low_precision_is_rounded_once() -> None:
    """The step of (126.5, 101, 3.5) is 126.5/127: 101/step = 101.399 and 3.5/step = 3.514 give 101 and 4.

    In bfloat16, which has halves there, 101.399 would become 101.5 and go up to 102.
    """
    vector = torch.tensor([126.5, 101, 3.5], dtype=torch.bfloat16)
    parts = create("int8", 1.0, layout(3)).encode(vector, 0)
    assert parts["scales"].dtype == torch.float32
    assert float(parts["scales"]) == pytest.approx(126.5 / 127, rel=1e-7)
    assert parts["values"].tolist() == [127, 101, 4]


def test_int8_of_a_step_too_small_to_be_a_number() -> None:
    """5e-324/127 is 0: all are zero, none the largest code."""
    parts = create("int8", 1.0, layout(2)).encode(f64(5e-324, -5e-324), 0)
    assert parts["values"].tolist() == [0, 0]
    assert parts["scales"].tolist() == [0]


def test_casts_by_hand() -> None:
    """Half an ulp above 1 goes to even; what is too large becomes the largest number, in either direction."""
    big = float(torch.finfo(torch.bfloat16).max)
    assert there_and_back("bfloat16", torch.tensor([1 + 2**-8, 1 + 2**-7, -0.0, 3.4e38, -3.4e38])).tolist() == [
        *(1, 1 + 2**-7, 0, big, -big)
    ]
    assert there_and_back("float16", torch.tensor([1 + 2**-11, 1 + 2**-10, 70000, -1e30, 2**-25])).tolist() == [
        *(1, 1 + 2**-10, 65504, -65504, 0)
    ]
    assert there_and_back("bfloat16", torch.tensor([65504.0, -65504.0]).half()).tolist() == [65504, -65504]
    assert there_and_back("float16", torch.tensor([65536.0, 1e38]).bfloat16()).tolist() == [65536] * 2  # 65504


def test_random_k_is_the_first_distinct_numbers_of_a_stream() -> None:
    """PCG64's raw 64 bits modulo d until k are distinct; with k > d/2 those are left out. Pinned: sides must agree."""
    for d, ratio in ((10, 0.3), (10, 0.8), (10, 1.0), (1, 1.0), (1000, 0.37)):
        k = math.ceil(Fraction(str(ratio)) * d)
        stream, seen = np.random.PCG64(7), set[int]()
        while len(seen) < min(k, d - k):
            seen.add(int(stream.random_raw()) % d)
        wanted = sorted(seen if k <= d / 2 else set(range(d)) - seen)
        compressor = create("random-k", ratio, layout(d))
        assert compressor.encode(torch.arange(d).float(), 7)["values"].tolist() == wanted
        assert there_and_back("random-k", torch.arange(1.0, d + 1), ratio, seed=7).nonzero().view(-1).tolist() == wanted
    assert create("random-k", 0.3, layout(10)).encode(torch.arange(10.0), 7)["values"].tolist() == [3, 5, 6]


# --- what they promise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1 / 3, 2 / 3])
def test_random_k_draws_every_subset_alike(ratio: float) -> None:
    """6000 seeds over the 15 subsets of 2, or of 4, out of 6: 400 each, sigma = sqrt(400 * 14/15) = 19.3; 5 sigma."""
    compressor = create("random-k", ratio, layout(6))
    got = Counter(tuple(compressor.encode(torch.arange(6.0), seed)["values"].tolist()) for seed in range(6000))
    subsets = set(itertools.combinations(map(float, range(6)), round(6 * ratio)))
    assert got.keys() == subsets
    assert all(abs(count - 400) < 97 for count in got.values())


def test_random_k_is_unbiased_with_d_over_k_and_contractive_without() -> None:
    """E C(u) = u with the factor 5/2; without it E|C(u) - u|^2 = (1 - 2/5)|u|^2.

    Over n seeds the mean of an entry has the deviation |u_j| sqrt((5/2 - 1)/n): 5 of them. The squares lie in
    0..|u|^2, hence deviate by less than |u|^2/2 sqrt(n).
    """
    vector, n = f64(1, -2, 4, 0.5, 8), 4000
    scaled = create("random-k", 0.4, layout(3, 2), unbiased=True)
    plain = create("random-k", 0.4, layout(3, 2))
    means, kept = (
        torch.stack([each.decode(each.encode(vector, seed), vector, seed) for seed in range(n)])
        for each in (scaled, plain)
    )
    assert bool(((means.mean(0) - vector).abs() < 5 * vector.abs() * math.sqrt(1.5 / n)).all())
    assert bool(((means == 2.5 * kept) & ((kept == 0) | (kept == vector))).all())
    lost = (kept - vector).square().sum(1) / vector.square().sum()
    assert abs(float(lost.mean()) - 0.6) < 5 * 0.5 / math.sqrt(n)


@given(st.lists(NUMBERS, min_size=6, max_size=6), st.sampled_from(DTYPES))
def test_contraction(numbers: list[float], dtype: torch.dtype) -> None:
    """|C(u) - u|^2: top-k at most (1 - k/d)|u|^2, sign |u|^2 - sum_t |u_t|_1^2/d_t. The dense ones, entry by entry: at
    most half a step, or a relative 2^-8 and 2^-11 where float16 has numbers so small; never more than |u_j|."""
    vector = torch.tensor(numbers).to(dtype)
    u, eps = vector.double(), 4 * torch.finfo(dtype).eps
    total = float(u.square().sum())
    lost = {name: there_and_back(name, vector, 0.5, (4, 2)).double() - u for name in LOSSY}
    assert float(lost["top-k"].square().sum()) <= 0.5 * total
    shares = sum(float(part.abs().sum()) ** 2 / part.numel() for part in (u[:4], u[4:]))
    assert float(lost["sign"].square().sum()) == pytest.approx(total - shares, rel=1e-6, abs=2 * eps * total)
    for part, error in ((u[:4], lost["int8"][:4]), (u[4:], lost["int8"][4:])):
        assert float(error.abs().max()) <= float(part.abs().max()) * (0.5 / 127 + eps)
    assert bool((lost["bfloat16"].abs() <= u.abs() * 2**-8).all())
    assert bool((lost["float16"].abs() <= torch.maximum(u.abs() * 2**-11, f64(2**-25))).all())
    for name in ("int8", "bfloat16", "float16", "top-k", "random-k"):
        assert bool((lost[name].abs() <= u.abs() * (1 + eps)).all()), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_extremes(name: str, dtype: torch.dtype) -> None:
    """Largest, smallest, zeros and one entry alone: finite, and no entry is further off than the tensor is large."""
    info = torch.finfo(dtype)
    least = float(torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)))
    for numbers in ([info.max] * 3, [info.max, -info.max, 1], [least, -least, 0], [least * 190] * 3, [0.0, -0.0, 0.0]):
        for sizes in ((3,), (1, 2)):
            vector = torch.tensor(numbers, dtype=torch.float64).to(dtype)
            result = there_and_back(name, vector, sizes=sizes)
            assert bool(result.isfinite().all())
            assert bool(((result.double() - vector.double()).abs() <= vector.double().abs().max() * (1 + 1e-7)).all())
    assert bool(there_and_back(name, torch.zeros(1, dtype=dtype)).isfinite().all())
    if name not in ("bfloat16", "float16"):
        assert there_and_back(name, torch.tensor([-3], dtype=dtype)).tolist() == pytest.approx([-3])


def test_tensors_without_entries_have_no_scale() -> None:
    """A layout may hold an empty tensor; it has no mean and no largest entry."""
    for name in ("sign", "int8"):
        compressor = create(name, 1.0, layout(0, 2, 0, 1))
        parts = compressor.encode(f64(127, -127, 254), 0)
        assert parts["scales"].numel() == 2
        assert compressor.decode(parts, torch.empty(3).double(), 0).tolist() == [127, -127, 254]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("identity", lambda item, wide: 1003 * item),
        ("top-k", lambda item, wide: 11 * (4 + item)),
        ("random-k", lambda item, wide: 11 * item),
        ("sign", lambda item, wide: 126 + 3 * wide),
        ("int8", lambda item, wide: 1003 + 3 * wide),
        ("bfloat16", lambda item, wide: 1003 * 2),
        ("float16", lambda item, wide: 1003 * 2),
    ],
)
def test_bytes(name: str, size: Callable[[int, int], int], dtype: torch.dtype) -> None:
    """d = 1003 in three tensors, k = 11; scales are float32, or float64 for float64."""
    parts = create(name, 0.01, layout(1000, 2, 1)).encode(torch.ones(1003, dtype=dtype), 0)
    sent = sum(part.numel() * part.element_size() for part in parts.values())
    assert sent == size(dtype.itemsize, max(4, dtype.itemsize))


def test_which_may_be_applied_to_a_level() -> None:
    """Those whose result is close to u entry by entry."""
    assert {n for n, c in COMPRESSORS.items() if c.absolute} == {"identity", "int8", "bfloat16", "float16"}
    assert {n for n, c in COMPRESSORS.items() if c.lossless} == {"identity"}


@pytest.mark.parametrize("name", ["none", "zip"])
def test_unknown_names(name: str) -> None:
    """`none` is no compressor."""
    with pytest.raises(ValueError, match=f"compressor '{name}' is unknown; allowed: identity, top-k"):
        create(name, 0.1, layout(1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_gpu_makes_the_same_of_it(name: str, dtype: torch.dtype) -> None:
    """The same parts decode to the same bits. Encoding is the same too, but for the order of the sums of sign."""
    vector = torch.randn(300_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    compressor = create(name, 0.01, layout(300_000, 1))
    here, there = compressor.encode(vector, 5), compressor.encode(vector.cuda(), 5)
    for key, part in here.items():
        assert same(part, there[key].cpu()) or (name, key) == ("sign", "scales")
    assert same(compressor.decode(here, vector, 5), compressor.decode(here, vector.cuda(), 5).cpu())


# --- what they refuse ------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("identity", {}, r"parts \[\], expected \['values'\]"),
    ("identity", {"values": torch.ones(5), "more": torch.ones(5)}, r"parts \['more', 'values'\]"),
    ("identity", {"values": torch.ones(5).double()}, r"values is float64 \(5,\), expected float32 \(5,\)"),
    ("identity", {"values": torch.ones(4)}, r"values is float32 \(4,\), expected float32 \(5,\)"),
    ("identity", {"values": torch.ones(1, 5)}, r"values is float32 \(1, 5\)"),
    ("identity", {"values": torch.tensor(1.0)}, r"values is float32 \(\)"),
    ("identity", {"values": torch.tensor([1, 1, 1, 1, math.nan])}, "values holds NaN or Inf"),
    ("identity", {"values": torch.tensor([1, 1, -math.inf, 1, 1])}, "values holds NaN or Inf"),
    ("top-k", {"indices": torch.tensor([1, 1])}, "indices is int64"),
    ("top-k", {"indices": torch.tensor([1, 1]).int()}, "indices are not strictly increasing"),
    ("top-k", {"indices": torch.tensor([3, 1]).int()}, "indices are not strictly increasing"),
    ("top-k", {"indices": torch.tensor([-1, 3]).int()}, r"indices not in 0\.\.4"),
    ("top-k", {"indices": torch.tensor([3, 5]).int()}, r"indices not in 0\.\.4"),
    ("top-k", {"indices": torch.tensor([2**31 - 1, -(2**31)]).int()}, "indices are not strictly increasing"),
    ("top-k", {"indices": torch.tensor([1, 2, 3]).int(), "values": torch.ones(3)}, r"indices is int32 \(3,\)"),
    ("top-k", {"values": torch.tensor([1, math.inf])}, "values holds NaN or Inf"),
    ("random-k", {"values": torch.ones(5)}, r"values is float32 \(5,\), expected float32 \(2,\)"),
    ("random-k", {"values": torch.tensor([math.nan, 1])}, "values holds NaN or Inf"),
    ("sign", {"signs": torch.tensor([0b100000], dtype=torch.uint8)}, "bits beyond the last entry"),
    ("sign", {"signs": torch.tensor([1], dtype=torch.int8)}, "signs is int8"),
    ("sign", {"signs": torch.tensor([1, 0], dtype=torch.uint8)}, r"signs is uint8 \(2,\), expected uint8 \(1,\)"),
    ("sign", {"scales": torch.tensor([1.0, -1.0])}, "scales are negative"),
    ("sign", {"scales": torch.tensor([math.inf, 1.0])}, "scales holds NaN or Inf"),
    ("sign", {"scales": torch.tensor([1.0])}, r"scales is float32 \(1,\), expected float32 \(2,\)"),
    ("int8", {"scales": torch.tensor([-1.0, 1.0])}, "scales are negative"),
    ("int8", {"scales": torch.tensor([math.nan, 1.0])}, "scales holds NaN or Inf"),
    ("int8", {"scales": torch.tensor([3e38, 1.0])}, "scales are too large for float32"),
    ("int8", {"values": torch.tensor([1, 1, 1, 1, -128], dtype=torch.int8)}, "values hold -128"),
    ("int8", {"values": torch.tensor([1, 1, 1, 1, 200], dtype=torch.uint8)}, "values is uint8"),
    ("bfloat16", {"values": torch.ones(5)}, "values is float32"),
    ("bfloat16", {"values": torch.tensor([1, 1, 1, 1, math.inf]).bfloat16()}, "values holds NaN or Inf"),
    ("float16", {"values": torch.tensor([1, 1, 1, 1, math.nan]).half()}, "values holds NaN or Inf"),
]


@pytest.mark.parametrize(("name", "change", "text"), REFUSED, ids=range(len(REFUSED)))
def test_malformed_parts_are_refused(name: str, change: dict[str, Tensor], text: str) -> None:
    """One line that says what is wrong."""
    compressor = create(name, 0.4, layout(3, 2))
    parts = {} if text.startswith(r"parts \[\]") else compressor.encode(torch.ones(5), 0) | change
    with pytest.raises(ValueError, match=text) as caught:
        compressor.decode(parts, torch.empty(5), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sign", "int8"])
def test_scales_must_fit_the_vector(name: str) -> None:
    """70000 is a float32, but no float16; for int8 127 times the scale counts."""
    compressor = create(name, 0.4, layout(5))
    parts = compressor.encode(torch.ones(5).half(), 0)
    for scale in (70000.0, *([600.0] if name == "int8" else [])):
        with pytest.raises(ValueError, match="scales are too large for float16"):
            compressor.decode(parts | {"scales": torch.tensor([scale])}, torch.empty(5).half(), 0)


@st.composite
def corrupted(draw: st.DrawFn) -> tuple[str, torch.dtype, str, State, State]:
    """What a compressor made of a vector, then bytes changed, or a part replaced, left out, renamed or added."""
    name, dtype = draw(st.sampled_from(sorted(COMPRESSORS))), draw(st.sampled_from(DTYPES))
    feedback = draw(st.sampled_from(["none", "ef14", "ef21"]))
    vector = torch.randn(9, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    copies = {"copy.delta": vector / 2} if draw(st.booleans()) else {}
    sent, _ = codec(name, feedback, (6, 3), ratio=0.4).encode({"delta": vector}, VECTOR, copies, len)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*sorted(sent), "delta/values", "delta", "other/values"]))
        part = sent.pop(key, torch.ones(3))
        how = draw(st.sampled_from(["bytes", "bytes", "bytes", "random", "drop", "rename", "dtype", "shape"]))
        if how == "bytes":
            part = part.clone()
            raw = part.view(-1).view(torch.uint8)
            for _ in range(draw(st.integers(1, 4)) if raw.numel() else 0):
                raw[draw(st.integers(0, raw.numel() - 1))] = draw(st.integers(0, 255))
        elif how == "random":
            data = draw(st.binary(min_size=part.nbytes, max_size=part.nbytes))
            part = torch.tensor(list(data), dtype=torch.uint8).view(part.dtype).view(part.shape)
        elif how == "dtype":
            part = part.to(draw(st.sampled_from([*DTYPES, torch.int8, torch.uint8, torch.int32, torch.int64])))
        elif how == "shape":
            flat = part.reshape(-1)
            part = draw(st.sampled_from([flat[:-1], flat.unsqueeze(0), flat.repeat(2), flat[:0], flat.sum()]))
        if how != "drop":
            sent[key + "x" if how == "rename" else key] = part
    return name, dtype, feedback, sent, copies


@settings(max_examples=600, deadline=None)
@given(corrupted())
def test_garbage_is_refused_or_finite(case: tuple[str, torch.dtype, str, State, State]) -> None:
    """Whatever comes over the wire: a ValueError of one line, or a finite vector of the right shape and dtype."""
    name, dtype, feedback, sent, copies = case
    both, like, text = codec(name, feedback, (6, 3), ratio=0.4), torch.empty(9, dtype=dtype), ""
    try:
        vectors, copies = both.decode(sent, VECTOR, like, copies, len)
    except ValueError as error:
        text = str(error)
    if text:
        assert "\n" not in text
        return
    assert vectors.keys() == {"delta"}
    assert copies.keys() <= {"copy.delta"}
    for value in (*vectors.values(), *copies.values()):
        assert (value.shape, value.dtype) == ((9,), dtype)
        assert bool(value.isfinite().all())


KINDS: dict[str, Kind] = {"delta": "vector", "control": "increment", "steps": "scalar"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"control/values": None, "control/indices": None}, r"groups \['delta', 'steps'\], expected \['control'"),
        ({"other/values": torch.ones(2)}, r"groups \['control', 'delta', 'other', 'steps'\]"),
        ({"delta/values": None}, r"^delta: parts \['indices'\], expected \['indices', 'values'\]$"),
        ({"delta": torch.ones(5)}, r"groups \['', 'control'"),
        ({"steps": None}, r"groups \['control', 'delta'\]"),
        ({"steps/values": torch.ones(1)}, r"^steps: parts \['', 'values'\], expected a scalar$"),
        ({"steps": None, "steps/values": torch.ones(1)}, r"^steps: parts \['values'\], expected a scalar$"),
    ],
)
def test_groups_must_be_those_expected(change: dict[str, Tensor | None], text: str) -> None:
    """Missing, further, compressed where it is none, or the other way round."""
    both = codec("top-k", ratio=0.4)
    sent, _ = both.encode({"delta": torch.ones(5), "control": torch.ones(5), "steps": torch.ones(())}, KINDS, {}, len)
    changed = {name: part for name, part in (sent | change).items() if part is not None}
    with pytest.raises(ValueError, match=text):
        both.decode(changed, KINDS, torch.empty(5), {}, len)


# --- error feedback --------------------------------------------------------------------------------------------------


def rounds(
    both: Codec, vectors: list[State], kinds: dict[str, Kind], memory: State | None = None
) -> list[tuple[State, State, State, State]]:
    """What is sent, arrives and is kept on both sides, round after round; nothing given may change."""
    memory, copies, result = memory or {}, {}, []
    for t, each in enumerate(vectors):
        given_ = [each, memory, copies]
        before = [{name: value.clone() for name, value in state.items()} for state in given_]

        def seed(group: str, t: int = t) -> int:
            return 1000 * t + len(group)

        sent, kept = both.encode(each, kinds, memory, seed)
        wire = {name: value.clone() for name, value in sent.items()}
        arrived, kept_copies = both.decode(wire, kinds, torch.empty_like(each["delta"]), copies, seed)
        assert all(same(wire[name], sent[name]) for name in sent)
        for state, old in zip(given_, before, strict=True):
            assert all(same(value, old[name]) for name, value in state.items())
        memory, copies = kept, kept_copies
        result.append((sent, arrived, memory, copies))
    return result


def test_flags() -> None:
    """A loss that is remembered needs memory; only ef21's belongs to the server's copies."""
    for up, feedback in itertools.product(["none", *COMPRESSORS], ["none", "ef14", "ef21"]):
        each = codec(up, feedback)
        remembers = up not in ("none", "identity") and feedback != "none"
        assert (each.active, each.remembers) == (up != "none", remembers)
        assert each.binds == (remembers and feedback == "ef21")


def test_nothing_is_compressed_by_default() -> None:
    """up = "none": all names and tensors pass as they are."""
    both, state = Codec(CompressionSettings(), layout(3)), {"delta": torch.ones(3), "steps": torch.ones(())}
    sent, kept = both.encode(state, {"delta": "vector", "steps": "scalar"}, {}, len)
    assert sent == state
    arrived, copies = both.decode(sent, {"delta": "vector", "steps": "scalar"}, torch.empty(3), {}, len)
    assert arrived == state
    assert kept == copies == {}


@pytest.mark.parametrize("feedback", ["none", "ef14", "ef21"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_is_the_uncompressed_run(feedback: str, dtype: torch.dtype) -> None:
    """Bit for bit, the sign of zero included; nothing is kept."""
    both = codec("identity", feedback)
    vectors = [{"delta": torch.tensor([-0.0, 0.1, torch.finfo(dtype).max, -3, t], dtype=dtype)} for t in range(3)]
    for given_, (sent, arrived, memory, copies) in zip(vectors, rounds(both, vectors, VECTOR), strict=True):
        assert sent.keys() == {"delta/values"}
        assert same(arrived["delta"], given_["delta"])
        assert memory == copies == {}


def test_ef14_by_hand() -> None:
    """v = (1, 3/4) each round, one entry sent.

    u = (1, 3/4) sends 1, e = (0, 3/4); u = (1, 3/2) sends 3/2, e = (1, 0); u = (2, 3/4) sends 2, e = (0, 3/4).
    With decay 1/2: e = (0, 3/4); u = (1, 9/8) sends 9/8, e = (1, 0); u = (3/2, 3/4) sends 3/2, e = (0, 3/4).
    """
    for decay, wanted in ((1.0, [(1, 0), (0, 1.5), (2, 0)]), (0.5, [(1, 0), (0, 1.125), (1.5, 0)])):
        both = codec("top-k", "ef14", (2,), ratio=0.5, decay=decay)
        got = rounds(both, [{"delta": f64(1, 0.75)}] * 3, VECTOR)
        assert [tuple(arrived["delta"].tolist()) for _, arrived, _, _ in got] == wanted
        assert [memory["residual.delta"].tolist() for _, _, memory, _ in got] == [[0, 0.75], [1, 0], [0, 0.75]]
        assert all(memory.keys() == {"residual.delta"} and not copies for _, _, memory, copies in got)


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
@pytest.mark.parametrize("name", LOSSY)
def test_what_was_sent_is_what_was_meant_but_for_the_memory(name: str, feedback: str) -> None:
    """sum sent = sum v - e after every round, exactly in binary fractions; increments so under ef21 too.

    Tensors of 4 and 2 entries, so that the means of sign are exact; int8's step is 1 where the largest entry of a
    tensor is 127, elsewhere its sums are rounded.
    """
    both = codec(name, feedback, (4, 2), ratio=0.3)
    kinds: dict[str, Kind] = {"delta": "vector", "control": "increment"}
    values = torch.randint(-64, 64, (12, 6), generator=torch.Generator().manual_seed(3)).double() / 16
    sums = {"true": torch.zeros(6).double(), "sent": torch.zeros(6).double()}
    for row, (_, arrived, memory, _) in zip(
        values, rounds(both, [{"delta": row, "control": row} for row in values], kinds), strict=True
    ):
        sums["true"] += row
        sums["sent"] += arrived["control"]
        missing = sums["true"] - sums["sent"] - memory["residual.control"]
        assert float(missing.abs().max()) <= (1e-12 if name == "int8" else 0)
        assert memory.keys() == ({"residual.control", "residual.delta" if feedback == "ef14" else "copy.delta"})


def test_decay_forgets() -> None:
    """e_t = v_t + decay e_(t-1) - sent_t, for each entry of a float64 vector, as computed with fractions."""
    both = codec("sign", "ef14", (2, 2), decay=0.25)
    values = torch.randint(-64, 64, (8, 4), generator=torch.Generator().manual_seed(5)).double() / 16
    owed = [Fraction(0)] * 4
    for row, (_, arrived, memory, _) in zip(
        values, rounds(both, [{"delta": row} for row in values], VECTOR), strict=True
    ):
        owed = [
            Fraction(v) + e / 4 - Fraction(c)
            for v, e, c in zip(row.tolist(), owed, arrived["delta"].tolist(), strict=True)
        ]
        assert [Fraction(e) for e in memory["residual.delta"].tolist()] == owed


def test_the_first_round_adds_nothing() -> None:
    """-0 + 0 = +0: without a memory, of another group's even, the sign of zero reaches the server."""
    both = codec("bfloat16")
    sent, memory = both.encode({"delta": torch.tensor([-0.0] * 5)}, VECTOR, {"residual.control": torch.ones(5)}, len)
    assert bool(torch.signbit(sent["delta/values"]).all())
    assert memory.keys() == {"residual.delta", "residual.control"}  # what is not sent keeps its own


def test_ef21_by_hand() -> None:
    """The first is sent whole. Then v - h = (4, 1) - (1, 2) = (3, -1) sends 3: h = (4, 2); then -1: h = (4, 1)."""
    both = codec("top-k", "ef21", (2,), ratio=0.5)
    vectors = [{"delta": each} for each in (f64(1, 2), f64(4, 1), f64(4, 1))]
    got = rounds(both, vectors, VECTOR)
    assert [arrived["delta"].tolist() for _, arrived, _, _ in got] == [[1, 2], [4, 2], [4, 1]]
    assert [sorted(sent) for sent, _, _, _ in got] == [["delta/values"], *[["delta/indices", "delta/values"]] * 2]
    assert [sent["delta/values"].tolist() for sent, _, _, _ in got] == [[1, 2], [3], [-1]]
    assert all(memory.keys() == copies.keys() == {"copy.delta"} for _, _, memory, copies in got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_ef21_copies_are_equal_on_both_sides(name: str, dtype: torch.dtype) -> None:
    """Bit for bit after each of 30 rounds of vectors that never settle; what arrives is the copy."""
    both = codec(name, "ef21", (40, 9), ratio=0.1)
    source = torch.Generator().manual_seed(2)
    vectors = [{"delta": torch.randn(49, generator=source).to(dtype)} for _ in range(30)]
    for _, arrived, memory, copies in rounds(both, vectors, VECTOR):
        assert same(memory["copy.delta"], copies["copy.delta"])
        assert same(arrived["delta"], copies["copy.delta"])


def test_ef21_copies_on_one_side_alone_are_noticed() -> None:
    """A difference without the server's copy, or a whole vector where it has one: refused, never added."""
    both, held = codec("top-k", "ef21", ratio=0.4), {"copy.delta": torch.ones(5)}
    for memory, copies, got in ((held, {}, "'indices', 'values'"), ({}, held, "'values'")):
        sent, _ = both.encode({"delta": torch.zeros(5)}, VECTOR, memory, len)
        with pytest.raises(ValueError, match=rf"^delta: parts \[{got}\], expected"):
            both.decode(sent, VECTOR, torch.empty(5), copies, len)


@pytest.mark.parametrize(("name", "delta"), [("top-k", 0.1), ("sign", 0.05), ("int8", 0.9), ("bfloat16", 0.9)])
def test_ef21_converges_where_the_vector_settles(name: str, delta: float) -> None:
    """h = 0 at first, then v stays: |v - h_t|^2 <= (1 - delta)^t |v|^2, delta = k/d, 1/d_t; top-k ends after d/k."""
    both = codec(name, "ef21", (20,), ratio=0.1)
    target = torch.randn(20, generator=torch.Generator().manual_seed(4)).double()
    got = rounds(both, [{"delta": torch.zeros_like(target)}, *[{"delta": target}] * 60], VECTOR)
    errors = [float((target - arrived["delta"]).square().sum() / target.square().sum()) for _, arrived, _, _ in got]
    assert errors[0] == 1
    assert all(error <= (1 - delta) ** t + 1e-28 for t, error in enumerate(errors))
    if name == "top-k":
        assert errors[9] > 0
        assert errors[10:] == [0] * 51


def test_ef14_does_not_settle_where_ef21_does() -> None:
    """v constant: ef14 still sends one entry of two at a time, twice as large; ef21 sends v."""
    vectors = [{"delta": f64(0, 0)}, *[{"delta": f64(1, 1)}] * 9]
    last = {f: rounds(codec("top-k", f, (2,), ratio=0.5), vectors, VECTOR)[-1][1] for f in ("ef14", "ef21")}
    assert sorted(last["ef14"]["delta"].tolist()) == [0, 2]
    assert last["ef21"]["delta"].tolist() == [1, 1]


def test_a_client_that_was_absent_goes_on() -> None:
    """Its memory waits: e of round 1 is sent in the next round in which it takes part, at its old scale."""
    both = codec("top-k", "ef14", (2,), ratio=0.5)
    _, memory = both.encode({"delta": f64(4, 3)}, VECTOR, {}, len)
    sent, _ = both.encode({"delta": f64(0.25, 0)}, VECTOR, memory, len)
    assert sent["delta/values"].tolist() == [3]


def test_without_feedback_nothing_is_kept_and_random_k_is_scaled() -> None:
    """d/k = 5/2 only without feedback."""
    for feedback, factor in (("none", 2.5), ("ef14", 1.0)):
        both = codec("random-k", feedback, ratio=0.4)
        ((sent, arrived, memory, _),) = rounds(both, [{"delta": torch.ones(5)}], VECTOR)
        assert sent["delta/values"].tolist() == [factor] * 2
        assert sorted(arrived["delta"].tolist()) == [0, 0, 0, factor, factor]
        assert bool(memory) == (feedback == "ef14")
    sent, memory = codec("sign", "none").encode(
        {"delta": torch.ones(5)}, VECTOR, {"residual.delta": torch.ones(5)}, len
    )
    assert sent["delta/scales"].tolist() == [1, 1]
    assert memory == {}


def test_scalars_pass_and_each_group_has_its_seed() -> None:
    """The seed function is asked once a vector, by name, on each side; a scalar travels under its own name."""
    both, asked = codec("random-k", ratio=0.4), list[str]()

    def seed(group: str) -> int:
        asked.append(group)
        return len(group)

    vectors = {"delta": torch.arange(5.0), "control": torch.arange(5.0), "steps": torch.tensor(3.0)}
    sent, memory = both.encode(vectors, KINDS, {}, seed)
    assert sorted(sent) == ["control/values", "delta/values", "steps"]
    assert sent["steps"] is vectors["steps"]
    assert sorted(memory) == ["residual.control", "residual.delta"]
    arrived, _ = both.decode(sent, KINDS, torch.empty(5), {}, seed)
    assert arrived["steps"] is vectors["steps"]
    assert Counter(asked) == {"delta": 2, "control": 2}
    plain = create("random-k", 0.4, layout(5))
    for group in ("delta", "control"):
        assert torch.equal(sent[f"{group}/values"], plain.encode(vectors[group], len(group))["values"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("feedback", ["none", "ef14", "ef21"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_not_finite_is_not_sent(name: str, feedback: str, bad: float) -> None:
    """random-k might not draw it, a cast would hide it, and the memory would hold it for ever."""
    vector = torch.ones(5)
    vector[3] = bad
    with pytest.raises(ArithmeticError, match="the vector 'delta' to be sent holds NaN or Inf"):
        codec(name, feedback, ratio=0.2).encode({"delta": vector}, VECTOR, {}, len)


def test_a_memory_that_overflows_is_noticed() -> None:
    """3e38 + 3e38 is no float32."""
    with pytest.raises(ArithmeticError, match="'delta'"):
        codec("random-k", ratio=0.2).encode(
            {"delta": torch.full((5,), 3e38)}, VECTOR, {"residual.delta": torch.full((5,), 3e38)}, len
        )
