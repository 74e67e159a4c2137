"""The server's side of a schedule: its lives, the steps at which it is killed, and time that nobody waits for."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from torch import Tensor

from client.app import app
from client.memory.versions import DiskMemory
from client.training.work import LocalWork
from common.errors import RunError
from common.experiment import Experiment
from server.engines.inprocess import answer
from server.rounds.checkpoint import Checkpoints, read
from server.rounds.folder import HISTORY, RunFolder
from server.rounds.loop import Rounds
from server.rounds.prepare import prepare
from strategies.protocol.coordinator import Coordinator
from tests.support.network import Client, Network
from tests.support.promises import Timeline
from tests.support.schedules import DEADLINE_S, JOINS_AT, ON_SERVER, Fault, Killed, Schedule

MOST_PULLS, MOST_LIVES = 20_000, 40


class Clock:
    """Stands for the module `time` in the server: sleeping takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)


class World:
    """One schedule: `run` ends when all rounds are done and raises AssertionError if a promise is broken.

    `counts` tells which faults really struck, and what came of them.
    """

    def __init__(self, folder: Path, experiment: Experiment, schedule: Schedule) -> None:
        self.experiment = experiment
        self.folder = RunFolder(folder / "run")
        self.counts: Counter[str] = Counter()
        self.tries = 0
        self.slow_disk = schedule.slow_disk
        self.clients: dict[str, Client] = {}
        self.timeline = Timeline(experiment, self.clients, self.folder)
        for i in range(schedule.clients):
            joins = JOINS_AT if i >= schedule.clients - schedule.late else 0
            self.clients[str(i)] = Client(str(i), folder / "disks" / str(i), joins_at=joins)
        self.history: list[dict[str, Any]] = []
        self._clock = Clock()
        self._nodes = iter(range(10, 10**6))
        for client in self.clients.values():
            client.node = next(self._nodes)
            client.start()
        self._faults = [fault for fault in schedule.faults if fault.kind not in ON_SERVER]
        self._server = [fault for fault in schedule.faults if fault.kind in ON_SERVER]
        self._network = Network(self)
        self._running: Client | None = None
        self._gate, self._torn, self._saving = threading.Event(), False, False
        self._pulls = 0

    # --- what the network asks

    def online(self) -> list[Client]:
        """Whose node is listed; those who were away for long enough come back first."""
        for client in self.clients.values():
            if not (client.up and client.listed) and self._clock.now >= client.back_s:
                if not client.up:
                    client.start()
                if not client.listed:
                    client.node, client.listed = next(self._nodes), True
        return [c for c in self.clients.values() if c.listed and self.tries >= c.joins_at]

    def at(self, node: int) -> Client | None:
        """The client at a node, if its process lives."""
        return next((c for c in self.clients.values() if c.node == node and c.listed and c.up), None)

    def listed(self, message: Message) -> bool:
        """Whether the node that a message went to is known to the SuperLink still."""
        return message.metadata.dst_node_id in [c.node for c in self.clients.values() if c.listed]

    def pulled(self) -> None:
        self._pulls += 1
        assert self._pulls < MOST_PULLS, "the server asks without end"

    def struck(self, sampled: Sequence[str]) -> tuple[dict[str, dict[str, Fault]], list[Fault]]:
        """This try's faults: client -> kind -> fault, and those of the order of arrival."""
        mine: dict[str, dict[str, Fault]] = defaultdict(dict)
        orders = []
        for fault in self._faults:
            if fault.at == self.tries and fault.kind in ("reordered", "one by one"):
                self.counts[fault.kind] += 1
                orders.append(fault)
            elif fault.at == self.tries:
                mine[sampled[fault.who % len(sampled)]][fault.kind] = fault
        return mine, orders

    def strike(self, name: str, fault: Fault) -> None:
        """What happens to a client before it works on its message. Its message and reply are the network's affair."""
        client = self.clients[name]
        if fault.kind in ("disk wiped", "version truncated", "version damaged"):
            self.counts[fault.kind] += client.damage(fault)
        elif fault.kind == "node left":
            self.counts[fault.kind] += 1
            client.listed, client.back_s = False, self._clock.now + fault.how % 3 * DEADLINE_S
            client.up = fault.how % 2 == 0  # the same process joins again, or a new one
        elif fault.kind.startswith("killed"):
            client.dies = fault
        else:
            self.counts[fault.kind] += 1

    def train(self, message: Message) -> Message | None:
        """A client works on a message; None if it is not there or dies over it."""
        client = self.at(message.metadata.dst_node_id)
        if client is None:
            return None
        try:
            self._running = client
            self._dies("killed before training")
            self.timeline.asked(client, message)
            return answer(app, message, client.context)
        except Killed:
            assert client.dies is not None
            self.counts[client.dies.kind] += 1
            client.up, client.back_s = False, self._clock.now + client.dies.how % 3 * DEADLINE_S
            client.listed = client.dies.how % 2 == 0  # its node stays listed until it is back, or goes with it
            return None
        finally:
            self._running = None
            client.dies = None

    def _dies(self, kind: str, how: int | None = None) -> None:
        fault = self._running.dies if self._running is not None else None
        if fault is not None and fault.kind == kind and how in (None, fault.how % 2):
            raise Killed(kind)

    # --- the server's end

    def due(self, kind: str, keep: bool = False) -> Fault | None:
        """Whether this is to happen by now."""
        for fault in self._server:
            if fault.kind == kind and fault.at <= self.tries:
                if not keep:
                    self._server.remove(fault)
                    self.counts[kind] += 1
                return fault
        return None

    def kill(self, kind: str) -> None:
        """The server ends here, if the schedule says so; a checkpoint under way is cut off or just makes it."""
        if fault := self.due(kind):
            self._torn |= fault.how % 2 == 1
            raise Killed(kind)

    def run(self) -> World:
        """The whole experiment, over as many lives of the server as it takes."""
        with self._hooks():
            for _ in range(MOST_LIVES):
                self._pulls = 0
                resume = self.folder.holds_run()
                said: list[str] = []
                expected = self.timeline.resumed() if resume else self.timeline.begin()
                try:
                    with self.folder.open(resume):
                        prepared = prepare(self.experiment)
                        rounds = Rounds(self._network, prepared, self.folder, say=said.append, strict=False)
                        rounds.run(resume)
                    break
                except Killed:
                    self.counts["resumes"] += self.folder.holds_run()
                except RunError as error:
                    if "no progress in round" not in str(error) and "clients came within" not in str(error):
                        raise
                    self.counts["no progress"] += 1
                    for client in self.clients.values():
                        client.back_s = 0.0
                finally:
                    self._gate.set()
                    self._torn = False
                    self.counts["void rounds"] += sum(" is void: " in text for text in said)
                if resume:
                    assert said[0].partition(";")[0] == f"resuming after round {expected}"
            else:
                raise AssertionError(f"no end after {MOST_LIVES} lives of the server")
        self.counts["rounds"] += self.experiment.rounds
        self.counts["tries"] += self.tries
        self.counts["generations"] += self.timeline.generations
        self.counts["versions of a left generation gone"] += self.timeline.forsaken
        self.timeline.check_end()
        self.history = self.folder.history()
        return self

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, module in list(sys.modules.items()):
                if name.startswith("server.") and getattr(module, "time", None) is time:
                    patch.setattr(module, "time", self._clock)
            self._hook_clients(patch)
            self._hook_server(patch)
            self._hook_files(patch)
            self.timeline.hook(patch)
            yield

    def _hook_clients(self, patch: pytest.MonkeyPatch) -> None:
        steps, save = LocalWork.steps, DiskMemory.save

        def killed_steps(work: LocalWork, **given: Any) -> Iterator[Tensor]:
            for taken, gradient in enumerate(steps(work, **given)):
                yield gradient
                if taken == 1:
                    self._dies("killed in training", 1)
                self._dies("killed in training", 0)
            self._dies("killed in training")

        def killed_save(
            memory: DiskMemory, run: str, client: str, generation: int, version: int, *rest: Any, **more: Any
        ) -> Any:
            self._dies("killed before the save")
            result = save(memory, run, client, generation, version, *rest, **more)
            self.timeline.saved(run, client, generation, version)
            self._dies("killed after the save")
            return result

        patch.setattr(LocalWork, "steps", killed_steps)
        patch.setattr(DiskMemory, "save", killed_save)

    def _hook_server(self, patch: pytest.MonkeyPatch) -> None:
        advance, append, save, wait = Coordinator.advance, RunFolder.append, Checkpoints.save, Checkpoints.wait

        def killed_advance(coordinator: Coordinator, round: int, uploads: Any, *informed: Any) -> Any:
            result = advance(coordinator, round, uploads, *informed)
            self.timeline.advanced(coordinator, round, [upload.name for upload in result])
            self.kill("server killed after the aggregate")
            return result

        def killed_append(folder: RunFolder, record: dict[str, Any]) -> dict[str, Any]:
            if self.due("server killed in the line"):
                with (folder.path / HISTORY).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record)[:70])
                raise Killed
            line = append(folder, record)
            self.kill("server killed after the line")
            return line

        def killed_save(checkpoints: Checkpoints, coordinator: Coordinator) -> None:
            checkpoints.wait()
            self._gate.clear()
            self._torn = self.due("server killed in the checkpoint") is not None
            self._saving = True
            save(checkpoints, coordinator)
            self._saving = False
            self.timeline.mark(coordinator)
            if not self.slow_disk:
                checkpoints.wait()
            damage = self.due("newest checkpoint damaged")
            if damage or self.due("server killed after the checkpoint"):
                checkpoints.wait()
                if damage:
                    self._damage_checkpoint(damage)
                raise Killed

        def opened_wait(checkpoints: Checkpoints) -> None:
            if not self._saving:
                self._gate.set()
            wait(checkpoints)

        patch.setattr(Coordinator, "advance", killed_advance)
        patch.setattr(RunFolder, "append", killed_append)
        patch.setattr(Checkpoints, "save", killed_save)
        patch.setattr(Checkpoints, "wait", opened_wait)

    def _damage_checkpoint(self, fault: Fault) -> None:
        """The newest one, if there is another to fall back to."""
        whole = [path for path in sorted(self.folder.checkpoints.glob("*.safetensors")) if read(path)]
        if len(whole) < 2:
            self.counts[fault.kind] -= 1
            self.counts["server killed after the checkpoint"] += 1
            return
        content = bytearray(whole[-1].read_bytes())
        content[-1] ^= 1
        whole[-1].write_bytes(content[: len(content) // 2] if fault.how % 2 else content)

    def _hook_files(self, patch: pytest.MonkeyPatch) -> None:
        replace: Callable[..., None] = os.replace

        def killed_replace(source: Any, target: Any, **more: Any) -> None:
            if Path(target).parent == self.folder.checkpoints:
                assert self._gate.wait(60)
                if self._torn:
                    raise Killed("in the checkpoint")  # its temporary file stays
            elif self._running is not None and Path(target).is_relative_to(self._running.disk):
                self._dies("killed in the save", 0)  # its temporary file stays
            replace(source, target, **more)
            if self._running is not None and Path(target).is_relative_to(self._running.disk):
                self._dies("killed in the save", 1)  # nothing is pruned

        patch.setattr(os, "replace", killed_replace)
        patch.setattr(os, "fsync", lambda descriptor: None)  # the machine itself never goes down here
