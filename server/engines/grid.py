"""The grid for clients without a server, in this process or in several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

from flwr.serverapp import Grid

from common.errors import SettingsError
from server.engines.inprocess import CohortGrid, InProcessGrid
from server.engines.worker_grid import WorkerGrid

# By name: the server's code knows no client code, Flower's project file names the two apps.
CLIENT_APP = "client.app:app"
TOGETHER = "client.cohort:answer_all"
"""What answers TRAIN messages together."""


@contextmanager
def grid(
    app: str, workers: int, device: str = "cpu", memory: Path | None = None, cohort: int | None = None
) -> Iterator[Grid]:
    """A grid for the ClientApp `app` ("module:attribute"), in this process or in `workers` processes.

    Client memory lies in the folder `memory`, so that a run can be resumed; without one it ends with the grid.
    `cohort`: a round's clients train together, so many at once (0: all).
    Raises SettingsError for a cohort in more than one process.
    """
    if cohort is not None:
        if workers != 1:
            raise SettingsError(f"cohort mode trains in one process; workers = {workers}: allowed: 1")
        yield CohortGrid(resolve_name(app), resolve_name(TOGETHER), cohort, device, str(memory or "ram"))
    elif workers == 1:
        yield InProcessGrid(resolve_name(app), device, str(memory or "ram"))
    else:
        with WorkerGrid(app, workers, device, memory) as grid:
            yield grid
