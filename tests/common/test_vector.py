"""A model as one flat vector: what is shared, what is refused, and the three reductions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from common import vector
from common.errors import SettingsError
from common.model import FlatModel
from common.vector import CHUNK, mean_pairwise_cosine, norm, sha256, weighted_sum

NUMBERS = st.one_of(st.just(0.0), st.floats(2**-10, 2**10, width=32), st.floats(-(2**10), -(2**-10), width=32))


class Tied(nn.Module):
    """An encoder whose transpose decodes: one parameter under two names, a frozen scale and a buffer."""

    def __init__(self, scale: float = 2.0, scale_name: str = "scale") -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_parameter(scale_name, nn.Parameter(torch.tensor([scale]), requires_grad=False))
        self.scale_name = scale_name
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.decoder(self.encoder(x))) * getattr(self, self.scale_name)


def mlp(hidden: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))


def train(model: FlatModel, inputs: int, steps: int = 3) -> None:
    leaf = nn.Parameter(model.vector)
    leaf.grad = model.gradient
    optimizer = torch.optim.SGD([leaf], lr=0.1, momentum=0.9)
    for _ in range(steps):
        model.gradient.zero_()
        model.module(torch.randn(8, inputs)).square().mean().backward()
        optimizer.step()


def test_training_moves_the_vector_and_the_vector_moves_the_module() -> None:
    """Parameters are views of `vector`, gradients of `gradient`: one optimizer step on the vector trains the model."""
    model = FlatModel(mlp())
    before = model.vector.clone()
    train(model, 3)
    parameters = list(model.module.parameters())
    assert torch.equal(model.vector, torch.cat([p.detach().reshape(-1) for p in parameters]))
    assert torch.equal(model.gradient, torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]))
    assert not torch.equal(before, model.vector)
    model.check_views()
    model.vector.fill_(7)
    assert all(bool((p == 7).all()) for p in parameters)


def test_the_flat_model_trains_as_the_plain_module_does() -> None:
    """SGD on the vector gives, bit for bit, the weights of SGD on the parameters."""
    torch.manual_seed(1)
    plain = mlp()
    flat = FlatModel(mlp())
    flat.module.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(2)
    for _ in range(3):
        optimizer.zero_grad()
        plain(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    torch.manual_seed(2)
    train(flat, 3)
    assert all(torch.equal(value, flat.named_tensors()[name]) for name, value in plain.state_dict().items())


def test_replaced_storage_or_gradient_is_noticed() -> None:
    """A module that swaps its storage would train a copy unseen; `check_views` says so."""
    model = FlatModel(mlp())
    model.module.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="replaced a parameter's storage or gradient"):
        model.check_views()
    model = FlatModel(mlp())
    model.module.double()
    with pytest.raises(RuntimeError, match="replaced"):
        model.check_views()


def test_tied_frozen_and_buffers() -> None:
    """A tied weight counts once, a frozen one not at all; persistent buffers lie in one vector for each dtype."""
    model = FlatModel(Tied())
    assert list(model.layout) == ["encoder.weight", "norm.weight", "norm.bias"]
    assert model.vector.numel() == 16 + 4 + 4
    assert {name: value.numel() for name, value in model.buffers.items()} == {
        "buffers.float32": 8,
        "buffers.int64": 1,
    }
    train(model, 4)
    module = model.module
    assert isinstance(module, Tied)
    assert module.decoder.weight is module.encoder.weight
    assert torch.equal(model.layout["encoder.weight"].view(model.vector), module.decoder.weight)
    assert module.scale.item() == 2.0
    assert model.buffers["buffers.int64"].tolist() == [3]
    assert torch.equal(model.buffers["buffers.float32"][:4], module.norm.running_mean)


def test_named_tensors_load_into_the_plain_model() -> None:
    """All of `state_dict` with strict=True; copies, so that further training does not move them."""
    model = FlatModel(Tied())
    train(model, 4)
    named = model.named_tensors()
    plain = Tied(scale=0.0)
    plain.load_state_dict(named, strict=True)
    model.module.eval()
    plain.eval()
    x = torch.randn(5, 4)
    assert torch.equal(plain(x), model.module(x))
    kept = {name: value.clone() for name, value in named.items()}
    train(model, 4)
    assert all(torch.equal(kept[name], named[name]) for name in kept)


def test_load_copies() -> None:
    """`load` never keeps a reference to what it is given, and refuses other shapes."""
    model = FlatModel(mlp())
    given = torch.ones_like(model.vector)
    buffers = {name: torch.ones_like(value) for name, value in model.buffers.items()}
    model.load(given, buffers)
    given.zero_()
    buffers["buffers.float32"].zero_()
    assert float(model.vector.sum()) == model.vector.numel()
    assert float(model.buffers["buffers.float32"].sum()) == 10
    with pytest.raises(RuntimeError):
        model.load(torch.ones(3), buffers)


def test_what_cannot_be_one_vector_is_refused() -> None:
    """Two dtypes, or nothing to train: the error says what the model has."""
    with pytest.raises(SettingsError, match=r"must share one dtype.*\['float32', 'float64'\]"):
        FlatModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    with pytest.raises(SettingsError, match="the model has no trainable parameters"):
        FlatModel(nn.ReLU())


def test_the_layout_hash_tells_models_apart() -> None:
    """Names, shapes, dtypes and the values of frozen tensors count; trainable values do not."""
    assert FlatModel(mlp()).layout_hash == FlatModel(mlp()).layout_hash
    assert FlatModel(Tied()).layout_hash == FlatModel(Tied()).layout_hash
    others = [mlp(), mlp(6), mlp().double(), nn.Sequential(*mlp(), nn.Identity(), nn.BatchNorm1d(2))]
    others += [Tied(), Tied(scale=3.0), Tied(scale_name="factor"), nn.Sequential(Tied())]
    hashes = [FlatModel(module).layout_hash for module in others]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK + 1, 3 * CHUNK + 5])
def test_weighted_sum_is_the_float64_sum(dtype: torch.dtype, size: int) -> None:
    """Rounded once, to the vectors' dtype, after a float64 accumulation; sizes around the chunk's."""
    torch.manual_seed(size)
    vectors = [torch.randn(size).to(dtype) for _ in range(4)]
    weights = [0.1, 0.2, 0.3, 0.4]
    got = weighted_sum(vectors, weights)
    exact = sum((v.double() * w for v, w in zip(vectors, weights, strict=True)), torch.zeros(size).double())
    assert got.dtype == dtype
    # FMA may change the last bit of the float64 accumulator, hence one step of the result at a tie.
    assert torch.allclose(got.double(), exact.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-15)


def test_weighted_sum_keeps_small_terms_between_large_ones() -> None:
    """1e8 + 1 - 1e8 = 1 in any order; in float32 it is 0 in two of them."""
    values = [torch.full((3,), x) for x in (1e8, 1.0, -1e8)]
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1)):
        assert weighted_sum([values[i] for i in order], [1.0] * 3).tolist() == [1.0] * 3


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_weighted_sum_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Elementwise: any chunk size and any order of the entries give the same bits."""
    torch.manual_seed(0)
    vectors, weights = [torch.randn(999) for _ in range(5)], [0.3, -1.5, 2.0, 0.1, 1e-3]
    whole = weighted_sum(vectors, weights)
    order = torch.randperm(999)
    monkeypatch.setattr(vector, "CHUNK", chunk)
    assert torch.equal(weighted_sum(vectors, weights), whole)
    assert torch.equal(weighted_sum([v[order] for v in vectors], weights), whole[order])


