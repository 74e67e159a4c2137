"""A federation of real processes that tests can hurt: SuperLink, server app, resident clients, a proxy for each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from client.memory.versions import DiskMemory
from common import vector
from common.experiment import Experiment
from common.flower import ROOT
from server.deploy.clients import Clients, start_clients
from server.deploy.processes import held_ports
from server.deploy.superlink import SuperLink
from server.rounds.checkpoint import Checkpoint, read
from server.rounds.folder import RunFolder
from tests.support.children import OWNER, carrying, environment
from tests.support.gated import VARIABLE, Gates
from tests.support.helpers import Simulation
from tests.support.patience import until
from tests.support.proxy import Proxy

MARK = "FEDKEEL_TEST"


def experiment(
    rounds: int, *, quorum: int, deadline_s: float, size: int = 1000, strategy: str = "scaffold", **round: Any
) -> Experiment:
    """Three clients on the task `tests.support.gated`; no number of void rounds ends the run."""
    return Experiment.model_validate(
        {
            "name": "chaos",
            "rounds": rounds,
            "task": {"name": "tests.support.gated:task", "size": size},
            "partition": {"clients": 3},
            "strategy": {"name": strategy},
            "local": {"lr": 0.1, "batch_size": 4},
            "round": {"quorum": quorum, "deadline_s": deadline_s, "max_void": 1000, "wait_for": 3, **round},
            "evaluate": {"clients": "none"},
        }
    )


def left_behind(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark in their environment."""
    return carrying(MARK, mark)


class Federation:
    """A SuperLink on fixed ports and resident clients, each behind its own proxy; a context manager.

    At its end no process is left, or AssertionError.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ("0", "1", "2")) -> None:
        self.folder = folder
        self.names = names
        self.gates = Gates(folder / "gates")
        self.control_port, self.fleet_port = held_ports(2)
        self.clients: dict[str, Clients] = {}
        self.run_id = 0
        self._stack = ExitStack()
        self._link = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._none_left)
            stack.callback(self._stop)
            self.proxies = {name: stack.enter_context(Proxy(self.fleet_port)) for name in (*self.names, "3")}
            for name in self.names:  # They load while the SuperLink does.
                self.start(name)
            self.start_link()
            self.wait_for_nodes(len(self.names))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _stop(self) -> None:
        self.gates.open_all()
        for name in self.clients:
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGTERM)
        self._link.close()
        for clients in self.clients.values():
            clients.stop(3)

    def _none_left(self) -> None:
        end = time.monotonic() + 10  # Some have been told to end a moment ago.
        while (left := left_behind(str(self.folder))) and time.monotonic() < end:
            time.sleep(0.1)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        assert not left, left

    @contextmanager
    def _environment(self) -> Iterator[None]:
        # The server app runs from the bundle, which has no tests: it finds the task by the path.
        gates, path = {VARIABLE: str(self.gates.folder)}, {"PYTHONPATH": str(ROOT)}
        with environment(**{MARK: str(self.folder), OWNER: str(self.folder)}, **gates, **path):
            yield

    # --- clients

    def start(self, name: str) -> None:
        """Start a client, or start it again: same name, same memory."""
        with self._environment():
            self.clients[name] = start_clients(
                self.proxies[name].address, [name], memory_root=self.folder / "memory", log_dir=self.folder
            )

    def restart(self, name: str) -> None:
        """Start it anew and wait until it has joined."""
        before = set(self.link.control.online())
        self.start(name)
        until(lambda: set(self.link.control.online()) - before, f"client {name} joins")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a client."""
        with suppress(ProcessLookupError):
            if name not in self.clients[name].ended():
                os.kill(self.clients[name].pid(name), number)

    def kill(self, name: str) -> None:
        """SIGKILL. What it still had in its connection is lost with it."""
        self.signal(name, signal.SIGKILL)
        until(lambda: name in self.clients[name].ended(), f"client {name} dies")
        self.proxies[name].cut()

    def wait_for_nodes(self, count: int) -> None:
        """Until so many nodes have joined."""
        until(lambda: len(self.link.control.online()) >= count, f"{count} clients join")

    # --- the server

    def start_link(self) -> None:
        """Start the SuperLink, on the same ports each time."""
        log = self.folder / "superlink.log"
        with self._environment():
            self.link = self._link.enter_context(
                SuperLink(log, control_port=self.control_port, fleet_port=self.fleet_port)
            )

    def kill_link(self) -> None:
        """SIGKILL the SuperLink and all that it started."""
        victims = self.link.family.members()
        for process in victims:
            with suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(victims, timeout=10)
        assert not alive
        self._link.close()

    def kill_app(self) -> None:
        """SIGKILL the server app."""
        victims = self.link.apps()
        assert victims, [process.cmdline() for process in self.link.family.members()]
        for process in victims:
            process.kill()
        # Not `psutil.wait_procs`: its parent, Flower's, leaves it a zombie.
        until(lambda: not self.link.apps(), "the server app dies")

    def submit(self, settings: Experiment, folder: RunFolder, resume: bool = False) -> None:
        """Start a run."""
        config: dict[str, str | int | float | bool] = {
            "experiment-toml": settings.toml(),
            "run-dir": str(folder.path),
            "resume": resume,
        }
        self.run_id = self.link.control.submit(ROOT, config)

    def finish(self, folder: RunFolder, limit_s: float = 120.0) -> list[dict[str, Any]]:
        """Wait for the end of the run; returns its history."""

        def ended() -> bool:
            assert folder.status().get("status") != "failed", f"{folder.status()}\n{self._log()}"
            return folder.status().get("status") == "finished"

        until(ended, lambda: f"no end: {folder.status()}\n{self._log()}\n{folder.notes()[-5:]}", limit_s)
        return folder.history()

    def _log(self) -> str:
        with suppress(Exception):
            return self.link.control.log(self.run_id)[-3000:]
        return "no log"

    def mend(self) -> None:
        """Between two tests: no run, no fault, all clients here."""
        self.gates.open_all()
        for name, proxy in self.proxies.items():
            proxy.rate, proxy.reset_share = None, 0.0
            proxy.flow()
            if name in self.clients:
                self.signal(name, signal.SIGCONT)
        if not self.link.running:
            self._link.close()
            self.start_link()
        if self.run_id and not self.link.control.status(self.run_id).over:
            with suppress(AssertionError):
                self.kill_app()
        self.run_id = 0
        for name in self.names:
            if name in self.clients[name].ended():
                self.restart(name)
        self.wait_for_nodes(len(self.names))


