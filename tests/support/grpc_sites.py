"""Sites as processes, each with a file of its own, over gRPC to a SuperLink."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from common.experiment import Experiment
from common.flower import ROOT
from server.deploy.clients import start_clients
from server.deploy.superlink import SuperLink
from server.rounds.folder import RunFolder
from tests.support.children import environment
from tests.support.patience import until


def over_grpc(asked: Experiment, files: Mapping[str, Path], place: Path) -> RunFolder:
    """Run an experiment with the files by site; returns the run folder once the run is over. Logs lie in `place`."""
    folder = RunFolder(place / "grpc")
    with ExitStack() as stack:
        stack.enter_context(environment(PYTHONPATH=str(ROOT)))
        link = stack.enter_context(SuperLink(place / "superlink.log"))
        for name, file in files.items():
            options = ["--data", str(file)]
            places = {"memory_root": place / "memory", "log_dir": place}
            stack.enter_context(start_clients(link.fleet_address, [name], **places, options=options))
        link.control.submit(ROOT, {"experiment-toml": asked.toml(), "run-dir": str(folder.path), "resume": False})
        until(lambda: folder.status().get("status") in ("finished", "failed"), lambda: str(folder.status()), 120)
    return folder
