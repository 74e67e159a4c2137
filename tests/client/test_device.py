"""Where and how exactly a client computes: which device, float16, channels_last, transfers, lack of memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client import session
from client.training import device, forward, work
from client.training.batches import channels_last
from client.training.device import Staging, choose, out_of_memory, settle
from common.errors import SettingsError
from common.vector import State, sha256
from strategies.protocol.messages import Reply
from tests.support import faults
from tests.support.faults import toy
from tests.support.site import Site
from tests.support.tiny import Tiny, settings, simulate, trained


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """As in a new process, before and after."""
    device._choose.cache_clear()
    session._sessions.clear()
    session._cache.clear()
    yield
    device._choose.cache_clear()
    session._sessions.clear()
    settle(settings().local)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this machine seem to have so many GPUs."""

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    return have


# --- the choice


@pytest.mark.parametrize(
    ("count", "name", "expected"),
    [
        (0, "cpu", "cpu"),
        (0, "auto", "cpu"),
        (2, "cpu", "cpu"),
        (1, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
    ],
)
def test_the_device_that_was_asked_for(count: int, name: str, expected: str, gpus: Callable[[int], None]) -> None:
    """With its number, always: "cuda" alone means another one after `torch.cuda.set_device`."""
    gpus(count)
    assert str(choose(name)) == expected
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (expected != "cpu")


@pytest.mark.parametrize(
    ("count", "name", "why"),
    [
        (0, "cuda", "device 'cuda' was asked for and .*; allowed here: cpu, auto"),
        (0, "cuda:1", "device 'cuda:1' was asked for and .*; allowed here: cpu, auto"),
        (2, "cuda:2", r"'cuda:2' was asked for and this machine has cuda:0 \(Card 0\), cuda:1 \(Card 1\)"),
        (2, "cuda:-1", "device 'cuda:-1' is unknown; allowed: cpu, auto, cuda, cuda:N"),
        (2, "cuda:", "device 'cuda:' is unknown"),
        (2, "cuda:²", "device 'cuda:²' is unknown"),
        (2, "mps", "device 'mps' is unknown"),
        (2, "", "device '' is unknown"),
    ],
)
def test_a_device_that_is_not_there(count: int, name: str, why: str, gpus: Callable[[int], None]) -> None:
    """Is refused, never replaced by the CPU."""
    gpus(count)
    with pytest.raises(SettingsError, match=why):
        choose(name)


def test_a_gpu_that_nobody_uses_is_told_once(
    gpus: Callable[[int], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without touching it, which would take its memory; and nothing where there is none."""
    gpus(1)
    monkeypatch.setattr(torch.cuda, "get_device_name", None)
    with caplog.at_level(logging.WARNING, "client.training.device"):
        choose("cpu")
        choose("cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "training on the CPU although this machine has a GPU (1 in all); --device auto uses it"
    ]
    caplog.clear()
    gpus(0)
    device._choose.cache_clear()
    choose("cpu")
    assert not caplog.records


def test_a_part_of_a_gpu(gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the GPU chosen; meaningless on a CPU and beyond 1."""
    gpus(2)
    given: list[tuple[float, str]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, d: given.append((f, str(d))))
    choose("cuda:1", 0.25)
    choose("cuda:0", 0.0)
    assert given == [(0.25, "cuda:1")]
    for name, fraction in (("cpu", 0.5), ("cuda", 1.5), ("cuda", -0.1), ("cuda", float("nan"))):
        with pytest.raises(SettingsError, match="gpu-memory-fraction"):
            choose(name, fraction)
    assert len(given) == 1


def test_a_client_whose_gpu_is_gone_takes_no_part(tmp_path: Path, gpus: Callable[[int], None]) -> None:
    """It says so at the roll and in its replies."""
    gpus(0)
    site = Site(tmp_path, toy(), device="cuda:1")
    assert site.roll().error.startswith("client 2: device-unusable: ")
    assert site.train().head.status == "error"


def test_deterministic_mode_follows_the_experiment(tmp_path: Path) -> None:
    """On and off again with each message's experiment; what another part of the process chose is left alone."""
    assert not torch.are_deterministic_algorithms_enabled()
    exact = Site(tmp_path / "a", toy(local={"lr": 0.2, "deterministic": True}))
    loose = Site(tmp_path / "b", toy(local={"lr": 0.2}))
    for site, expected in ((exact, True), (loose, False), (exact, True)):
        assert site.train().head.status == "ok"
        assert torch.are_deterministic_algorithms_enabled() == expected
        assert torch.backends.cudnn.deterministic == expected
    loose.train()
    torch.use_deterministic_algorithms(True)
    try:
        assert loose.train().head.status == "ok"
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("local", [{"precision": "float16"}, {"channels_last": True}, {"deterministic": True}])
def test_what_decides_weights_is_part_of_the_identity(local: dict[str, Any]) -> None:
    """A checkpoint of another precision, memory format or kernel choice is foreign."""
    assert settings(**local).identity != settings().identity


# --- float16


class Scaled(Tiny):
    """Its loss is multiplied; every forward pass is counted, also by BatchNorm."""

    def __init__(self, factor: float, **more: Any) -> None:
        super().__init__(**more)
        self.factor = factor

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * self.factor


def gradients(task: Tiny, **local: Any) -> tuple[list[Tensor], work.LocalWork]:
    """All raw gradients of a round."""
    done = simulate(task, **local).work("2")
    return [gradient.clone() for gradient in done.steps()], done


def test_float16_is_near_float32() -> None:
    """Weights, gradients and uploads stay float32."""
    _, exact = trained(Tiny(norm=False), "2", epochs=3)
    done, rounded = trained(Tiny(norm=False), "2", epochs=3, precision="float16")
    assert rounded.dtype == done.vector.dtype == torch.float32
    assert 0 < float((rounded - exact).norm()) < 0.05 * float(exact.norm())


def test_small_gradients_do_not_vanish_in_float16() -> None:
    """A loss times 1e-6 has gradients below float16's least number, 6e-8; scaled by 2^16 they are there."""
    exact, _ = gradients(Scaled(1e-6, norm=False))
    seen, _ = gradients(Scaled(1e-6, norm=False), precision="float16")
    for one, other in zip(seen, exact, strict=True):
        assert float((one - other).norm()) < 0.02 * float(other.norm())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_scale_that_overflows_is_halved_on_the_same_batch(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient that is not finite is seen and none is left out; the forward pass is not run twice, so BatchNorm and
    dropout do not notice; and the gradients are those of a scale that was right from the start."""
    task = Scaled(100.0, sizes=(5, 1, 8), dropout=dropout)
    torch.manual_seed(0)
    seen, done = gradients(task, precision="float16", lr=1e-3)
    assert done._forward._scale < forward.FIRST_SCALE, "this task should overflow"
    assert all(bool(torch.isfinite(gradient).all()) for gradient in seen)
    assert len(task.batches) == done.steps_taken == len(seen) == 4
    assert int(done._model.module[1].num_batches_tracked) == 4
    monkeypatch.setattr(forward, "FIRST_SCALE", done._forward._scale)
    torch.manual_seed(0)
    right, _ = gradients(Scaled(100.0, sizes=(5, 1, 8), dropout=dropout), precision="float16", lr=1e-3)
    assert [sha256({"g": one}) for one in seen] == [sha256({"g": one}) for one in right]


def test_the_scale_grows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After GROWTH_STEPS good steps, no higher than it began; and it begins anew each round."""
    monkeypatch.setattr(forward, "GROWTH_STEPS", 3)
    done = simulate(Tiny(norm=False), precision="float16", steps=7).work("2")
    done._forward._scale = forward.FIRST_SCALE / 4
    scales = [done._forward._scale / forward.FIRST_SCALE for _ in done.steps()]
    assert scales == [0.25, 0.25, 0.5, 0.5, 0.5, 1.0, 1.0]
    assert simulate(precision="float16").work("2")._forward._scale == forward.FIRST_SCALE


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_ends_the_round_of_its_client(factor: float, tmp_path: Path) -> None:
    """No scale can mend it: the reply is an error."""
    with pytest.raises(ArithmeticError, match="no finite gradient in float16"):
        gradients(Scaled(factor), precision="float16")


def test_the_full_gradient_is_scaled_too() -> None:
    """Near float32's, and small ones do not vanish."""
    for factor in (1e-6, 1.0, 100.0):
        exact = simulate(Scaled(factor, norm=False)).work("2").full_gradient()
        half = simulate(Scaled(factor, norm=False), precision="float16").work("2").full_gradient()
        assert 0 < float((half - exact).norm()) < 0.02 * float(exact.norm())


# --- channels_last


class Images(Tiny):
    """Inputs (b, 3, 4, 4); records how they lie in memory."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.formats: set[bool] = set()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))

    def client(self, name: str, file: str | None = None) -> Any:
        held = super().client(name, file)
        images = torch.randn(len(held.train), 3, 4, 4, generator=torch.Generator().manual_seed(0))
        examples = type(held.train)(images, held.train.targets)
        return type(held)(examples, examples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.formats.add(batch[0].is_contiguous(memory_format=torch.channels_last))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_channels_last() -> None:
    """Inputs lie so in steps and in full gradients, parameters stay views of one vector, the result is near."""
    deltas = {}
    for last in (False, True):
        task = Images()
        done, deltas[last] = trained(task, "2", channels_last=last)
        done.full_gradient()
        assert task.formats == {last}
        done._model.check_views()
    assert torch.allclose(deltas[True], deltas[False], atol=1e-6)


def test_only_tensors_of_four_dimensions_are_turned() -> None:
    """Anything else in a batch passes as it is."""
    image, vector, text = torch.zeros(2, 3, 4, 4), torch.zeros(2), "x"
    (turned, same), other = channels_last(([image, vector], text))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert same is vector
    assert other is text
    trained(Tiny(), "2", channels_last=True)


# --- transfers


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The way over pinned buffers, on a machine without a GPU: a log of allocations and waits."""
    log: list[str] = []

    def pinned(size: int) -> Tensor:
        log.append(f"pin {size}")
        return torch.full((size,), 255, dtype=torch.uint8)

    start = Staging.__init__

    def active(self: Staging, target: torch.device) -> None:
        start(self, target)
        self._active = True

    monkeypatch.setattr(device, "_pinned", pinned)
    monkeypatch.setattr(Staging, "__init__", active)
    monkeypatch.setattr(Staging, "_wait", lambda self: log.append("wait"))
    return log


def state_of_all_kinds(size: int) -> State:
    return {
        "f32": torch.randn(size),
        "bf16": torch.randn(size).bfloat16(),
        "f64": torch.randn((), dtype=torch.float64),
        "bool": torch.rand(size) > 0.5,
        "int": torch.arange(size),
        "none": torch.empty(0),
    }


def test_buffers_are_kept_from_round_to_round(staged: list[str]) -> None:
    """All values arrive, one wait a state, one buffer a name: no allocation unless a vector is larger than before."""
    way = Staging(torch.device("cpu"))
    for size, pins in ((5, 6), (5, 0), (3, 0), (9, 4), (5, 0)):
        staged.clear()
        state = state_of_all_kinds(size)
        for move in (way.to_device, way.to_host):
            moved = move(state)
            assert sha256(moved) == sha256(state)
            assert all(moved[name].data_ptr() != value.data_ptr() for name, value in state.items() if value.numel())
        assert [line for line in staged if line == "wait"] == ["wait"] * 2
        assert len(staged) - 2 == pins


def test_a_cpu_needs_no_copies() -> None:
    """What is received is used where it lies."""
    way, state = Staging(torch.device("cpu")), state_of_all_kinds(5)
    for moved in (way.to_device(state), way.to_host(state)):
        assert all(moved[name].data_ptr() == value.data_ptr() for name, value in state.items())


@pytest.mark.parametrize("strategy", ["scaffold", "hafedho"])
def test_transfers_change_no_bit(
    strategy: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds over buffers, whose kept and sent vectors have one name and are on their way at the same time, against
    rounds without."""

    def rounds(folder: Path) -> list[str]:
        session._sessions.clear()
        session._cache.clear()
        site, seen = Site(folder, toy(strategy)), []
        for round in (1, 2, 3):
            reply = site.train(round, accepted=round - 1)
            assert reply.head.status == "ok", reply.head.reason
            seen.append(sha256(reply.state | reply.buffers))
            session._cache.clear()  # as another process would read it
        return seen

    plain = rounds(tmp_path / "plain")
    staged, both, move = request.getfixturevalue("staged"), threading.Barrier(2), Staging.to_host

    def together(self: Staging, state: State) -> State:
        moved = move(self, state)
        both.wait(10)
        return moved

    monkeypatch.setattr(Staging, "to_host", together)
    assert rounds(tmp_path / "staged") == plain
    assert any(line.startswith("pin") for line in staged)


# --- lack of memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] not enough memory: you tried to allocate 4 bytes."),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_lack_of_memory_costs_a_round(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is an error, what only saves time is given up, and the next round is as if nothing had been."""
    site = Site(tmp_path, toy("scaffold"))
    site.train(1)
    expected = site.train(2, accepted=1)
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(session._cache.size))

    def full(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(faults.Toy, "loss", full)
        reply: Reply = site.train(3, accepted=2, keep=[1])
    assert reply.head.reason.startswith("client 2, round 3, train: out-of-memory: ")
    assert freed == [0]
    again = site.train(2, accepted=1)
    assert sha256(again.state) == sha256(expected.state)
    assert len(freed) == 1


def test_other_errors_free_nothing() -> None:
    """A wrong shape is no lack of memory."""
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


# --- a real GPU


@pytest.mark.gpu
def test_a_gpu_trains_as_the_cpu_does(tmp_path: Path) -> None:
    """Near its results in every precision; tensors of memory stay on the GPU; twice the same bits."""
    cpu = Site(tmp_path / "cpu", toy("scaffold"))
    exact = [cpu.train(1), cpu.train(2, accepted=1)][1].state["delta"]
    for precision, bound in (("float32", 1e-3), ("bfloat16", 0.1), ("float16", 0.1)):
        local = {"lr": 0.2, "batch_size": 4, "precision": precision, "deterministic": True, "channels_last": True}
        twice = []
        for folder in ("a", "b"):
            session._cache.clear()
            site = Site(tmp_path / precision / folder, toy("scaffold", local=local), device="auto")
            site.train(1)
            [entry] = session._cache._entries.values()
            assert entry.state["control"].is_cuda
            twice.append(site.train(2, accepted=1).state["delta"])
        assert torch.equal(*twice)
        assert float((twice[0] - exact).norm()) < bound * float(exact.norm())


@pytest.mark.gpu
def test_buffers_of_a_gpu_are_pinned() -> None:
    """Values of all kinds there and back."""
    way, state = Staging(torch.device("cuda", 0)), state_of_all_kinds(1000)
    there = way.to_device(state)
    assert all(value.is_cuda for value in there.values())
    assert sha256(Staging(torch.device("cuda", 0)).to_host(there)) == sha256(state)
    assert way._buffers["f32"].is_pinned()


@pytest.mark.gpu
def test_a_full_gpu_costs_a_round(tmp_path: Path) -> None:
    """Beyond the memory fraction: an error reply, and the next round works."""
    site = Site(tmp_path, toy("scaffold"), device="cuda:0", trusted=True, **{"gpu-memory-fraction": 0.1})
    assert site.train(1).head.status == "ok"
    size = torch.cuda.get_device_properties(0).total_memory // 4
    large = toy("scaffold", task={"name": "benchmarks.flat:task", "size": size // 4}).json()
    reply = site.train(2, accepted=1, experiment=large)
    assert "out of memory" in reply.head.reason
    assert site.train(2, accepted=1).head.status == "ok"
