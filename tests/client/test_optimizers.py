"""The local optimizers, each against a plain numpy reference that shares no code with it.

`run` lays the weights into the middle of a larger vector and gives the optimizer slices, so every test here also
shows that it works in place, touches nothing outside and leaves the gradient as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.training.optimizers import LocalOptimizer
from common.errors import SettingsError
from common.experiment import LocalSettings
from common.vector import Slot, State

Array = NDArray[Any]
FRONT, BACK = 3, 2  # what lies around the slice
B1, B2, EPS, LR = 0.75, 0.5, 0.125, 0.25
# A wide and a tall matrix and a convolution, among numbers that are no matrices: 2, then 1, then 3 of them.
WIDE, TALL, CONV = Slot(2, 8, (2, 3)), Slot(8, 20, (4, 3)), Slot(21, 33, (3, 2, 2, 1))
SLOTS, SIZE = (WIDE, TALL, CONV), 36
REST = [*range(2), 20, *range(33, 36)]


def settings(optimizer: str, **given: Any) -> LocalSettings:
    """eps and the betas are such that each of them shows in every step."""
    return LocalSettings(optimizer=optimizer, **({"lr": LR, "betas": (B1, B2), "eps": EPS} | given))


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def run(
    given: LocalSettings,
    start: Array,
    gradients: Sequence[Array],
    matrices: Sequence[Slot] = (),
    lr: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Array:
    """The weights after each step (steps, n)."""
    size = len(start)
    vector = torch.from_numpy(numbers(FRONT + size + BACK, seed=9)).to(dtype)
    around = vector.clone()
    gradient = torch.full_like(vector, 7.0)
    live, slope = vector[FRONT : FRONT + size], gradient[FRONT : FRONT + size]
    live.copy_(torch.from_numpy(start))
    optimizer = LocalOptimizer(given, live, slope, given.lr if lr is None else lr, matrices)
    path = []
    for values in gradients:
        slope.copy_(torch.from_numpy(values))
        before = gradient.clone()
        optimizer.step()
        assert torch.equal(gradient, before)
        path.append(vector[FRONT : FRONT + size].double().numpy().copy())
    assert torch.equal(vector[:FRONT], around[:FRONT])
    assert torch.equal(vector[-BACK:], around[-BACK:])
    return np.stack(path)


def close(actual: Array, expected: Array, rel: float = 1e-12) -> bool:
    return bool(np.abs(actual - expected).max() <= rel * np.abs(expected).max())


# --- one leaf


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.75, False), (0.75, True)])
def test_sgd(momentum: float, nesterov: bool) -> None:
    """g += wd w; m <- mu m + g; w <- w - lr m, or with Nesterov w - lr (g + mu m)."""
    w, m, expected, gradients = numbers(5), np.zeros(5), [], numbers(4, 5, seed=1)
    for g in gradients:
        g = g + 0.5 * w
        m = momentum * m + g
        w = w - LR * (g + momentum * m if nesterov else m)
        expected.append(w)
    given = settings("sgd", momentum=momentum, nesterov=nesterov, weight_decay=0.5)
    assert close(run(given, numbers(5), gradients), np.stack(expected))


def adam(
    w: Array,
    gradients: Sequence[Array],
    lr: float = LR,
    *,
    correct: bool = True,
    largest: bool = False,
    coupled: float = 0.0,
    decoupled: float = 0.0,
) -> Array:
    """The weights after each step, moments from zero."""
    m, v, top, path = 0 * w, 0 * w, 0 * w, []
    for k, g in enumerate(gradients, start=1):
        g = g + coupled * w
        w = w * (1 - lr * decoupled)
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g**2
        top = np.maximum(top, v) if largest else v
        one, two = (1 - B1**k, 1 - B2**k) if correct else (1.0, 1.0)
        w = w - lr * (m / one) / (np.sqrt(top / two) + EPS)
        path.append(w)
    return np.stack(path)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("name", ["adam", "adamw", "amsgrad"])
def test_adam(name: str, correct: bool) -> None:
    """Five steps whose gradients shrink, so that AMSGrad's maximum counts, with decay (coupled but in adamw)."""
    gradients = numbers(5, 6, seed=1) * np.array([[4.0], [2.0], [1.0], [0.5], [0.25]])
    given = settings(name, bias_correction=correct, weight_decay=0.5)
    decay = {"decoupled": 0.5} if name == "adamw" else {"coupled": 0.5}
    expected = adam(numbers(6), gradients, correct=correct, largest=name == "amsgrad", **decay)
    assert close(run(given, numbers(6), gradients), expected)