# --- what a run must have come to


def replay(settings: Experiment, history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Simulation:
    """The same rounds in this process, with the same clients accepted, round by round to the same weights.

    `names`: who was on the roll before round 1; others are admitted in the round that first asked them.
    """
    simulation = Simulation(settings, names)
    for record in history:
        tries = [*(void["sampled"] for void in record["void"]), record["sampled"]]
        simulation.join(sorted({name for sampled in tries for name in sampled} - simulation.members.keys()))
        while simulation.coordinator.generation < record["generation"]:
            simulation.coordinator.new_generation()
        simulation.step(lost=simulation.members.keys() - set(record["accepted"]))
        assert vector.sha256({"model": simulation.x}) == record["sha256"], f"round {record['round']}: {record}"
    return simulation


def checkpoint(folder: RunFolder) -> Checkpoint:
    """The newest one."""
    loaded = read(sorted(folder.checkpoints.glob("*.safetensors"))[-1])
    assert loaded is not None
    return loaded[0]


def check(
    settings: Experiment, folder: RunFolder, memory: Path | None = None, names: Sequence[str] = ("0", "1", "2")
) -> None:
    """Each round once; model, server control and the clients' controls on their disks bit for bit as in a replay."""
    history, last = folder.history(), checkpoint(folder)
    assert [record["round"] for record in history] == list(range(1, settings.rounds + 1))
    simulation = replay(settings, history, names)
    assert last.accepted == simulation.coordinator.accepted
    assert last.state.keys() == simulation.coordinator.state.keys()
    for name, value in last.state.items():
        assert torch.equal(value, simulation.coordinator.state[name]), name
    for name, version in last.accepted.items() if memory else ():
        kept = DiskMemory(memory / name).load(last.run, name, last.generation, version)
        assert kept is not None, f"client {name} has lost version {version}"
        assert torch.equal(kept["control"], simulation.memory(name)["control"]), name
