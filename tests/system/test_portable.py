"""Bits that travel: in portable arithmetic every x86-64 processor with AVX2 gives the weights that are pinned here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from common import portable
from common.arithmetic import PINNED
from common.flower import ROOT
from server.rounds.folder import RunFolder

MADE_WITH = ("torch 2.14.1+cu130", "numpy 2.4.6")
DIGITS = "2bbae6ed3f07003148a603a9bf3b3c39c353d1aa9cd1bcd31f2948f699be0b53"
"""experiments/digits.toml --portable."""
WEIGHTS = {
    "mlp, scaffold, sgd": "b6764532b86407b92423d147e0f64c33979701beb7896777070f4744d4a3be02",
    "mlp, fedavg, adam": "8b6d4fa8309ea102d89b65d54e21be89010b97a0d40a3ac72b9631f6f093845f",
    "mlp, fedavg, amsgrad": "75b87ad602db5d4fb1a73449c193a4f97425445492b7c5fb68fe44ef63e6f929",
    "mlp, fedavg, adamw without bias correction": "109effd854527743c16fdd97324bf9fcc70f7aea91615d02f65ad9a4b101f8e9",
    "mlp, fedavg, normalized": "e0421f83ba984031d0860ece830e077837fdb7071490edeb40cdb36b763904cc",
    "mlp, fedavg, muon": "c06cf1a4ffdec5968bf3d6fb6d98529fde6e55cf6e01cd2fcf407b8171369d0b",
    "mlp, fedavg, soap": "98ad7ad3fbd9259ff74642fbb1060eb78be6c39cad87253634b9847d626f8a73",
    "mlp, fedadam, sgd": "cf2305abeaca52292d0f8e9be2cd499ba44e580ee34a573471d55b00f72df5f2",
    "mlp, fedams, sgd": "f33e989e13f674617cf4120d4e7797425a8b43f43f76c8d067bfd5a3ba62c8a3",
    "mlp, mime with adam": "d8bf39eef5a1710c71cd3e93be4cd5717fe3a4baabe110db0e314fc7d8debaa3",
    "mlp, float64, adam": "ccef0cdff91ab3e42311e1a55e5082b7893d66af952f531f476f93ca0bfdddea",
    "mlp, float64, fedyogi": "7339ec8c8239f38e3d6257e6785d019381e7f34c5f3d378e6167618f92c59e97",
    "mlp, two threads": "a545471954845ddfcec798ccf21b988cc50715d9ce94224a5f6165401c8527b2",
    "cnn, scaffold, sgd": "ad32318eb58213bbe48b5d6152abd4eceadd17360a4f05a6ed79059406d4c928",
    "cnn, fedavg, adam": "4861e2e7abf15219c22c20781f7172b393a9ddcbfc75e8ac46e8a05a243416fa",
}
"""Run of `tests.support.portable_runs` -> sha256 of its weights."""
PROCESSORS = ("Haswell", "EPYC")
"""qemu's names: the first Intel and the first AMD Zen with AVX2, neither with AVX-512."""

same_software = pytest.mark.skipif(
    (f"torch {torch.__version__}", f"numpy {np.__version__}") != MADE_WITH,
    reason=f"weights are pinned for {' and '.join(MADE_WITH)}",
)


def natively(**more: str) -> dict[str, str]:
    """The environment of a process that starts in native arithmetic."""
    return {key: value for key, value in os.environ.items() if key not in portable.ENVIRONMENT} | more