def test_first_step_of_adam_by_hand() -> None:
    """g = 2: m = 1/2, v = 2, and with the correction 2, 4. Steps 0.5/(sqrt(2) + 1/8) and 2/(2 + 1/8), times lr 1/4."""
    for correct, step in ((False, 0.5 / (math.sqrt(2) + 0.125)), (True, 2 / 2.125)):
        path = run(settings("adam", bias_correction=correct), np.ones(1), [np.full(1, 2.0)])
        assert path.item() == pytest.approx(1 - step / 4, rel=1e-15)


@pytest.mark.parametrize("name", ["adam", "adamw", "amsgrad"])
def test_gain_without_bias_correction(name: str) -> None:
    """On a constant gradient m = (1 - b1^k) g and v = (1 - b2^k) g^2: step k is (1 - b1^k)/sqrt(1 - b2^k) times lr.
    b1 = 0.9, b2 = 0.99: 1.0 at k = 1, 2.1 at 10, 1.8 at 33, 1.5 at 60."""
    given = LocalSettings(optimizer=name, lr=1.0, bias_correction=False)
    lengths = -np.diff(run(given, np.zeros(1), [np.full(1, 3.0)] * 60)[:, 0], prepend=0.0)
    k = np.arange(1, 61)
    assert np.allclose(lengths, (1 - 0.9**k) / np.sqrt(1 - 0.99**k), rtol=1e-7, atol=0)
    assert [round(float(lengths[k - 1]), 1) for k in (1, 10, 33, 60)] == [1.0, 2.1, 1.8, 1.5]
    corrected = run(given.model_copy(update={"bias_correction": True}), np.zeros(1), [np.full(1, 3.0)] * 60)
    assert np.allclose(np.diff(corrected[:, 0]), -1.0, rtol=1e-7, atol=0)


