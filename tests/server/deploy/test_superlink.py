"""A SuperLink that stays, and runs that come and go: stopped in mid-run, started again, gone on with."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.app import app
from common import flower
from common.experiment import Experiment
from common.flower import ROOT
from server.app import run
from server.deploy.processes import Family, held_ports, stop
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support import patience

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TEXT = """
name = "long"
rounds = 12
partition.kind = "dirichlet"
partition.clients = 3
strategy.name = "scaffold"
local.epochs = 20
"""


def until(true: Callable[[], object], seconds: float, *families: Family) -> None:
    patience.until(true, lambda: [family.tail() for family in families], seconds)


def health(port: int) -> dict[str, object] | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            body: dict[str, object] = json.load(answer)
            return body
    except OSError:
        return None


@contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Family]]:
    families: list[Family] = []

    def start(*words: str) -> Family:
        log = folder / f"{len(families)}-{words[0]}-{words[1]}.log"
        families.append(Family([sys.executable, "-m", *words], flower.environment(), log, ROOT))
        return families[-1]

    try:
        yield start
    finally:
        stop(families, 5)


@pytest.mark.rest
def test_a_superlink_is_restarted_in_mid_run(tmp_path: Path) -> None:
    """SIGTERM: the round in hand is finished, both commands end, the run's with 1, for a supervisor to try again. The
    clients stay. The next command goes on where the first one was. It is killed, and another one watches the run to its
    end, with the weights of one process; one more finds nothing to do."""
    fleet, control = held_ports(2)
    [watch] = held_ports(1)
    experiment, folder = tmp_path / "experiment.toml", RunFolder(tmp_path / "run")
    experiment.write_text(TEXT)
    ports = ["--fleet-port", str(fleet), "--control-port", str(control), "--metrics", str(watch)]
    link_words = ["server", "superlink", *ports, "--state", str(tmp_path / "state"), "--log-format", "json"]
    run_words = ["server", "run", str(experiment), "--superlink", f"127.0.0.1:{control}", "--run-dir", str(folder.path)]
    names = [word for name in ("0", "1", "2") for word in ("--name", name)]
    with commands(tmp_path) as start:
        link = start(*link_words)
        clients = start(
            "client", "join", "--server", f"127.0.0.1:{fleet}", "--memory", str(tmp_path / "memory"), *names
        )
        until(lambda: health(watch), 90, link)
        first = start(*run_words, "--resume-or-start")
        until(lambda: len(folder.history()) >= 2, 120, first, link, clients)
        link.process.terminate()
        until(lambda: not link.running, 60, link)
        until(lambda: not first.running, 30, first)
        assert (link.process.returncode, first.process.returncode) == (0, 1), first.tail()
        assert "stopped with its SuperLink" in first.tail()
        assert folder.status()["status"] == "stopped"
        before = len(folder.history())
        assert before < 12

        link = start(*link_words)
        until(lambda: health(watch), 90, link)
        killed = start(*run_words, "--resume-or-start")
        until(lambda: len(folder.history()) > before, 120, killed, link, clients)
        killed.process.kill()
        killed.process.wait(10)
        second = start(*run_words, "--resume-or-start")
        until(lambda: not second.running, 150, second, link, clients)
        assert second.process.returncode == 0, second.tail()
        assert clients.running
        said = [json.loads(line) for line in link.log.read_text().splitlines()]
        assert any("SuperLink: clients at" in line["message"] for line in said)
        third = start(*run_words, "--resume-or-start")
        until(lambda: not third.running, 90, third, link)
        assert third.process.returncode == 0, third.tail()
    history = folder.history()
    assert [line["round"] for line in history] == list(range(1, 13))
    assert {line["generation"] for line in history} == {1}
    expected = run(InProcessGrid(app), Experiment.parse(TEXT), RunFolder(tmp_path / "inprocess"))
    assert history[-1]["sha256"] == expected["sha256"]


@pytest.mark.rest
def test_a_state_has_one_superlink(tmp_path: Path) -> None:
    fleet, control, other_fleet, other_control = held_ports(4)
    [watch] = held_ports(1)
    words = ["server", "superlink", "--state", str(tmp_path / "state")]
    with commands(tmp_path) as start:
        first = start(*words, "--fleet-port", str(fleet), "--control-port", str(control), "--metrics", str(watch))
        until(lambda: health(watch), 90, first)
        second = start(*words, "--fleet-port", str(other_fleet), "--control-port", str(other_control))
        until(lambda: not second.running, 60, second)
        assert second.process.returncode == 2
        assert "in use by process" in second.tail()
        assert first.running
