"""Real images with a natural split by writer and a convolutional model with BatchNorm: buffers on real data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from client.app import app
from common import tasks
from common.experiment import Experiment
from common.flower import ROOT
from server.app import run
from server.engines.grid import grid
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.today import cells

pytestmark = [pytest.mark.data, pytest.mark.slow]


def experiment(algorithm: str) -> Experiment:
    """The ready experiment, smaller, with another algorithm."""
    ready = Experiment.load(ROOT / "experiments" / "mnist_writers.toml")
    values = ready.model_dump(exclude_unset=True)
    values |= {"rounds": 4, "strategy": {"name": algorithm}}
    values["partition"] |= {"clients": 12}
    values["round"] |= {"sample": 4}
    values["local"] |= {"steps": 10}
    return Experiment.model_validate(values)


@pytest.mark.parametrize("algorithm", cells(["fedadam", "scaffold", "hafedho"], 1, 3, "writers"))
def test_batchnorm_on_real_images(algorithm: str, tmp_path: Path) -> None:
    """In this process and in two workers the weights and buffers are the same; BatchNorm's counters stay integers,
    its variances positive (no optimizer touches them); the model loads into plain torch and beats chance."""
    settings = experiment(algorithm)
    here = run(InProcessGrid(app), settings, RunFolder(tmp_path / "here"))
    with grid("client.app:app", 2) as workers:
        there = run(workers, settings, RunFolder(tmp_path / "there"))
    assert there["sha256"] == here["sha256"]
    assert here["dropped"] == {}
    saved = load_file(tmp_path / "here" / "model.safetensors")
    for name, tensor in saved.items():
        if name.endswith("num_batches_tracked"):
            assert tensor.dtype == torch.int64
            assert tensor > 0
        if name.endswith("running_var"):
            assert (tensor > 0).all()
    model = tasks.create(settings.task, settings.partition, settings.seed).model()
    model.load_state_dict(saved)
    assert here["central"]["accuracy"] > 0.2