@pytest.mark.parametrize("correct", [True, False])
def test_normalized(correct: bool) -> None:
    """m <- b1 m + (1-b1) g; w <- w - lr m/(||m|| + eps), one norm over all; the same without bias correction."""
    w, m, expected, gradients = numbers(6), np.zeros(6), [], numbers(4, 6, seed=1)
    for g in gradients:
        m = B1 * m + (1 - B1) * g
        w = w - LR * m / (np.sqrt((m**2).sum()) + EPS)
        expected.append(w)
    assert close(run(settings("normalized", bias_correction=correct), numbers(6), gradients, SLOTS), np.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalized_gradient_of_zero(dtype: torch.dtype) -> None:
    """0/(0 + eps) = 0; g = (3, 4) then moves by lr (3/5, 4/5)."""
    given = LocalSettings(optimizer="normalized", lr=0.5)
    path = run(given, np.ones(2), [np.zeros(2), np.array([3.0, 4.0])], dtype=dtype)
    assert np.array_equal(path[0], [1.0, 1.0])
    assert np.allclose(path[1], [0.7, 0.6], rtol=1e-6, atol=0)


# --- matrices, and what is left to Adam


def parts(slot: Slot, values: Array) -> Array:
    """A slot's matrix: a convolution is (out, rest)."""
    return values[..., slot.start : slot.stop].reshape(*values.shape[:-1], slot.shape[0], -1)


def bfloat16(values: Array) -> Array:
    """Rounded to 8 significant bits, ties to even."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(fraction * 256) / 256, exponent)


def orthogonalized(m: Array, steps: int) -> Array:
    """Newton-Schulz in bfloat16: each product accumulated exactly and rounded once."""
    if m.shape[0] > m.shape[1]:
        return orthogonalized(m.T, steps).T
    x = bfloat16(m)
    x = bfloat16(x / bfloat16(np.sqrt((x**2).sum()) + 1e-7))
    for _ in range(steps):
        a = bfloat16(x @ x.T)
        b = bfloat16(-4.7750 * a + 2.0315 * a @ a)
        x = bfloat16(3.4445 * x + b @ x)
    return x


SCALE: dict[str, Callable[[int, int], float]] = {
    "none": lambda rows, columns: 1.0,
    "aspect": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def muon(w: Array, gradients: Array, scale: float, nesterov: bool, decay: float, steps: int = 5) -> Array:
    m, path = np.zeros_like(w), []
    for g in gradients:
        m = B1 * m + (1 - B1) * g
        u = B1 * m + (1 - B1) * g if nesterov else m
        w = (1 - LR * decay) * w - LR * scale * orthogonalized(u, steps)
        path.append(w)
    return np.stack(path)


@pytest.mark.parametrize(("nesterov", "steps"), [(False, 5), (True, 5), (False, 2)])
@pytest.mark.parametrize("scale", SCALE)
def test_muon(scale: str, nesterov: bool, steps: int) -> None:
    """Within a few units in the last place of bfloat16, which is where kernels may differ; a wrong rule, shown by the
    other choice of Nesterov, is further away."""
    gradients = numbers(3, SIZE, seed=1)
    given = settings("muon", muon_scale=scale, nesterov=nesterov, muon_steps=steps, weight_decay=0.5)
    path = run(given, numbers(SIZE), gradients, SLOTS)
    for slot in SLOTS:
        w, g = parts(slot, numbers(SIZE)), parts(slot, gradients)
        factor = SCALE[scale](*w.shape)
        right, wrong = (muon(w, g, factor, choice, 0.5, steps) for choice in (nesterov, not nesterov))
        assert np.abs(parts(slot, path) - right).max() < 0.02 * LR * factor
        assert np.abs(parts(slot, path) - wrong).max() > 0.1 * LR * factor


def test_muon_ends_in_a_band_around_one() -> None:
    """An orthogonal direction has equal singular values s = 1/sqrt(2), and each iteration takes s to
    a s + b s^3 + c s^5: 1.1066, 0.7123, 1.0995, 0.7184, 1.0921... of which the fifth stays, not 1."""
    s = 1 / math.sqrt(2)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    turn = np.array([0.6, -0.8, 0.8, 0.6])
    path = run(LocalSettings(optimizer="muon", lr=1.0), np.zeros(4), [turn * 1000], [Slot(0, 4, (2, 2))])
    assert np.allclose(path[0], -s * turn, rtol=0.03, atol=0)
    assert abs(s - 1) > 0.05


def test_muon_gradient_of_zero() -> None:
    """0/1e-7 = 0."""
    assert not run(LocalSettings(optimizer="muon"), np.zeros(6), [np.zeros(6)] * 2, [Slot(0, 6, (3, 2))]).any()


def test_muon_in_bfloat16() -> None:
    """torch's step without Nesterov would put the normalized momentum in the momentum's place: refused. With Nesterov
    the momentum is b1 m + (1-b1) g: from g = 8 it is 2, then 3.5."""
    vector, gradient = torch.zeros(6, dtype=torch.bfloat16), torch.full((6,), 8.0, dtype=torch.bfloat16)
    slots = [Slot(0, 6, (2, 3))]
    with pytest.raises(SettingsError, match="'muon' without nesterov needs a model of another dtype than bfloat16"):
        LocalOptimizer(settings("muon"), vector, gradient, LR, slots)
    optimizer = LocalOptimizer(settings("muon", nesterov=True), vector, gradient, LR, slots)
    for mean in (2.0, 3.5):
        optimizer.step()
        assert optimizer.state()["matrices.0.momentum_buffer"].unique().tolist() == [mean]


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("name", ["muon", "soap"])
@pytest.mark.parametrize(
    ("aux_lr", "lr", "rate"), [(None, LR, LR), (None, 0.5, 0.5), (0.0625, LR, 0.0625), (0.0625, 0.125, 0.03125)]
)
def test_what_is_no_matrix_goes_to_adam(name: str, correct: bool, aux_lr: float | None, lr: float, rate: float) -> None:
    """At aux_lr, or lr; aux_lr falls with the schedule of lr: half the rate in a round with half of `local.lr`. Decay
    decoupled. SOAP's first step, which moves no matrix, moves these."""
    gradients = numbers(4, SIZE, seed=1)
    given = settings(name, aux_lr=aux_lr, bias_correction=correct, weight_decay=0.5)
    path = run(given, numbers(SIZE), gradients, SLOTS, lr=lr)
    expected = adam(numbers(SIZE)[REST], gradients[:, REST], rate, correct=correct, decoupled=0.5)
    assert close(path[:, REST], expected)


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_all_or_nothing_a_matrix(name: str) -> None:
    """Without matrices all is Adam's; a vector that is two matrices, in any order, leaves Adam nothing."""
    gradients = numbers(3, 10, seed=1)
    assert close(run(settings(name, aux_lr=0.5), numbers(10), gradients), adam(numbers(10), gradients, 0.5))
    slots = [Slot(0, 6, (2, 3)), Slot(6, 10, (2, 2))]
    path = run(settings(name), numbers(10), gradients, slots)
    assert np.array_equal(path, run(settings(name), numbers(10), gradients, slots[::-1]))
    vector = torch.zeros(10)
    optimizer = LocalOptimizer(settings(name), vector, torch.ones(10), LR, slots)
    optimizer.step()
    assert {key.partition(".")[0] for key in optimizer.state()} == {"matrices"}


# --- SOAP


def soap(w: Array, gradients: Array, every: int, correct: bool, decay: float) -> Array:
    """Adam in the eigenbases of L and R. The sides of each matrix here differ by one at most: two eigenvalues 0 would
    leave the first basis arbitrary, and the steps with it. The signs of a basis cancel."""
    first, *others = gradients
    sides = [(1 - B2) * first @ first.T, (1 - B2) * first.T @ first]
    bases = [np.linalg.eigh(side)[1][:, ::-1] for side in sides]
    m, v, path = 0 * w, 0 * w, [w]
    for t, g in enumerate(others, start=1):
        left, right = bases
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * (left.T @ g @ right) ** 2
        rate = LR * (math.sqrt(1 - B2**t) / (1 - B1**t) if correct else 1.0)
        w = w - rate * left @ ((left.T @ m @ right) / (np.sqrt(v) + EPS)) @ right.T
        w = w * (1 - LR * decay)
        path.append(w)
        sides = [B2 * sides[0] + (1 - B2) * g @ g.T, B2 * sides[1] + (1 - B2) * g.T @ g]
        if t % every == 0:
            orders = [np.argsort(-np.diag(q.T @ side @ q)) for side, q in zip(sides, bases, strict=True)]
            v = v[orders[0]][:, orders[1]]
            bases = [np.linalg.qr(s @ q[:, order])[0] for s, q, order in zip(sides, bases, orders, strict=True)]
    return np.stack(path)


@pytest.mark.parametrize("correct", [True, False])
def test_soap(correct: bool) -> None:
    """Seven steps: the first makes the bases and moves no matrix, steps 3, 5 and 7 refresh them. Q is a float32 QR in
    any case. Bases that were never refreshed would be far away."""
    gradients = numbers(7, SIZE, seed=1)
    given = settings("soap", precondition_every=2, bias_correction=correct, weight_decay=0.5)
    path = run(given, numbers(SIZE), gradients, SLOTS)
    for slot in SLOTS:
        w, g = parts(slot, numbers(SIZE)), parts(slot, gradients)
        assert np.array_equal(parts(slot, path)[0], w)
        assert close(parts(slot, path), soap(w, g, 2, correct, 0.5), rel=1e-5)
        for wrong in (soap(w, g, 100, correct, 0.5), soap(w, g, 2, not correct, 0.5), soap(w, g, 2, correct, 0.4)):
            assert not close(parts(slot, path), wrong, rel=1e-3)


# --- rates


def test_decay_of_the_rates() -> None:
    """Rate 1/4, then 1/8: 0 - 0.25 * 2 - 0.125 * 2 = -0.75. Muon's second rate decays too."""
    vector, gradient = torch.zeros(1), torch.full((1,), 2.0)
    optimizer = LocalOptimizer(settings("sgd"), vector, gradient, LR)
    optimizer.step()
    optimizer.decay(0.5)
    optimizer.step()
    assert (vector.item(), optimizer.lr) == (-0.75, 0.125)
    vector, gradient = torch.zeros(5), torch.zeros(5)
    optimizer = LocalOptimizer(settings("muon", aux_lr=0.5, eps=1e-8), vector, gradient, LR, [Slot(0, 4, (2, 2))])
    assert optimizer.lr == LR
    optimizer.decay(0.25)
    gradient[4] = 3.0
    optimizer.step()
    assert optimizer.lr == LR / 4
    assert vector.tolist() == pytest.approx([0, 0, 0, 0, -0.125])


# --- state

VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd-momentum": {"momentum": 0.9},
    "sgd-nesterov": {"momentum": 0.9, "nesterov": True},
    "adam": {},
    "adam-formula": {"bias_correction": False},
    "adamw": {"weight_decay": 0.1},
    "adamw-formula": {"weight_decay": 0.1, "bias_correction": False},
    "amsgrad": {},
    "amsgrad-formula": {"bias_correction": False},
    "normalized": {},
    "muon": {},
    "muon-nesterov": {"nesterov": True, "bias_correction": False},
    "muon-aspect": {"muon_scale": "aspect", "weight_decay": 0.1},
    "muon-rms": {"muon_scale": "rms"},
    "soap": {"precondition_every": 3},
    "soap-formula": {"bias_correction": False, "weight_decay": 0.1},
}
LARGE = (Slot(5, 2405, (60, 40)), Slot(2412, 6012, (40, 10, 3, 3)))


