"""What must hold under any faults: server state fits the accepted client memories after every round, no version that
may be asked for is gone, and a fault-free run that is given the same accepted sets ends with the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from common.experiment import Experiment
from common.vector import State, sha256
from server.rounds.checkpoint import read
from server.rounds.folder import MODEL, RunFolder
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.messages import Refused, TrainHead, read_head
from tests.support.helpers import Simulation
from tests.support.network import Client


@dataclass(frozen=True)
class Event:
    """A change of the server's coordinator, and a digest of all that it holds afterwards."""

    kind: str
    digest: str
    names: tuple[str, ...] = ()
    round: int = 0
    sampled: tuple[str, ...] = ()
    forgot: frozenset[str] = frozenset()
    """Accepted clients that had to start from an empty memory of their own (never one that is bound)."""
    generation: int = 0


class Timeline:
    """What a run's server did, as far as its history is not overtaken by a resume."""

    def __init__(self, experiment: Experiment, clients: Mapping[str, Client], folder: RunFolder) -> None:
        self.events: list[Event] = []
        self.generations = 0
        self.forsaken = 0
        """How often a kept checkpoint of an older generation named a version that is gone."""
        self._experiment = experiment
        self._clients = clients
        self._folder = folder
        self._marks: dict[int, int] = {}  # round of a checkpoint -> events before it
        self._values: dict[tuple[str, str, int, int], State] = {}
        self._sent: dict[str, Message] = {}
        self._forgot: set[str] = set()

    def begin(self) -> int:
        """A fresh run."""
        self.events, self._marks = [], {}
        return 0

    def resumed(self) -> int:
        """A run goes on from its newest whole checkpoint; returns its round."""
        whole = [kept[0] for path in self._folder.checkpoints.glob("*.safetensors") if (kept := read(path))]
        newest = max(whole, key=lambda kept: kept.round)
        del self.events[self._marks[newest.round] :]
        return newest.round

    def mark(self, coordinator: Coordinator) -> None:
        self._marks[coordinator.round] = len(self.events)

    def hook(self, patch: pytest.MonkeyPatch) -> None:
        """Take notes of what happens to a coordinator. `advanced` is called by the world."""
        admit, renew, messages, lost = (
            Coordinator.admit,
            Coordinator.new_generation,
            Coordinator.messages,
            Coordinator.lost_memory,
        )

        def noted_admit(coordinator: Coordinator, members: Any) -> None:
            members = list(members)
            admit(coordinator, members)
            self._note(coordinator, "join", tuple(member.name for member in members))

        def noted_generation(coordinator: Coordinator) -> None:
            renew(coordinator)
            self.generations += 1
            self._note(coordinator, "generation")
            for tracker in coordinator.strategy.trackers:
                assert not coordinator.state[tracker].any(), (
                    f"{tracker} is not zero in generation {coordinator.generation}"
                )

        def noted_messages(coordinator: Coordinator, *given: Any) -> dict[str, Message]:
            self._sent = messages(coordinator, *given)
            return self._sent

        def noted_lost(coordinator: Coordinator, name: str) -> bool:
            bound = lost(coordinator, name)
            if not bound:
                self._note(coordinator, "loss", (name,))
            return bound

        patch.setattr(Coordinator, "lost_memory", noted_lost)
        patch.setattr(Coordinator, "admit", noted_admit)
        patch.setattr(Coordinator, "new_generation", noted_generation)
        patch.setattr(Coordinator, "messages", noted_messages)

    def asked(self, client: Client, message: Message) -> None:
        """A client is about to work on a message."""
        try:
            head = read_head(TrainHead, message.content)
        except Refused:
            return
        if (head.run, head.generation, head.accepted) in client.lost:
            self._forgot.add(message.metadata.message_id)

    def saved(self, run: str, name: str, generation: int, version: int) -> None:
        """A client has a version on its disk."""
        client = self._clients[name]
        client.lost.discard((run, generation, version))
        kept = client.load(run, generation, version)
        self._values[name, run, generation, version] = {key: value.clone() for key, value in kept.items()}

    def advanced(self, coordinator: Coordinator, round: int, accepted: Sequence[str]) -> None:
        """The server has accepted a round. Checks all that must hold now."""
        forgot = {name for name in accepted if self._sent[name].metadata.message_id in self._forgot}
        assert not forgot or coordinator.strategy.memory_kind(coordinator.experiment) == "own"
        self._note(coordinator, "round", tuple(accepted), round, tuple(self._sent), frozenset(forgot))
        self._check_balance(coordinator, accepted)
        self._check_kept(coordinator)

    def _note(self, coordinator: Coordinator, kind: str, *more: Any) -> None:
        self.events.append(Event(kind, digest(coordinator), *more, generation=coordinator.generation))

    def _memory(self, coordinator: Coordinator, name: str) -> State:
        """A client's accepted version, {} before the first. One that was destroyed is taken as it was saved."""
        version = coordinator.accepted.get(name)
        if version is None:
            return {}
        if (coordinator.run, coordinator.generation, version) in self._clients[name].lost:
            return self._values[name, coordinator.run, coordinator.generation, version]
        kept: State | None = self._clients[name].load(coordinator.run, coordinator.generation, version)
        assert kept is not None, f"client {name} has lost its accepted version {version}"
        return kept

    def _check_balance(self, coordinator: Coordinator, accepted: Sequence[str]) -> None:
        """Tracker == sum_i q_i (accepted memory of i, less what compression still owes) over all known clients;
        HaFedHo's g is the cohort mean. EF21's copies are alike on both sides."""
        for key, copy in coordinator.copies.items():
            name, _, entry = key.partition("/")
            assert torch.equal(self._memory(coordinator, name)[entry], copy), (
                f"round {coordinator.round}: {key} differs"
            )
        key, whom = "gradient", list(accepted)  # HaFedHo
        if not coordinator.strategy.trackers and coordinator.experiment.compression.up != "none":
            return  # what arrives is another vector than what is kept
        if coordinator.strategy.trackers:
            (key,), whom = coordinator.strategy.trackers, list(coordinator.known)
        uniform = coordinator.strategy.weights == "uniform"
        mass = {name: 1 if uniform else coordinator.known[name] for name in whom}
        total, largest = torch.zeros_like(coordinator.state[key]), 1.0
        for name in whom:
            memory, zero = self._memory(coordinator, name), torch.zeros_like(total)
            own = memory.get(key, zero) - memory.get(f"residual.{key}", zero)
            total += own * (mass[name] / sum(mass.values()))
            largest = max(largest, float(own.abs().max()))
        error = float((coordinator.state[key] - total).abs().max())
        assert error <= 1e-12 * largest, (
            f"round {coordinator.round}: the server's {key} is {error:.3g} off its clients'"
        )

    def _check_kept(self, coordinator: Coordinator) -> None:
        """Every version that this server, or one resumed from a kept checkpoint, may ask for is on its disk.

        Those of a generation that the client has left are not: asked for one, it starts a new generation."""
        for path in sorted(self._folder.checkpoints.glob("*.safetensors")):
            loaded = read(path)
            if loaded is None:
                continue
            kept = loaded[0]
            for name, version in kept.accepted.items():
                client, key = self._clients[name], (kept.run, kept.generation, version)
                if key in client.lost or client.load(*key) is not None:
                    continue
                assert kept.generation < coordinator.generation, (
                    f"round {coordinator.round}: client {name} dropped version {version}, "
                    f"checkpoint {kept.round} needs it"
                )
                self.forsaken += 1

    def check_end(self) -> None:
        """History, final checkpoint and model are those of a fault-free run with the same accepted sets."""
        lines, rounds = self._folder.history(), [event for event in self.events if event.kind == "round"]
        assert [line["round"] for line in lines] == list(range(1, self._experiment.rounds + 1))
        told = [(r["round"], r["generation"], tuple(r["sampled"]), tuple(r["accepted"])) for r in lines]
        assert told == [(event.round, event.generation, event.sampled, event.names) for event in rounds]
        # Who joins a run that is over changes nothing.
        replayed = replay(self._experiment, self.events[: self._marks[self._experiment.rounds]])
        assert [line["sha256"] for line in lines] == replayed.models
        newest = read(self._folder.checkpoints / f"{self._experiment.rounds:09d}.safetensors")
        assert newest is not None
        assert sha256({**newest[0].state, **newest[0].buffers}) == sha256(
            {**replayed.coordinator.state, **replayed.coordinator.buffers}
        )
        assert newest[0].accepted == replayed.coordinator.accepted
        assert newest[0].generation == replayed.coordinator.generation
        assert torch.equal(load_file(self._folder.path / MODEL)["w"], replayed.x)