def server(*words: str) -> str:
    """A command of `python -m server`; what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *words], cwd=ROOT, env=natively(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_ci_installs_is_pinned() -> None:
    """Or every check of bits would be skipped there."""
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    for made in MADE_WITH:
        library, version = made.split()
        assert re.search(rf"^{library}=={re.escape(version.split('+')[0])}$", constraints, re.M)
        assert made in PINNED


@same_software
def test_portable_weights_are_those_of_every_processor() -> None:
    """Every optimizer that takes a square root, both dtypes, a convolution, two threads, and the README's run."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.portable_runs"],
        cwd=ROOT,
        env=natively(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == WEIGHTS | {"experiments/digits.toml": DIGITS}


@pytest.mark.slow
@pytest.mark.full
@same_software
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_emulated_processors_give_the_same_weights(processor: str) -> None:
    """The whole program under qemu-user: other kernels are chosen there, if anything still chooses.

    The emulator itself sometimes dies in oneDNN's generated code (signal 11, seen with 7.2): then once more.
    """
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is not installed: apt-get install qemu-user")
    emulated = [emulator, "-cpu", processor, sys.executable]
    flags = subprocess.run(
        [*emulated, "-c", "import numpy._core._multiarray_umath as m; print(m.__cpu_features__['AVX2'])"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if flags.stdout.strip() != "True":
        pytest.skip(f"this qemu emulates no AVX2 (7.2 and later do): {flags.stdout} {flags.stderr[-200:]}")
    left = list(WEIGHTS)
    for _ in range(5):
        done = subprocess.run(
            [*emulated, "-m", "tests.support.portable_runs", *left],
            cwd=ROOT,
            env=natively(),
            capture_output=True,
            text=True,
            timeout=3600,
        )
        found = dict(re.findall(r"^(.+) ([0-9a-f]{16})$", done.stderr, re.M))
        assert found == {name: WEIGHTS[name][:16] for name in found}
        left = [name for name in left if name not in found]
        if not left:
            return
        assert done.returncode in (-signal.SIGSEGV, 128 + signal.SIGSEGV), done.stderr
    pytest.fail(f"the emulator never came to {left}")


@pytest.mark.rest
@pytest.mark.processes
def test_all_engines_inherit_it(tmp_path: Path) -> None:
    """A file that says so is enough: the command starts anew, and workers, actors, resident clients, the server app
    and the cells of a comparison follow."""
    text = """
    rounds = 2
    task.hidden = 8
    partition.clients = 2
    strategy.name = "fedadam"
    local = {optimizer = "adam", lr = 0.01, steps = 3, arithmetic = "portable"}
    """
    file, plan = tmp_path / "small.toml", tmp_path / "plan.toml"
    file.write_text(f'name = "small"\n{text}', "utf-8")
    plan.write_text(f'name = "plan"\nbase = "{file.name}"\n', "utf-8")
    ways = {
        "one": ["simulate", str(file)],
        "workers": ["simulate", str(file), "--workers", "2"],
        "flower": ["simulate", str(file), "--engine", "flower", "--workers", "1"],
        "local": ["local", str(file)],
    }
    for name, words in ways.items():
        server(*words, "--run-dir", str(tmp_path / name))
    server("compare", str(plan), "--workers", "1", "--run-dir", str(tmp_path / "plan"))
    folders = [RunFolder(tmp_path / name) for name in ways] + [RunFolder(tmp_path / "plan" / "base" / "seed-0")]
    told = [folder.status() for folder in folders]
    assert len({status["sha256"] for status in told}) == 1
    lines = {line for status in told for each in status["arithmetic"].values() for line in each}
    assert len(lines) == 1
    assert "AVX2 portable" in lines.pop()
    assert [folder.notes() for folder in folders] == [[]] * len(folders)


@pytest.mark.rest
@pytest.mark.slow
def test_the_option_is_the_same_as_the_setting(tmp_path: Path) -> None:
    """Of an experiment and of a plan; the run folder says it, and --resume without it is another experiment's."""
    file, plan = tmp_path / "small.toml", tmp_path / "plan.toml"
    file.write_text('name = "small"\nrounds = 1\ntask.hidden = 4\npartition.clients = 2\n', "utf-8")
    plan.write_text(f'name = "plan"\nbase = "{file.name}"\n', "utf-8")
    server("simulate", str(file), "--portable", "--run-dir", str(tmp_path / "run"))
    server("compare", str(plan), "--portable", "--workers", "1", "--run-dir", str(tmp_path / "plan"))
    for folder in (tmp_path / "run", tmp_path / "plan" / "base" / "seed-0"):
        assert 'arithmetic = "portable"' in (folder / "experiment.toml").read_text("utf-8")
        assert "AVX2 portable" in RunFolder(folder).status()["arithmetic"]["clients"][0]
    with pytest.raises(AssertionError, match="is of another experiment"):
        server("simulate", str(file), "--resume", "--run-dir", str(tmp_path / "run"))
