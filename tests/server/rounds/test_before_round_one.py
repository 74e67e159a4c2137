"""What cannot be trained is told in one line before round 1; what only looks odd works and changes no other bit."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn

from client import session
from common.data.examples import ClientData
from common.errors import SettingsError
from server.app import run as run_app
from server.engines.inprocess import host_context
from server.rounds.folder import RunFolder
from server.rounds.prepare import prepare
from strategies.protocol.messages import BUFFERS, HEAD
from strategies.registry import REGISTRY
from tests.support import faults
from tests.support.faults import FaultyGrid, Net, lies, put, ran, toy

Change = Callable[[Net], Any]


@pytest.fixture(autouse=True)
def new_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is kept by its experiment's text, which does not tell one patched task from another."""
    monkeypatch.setattr(session, "_sessions", {})


def model(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy task's model with something more in it, from now on."""

    class Changed(Net):
        def __init__(self) -> None:
            super().__init__()
            change(self)

    monkeypatch.setattr(faults, "Net", Changed)
    monkeypatch.setattr(session, "_sessions", {})


def empty(net: Net) -> None:
    net.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    net.register_parameter("none", nn.Parameter(torch.empty(0)))
    net.register_buffer("void", torch.empty(0, 2))


def mask(net: Net) -> None:
    net.register_buffer("causal", torch.full((3, 3), -math.inf).triu(1))
    net.register_buffer("unset", torch.tensor([math.nan, math.inf]))


def odd(algorithm: str) -> dict[str, Any]:
    """The toy experiment's other settings, so that each algorithm has what it asks for."""
    return {"personal": {"parts": ["batch-norm"]}} if algorithm == "fedbn" else {}


@pytest.mark.parametrize("change", [empty, mask])
@pytest.mark.parametrize("algorithm", sorted(REGISTRY.keys() - {"pfedafm"}))
def test_what_does_not_train_is_no_matter(
    algorithm: str, change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of 0 elements, a causal mask of -inf and buffers that hold NaN from the start: all clients count, and
    the model's bits are those without them."""
    settings = toy(algorithm, rounds=2, **odd(algorithm))
    plain = ran(tmp_path / "plain", settings)
    model(change, monkeypatch)
    result = ran(tmp_path / "odd", settings)
    assert [line["dropped"] for line in result.history] == [{}, {}]
    assert result.final["model"] == plain.final["model"]
    kept = result.checkpoint.buffers["buffers.float32"]
    before = result.at(0).buffers["buffers.float32"]
    assert torch.equal(kept.isfinite(), before.isfinite())
    shared = plain.checkpoint.buffers.get("buffers.float32", torch.empty(0))
    assert len(kept) == len(shared) + (11 if change is mask else 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon", "soap"])
@pytest.mark.parametrize("up", ["top-k", "sign", "int8"])
def test_nor_for_optimizers_of_matrices_and_compression(
    optimizer: str, up: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = toy(rounds=2, local={"optimizer": optimizer, "lr": 0.01, "batch_size": 4}, compression={"up": up})
    plain = ran(tmp_path / "plain", settings)
    model(empty, monkeypatch)
    assert ran(tmp_path / "odd", settings).final["model"] == plain.final["model"]


def test_a_mask_that_a_client_changes_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-inf where the server's is finite, and NaN where it is -inf, are refused; the entries that stayed are not."""
    model(mask, monkeypatch)
    for number, bad in enumerate((-math.inf, math.nan)):

        def spoil(vector: Tensor, bad: float = bad) -> Tensor:
            hidden = vector.isinf().nonzero()[0] if math.isnan(bad) else vector.isfinite().nonzero()[0]
            vector[hidden] = bad
            return vector

        grid = FaultyGrid(lies("2", put(spoil, "buffers.float32", BUFFERS)))
        result = ran(tmp_path / str(number), toy(rounds=2), grid)
        assert result.dropped(2) == {"2": "not finite: buffers.float32 holds NaN or Inf"}


def complex_parameter(net: Net) -> None:
    net.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))


def half(net: Net) -> None:
    net.to(torch.float8_e4m3fn)


REFUSED: dict[str, tuple[Change, str]] = {
    "lazy": (lambda net: net.add_module("lazy", nn.LazyLinear(2)), "parameter 'lazy.weight' has no shape before a "),
    "lazy buffer": (lambda net: net.add_module("n", nn.LazyBatchNorm1d(affine=False)), "buffer 'n.running_mean' has"),
    "meta": (lambda net: net.add_module("m", nn.Linear(2, 2, device="meta")), "parameter 'm.weight' is on the device"),
    "complex parameter": (complex_parameter, "parameter 'phase' is complex64; allowed: dense tensors of float64, "),
    "complex and frozen": (
        lambda net: (complex_parameter(net), net.get_parameter("phase").requires_grad_(False)),
        "parameter 'phase' is complex64",
    ),
    "complex buffer": (
        lambda net: net.register_buffer("phase", torch.zeros(2, dtype=torch.complex128)),
        "buffer 'phase' is complex128; allowed: dense tensors of float64, float32, ",
    ),
    "sparse buffer": (
        lambda net: net.register_buffer("few", torch.eye(3).to_sparse()),
        "buffer 'few' is sparse_coo; allowed: dense tensors of ",
    ),
    "float8": (half, "parameter 'norm.weight' is float8_e4m3fn"),
    "two dtypes": (lambda net: net.linear.double(), "must share one dtype, this model has: ['float32', 'float64']"),
    "all frozen": (lambda net: net.requires_grad_(False), "the model has no trainable parameters"),
    "no parameters": (
        lambda net: (delattr(net, "linear"), delattr(net, "norm")),
        "the model has no trainable parameters",
    ),
    "NaN": (lambda net: nn.init.constant_(net.linear.bias, math.nan), "parameter 'linear.bias' holds NaN or Inf"),
    "Inf": (lambda net: nn.init.constant_(net.linear.weight, math.inf), "parameter 'linear.weight' holds NaN or Inf"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_no_round_could_train(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, in one line."""
    change, words = REFUSED[what]
    model(change, monkeypatch)
    with pytest.raises(SettingsError) as caught:
        prepare(toy())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_part_of_the_state_may_be_complex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings keep their turns so: each process has its own, nothing is sent."""
    model(lambda net: net.register_buffer("turns", torch.ones(2, dtype=torch.complex64), persistent=False), monkeypatch)
    assert [line["dropped"] for line in ran(tmp_path, toy(rounds=1)).history] == [{}]


@pytest.mark.parametrize(
    ("optimizer", "nesterov"),
    [*((name, False) for name in ("sgd", "adam", "adamw", "amsgrad", "normalized", "soap", "muon")), ("muon", True)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_dtype_that_an_optimizer_cannot_take_is_told_before_round_one(
    optimizer: str, dtype: torch.dtype, nesterov: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `prepare` lets pass trains; muon without nesterov does not take bfloat16."""
    model(lambda net: (net.add_module("hidden", nn.Linear(3, 4)), net.to(dtype)), monkeypatch)
    loss = faults.Toy.loss
    monkeypatch.setattr(
        faults.Toy, "loss", lambda self, module, batch: loss(self, module, (batch[0].to(dtype), batch[1]))
    )
    settings = toy(rounds=1, local={"optimizer": optimizer, "lr": 0.01, "batch_size": 4, "nesterov": nesterov})
    if (optimizer, dtype, nesterov) == ("muon", torch.bfloat16, False):
        with pytest.raises(SettingsError, match=r"local.optimizer = 'muon' with a model of bfloat16 needs local.nest"):
            prepare(settings)
        return
    assert [line["dropped"] for line in ran(tmp_path, settings).history] == [{}]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda loss: loss.expand(2), "a tensor (2,)"),
        (lambda loss: loss.reshape(1, 1), "a tensor (1, 1)"),
        (lambda loss: float(loss), "float"),
        (lambda loss: {"loss": loss}, "dict"),
        (lambda loss: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar(
    wrong: Callable[[Tensor], Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = faults.Toy.loss
    monkeypatch.setattr(faults.Toy, "loss", lambda *given: wrong(loss(*given)))
    words = rf"^roll call failed: client .*: Toy\.loss\(\) returned {re.escape(told)}; allowed: a 0-d tensor, the mean"
    with pytest.raises(SettingsError, match=words):
        run_app(FaultyGrid(), toy(), RunFolder(tmp_path), say=lambda text: None)
    assert not RunFolder(tmp_path).history()


def test_to_look_at_the_loss_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are as they were, also those that no message carries, and no random number is drawn."""
    model(lambda net: net.register_buffer("turns", torch.zeros(()), persistent=False), monkeypatch)
    loss = faults.Toy.loss

    def counted(self: Any, module: nn.Module, batch: Any) -> Tensor:
        module.get_buffer("turns").add_(1)
        return loss(self, module, batch) + torch.rand(())

    monkeypatch.setattr(faults.Toy, "loss", counted)
    settings = toy()
    held = session.Session.of(settings.json(), host_context("ram", "cpu"))
    before = [buffer.clone() for buffer in held.model.module.buffers()]
    chance = torch.get_rng_state()
    assert held.roll(["0", "1"], "", False, 0).examples == [6, 10]
    assert all(torch.equal(a, b) for a, b in zip(before, held.model.module.buffers(), strict=True))
    assert torch.equal(chance, torch.get_rng_state())
    assert held._sound


def test_a_task_without_clients_is_told_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SettingsError, match=r"the task has no clients of its own .*client join --name NAME --data"):
        run_app(FaultyGrid(), toy(task={"sizes": []}), RunFolder(tmp_path), say=lambda text: None)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("steps", [0, -1, True, 2.5])
def test_steps_of_a_clients_own_are_whole_and_above_zero(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is no way to say "as the settings say"."""
    given = faults.Toy.client

    def client(self: Any, name: str, file: str | None = None) -> ClientData:
        data = given(self, name, file)
        return ClientData(data.train, data.evaluate, steps if name == "3" else None)

    monkeypatch.setattr(faults.Toy, "client", client)
    words = rf"^roll call failed: client .*ClientData: steps = {steps}; allowed: a whole number from 1, or None$"
    with pytest.raises(SettingsError, match=words):
        run_app(FaultyGrid(), toy(), RunFolder(tmp_path), say=lambda text: None)


NAMES = ["Zürich", "a b", "../x", "", ".", "-a", "a/b", "x" * 5000, "a\n"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_names_that_no_folder_can_have(algorithm: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no client keeps anything; a long one is not echoed whole."""
    monkeypatch.setattr(faults.Toy, "names", lambda self: ["0", name])
    with pytest.raises(SettingsError, match=r"^Toy.names\(\): .* is no name: a name has 1 to 100 of the letters") as t:
        prepare(toy(algorithm))
    assert len(str(t.value)) < 300


@pytest.mark.parametrize("name", NAMES)
def test_nor_can_a_client_on_the_roll(name: str, tmp_path: Path) -> None:
    def lie(client: str, round: int, reply: Message) -> Message:
        if not client:
            reply.content.config_records[HEAD]["names"] = ["0", "1", "2", "3", name]
        return reply

    with pytest.raises(SettingsError, match=r"^name: .* is no name: a name has ") as t:
        run_app(FaultyGrid(lie), toy(), RunFolder(tmp_path), say=lambda text: None)
    assert len(str(t.value)) < 300


def test_two_clients_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(client: str, round: int, reply: Message) -> Message:
        if not client:
            reply.content.config_records[HEAD]["names"] = ["0", "1", "2", "3", "1"]
        return reply

    with pytest.raises(SettingsError, match=r"^name: one node hosts 2 clients called '1': each client has"):
        run_app(FaultyGrid(lie), toy(), RunFolder(tmp_path), say=lambda text: None)
    monkeypatch.setattr(faults.Toy, "names", lambda self: ["0", "1", "0"])
    with pytest.raises(SettingsError, match=r"^Toy.names\(\) holds '0' twice: each client has its own name$"):
        prepare(toy())