def variant(name: str) -> LocalSettings:
    return LocalSettings(optimizer=name.partition("-")[0], lr=0.01, **VARIANTS[name])


def start(given: LocalSettings, vector: Tensor) -> tuple[LocalOptimizer, Tensor]:
    gradient = torch.zeros_like(vector)
    return LocalOptimizer(given, vector, gradient, 0.01, LARGE), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", VARIANTS)
def test_state_goes_on_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """10 steps are 5 steps and 5 of another optimizer that loads the state, and of a third that loads the same."""
    given, gradients = variant(name), torch.from_numpy(numbers(10, 6015, seed=1)).to(dtype)
    whole = torch.from_numpy(numbers(6015)).to(dtype)
    optimizer, gradient = start(given, whole)
    assert optimizer.state() == {}
    state: State = {}
    for k, values in enumerate(gradients):
        if k == 5:
            state = {key: value.clone() for key, value in optimizer.state().items()}
            half = whole.clone()
        gradient.copy_(values)
        optimizer.step()
    assert all(value.is_contiguous() for value in state.values())
    kept = {key: value.clone() for key, value in state.items()}
    for _ in range(2):
        vector = half.clone()
        optimizer, gradient = start(given, vector)
        optimizer.load(state)
        assert optimizer.state().keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in optimizer.state().items())
        for values in gradients[5:]:
            gradient.copy_(values)
            optimizer.step()
        assert torch.equal(vector, whole)
        assert all(torch.equal(state[key], kept[key]) for key in kept)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "sgd"])
