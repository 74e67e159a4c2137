"""The benchmarks of simulation run, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cohort, gpu_simulate, simulate


def test_cohort(capsys: pytest.CaptureFixture[str]) -> None:
    """A table with a row for each case and number of threads; equal clients are always together."""
    cohort.main(["--cases", "tiny", "--threads", "1", "--rounds", "2"])
    header, rule, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == rule.count("|") == row.count("|") == 9
    assert row.startswith("| tiny | 1 | ")
    assert row.split(" | ")[-2] == "100%"


@pytest.mark.slow
@pytest.mark.rest
def test_gpu_simulate_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare loop does the engine's own work: its weights are ours to rounding."""
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    gpu_simulate.main(["--device", "cpu", "--tiny", "--rounds", "3", "--skip-vce"])
    first, *table = capsys.readouterr().out.splitlines()
    result = json.loads(first)
    assert result["to_bare"] == pytest.approx(result["seconds"]["ours"] / result["seconds"]["bare"])
    assert result["weights_apart"] < 1e-4
    assert result["to_vce"] is None
    assert [row.split(" | ")[0] for row in table[2:]] == ["| bare PyTorch", "| in process"]


def test_gpu_simulate_needs_rounds_after_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_simulate.main(["--rounds", "2"])
    assert "--rounds 2: allowed: more than 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.rest
def test_the_datas_part_of_a_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CIFAR-10 random images stand in; a share for each kind of augmentation."""
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    simulate.main(["--pipeline", "--rounds", "2"])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "random images"
    assert [line.split()[0] for line in told[2:]] == ["none", "crop-flip"]
    assert all(0 < float(line.split()[3].removesuffix("%")) < 100 for line in told[2:])
