"""The same apps under Flower's simulation engine (VCE, on Ray)."""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.tasks.base import NO_CLIENTS
from server.app import run
from server.rounds.folder import RunFolder
from server.rounds.prepare import prepare
from server.rounds.records import Record
from server.rounds.stopping import Stop

RAY_PROCESSES = ("raylet", "gcs_server")
LOOK_S, ENDS_S = 1.0, 30.0


def simulate(
    experiment: Experiment,
    folder: RunFolder,
    client: ClientApp,
    *,
    resume: bool,
    workers: int,
    say: Callable[[str], None],
    show: Callable[[Record], None],
    stop: Stop = lambda: None,
    device: str = "cpu",
    gpus: float = 1.0,
) -> None:
    """Run an experiment with one virtual node a client and `workers` Ray actors of one CPU each.

    device: cpu, auto or cuda; `gpus`: the part of a GPU that each actor then takes, 0.25 for four on each.
    Raises SettingsError for a device that is not there.
    """
    on_gpu = _uses_gpu(device)
    nodes = len(prepare(experiment).task.names())
    if not nodes:
        raise SettingsError(NO_CLIENTS)
    app, ray, ended = ServerApp(), _RayProcesses(), threading.Event()

    def watched() -> float | None:
        ray.check()
        return stop()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run(grid, experiment, folder, resume=resume, say=say, show=show, stop=watched)
        finally:
            ended.set()

    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = {
        "client_resources": {"num_cpus": 1, "num_gpus": gpus if on_gpu else 0.0},
        "init_args": {"num_cpus": workers, "log_to_driver": False, "logging_level": logging.ERROR},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = _OnDevice(client, "cuda" if on_gpu else "cpu")
        try:
            run_simulation(app, placed, nodes, backend_config=config)  # type: ignore[arg-type]
        except RuntimeError as error:
            if ended.is_set():
                raise
            # The engine failed, and the server app, in a thread of its own, would wait for clients.
            ray.failed = f"Flower's simulation engine failed: {_root(error)}"
            ended.wait(ENDS_S)
            raise RunError(ray.failed) from error


def _uses_gpu(device: str) -> bool:
    """Whether actors train on GPUs. Ray hands each actor its GPU as the only one that it sees."""
    if device not in ("cpu", "auto", "cuda"):
        raise SettingsError(f"device {device!r} with engine flower: allowed: cpu, auto, cuda; Ray chooses the GPU")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise SettingsError(f"device {device!r} was asked for and this machine has no usable GPU; allowed: cpu, auto")
    return there and device != "cpu"


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


class _RayProcesses:
    """Those without which no actor answers. Flower never looks after them and would wait in vain."""

    def __init__(self) -> None:
        self.failed = ""
        """Why the engine ended, if it did."""
        self._seen: dict[int, psutil.Process] = {}
        self._looked = -math.inf

    def check(self) -> None:
        """Raise RunError if one that was there is gone."""
        if self.failed:
            raise RunError(self.failed)
        if (now := time.monotonic()) - self._looked < LOOK_S:
            return
        self._looked = now
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if process.name() in RAY_PROCESSES and _lives(process):
                    self._seen.setdefault(process.pid, process)
        for pid, process in self._seen.items():
            if not _lives(process):
                raise RunError(f"Ray, in which the clients run, has died: its process {pid} is gone")


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class _OnDevice:
    """The client app on virtual nodes with a device: Flower gives them no settings of their own."""

    def __init__(self, app: ClientApp, device: str) -> None:
        self._app, self._device = app, device

    def __call__(self, message: Message, context: Context) -> Message:
        context.node_config["device"] = self._device
        context.node_config["trusted"] = True
        return self._app(message, context)
