"""One cell of a comparison, and the worker process that runs cells one after another until its input closes."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any

from common import flower
from common.deploy import logs
from common.files import write_atomically
from server.rounds.folder import CELL, RunFolder


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
    from common.experiment import Experiment
    from server.app import run
    from server.engines.grid import grid

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
    """Remove what only a resumed run needs: client memory and checkpoints."""
    for name in ("memory", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)


def free() -> None:
    """Give back what the cell before filled, also the accelerator's memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def quiet() -> None:
    """Set up Flower and logging as the command does."""
    flower.prepare()
    logs.configure("text")
    logging.getLogger("client.app").setLevel(logging.ERROR)


def main() -> None:
    """Serve over the standard streams, a JSON line each way; whatever a run prints goes to standard error."""
    quiet()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs: SimpleQueue[Job] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        replies.write(json.dumps(reply(jobs.get())) + "\n")
        replies.flush()
        free()


def _read(jobs: SimpleQueue[Job]) -> None:
    """Requests, until the input closes: then the parent has ended, however it did, and so does this process."""
    for line in sys.stdin:
        jobs.put(Job(**json.loads(line)))
    os._exit(0)


def reply(job: Job) -> dict[str, str]:
    """Run a cell: its status, or the error that ended it."""
    try:
        return {"status": serve(job)}
    except (Exception, SystemExit) as error:
        return {"error": reason(error)}


def reason(error: BaseException) -> str:
    """An error as a line of cells.json: what users are meant to read as it stands, else with its type."""
    from common.errors import RunError, SettingsError

    text = str(error)
    return text if isinstance(error, SettingsError | RunError) and text else f"{type(error).__name__}: {error}"


def line(job: Job) -> str:
    """A request."""
    return json.dumps(asdict(job)) + "\n"


if __name__ == "__main__":
    # Ready for the first cell: what takes long to load.
    resolve_name("server.app:run")
    resolve_name("client.app:app")
    gc.freeze()
    main()
