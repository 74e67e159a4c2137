"""The benchmarks of simulation run, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from grimp import build_graph

from benchmarks import accuracy, cohort, gpu_simulate, house, simulate
from server.compare.plan import Plan
from server.compare.vetting import expand
from strategies.registry import REGISTRY


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


def test_accuracy_tunes_every_algorithm() -> None:
    """Each has candidates, every cell of the plan can begin, and no seed of the table is one of the tuning."""
    cells = expand(Plan.of(accuracy.tables(list(REGISTRY))))
    tuned = {cell.variant: cell.tuned for cell in cells if cell.stage == "tune"}
    assert list(tuned) == list(REGISTRY)
    assert all("local.lr" in candidate for candidate in tuned.values())
    assert "server.lr" in tuned["fedadam"]
    assert not set(accuracy.SEEDS) & set(accuracy.TUNING_SEEDS)


def test_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors from the ground up; imports in functions and under TYPE_CHECKING count; of two rooms
    in a circle the arrow of the first name is said to run upward."""
    files = {
        "__init__": "",
        "ground": "",
        "left": "from cards import ground, right",
        "right": "import typing\nfrom cards import ground\nif typing.TYPE_CHECKING:\n    from cards import left",
        "roof/__init__": "",
        "roof/window": "def look():\n    from cards.left import x\n    from cards import right",
        "roof/door": "from cards.roof import window",
    }
    for name, text in files.items():
        (tmp_path / "cards" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cards" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = house.measure(build_graph("cards", cache_dir=None), "cards")
    assert found.floors == [["ground"], ["left"], ["right"], ["roof/"]]
    assert (len(found.arrows), found.upward, found.circles) == (6, {("left", "right")}, [{"left", "right"}])
    assert house.picture(found)[-2:] == ["    upward: left -> right", "    circle: left, right"]
