"""Portable arithmetic: its environment, its square roots, and what a machine says of itself."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import pytest
import torch

from client.training.optimizers import LocalOptimizer
from common import arithmetic, portable
from common.errors import SettingsError
from common.experiment import Experiment, LocalSettings
from common.flower import ROOT

LINE = (
    r"torch \S+, (MKL \S+|no MKL), (oneDNN \S+|no oneDNN), \w+( portable)?, \d+ threads?, answers [0-9a-f]{12} on cpu"
)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without the variables."""
    held = {key: value for key, value in os.environ.items() if key not in portable.ENVIRONMENT}
    monkeypatch.setattr(os, "environ", held)
    monkeypatch.setattr(portable, "_late", [])
    return held


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes itself for a portable one."""
    monkeypatch.setattr(portable, "_entered", [True])


def program(text: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own that starts natively."""
    own = {key: value for key, value in os.environ.items() if key not in portable.ENVIRONMENT}
    return subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env={**own, **more}, capture_output=True, text=True, timeout=300
    )


# --- the environment


def test_the_option_or_the_variable_sets_all_variables(bare: dict[str, str]) -> None:
    """What the user had set otherwise gives way; without either nothing changes."""
    portable.start(["simulate", "x.toml"])
    assert not portable.complete()
    assert not portable.ENVIRONMENT.keys() & bare.keys()
    bare["MKL_CBWR"] = "AVX2"
    portable.start(["simulate", "x.toml", "--portable"])
    assert portable.complete()
    assert bare["MKL_CBWR"] == "COMPATIBLE"
    del bare["MKL_CBWR"]
    portable.start([])
    assert portable.complete()


def test_what_was_loaded_before_is_remembered(bare: dict[str, str]) -> None:
    """Here torch and numpy are: they have read their variables. In an environment that had them before, nothing is."""
    portable.enter()
    assert portable.late() == ["torch", "numpy"]
    portable._late.clear()
    portable.enter()
    assert portable.late() == []


def test_only_the_command_line_starts_anew(bare: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own words, in the environment that is missing; never a test, a notebook or a portable process."""
    called: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: called.append(given))
    portable.ensure()
    assert called == []
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": portable.COMMAND}))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "server", "simulate", "x.toml"])
    portable.ensure()
    (path, words, environment) = called[0]
    assert (path, words) == (sys.executable, [sys.executable, "-m", "server", "simulate", "x.toml"])
    assert environment == {**bare, **portable.ENVIRONMENT}
    portable.enter()
    portable.ensure()
    assert len(called) == 1


def test_the_commands_load_neither_torch_nor_numpy_before_it() -> None:
    """Or the variables would be read too late."""
    for name in ("server", "client"):
        text = f"""
import sys
sys.argv = ["{name}", "--portable"]
import {name}.__main__
from common import portable
assert portable.complete() and portable.late() == [], portable.late()
"""
        done = program(text)
        assert done.returncode == 0, done.stderr


def test_for_other_programs_the_variables_are_printed_for_a_shell() -> None:
    """All of them, as a shell reads them."""
    text = subprocess.run(
        [sys.executable, "-m", "common.portable"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    shown = subprocess.run(["sh", "-c", f"{text.stdout}\nenv"], capture_output=True, text=True, check=True).stdout
    assert {f"{key}={value}" for key, value in portable.ENVIRONMENT.items()} <= set(shown.splitlines())


# --- whether it took effect


def test_a_native_process_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; "native" asks for nothing, of a portable process either."""
    monkeypatch.setattr(portable, "_entered", [False])
    arithmetic.require("native")
    with pytest.raises(SettingsError, match="'portable' and this process computes natively: start it with --portable"):
        arithmetic.require("portable")
    monkeypatch.setattr(portable, "_entered", [True])
    arithmetic.require("native")
    arithmetic.require("native", "cuda:0")


def test_a_gpu_is_refused(entered: None) -> None:
    """Its kernels are another matter."""
    with pytest.raises(SettingsError, match="a matter of processors and this process trains on cuda:1; allowed: cpu"):
        arithmetic.require("portable", "cuda:1")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("from common import portable; portable.enter()", "torch and numpy had been loaded before the variables"),
        (
            "import os; from common.portable import ENVIRONMENT; os.environ.update(ENVIRONMENT)",
            "kernels give other answers than the pinned ones in",
        ),
    ],
)
def test_variables_that_come_too_late_are_noticed(how: str, cause: str) -> None:
    """After the first operation they do nothing, silently."""
    text = f"""
import torch
torch.ones(300, 300) @ torch.ones(300, 300)
torch.backends.cpu.get_cpu_capability()
{how}
from common.arithmetic import require
from common.errors import SettingsError
try:
    require("portable")
except SettingsError as error:
    print(error)
"""
    done = program(text)
    assert cause in done.stdout, done.stderr


