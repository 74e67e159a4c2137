"""Standardized tables: one answer in this process, under VCE and over gRPC, with data of the sites' own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from client.app import app
from common.experiment import Experiment
from common.flower import ROOT
from server.api import Run
from server.app import run
from server.deploy.clients import start_clients
from server.deploy.superlink import SuperLink
from server.engines import vce
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.children import environment
from tests.support.patience import until
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
    asked, folder = settings(test_file=str(test)), RunFolder(tmp_path / "grpc")
    here = run(SiteGrid(files), asked, RunFolder(tmp_path / "here"), strict=False)
    with ExitStack() as stack:
        stack.enter_context(environment(PYTHONPATH=str(ROOT)))
        link = stack.enter_context(SuperLink(tmp_path / "superlink.log"))
        for name, file in files.items():
            more = ["--data", str(file)]
            places = {"memory_root": tmp_path / "memory", "log_dir": tmp_path}
            stack.enter_context(start_clients(link.fleet_address, [name], **places, options=more))
        link.control.submit(ROOT, {"experiment-toml": asked.toml(), "run-dir": str(folder.path), "resume": False})
        until(lambda: folder.status().get("status") in ("finished", "failed"), lambda: str(folder.status()), 120)
    assert folder.status().get("sha256") == here["sha256"], folder.status()
    assert folder.facts() == RunFolder(tmp_path / "here").facts()
