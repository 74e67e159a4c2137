"""A run without messages, so that tests can look at server state and client memories after every round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.training.forward import Forward
from client.training.work import LocalWork, local_steps
from common import tasks
from common.compression.feedback import Codec, Kind
from common.data.examples import ClientData
from common.experiment import Experiment
from common.model import build
from common.models.mixture import PRIVATE
from common.seeds import derive
from common.tasks.base import Task
from common.tasks.quadratic import write
from common.vector import State
from strategies.base import Upload
from strategies.protocol.acceptance import accepted_upload
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.downlink import Downlink
from strategies.protocol.members import Member, sample
from strategies.protocol.messages import Reply, ReplyHead, TrainHead, upload_seed
from strategies.registry import REGISTRY, settled

NORMED = {name for name, entry in REGISTRY.items() if "batch-norm" in entry.personal.get("parts", ())}
MIXED = {name for name, entry in REGISTRY.items() if entry.personal.get("parts") == PRIVATE}
"""Algorithms that need a model with BatchNorm, and those that need one of two extractors, by their personal parts."""

POOLED = {name for name, entry in REGISTRY.items() if entry.cls.simulated}
"""What is no federation: one client trains."""

ALGORITHMS = sorted(REGISTRY.keys() - NORMED - MIXED - POOLED)
"""All that `headed` serves."""

ON_DIGITS = dict.fromkeys(NORMED, 'task = {model = "cnn", width = 2}') | dict.fromkeys(MIXED, "task.extractor = 4")
"""Algorithm -> what else its experiment on digits needs, as TOML: the default model has neither."""


def problem(n: int = 6, d: int = 5, seed: int = 0) -> dict[str, NDArray[Any]]:
    """n quadratics of d coordinates that pull apart: unequal centers, curvatures, steps (1 to 8) and examples."""
    rng = np.random.default_rng(seed)
    return {
        "centers": rng.normal(0, 3, (n, d)),
        "curvatures": rng.uniform(0.5, 2.0, (n, d)),
        "steps": np.linspace(1, 8, n).astype(int),
        "examples": rng.permutation(np.arange(1, n + 1) * 10),
        "start": np.zeros(d),
    }


def experiment(folder: Path, strategy: str = "fedavg", **given: Any) -> Experiment:
    """An experiment on quadratics in float64, the file written to `folder`.

    Keywords: `arrays` of the file (default `problem()`), any table of the experiment file (`local`, `server`,
    `round`, ...), `seed`, `rounds`; the rest are the strategy's hyperparameters.
    """
    arrays = problem() | given.pop("arrays", {})
    tables = {key: given.pop(key) for key in list(given) if key in Experiment.model_fields}
    file = folder / "quadratic.npz"
    write(file, **arrays)
    task = {"name": "quadratic", "file": str(file), "dtype": "float64"}
    values = {"task": task, "strategy": {"name": strategy, **given}, **tables}
    return Experiment.model_validate(values)


def headed(folder: Path, strategy: str, task: Mapping[str, Any] | None = None, **given: Any) -> Experiment:
    """As `experiment`, of a model with an output layer, the last coordinate: what MOON and personal heads need."""
    tables = experiment(folder, strategy, **given).model_dump(exclude_unset=True)
    tables["task"] |= {"name": "tests.support.headed:task", **(task or {})}
    return Experiment.model_validate(tables)


class Simulation:
    """The four methods of a strategy, driven by the real `Coordinator` and `LocalWork`; only messages are missing.

    `coordinator` holds the server state after the last round; `memory(name)` is what the server knows of a client:
    its version of the last accepted round. A test holds this driver to the real loop, bit for bit.
    """

    def __init__(self, experiment: Experiment, names: Iterable[str] | None = None, task: Task | None = None) -> None:
        self.strategy, experiment = settled(experiment)
        self.experiment = experiment
        task = task or tasks.create(experiment.task, experiment.partition, experiment.seed)
        self.task = self.strategy.arrange(task, experiment)
        parts = experiment.personal.parts
        self.model = build(self.task, experiment.seed, personal=parts, check=self.strategy.check_model)
        self.coordinator = Coordinator.begin(self.strategy, experiment, "run", self.model)
        self.codec = Codec(experiment.compression, self.model.layout)
        self.downlink = Downlink(self.strategy, experiment, self.model.layout)
        self.forward = Forward
        self.informed: State | None = None
        self.members: dict[str, Member] = {}
        self.data: dict[str, ClientData] = {}
        self.versions: dict[tuple[str, int, int], State] = {}
        self.sampled: list[str] = []
        self.join(self.task.names() if names is None else names)

    @property
    def x(self) -> Tensor:
        """The server model (d,)."""
        return self.coordinator.state["model"]

    def join(self, names: Iterable[str]) -> None:
        """Put clients on the roll, before round 1 or later."""
        for name in names:
            data = self.data[name] = self.task.client(name)
            steps = local_steps(data, self.experiment.local)
            member = Member(name, 0, len(data.train), len(data.evaluate), steps)
            self.coordinator.admit([member])
            self.members[name] = member

    def memory(self, name: str) -> State:
        """The client's memory as of its last accepted upload; empty before the first."""
        coordinator = self.coordinator
        return self.versions.get((name, coordinator.generation, coordinator.accepted.get(name, 0)), {})

    def received(self, name: str) -> State:
        """The broadcast of the next round as the client gets it, by the way that its last acceptance allows."""
        coordinator, round = self.coordinator, self.coordinator.round + 1
        broadcast = self.strategy.broadcast(coordinator.state if self.informed is None else self.informed)
        sent, digest = self.downlink.whole(broadcast, coordinator.downlink), ""
        if self.downlink.saves and round > 1 and coordinator.accepted.get(name) == round - 1:
            sent, digest = self.downlink.rest(broadcast, coordinator.downlink)
        return self.downlink.receive(copies(sent), self.memory(name), self.model.vector, round, digest)

    def work(self, name: str) -> LocalWork:
        """What the client `name` is given in the next round, the server model loaded."""
        coordinator, round = self.coordinator, self.coordinator.round + 1
        received, memory = self.received(name), self.memory(name)
        self.model.load(received["model"], coordinator.buffers)
        self.model.load_personal(memory)
        budget = coordinator.participation.budget(round, self.members[name])
        head = TrainHead(
            experiment="",
            run=coordinator.run,
            client=name,
            generation=coordinator.generation,
            round=round,
            accepted=coordinator.accepted.get(name, 0),
            keep=[],
            share=coordinator.known[name] / coordinator.total,
            lr=coordinator.lr(round),
            layout=coordinator.layout,
            epochs=budget.epochs,
            steps=budget.steps,
            part=coordinator.part(name),
        )
        return LocalWork(self, head, self.data[name], received, memory, coordinator.assigned.get(name, {}))

    def train(self, name: str, phase: str = "") -> Upload:
        """One client's round: its new memory is stored as clients do, its upload checked as the server does."""
        coordinator, round = self.coordinator, self.coordinator.round + 1
        held = self.memory(name)
        if self.strategy.survey and not phase and self.codec.remembers:
            upload = self._upload(self.work(name), name, "survey")
            _, held = self._encode(upload, self.strategy.survey, name, held)
        work = self.work(name)
        upload = self._upload(work, name, phase)
        kinds = self.strategy.survey if phase else self.strategy.expects(work.assigned)
        sent, residuals = self._encode(upload, kinds, name, held)
        if not phase and self.strategy.memory_kind(self.experiment) != "none":
            kept = work.remembered() | self.downlink.remember(work.received) | residuals
            self.versions[name, coordinator.generation, round] = copies(kept)
        head = ReplyHead(
            run=coordinator.run,
            client=name,
            generation=coordinator.generation,
            round=round,
            layout=coordinator.layout,
            status="ok",
            examples=upload.examples,
            steps=upload.steps,
            lr=upload.lr,
            part=coordinator.part(name),
        )
        reply = Reply(head, copies(sent), copies(upload.buffers), dict(upload.metrics))
        return accepted_upload(coordinator, round, name, reply, phase)

    def _upload(self, work: LocalWork, name: str, phase: str) -> Upload:
        before = torch.get_rng_state()
        # As the client's fork_rng and manual_seed, without the half millisecond that they spend on devices.
        torch.default_generator.manual_seed(derive(self.experiment.seed, "torch", name, self.coordinator.round + 1))
        upload = self.strategy.look(work) if phase else self.strategy.local(work)
        torch.set_rng_state(before)
        return upload

    def _encode(self, upload: Upload, kinds: Mapping[str, Kind], name: str, held: State) -> tuple[State, State]:
        round, seed = self.coordinator.round + 1, self.experiment.seed
        return self.codec.encode(upload.vectors, kinds, held, lambda group: upload_seed(seed, name, round, group))

    def step(self, lost: Iterable[str] = ()) -> list[Upload]:
        """One round; clients in `lost` train, but their replies never arrive. Returns the accepted uploads."""
        trainers = [name for name, member in self.members.items() if member.examples]
        coordinator, wanted = self.coordinator, self.experiment.round.sample or len(trainers)
        round = coordinator.round + 1
        present = coordinator.participation.present(round, 0, trainers)
        chosen = sample(self.experiment.seed, round, 0, present, wanted)
        late = coordinator.participation.late(round, [self.members[name] for name in chosen])
        self.sampled = [name for name in chosen if name not in late]
        coordinator.assigned = self.strategy.assign(coordinator.state, self.sampled, round, self.experiment.seed)
        self.informed = None
        if self.strategy.survey:
            self.informed = coordinator.inform(round, [self.train(name, "survey") for name in self.sampled])
        uploads = [self.train(name) for name in self.sampled]
        return coordinator.advance(round, [u for u in uploads if u.name not in set(lost)], self.informed)

    def run(self, rounds: int) -> Tensor:
        """Some rounds; returns the server model (d,)."""
        for _ in range(rounds):
            self.step()
        return self.x

    def path(self, rounds: int) -> Tensor:
        """The server models after each of some rounds (rounds, d)."""
        return torch.stack([self.run(1) for _ in range(rounds)])

    def rest(self, most: int = 1500, tolerance: float = 1e-14) -> Simulation:
        """Run until five rounds in a row move no coordinate by `tolerance`; fails after `most` rounds."""
        still = 0
        for _ in range(most):
            before = self.x
            still = still + 1 if float((self.run(1) - before).abs().max()) < tolerance else 0
            if still == 5:
                return self
        raise AssertionError(f"still moving after {most} rounds")

    def distance(self, point: Any) -> float:
        """L2 distance of the server model to `point` (d,)."""
        return float(torch.linalg.vector_norm(self.x - torch.as_tensor(point)))


def copies(state: Mapping[str, Tensor]) -> State:
    """The same state in storage of its own, as the wire makes it."""
    return {name: value.clone() for name, value in state.items()}