def test_every_entry_of_the_state_is_needed(name: str) -> None:
    """A lost, a foreign and a misshaped entry are named, each of them."""
    given, vector = variant(name), torch.ones(6015)
    optimizer, gradient = start(given, vector)
    gradient.copy_(torch.from_numpy(numbers(6015)))
    optimizer.step()
    state = dict(optimizer.state())
    for key, value in state.items():
        shape = tuple(value.shape)
        for given_there, changed in (
            ("missing", {k: v for k, v in state.items() if k != key}),
            (str((2, *shape)), state | {key: torch.zeros(2, *shape)}),
        ):
            with pytest.raises(ValueError, match="does not fit") as error:
                start(given, vector)[0].load(changed)
            assert str(error.value) == f"optimizer state does not fit: {key!r} is {given_there} there and {shape} here"
    with pytest.raises(ValueError, match=r"'velocity' is \(3,\) there and unknown here"):
        start(given, vector)[0].load(state | {"velocity": torch.zeros(3)})


def test_steps_counted_in_the_state() -> None:
    """SOAP counts for all its matrices at once, Adam for each of its runs."""
    optimizer, _ = start(variant("soap"), torch.ones(6015))
    for _ in range(3):
        optimizer.step()
    steps = {key: value.item() for key, value in optimizer.state().items() if key.endswith("step")}
    assert steps == {"rest.0.step": 3, "rest.1.step": 3, "rest.2.step": 3, "matrices.step": 3}


def test_long_sides_keep_the_identity() -> None:
    """SOAP has no basis for a side longer than 10000, and its state no entry; it goes on all the same."""
    given, size = settings("soap", precondition_every=1), 10001 * 2
    slots, gradients = [Slot(0, size, (10001, 2))], torch.from_numpy(numbers(4, size, seed=1))
    whole, gradient = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    optimizer = LocalOptimizer(given, whole, gradient, LR, slots)
    half, state = whole, optimizer.state()
    for k, values in enumerate(gradients):
        if k == 2:
            half, state = whole.clone(), {key: value.clone() for key, value in optimizer.state().items()}
        gradient.copy_(values)
        optimizer.step()
    assert {key: tuple(value.shape) for key, value in state.items() if "Q" in key} == {"matrices.0.Q.1": (2, 2)}
    optimizer = LocalOptimizer(given, half, gradient, LR, slots)
    optimizer.load(state)
    for values in gradients[2:]:
        gradient.copy_(values)
        optimizer.step()
    assert torch.equal(half, whole)
