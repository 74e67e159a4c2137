"""Flower's own programs from end to end: `flower-superlink`, `flower-supernode`, `flwr run`; none of ours is started.

Client memory then lies in Flower's context: it lasts as long as the Flower run. A resumed run is a new Flower run: its
clients say that their memory is lost, and SCAFFOLD's trackers start anew on both sides, as docs/experiments.md says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from client.app import app
from common import flower
from common.deploy.addresses import answers
from common.experiment import Experiment
from common.flower import ROOT
from server.deploy.control import Control
from server.deploy.processes import Family, held_ports, stop
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.faults import ran
from tests.support.patience import limit, until
from tests.support.processes import MARK, check, left_behind

pytestmark = [pytest.mark.rest, pytest.mark.processes, pytest.mark.timeout(400)]

NAMES = ("0", "1")
BIN = Path(sys.executable).parent


def settings(rounds: int) -> Experiment:
    """SCAFFOLD on the digits, two clients; the task that comes with the code bundle."""
    return Experiment.parse(
        f"""
        name = "stock"
        rounds = {rounds}
        partition.kind = "dirichlet"
        partition.clients = 2
        strategy.name = "scaffold"
        local.steps = 5
        round.deadline_s = 120.0
        """
    )


class Stock:
    """A SuperLink and two SuperNodes as anybody would start them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        control, fleet, *nodes = held_ports(2 + len(NAMES))
        self.control = f"127.0.0.1:{control}"
        self.environ = flower.environment() | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
            MARK: str(folder),
        }
        (folder / "home").mkdir()
        connection = f'[superlink.test]\naddress = "{self.control}"\ninsecure = true\n'
        (folder / "home" / "config.toml").write_text(connection, "utf-8")
        families: list[Family] = []
        stack.callback(lambda: stop(families, 5))
        link = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(control)]
        link += ["--fleet-api-address", f"127.0.0.1:{fleet}"]
        families.append(self.start(link, "superlink"))
        until(lambda: answers(control) and answers(fleet), "the SuperLink answers")
        for name, port in zip(NAMES, nodes, strict=True):
            node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{fleet}"]
            node += ["--host", "127.0.0.1", "--port", str(port), "--node-config", f'name="{name}"']
            families.append(self.start(node, f"supernode-{name}"))
        until(lambda: len(Control(self.control).online()) == len(NAMES), "the SuperNodes join")

    def start(self, command: list[str], log: str) -> Family:
        """One of Flower's commands of this environment."""
        return Family([str(BIN / command[0]), *command[1:]], self.environ, self.folder / f"{log}.log", self.folder)

    def run(self, experiment: Experiment, folder: Path, resume: bool = False) -> str:
        """`flwr run . test --stream` to its end; returns what it printed."""
        file = self.folder / "experiment.toml"
        file.write_text(experiment.toml(), "utf-8")
        config = f'experiment="{file}" run-dir="{folder}" resume={str(resume).lower()}'
        command = [str(BIN / "flwr"), "run", ".", "test", "--run-config", config, "--stream"]
        done = subprocess.run(command, cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=limit(180))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Stock]:
    with ExitStack() as stack:
        yield Stock(tmp_path, stack)
    until(lambda: not left_behind(str(tmp_path)), "all processes end", 15)


def test_the_same_weights_and_a_resumed_run(stock: Stock, tmp_path: Path) -> None:
    """Two rounds are bit for bit those in this process; a resumed run goes on in a new generation, trackers at zero."""
    folder = RunFolder(tmp_path / "run")
    printed = stock.run(settings(2), folder.path)
    assert folder.status()["status"] == "finished", printed
    straight = ran(tmp_path / "in-process", settings(2), InProcessGrid(app))
    assert [record["sha256"] for record in folder.history()] == [record["sha256"] for record in straight.history]
    assert {record["generation"] for record in folder.history()} == {1}
    check(settings(2), folder, names=NAMES)

    stock.run(settings(3), folder.path, resume=True)
    assert folder.notes()[0] == "resuming after round 2"
    assert [record["generation"] for record in folder.history()] == [1, 1, 2]
    check(settings(3), folder, names=NAMES)
