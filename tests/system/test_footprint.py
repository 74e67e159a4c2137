"""What a simulation holds in memory: a model for each worker, each client's own memory, and no growth."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest
import torch

from client import session
from client.app import app
from client.memory.versions import RamMemory
from common.experiment import Experiment
from server.app import run
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder

CLIENTS, ROUNDS, HIDDEN = 100, 30, 2000
SIZE = 64 * HIDDEN + HIDDEN + 10 * HIDDEN + 10
MODEL_BYTES = 4 * SIZE


def experiment(rounds: int) -> Experiment:
    """SCAFFOLD, whose clients remember one vector each; a model of 0.6 MB that dwarfs the data."""
    return Experiment.parse(
        f"""
        rounds = {rounds}
        task.name = "digits"
        task.hidden = {HIDDEN}
        partition.clients = {CLIENTS}
        strategy.name = "scaffold"
        local.steps = 1
        round.sample = 10
        evaluate.every = 100
        checkpoint.every = 100
        """
    )


def model_sized() -> int:
    """Storages of at least a model's size that are alive."""
    gc.collect()
    found = {
        tensor.untyped_storage().data_ptr()
        for tensor in gc.get_objects()
        if issubclass(type(tensor), torch.Tensor) and tensor.untyped_storage().nbytes() >= MODEL_BYTES
    }
    return len(found)


@pytest.mark.slow
@pytest.mark.rest
def test_thirty_rounds_without_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rounds 10 and 30 the process grows by no more than the memories of clients seen for the first time.

    A client keeps the versions that the three kept checkpoints may ask for; with none after the start that is all of
    its versions, at most one a round it took part in: 20 rounds x 10 clients x 0.6 MB.
    """
    monkeypatch.setattr(session, "_ram", RamMemory())
    process, resident = psutil.Process(os.getpid()), {}

    def show(record: dict[str, object]) -> None:
        gc.collect()
        resident[record["round"]] = process.memory_info().rss

    run(InProcessGrid(app), experiment(ROUNDS), RunFolder(tmp_path), show=show, say=lambda text: None)
    growth = resident[ROUNDS] - resident[10]
    assert growth < 20 * 10 * MODEL_BYTES * 1.25 + 20e6


def test_one_model_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round 100 clients share one model: parameters and gradient, beside the server's state and the memories
    of the ten clients that took part."""
    monkeypatch.setattr(session, "_ram", RamMemory())
    session._sessions.clear()
    before = model_sized()
    run(InProcessGrid(app), experiment(1), RunFolder(tmp_path), say=lambda text: None)
    client_model, memories = 2, 10
    assert model_sized() - before <= client_model + memories
