"""Who runs the cells of a comparison: worker processes of this machine, or a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from common import portable
from common.errors import SettingsError
from common.flower import ROOT
from server.compare.cell import Job, Outcome, outcome, quiet
from server.engines.workers import Ask, WorkerDied, Workers

LOG = "workers.log"


class Pool(Protocol):
    """Runs up to `size` cells at a time."""

    size: int

    def submit(self, job: Job) -> Future[Outcome]:
        """Run a cell."""

    def close(self) -> None:
        """End whatever still runs."""


class ProcessPool:
    """Worker processes, each with its own device of `devices`; one that dies fails its cell and is replaced.

    They end when this process does, also if it is killed. What they print goes to the file `log`. `portably`: in
    portable arithmetic, whatever this process computes in.
    """

    def __init__(self, devices: list[str], log: Path, portably: bool = False) -> None:
        self.size = len(devices)
        variables = portable.ENVIRONMENT if portably else {}
        self._workers = Workers("server.compare.cell:runner", [[device] for device in devices], log, variables)

    def submit(self, job: Job) -> Future[Outcome]:
        """Hand a cell to the next idle worker."""
        return self._workers.submit(partial(_run, job))

    def close(self) -> None:
        """End all workers at once: a run survives it, as it does a crash."""
        self._workers.close()


def _run(job: Job, ask: Ask) -> Outcome:
    try:
        found: Outcome = json.loads(ask(json.dumps(asdict(job)).encode()))
    except WorkerDied as error:
        found = {"error": f"its worker process died: {error}"}
    return found


class RayPool:
    """Cells as tasks on a Ray cluster, one CPU for each thread of theirs; the run folder must lie on a shared path.

    `address`: of the cluster, "auto" for the one that this machine belongs to, "local" to start one here with `cpus`.
    The project must lie at the same path on all its machines.
    """

    def __init__(self, address: str, cpus: int, threads: int, gpus: float, portably: bool = False) -> None:
        ray: Any = import_module("ray")
        variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        passed = ("FEDKEEL_DATA", "FEDKEEL_CACHE", "FLWR_", "HF_HOME", "HF_HUB_OFFLINE")  # no keys: Ray shows them
        variables |= {key: value for key, value in os.environ.items() if key.startswith(passed)}
        variables |= portable.ENVIRONMENT if portably else {}
        options: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address == "local" else {}
        options |= {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": {"env_vars": variables}}
        before = signal.getsignal(signal.SIGTERM)
        try:
            _reach(address)
            with warnings.catch_warnings():  # Ray's hints about its own settings
                warnings.simplefilter("ignore")
                ray.init(address=address, **options)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise SettingsError(f"--ray {address}: no cluster there: {error}") from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray's own would end this process
        self._ray = ray
        # A cell that fails is told, not run again behind one's back.
        self._remote = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_serve_on_ray)
        resources = ray.cluster_resources()
        self.size = max(1, int(resources.get("CPU", 1) // threads))
        if gpus:
            self.size = max(1, min(self.size, int(resources.get("GPU", 0) // gpus)))
        self._tasks: list[Any] = []

    def submit(self, job: Job) -> Future[Outcome]:
        """Queue a cell."""
        task = self._remote.remote(job, os.getcwd())
        self._tasks.append(task)
        future: Future[Outcome] = task.future()
        return future

    def close(self) -> None:
        """Cancel what runs and leave the cluster."""
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError if nothing listens at "host:port": Ray would look for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def _serve_on_ray(job: Job, folder: str) -> Outcome:
    """A cell in a process of Ray's, in the same working folder."""
    quiet()
    with suppress(OSError):
        os.chdir(folder)
    return outcome(job)
