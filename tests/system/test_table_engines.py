"""Standardized tables: one answer in this process, under VCE and over gRPC, with data of the sites' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.app import app
from common.experiment import Experiment
from server.api import Run
from server.app import run
from server.engines import vce
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.grpc_sites import over_grpc
from tests.support.real_tables import breast_cancer, rows_of, sites, write_csv
from tests.support.site_grid import SiteGrid

pytestmark = [pytest.mark.rest, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


def settings(**task: object) -> Experiment:
    columns = [name for name in breast_cancer()[0] if name != "diagnosis"]
    given = {"name": "table", "inputs": columns, "target": "diagnosis", "classes": ["malignant", "benign"]}
    values = {"rounds": 3, "task": {**given, "standardize": True, **task}, "partition": {"clients": 3}}
    return Experiment.model_validate({**values, "round": {"wait_for": 3, "deadline_s": 120.0}})


def test_a_pooled_table_under_vce(tmp_path: Path) -> None:
    columns, rows = breast_cancer()
    whole = write_csv(tmp_path / "all.csv", rows_of(columns, rows[:300]))
    test = write_csv(tmp_path / "test.csv", rows_of(columns, rows[300:]))
    asked = settings(file=str(whole), test_file=str(test))
    here = run(InProcessGrid(app), asked, RunFolder(tmp_path / "here"))
    quiet = {"say": lambda text: None, "show": lambda record: None}
    vce.simulate(asked, RunFolder(tmp_path / "vce"), app, resume=False, workers=1, **quiet)  # type: ignore[arg-type]
    assert RunFolder(tmp_path / "vce").status()["sha256"] == here["sha256"]
    held = Run(tmp_path / "here")
    right = held.model(held.inputs(test)).argmax(1) == 1
    share = sum(
        r == (c == "benign") for r, c in zip(right.tolist(), rows_of(columns, rows[300:])["diagnosis"], strict=True)
    )
    assert share / 269 == pytest.approx(here["central"]["accuracy"])


def test_sites_with_shuffled_columns_over_grpc(tmp_path: Path) -> None:
    files, test = sites(tmp_path, *breast_cancer(), tested=114)
    asked = settings(test_file=str(test))
    here = run(SiteGrid(files), asked, RunFolder(tmp_path / "here"), strict=False)
    folder = over_grpc(asked, files, tmp_path)
    assert folder.status().get("sha256") == here["sha256"], folder.status()
    assert folder.facts() == RunFolder(tmp_path / "here").facts()