def test_weighted_sum_of_scalars_and_of_nothing() -> None:
    """0-d in, 0-d out; no vectors, or weights of another number, is an error."""
    got = weighted_sum([torch.tensor(2.0), torch.tensor(4.0)], [0.25, 0.5])
    assert got.shape == ()
    assert got.item() == 2.5
    for vectors, weights in (([], []), ([torch.ones(1)], [])):
        with pytest.raises(ValueError, match="vectors with"):
            weighted_sum(vectors, weights)


@given(st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=0, max_size=6), st.booleans())
def test_mean_pairwise_cosine_is_its_definition(rows: list[list[float]], scale: bool) -> None:
    """(|sum e_i|^2 - S)/(S (S - 1)) is the mean of cos(u_i, u_j) over pairs; vectors of length 0 do not count."""
    vectors = [torch.tensor(row) * (1e-3 if scale else 1.0) for row in rows]
    norms = [norm(v) for v in vectors]
    got = mean_pairwise_cosine(vectors, norms)
    units = [v.double().numpy() / n for v, n in zip(vectors, norms, strict=True) if n > 0]
    pairs = [float(np.dot(a, b)) for i, a in enumerate(units) for b in units[i + 1 :]]
    if not pairs:
        assert got is None
    else:
        assert got == pytest.approx(np.mean(pairs), abs=1e-5)


@given(st.lists(NUMBERS, max_size=20))
def test_norm_is_the_root_of_the_sum_of_squares(values: list[float]) -> None:
    """To float32's precision for float32; a norm that float32 cannot hold is still a number."""
    assert norm(torch.tensor(values)) == pytest.approx(math.sqrt(sum(x * x for x in values)), rel=1e-6)
    assert norm(torch.tensor(values).double()) == pytest.approx(math.sqrt(sum(x * x for x in values)), rel=1e-12)
    assert norm(torch.tensor([3e38, 3e38])) == pytest.approx(math.sqrt(2) * 3e38)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK])
def test_norm_finds_one_bad_entry(bad: float, place: int) -> None:
    """One NaN or Inf anywhere makes the norm not finite."""
    values = torch.zeros(2 * CHUNK + 1)
    assert norm(values) == 0
    values[place] = bad
    assert not math.isfinite(norm(values))


def test_sha256_tells_states_apart() -> None:
    """Values, names, dtypes and shapes count; the order of the names does not."""
    state = {"a": torch.arange(4.0), "b": torch.zeros(())}
    same = {"b": torch.zeros(()), "a": torch.arange(4.0)}
    assert sha256(state) == sha256(same)
    others = [
        state | {"b": torch.tensor(-0.0)},
        {"a": state["a"], "c": state["b"]},
        state | {"a": state["a"].view(2, 2)},
        state | {"a": state["a"].view(torch.int32)},
    ]
    assert len({sha256(s) for s in [state, *others]}) == 5
