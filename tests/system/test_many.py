"""Many clients in one process: each its own node and memory, and the weights of the federation of single ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from client.app import app
from client.node.resident import poll_delay
from common import flower
from common.experiment import Experiment
from common.flower import ROOT
from server.app import run
from server.deploy.processes import Family, stop
from server.deploy.superlink import SuperLink
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.patience import limit

TEXT = """
name = "many"
rounds = 4
partition.kind = "dirichlet"
partition.clients = 12
strategy.name = "scaffold"
round.sample = 8
round.deadline_s = 120
"""


def host(link: SuperLink, folder: Path, names: Sequence[int]) -> Family:
    command = [sys.executable, "-m", "client", "join", "--server", link.fleet_address]
    command += ["--memory", str(folder / "memory")]
    command += [word for name in names for word in ("--name", str(name))]
    return Family(command, flower.environment(), folder / f"clients-{names[0]}.log", ROOT)


@pytest.mark.processes
@pytest.mark.rest
@pytest.mark.timeout(300)
def test_two_processes_host_twelve_clients(tmp_path: Path) -> None:
    """One TCP connection a process, a memory folder a client; the sha256 of the in-process run."""
    folder = RunFolder(tmp_path / "run")
    with SuperLink(tmp_path / "superlink.log") as link:
        families = [host(link, tmp_path, range(first, 12, 2)) for first in (0, 1)]
        try:
            link.control.submit(ROOT, {"experiment-toml": TEXT, "run-dir": str(folder.path)})
            end = time.monotonic() + limit(200)
            connections = 0
            while folder.status().get("status") not in ("finished", "failed"):
                assert time.monotonic() < end, folder.status()
                assert all(family.running for family in families), families[0].tail()
                connections = max(connections, *(_connections(family, link.fleet_port) for family in families))
                time.sleep(0.1)
        finally:
            stop(families, 10)
        assert [family.process.returncode for family in families] == [0, 0]
    assert connections == 1
    assert folder.status()["status"] == "finished", folder.status()
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == sorted(map(str, range(12)))
    expected = run(InProcessGrid(app), Experiment.parse(TEXT), RunFolder(tmp_path / "inprocess"))
    assert folder.history()[-1]["sha256"] == expected["sha256"]


def _connections(family: Family, port: int) -> int:
    found = psutil.Process(family.process.pid).net_connections("tcp")
    return len([each for each in found if each.raddr and each.raddr.port == port and each.status == "ESTABLISHED"])


def test_the_clients_of_a_process_look_as_often_as_one_would() -> None:
    assert all(0.2 <= poll_delay(0.0, 25) <= 0.3 for _ in range(100))
    assert all(0.4 <= poll_delay(10, 5) <= 0.6 for _ in range(100))
