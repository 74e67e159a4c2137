"""Who runs the cells of a comparison: worker processes of this machine, or a Ray cluster."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from common import portable
from common.errors import SettingsError
from server.compare.cell import Job, line

LOG = "workers.log"

Reply = dict[str, str]
"""What became of a cell: its run's `status`, or the `error` that ended it."""


class Pool(Protocol):
    """Runs up to `size` cells at a time."""

    size: int

    def submit(self, job: Job) -> Future[Reply]:
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
        self._closed = False
        self._workers = [_Worker(device, log, portably) for device in devices]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.size, "cell")

    def submit(self, job: Job) -> Future[Reply]:
        """Hand a cell to the next idle worker."""
        return self._threads.submit(self._run, job)

    def _run(self, job: Job) -> Reply:
        worker = self._idle.get()
        try:
            return worker.ask(job)
        except (OSError, EOFError):
            return {"error": f"its worker process died: {worker.ended()}"}
        finally:
            if not self._closed:
                worker.revive()
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers at once: a run survives it, as it does a crash."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:  # one may have been replaced meanwhile
            worker.kill()
            worker.release()


class _Worker:
    """A process that runs one cell at a time."""

    def __init__(self, device: str, log: Path, portably: bool) -> None:
        self._device, self._log = device, log
        self._environment = portable.ENVIRONMENT if portably else {}
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "server.compare.cell"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                encoding="utf-8",
                env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Ctrl-C is for the parent, which then stops its workers.
                start_new_session=True,
            )

    def ask(self, job: Job) -> Reply:
        """Run a cell. Raises OSError or EOFError if the process dies."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line(replace(job, device=self._device)))
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.endswith("\n"):
            raise EOFError
        reply: Reply = json.loads(answer)
        return reply

    def ended(self) -> str:
        """How the process ended, for people."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its stream ended"
        if code == -signal.SIGKILL:
            return "killed (signal 9), perhaps for want of memory"
        return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}, see {self._log}"

    def revive(self) -> None:
        """Replace the process if it has ended."""
        if self._process.poll() is not None:
            self.release()
            self._start()

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Close the streams of a process that has ended."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()


class RayPool:
    """Cells as tasks on a Ray cluster, one CPU for each thread of theirs; the run folder must lie on a shared path.

    `address`: of the cluster, "auto" for the one that this machine belongs to, "local" to start one here with `cpus`.
    The project must lie at the same path on all its machines.
    """

    def __init__(self, address: str, cpus: int, threads: int, gpus: float, portably: bool = False) -> None:
        from common.flower import ROOT

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

    def submit(self, job: Job) -> Future[Reply]:
        """Queue a cell."""
        task = self._remote.remote(job, os.getcwd())
        self._tasks.append(task)
        future: Future[Reply] = task.future()
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


def _serve_on_ray(job: Job, folder: str) -> Reply:
    """A cell in a process of Ray's, in the same working folder."""
    from server.compare import cell

    cell.quiet()
    with suppress(OSError):
        os.chdir(folder)
    try:
        return cell.reply(job)
    finally:
        cell.free()
