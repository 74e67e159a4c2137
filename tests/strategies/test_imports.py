"""What importing a part of strategies/ costs: messages and algorithms stand alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.flower import ROOT


def loaded(module: str) -> set[str]:
    """All modules of a fresh process that has imported one."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_what_travels_costs_no_algorithm() -> None:
    """Both sides read messages; who only does that loads neither an algorithm nor what makes one."""
    ours = {name for name in loaded("strategies.protocol.messages") if name.startswith("strategies")}
    parts = {"messages", "wire", "work"}
    assert ours == {"strategies", "strategies.protocol", *(f"strategies.protocol.{part}" for part in parts)}


@pytest.mark.parametrize("module", ["algorithm", "work"])
def test_the_four_methods_know_nothing_of_flower(module: str) -> None:
    assert not {name for name in loaded(f"strategies.protocol.{module}") if name.partition(".")[0] == "flwr"}
