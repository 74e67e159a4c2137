"""Scalars that an algorithm tells of its state: in the history, frames, trackers and the report, the same after a
resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from common.errors import RunError
from common.vector import State, norm
from server.report import frames
from server.watch.tracking import scalars
from strategies.fedavg import FedAvg
from tests.support.faults import ran, run, toy


def test_scaffold_tells_the_norm_of_its_control_variate(tmp_path: Path) -> None:
    straight = ran(tmp_path / "straight", toy("scaffold"))
    last = straight.history[-1]["strategy"]
    assert last == {"control norm": norm(straight.checkpoint.state["control"])}
    assert dict(scalars(straight.history[-1]))["strategy/control norm"] == last["control norm"]
    assert frames.history(straight.history)["strategy.control norm"].iloc[-1] == last["control norm"]
    ran(tmp_path / "run", toy("scaffold", rounds=1))
    resumed = ran(tmp_path / "run", toy("scaffold"), resume=True)
    assert [line["strategy"] for line in resumed.history] == [line["strategy"] for line in straight.history]


def test_one_that_tells_nothing_has_no_such_group(tmp_path: Path) -> None:
    assert "strategy" not in ran(tmp_path, toy()).history[0]


def test_what_is_no_number_is_null_and_what_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(self: FedAvg, state: State) -> Mapping[str, float]:
        return {"size": float("nan")}

    monkeypatch.setattr(FedAvg, "describe", tell)
    assert ran(tmp_path / "a", toy()).history[0]["strategy"] == {"size": None}

    def fail(self: FedAvg, state: State) -> Mapping[str, float]:
        raise KeyError("control")

    monkeypatch.setattr(FedAvg, "describe", fail)
    failed = run(tmp_path / "b", toy())
    assert isinstance(failed.error, RunError)
    assert "FedAvg.describe failed: KeyError: 'control' (" in str(failed.error)
