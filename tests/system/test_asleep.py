"""Real processes: a site that sleeps longer than the server waits for it, and a stop while a round waits for one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import flower
from common.flower import ROOT
from server.deploy.processes import Family, held_ports, stop
from server.rounds.folder import RunFolder
from tests.support.patience import limit, until

pytestmark = [pytest.mark.processes, pytest.mark.rest, pytest.mark.timeout(400)]

TEXT = """
name = "asleep"
rounds = 100000
partition.clients = 2
local.steps = 1
round.deadline_s = 600
round.quorum = 2
round.wait_for = 2
round.max_void = 1000
evaluate.clients = "none"
"""
GRACE_S = 2.0


class World:
    """`server run` and two sites that join."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.families = folder, dict[str, Family]()
        (folder / "asleep.toml").write_text(TEXT)
        self.run = RunFolder(folder / "run")
        fleet, control = held_ports(2)
        ports = ["--fleet-port", str(fleet), "--control-port", str(control)]
        words = [str(folder / "asleep.toml"), "--run-dir", str(self.run.path), "--grace", str(GRACE_S), *ports]
        self.start("server", "server", "run", *words)
        for name in ("0", "1"):
            words = ["--server", f"127.0.0.1:{fleet}", "--name", name, "--memory", str(folder / name)]
            self.start(name, "client", "join", *words)

    def start(self, label: str, *words: str) -> None:
        command = [sys.executable, "-m", *words]
        self.families[label] = Family(command, flower.environment(), self.folder / f"{label}.log", ROOT)

    def round(self) -> int:
        return max((line["round"] for line in self.run.history()), default=0)

    def wait(self, true: object, seconds: float) -> None:
        until(true, lambda: {name: family.tail() for name, family in self.families.items()}, seconds)  # type: ignore[arg-type]

    def signal(self, label: str, number: int) -> None:
        os.kill(self.families[label].process.pid, number)

    def ends(self, label: str, most_s: float) -> int:
        """Its exit code; AssertionError if it takes longer than that to end."""
        started = time.monotonic()
        self.wait(lambda: not self.families[label].running, most_s)
        assert time.monotonic() - started < limit(most_s)
        return int(self.families[label].process.returncode)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    try:
        yield made
    finally:
        for name in ("0", "1"):
            if made.families[name].running:
                made.signal(name, signal.SIGCONT)
        stop(list(made.families.values()), 10)


def test_a_site_that_slept_comes_back_and_a_stop_waits_for_none_that_sleeps(world: World) -> None:
    world.wait(lambda: world.round() >= 2, 90)
    world.signal("1", signal.SIGSTOP)
    time.sleep(26)  # longer than the server's patience of two heartbeat intervals
    before = world.round()
    world.signal("1", signal.SIGCONT)
    log = world.families["1"].log
    world.wait(lambda: "did not run for" in log.read_text(), 30)
    world.wait(lambda: world.round() >= before + 3, 90)
    last = world.run.history()[-1]
    assert sorted(last["accepted"]) == ["0", "1"]

    # It sleeps again: the round in hand waits for its upload, and goes on waiting for 600 s if nobody stops it.
    world.signal("1", signal.SIGSTOP)
    time.sleep(2)
    at = world.round()
    world.signal("server", signal.SIGTERM)
    assert world.ends("server", GRACE_S + 12) == 0
    assert (world.run.status()["status"], world.round()) == ("stopped", at)
    world.signal("0", signal.SIGTERM)
    assert world.ends("0", 10) == 0
    world.signal("1", signal.SIGTERM)
    world.signal("1", signal.SIGCONT)
    assert world.ends("1", 10) == 0
