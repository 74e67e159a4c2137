"""The same apps under Flower's simulation engine (VCE, on Ray)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from common.experiment import Experiment
from server.app import run
from server.folder import RunFolder
from server.prepare import prepare
from server.rounds import Record
from server.stopping import Stop


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
) -> None:
    """Run an experiment with one virtual node a client and `workers` Ray actors of one CPU each."""
    from flwr.simulation import run_simulation

    nodes = len(prepare(experiment).task.names())
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, experiment, folder, resume=resume, say=say, show=show, stop=stop)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": workers, "log_to_driver": False, "logging_level": logging.ERROR},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_simulation(app, client, nodes, backend_config=config)  # type: ignore[arg-type]
