"""Kinds of task: one sha256 and the same metrics in process, under VCE, and over gRPC with files of the sites' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.app import app
from common.experiment import Experiment
from common.tasks.digits import _table
from server.app import run
from server.engines import vce
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.common.test_own_parts import write_ink
from tests.support.grpc_sites import over_grpc
from tests.support.site_grid import SiteGrid

pytestmark = [pytest.mark.rest, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

SITES = {"site-0": range(60), "site-1": range(60, 100), "site-2": range(100, 190)}
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "regression": ({"shape": [64], "outputs": 1}, ["mape"]),
    "multilabel": ({"shape": [64], "outputs": 4}, ["f1-micro"]),
    "segmentation": ({"shape": [16, 16], "classes": 3, "width": 4}, []),
}


def write(kind: str, path: Path, places: range) -> Path:
    """The digits at `places` as a file, or a folder, of a kind of task."""
    table = _table()[list(places)]
    labels = table[:, -1].astype(int)
    if kind == "segmentation":
        write_ink(path, table)
        return path
    targets = labels.astype(float) + 1 if kind == "regression" else np.stack([labels >> bit & 1 for bit in range(4)], 1)
    np.savez(path.with_suffix(".npz"), x_train=table[:, :-1] / 16, y_train=targets)
    return path.with_suffix(".npz")


def settings(kind: str, **more: Any) -> Experiment:
    options, metrics = KINDS[kind]
    return Experiment.model_validate(
        {
            "rounds": 2,
            "task": {"name": kind, **options, **more},
            "partition": {"clients": 3, "holdout": 0.3},
            "local": {"lr": 0.05, "batch_size": 16},
            "round": {"wait_for": 3, "deadline_s": 120.0},
            "evaluate": {"metrics": metrics, "clients": "all", "batch_size": 7},
            "tracking": {"use": []},
        }
    )


def evaluated(folder: Path) -> list[Any]:
    return [[record["clients"], record["each"], record["headline"]] for record in RunFolder(folder).history()]


@pytest.mark.parametrize("kind", KINDS)
def test_under_vce(kind: str, tmp_path: Path) -> None:
    asked = settings(kind, file=str(write(kind, tmp_path / "all", range(190))))
    here = run(InProcessGrid(app), asked, RunFolder(tmp_path / "here"))
    quiet: dict[str, Any] = {"say": lambda text: None, "show": lambda record: None}
    vce.simulate(asked, RunFolder(tmp_path / "vce"), app, resume=False, workers=1, **quiet)
    assert RunFolder(tmp_path / "vce").status()["sha256"] == here["sha256"]
    assert evaluated(tmp_path / "vce") == evaluated(tmp_path / "here")


@pytest.mark.parametrize("kind", KINDS)
def test_over_grpc_with_files_of_the_sites(kind: str, tmp_path: Path) -> None:
    files = {name: write(kind, tmp_path / name, places) for name, places in SITES.items()}
    asked = settings(kind)
    here = run(SiteGrid(files), asked, RunFolder(tmp_path / "here"), strict=False)
    folder = over_grpc(asked, files, tmp_path)
    assert folder.status().get("sha256") == here["sha256"], folder.status()
    assert evaluated(folder.path) == evaluated(tmp_path / "here")