class Replay(Simulation):
    """A run without messages, disks or processes: nothing in it can fail."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment, names=[])
        self.models: list[str] = []
        self.forgot: frozenset[str] = frozenset()

    def memory(self, name: str) -> State:
        return {} if name in self.forgot else super().memory(name)

    def repeat(self, event: Event) -> None:
        """The same change."""
        if event.kind == "join":
            self.join(event.names)
        elif event.kind == "generation":
            self.coordinator.new_generation()
        elif event.kind == "loss":
            assert not self.coordinator.lost_memory(event.names[0])
        else:
            self.sampled, self.forgot = list(event.sampled), event.forgot
            state, seed = self.coordinator.state, self.experiment.seed
            self.coordinator.assigned = self.strategy.assign(state, self.sampled, event.round, seed)
            self.coordinator.advance(event.round, [self.train(name) for name in event.names])
            self.models.append(sha256({"model": self.x, **self.coordinator.buffers}))


def replay(experiment: Experiment, events: Sequence[Event]) -> Replay:
    """Repeat a run from its accepted sets, joins and generations; equal in every bit after every change."""
    run = Replay(experiment)
    for event in events:
        run.repeat(event)
        assert digest(run.coordinator) == event.digest, f"the run and its fault-free repetition part at {event}"
    return run


def digest(coordinator: Coordinator) -> str:
    """All bits of the state, and all that is known of the clients."""
    more = (
        sorted(coordinator.accepted.items()),
        sorted(coordinator.known.items()),
        coordinator.generation,
        coordinator.round,
    )
    parts = (coordinator.state | coordinator.buffers, coordinator.copies, coordinator.downlink)
    return f"{[sha256(part) for part in parts]} {more}"
