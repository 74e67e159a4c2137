"""One cell of a comparison, and the processes that run cells one after another."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from common import flower
from common.deploy import logs
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.files import write_atomically
from server.app import run
from server.engines.grid import CLIENT_APP, grid
from server.engines.workers import Answer
from server.rounds.folder import CELL, CHECKPOINTS, EARLIER, RunFolder

Outcome = dict[str, str]
"""What became of a cell: its run's `status`, or the `error` that ended it."""


@dataclass(frozen=True)
class Job:
    """A cell as it travels to whoever runs it.

    `folder`: the run's, absolute; `experiment`: the settings that were set, TOML; `about`: what cell.json holds;
    `client`: the ClientApp by name; `device`: where it trains.
    """

    folder: str
    experiment: str
    about: Mapping[str, Any]
    client: str
    device: str


def serve(job: Job) -> str:
    """Run a cell to its end, from its latest checkpoint if it has one; returns the run's status, "finished" or, if the
    folder's stop file asked for it, "stopped". Raises what the run raises.

    Without a checkpoint what an earlier run left goes: it can only be run anew, to the same answer.
    """
    folder = RunFolder(job.folder)
    resume = any(folder.checkpoints.glob("*.safetensors"))
    if not resume:
        shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_atomically(folder.path / CELL, json.dumps(dict(job.about), indent=1).encode())
    experiment = Experiment.parse(job.experiment, job.folder)
    with grid(job.client, 1, job.device, folder.path / "memory") as node:
        run(node, experiment, folder, resume=resume, say=lambda text: None)
    return str(folder.status().get("status"))


def tidy(folder: Path) -> None:
    """Remove what only a resumed run needs: client memory, checkpoints, and what was best before the best."""
    for name in ("memory", CHECKPOINTS, EARLIER):
        shutil.rmtree(folder / name, ignore_errors=True)


def free() -> None:
    """Give back what the cell before filled, also the accelerator's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def quiet() -> None:
    """Set up Flower and logging as the command does."""
    flower.prepare()
    logs.configure("text")
    logging.getLogger("client.app").setLevel(logging.ERROR)


def runner(device: str) -> Answer:
    """In a worker process: what runs cells on a device, from a job to its outcome, both as JSON."""
    quiet()
    resolve_name(CLIENT_APP)  # Ready for the first cell: what takes long to load.
    return lambda request: json.dumps(outcome(replace(Job(**json.loads(request)), device=device))).encode()


def outcome(job: Job) -> Outcome:
    """Run a cell: its status, or the error that ended it."""
    try:
        return {"status": serve(job)}
    except (Exception, SystemExit) as error:
        return {"error": reason(error)}
    finally:
        free()


def reason(error: BaseException) -> str:
    """An error as a line of cells.json: what users are meant to read as it stands, else with its type."""
    text = str(error)
    return text if isinstance(error, SettingsError | RunError) and text else f"{type(error).__name__}: {error}"