def test_wrong_answers_are_named(entered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernel, as far as the installed versions are known; of others the roll alone can tell."""
    arithmetic.differing.cache_clear()
    key = f"torch {torch.__version__}"
    known = dict(arithmetic.answers()) | {"lstm": "0" * 12}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    try:
        monkeypatch.setattr(arithmetic, "PINNED", {key: known})
        with pytest.raises(SettingsError, match="other answers than the pinned ones in lstm: it needs an x86-64"):
            arithmetic.require("portable")
        arithmetic.differing.cache_clear()
        monkeypatch.setattr(arithmetic, "PINNED", {"torch 0.1": known})
        arithmetic.require("portable")
    finally:
        arithmetic.differing.cache_clear()


# --- what a machine says of itself


def test_a_line_says_what_decides_the_bits() -> None:
    """Threads among it; the processor's part ends before the device."""
    assert re.fullmatch(LINE, line := arithmetic.describe())
    assert arithmetic.host(line) + " on cpu" == line
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert arithmetic.describe() != line
    finally:
        torch.set_num_threads(before)


def test_answers_move_no_random_number_and_depend_on_no_setting() -> None:
    """A run has the weights that it had before anybody asked."""
    first, threads, chance = dict(arithmetic.answers()), torch.get_num_threads(), torch.get_rng_state()
    arithmetic.answers.cache_clear()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            assert arithmetic.answers() == first
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), chance)


# --- square roots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_exact_roots_are_correctly_rounded(dtype: torch.dtype) -> None:
    """Those of math.sqrt, which is the processor's in float64, rounded once; shapes and strides as given."""
    x = (torch.rand(500, 4, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)[:, ::2]
    roots = arithmetic.exact_sqrt(x)
    assert roots.dtype == dtype
    true = [[math.sqrt(each) for each in row] for row in x.tolist()]
    assert torch.equal(roots, torch.tensor(true, dtype=torch.float64).to(dtype))


def test_exact_roots_of_what_is_no_number() -> None:
    """As torch's, without a warning; a scalar stays one."""
    x = torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0])
    assert torch.equal(arithmetic.exact_sqrt(x).isnan(), x.sqrt().isnan())
    assert torch.equal(arithmetic.exact_sqrt(x)[:3], x.sqrt()[:3])
    assert arithmetic.exact_sqrt(torch.tensor(4.0, requires_grad=True)).shape == ()


def test_roots_are_torch_s_own_in_native_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: the weights of every experiment stay."""
    monkeypatch.setattr(portable, "_entered", [False])
    x = torch.rand(10_000)
    assert torch.equal(arithmetic.sqrt(x), x.sqrt())
    held = x.clone()
    assert arithmetic.sqrt_(held) is held
    assert torch.equal(held, x.sqrt())


def test_roots_in_a_library_s_code_are_exact_too() -> None:
    """In place and not, as function and as method; all else is untouched."""
    x = torch.rand(1000, dtype=torch.float64)
    exact = arithmetic.exact_sqrt(x)
    with arithmetic.ExactRoots():
        found = [x.sqrt(), torch.sqrt(x), x.clone().sqrt_(), torch.sqrt_(x.clone())]
        assert torch.equal(x.exp(), x.exp())
    assert all(torch.equal(each, exact) for each in found)


OPTIMIZERS = [
    {"optimizer": "adam"},
    {"optimizer": "adamw", "weight_decay": 0.1},
    {"optimizer": "amsgrad"},
    {"optimizer": "adam", "bias_correction": False},
    {"optimizer": "normalized"},
    {"optimizer": "sgd", "momentum": 0.9},
]


@pytest.mark.parametrize("given", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_local_optimizers_are_the_same_to_rounding(
    given: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable and native, the state moved from one to the other on the way."""
    found = []
    for first, second in ((False, False), (True, True), (True, False)):
        source = torch.Generator().manual_seed(1)
        vector, gradient = torch.randn(300, generator=source).to(dtype), torch.zeros(300, dtype=dtype)
        settings, state = LocalSettings.model_validate({"lr": 0.01, **given}), {}
        for active in (first, second):
            monkeypatch.setattr(portable, "_entered", [active])
            optimizer = LocalOptimizer(settings, vector, gradient, 0.01)
            if state:
                optimizer.load(state)
            for _ in range(3):
                gradient.copy_(torch.randn(300, generator=source))
                optimizer.step()
            state = {key: value.clone() for key, value in optimizer.state().items()}
        found.append(vector)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


# --- the experiment


def test_portable_is_another_experiment_and_native_the_one_of_before() -> None:
    """A checkpoint of a native run from before there was a choice goes on; one of the other kind does not."""
    experiment = Experiment()
    assert experiment.identity == "4e9424213bc56d5c"
    assert experiment.portable().identity != experiment.identity
    assert "arithmetic" not in experiment.json()
    assert '"arithmetic": "portable"' in experiment.portable().json()
