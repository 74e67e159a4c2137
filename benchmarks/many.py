"""Many clients in few processes: whether all rounds hold, and what an idle client costs.

    python -m benchmarks.many [--clients 50] [--processes 2] [--rounds 20] [--megabytes 1]

A real SuperLink, server app and resident processes on this machine. Prints the median seconds a round, the clients that
were dropped, and the CPU time of the client processes while they wait, for each client.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.round import experiment
from common import flower
from common.flower import ROOT
from server.deploy.processes import Family, stop
from server.deploy.superlink import SuperLink
from server.rounds.folder import RunFolder

IDLE_S = 20.0


def hosts(link: SuperLink, folder: Path, clients: int, processes: int) -> list[Family]:
    """Processes that host all clients, in equal parts."""
    families = []
    for number in range(processes):
        command = [sys.executable, "-m", "client", "join", "--server", link.fleet_address]
        command += ["--memory", str(folder / "memory")]
        for name in range(number, clients, processes):
            command += ["--name", str(name)]
        families.append(Family(command, flower.environment(), folder / f"clients-{number}.log", ROOT))
    return families


def cpu(families: list[Family]) -> float:
    """Seconds of CPU time of processes so far."""
    return sum(sum(psutil.Process(family.process.pid).cpu_times()[:2]) for family in families)


def finish(link: SuperLink, folder: RunFolder, limit_s: float) -> dict[str, Any]:
    """Wait for a run's end."""
    end = time.monotonic() + limit_s
    while (status := folder.status()).get("status") not in ("finished", "failed"):
        if time.monotonic() > end or not link.running:
            raise RuntimeError(f"no end of the run: {status}; log: {link.log}")
        time.sleep(0.2)
    return status


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=1)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        link = stack.enter_context(SuperLink(folder / "superlink.log"))
        families = hosts(link, folder, options.clients, options.processes)
        stack.callback(stop, families, 10.0)
        settings = experiment(options.megabytes, options.rounds, options.clients, options.clients)
        run = RunFolder(folder / "run")
        link.control.submit(ROOT, {"experiment-toml": settings.toml(), "run-dir": str(run.path)})
        status = finish(link, run, 1800)
        history = run.history()
        seconds = statistics.median(record["seconds"]["total"] for record in history[1:] or history)
        dropped = sum(len(record["dropped"]) + len(record["void"]) for record in history)
        print(f"{status['status']}: {len(history)} of {options.rounds} rounds, {dropped} clients or tries lost")
        print(f"{options.clients} clients in {options.processes} processes: {seconds:.2f} s a round")
        time.sleep(IDLE_S)  # the gap between polls grows with the idle time
        before = cpu(families)
        time.sleep(IDLE_S)
        idle = (cpu(families) - before) / IDLE_S / options.clients
        print(f"idle: {100 * idle:.3f} % of a core a client")


if __name__ == "__main__":
    main()
