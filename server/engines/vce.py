"""The same apps under Flower's simulation engine (VCE, on Ray)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from common.errors import SettingsError
from common.experiment import Experiment
from server.app import run
from server.rounds.folder import RunFolder
from server.rounds.prepare import prepare
from server.rounds.records import Record
from server.rounds.stopping import Stop


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
    from flwr.simulation import run_simulation

    on_gpu = _uses_gpu(device)
    nodes = len(prepare(experiment).task.names())
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, experiment, folder, resume=resume, say=say, show=show, stop=stop)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = {
        "client_resources": {"num_cpus": 1, "num_gpus": gpus if on_gpu else 0.0},
        "init_args": {"num_cpus": workers, "log_to_driver": False, "logging_level": logging.ERROR},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = _OnDevice(client, "cuda" if on_gpu else "cpu")
        run_simulation(app, placed, nodes, backend_config=config)  # type: ignore[arg-type]


def _uses_gpu(device: str) -> bool:
    """Whether actors train on GPUs. Ray hands each actor its GPU as the only one that it sees."""
    if device not in ("cpu", "auto", "cuda"):
        raise SettingsError(f"device {device!r} with engine flower: allowed: cpu, auto, cuda; Ray chooses the GPU")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise SettingsError(f"device {device!r} was asked for and this machine has no usable GPU; allowed: cpu, auto")
    return there and device != "cpu"


class _OnDevice:
    """The client app on virtual nodes with a device: Flower gives them no settings of their own."""

    def __init__(self, app: ClientApp, device: str) -> None:
        self._app, self._device = app, device

    def __call__(self, message: Message, context: Context) -> Message:
        context.node_config["device"] = self._device
        return self._app(message, context)
