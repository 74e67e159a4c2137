"""Small federations through the real round loop and the real client, some of whose replies are false, late or lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from torch import Tensor, nn

from client.app import app
from common.data.examples import ClientData, Examples
from common.experiment import Experiment, PartitionSettings
from common.models.mixture import Mixture
from common.tasks.base import Task
from common.vector import State
from server.engines.inprocess import InProcessGrid, answer
from server.rounds.checkpoint import Checkpoint, read
from server.rounds.folder import RunFolder
from server.rounds.loop import Rounds
from server.rounds.prepare import prepare
from strategies.protocol import wire
from strategies.protocol.messages import BUFFERS, HEAD, STATE
from tests.support.helpers import MIXED

SIZES = (6, 10, 4, 8, 12)


class Net(nn.Module):
    """Linear(3, 2) behind BatchNorm, with a counter of steps (int64) and a mask of inputs seen positive (bool)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positive", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.positive |= (x > 2).any(0)
        y: Tensor = self.linear(self.norm(x))
        return y


class Toy(Task):
    """Client i holds `sizes[i]` examples; the loss of client `broken` raises an exception. `mixture`: as pFedAFM."""

    def __init__(self, sizes: Sequence[int], broken: str, mixture: bool) -> None:
        self.sizes, self.broken, self.mixture = sizes, broken, mixture

    def model(self) -> nn.Module:
        if not self.mixture:
            return Net()
        private, shared = (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.ReLU()) for _ in range(2))
        return Mixture(private, shared, nn.Linear(4, 2), 4, torch.float32)

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        return model.head if isinstance(model, Mixture) else model.get_submodule("linear")

    def names(self) -> list[str]:
        return [str(i) for i in range(len(self.sizes))]

    def client(self, name: str, file: str | None = None) -> ClientData:
        source = torch.Generator().manual_seed(int(name))
        inputs = torch.randn(self.sizes[int(name)], 3, generator=source) + int(name) % 3
        targets = torch.full((len(inputs),), -1 if name == self.broken else int(name) % 2)
        return ClientData(Examples(inputs, targets), Examples(inputs[:2], targets[:2]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and int(batch[1][0]) < 0:
            raise ArithmeticError("label -1")
        return nn.functional.cross_entropy(model(batch[0]), batch[1].abs())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {"loss": self.loss(model, batch).item() * len(batch[1])}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`[task] name = "tests.support.faults:task"`."""
    return Toy(options.get("sizes", SIZES), options.get("broken", ""), options.get("mixture", False))


def toy(strategy: str = "fedavg", **tables: Any) -> Experiment:
    """An experiment on this task: five clients, all of them in each of three rounds."""
    values = {"rounds": 3, "strategy": {"name": strategy}, "local": {"lr": 0.2, "batch_size": 4}, **tables}
    values["task"] = {"name": "tests.support.faults:task", "mixture": strategy in MIXED, **tables.get("task", {})}
    return Experiment.model_validate({"evaluate": {"clients": "none"}, **values})


# --- replies that are not what the client made

Lie = Callable[[str, int, Message], Message]
"""(client, round, its true reply) -> what the server gets instead. A roll call has client "" and round 0."""


def lies(client: str, change: Callable[[Message], Message | None], round: int = 2) -> Lie:
    """Change one client's reply in one round, in place or by returning another one."""

    def lie(name: str, now: int, reply: Message) -> Message:
        return (change(reply) or reply) if (name, now) == (client, round) else reply

    return lie


def put(change: Callable[[Tensor], Tensor], group: str = "delta", record: str = STATE) -> Callable[[Message], None]:
    """Replace a vector of a reply."""

    def changed(reply: Message) -> None:
        arrays = reply.content.array_records[record]
        arrays[group] = wire.to_array(change(wire.from_array(arrays[group]).clone()))

    return changed


def head(**values: Any) -> Callable[[Message], None]:
    """Replace settings of a reply."""

    def changed(reply: Message) -> None:
        reply.content.config_records[HEAD].update(values)

    return changed


def fail(reply: Message) -> Message:
    """The reply is lost: Flower brings an error instead."""
    return Message(error=Error(ErrorCode.NODE_UNAVAILABLE, "gone"), metadata=reply.metadata)


class FaultyGrid(InProcessGrid):
    """All clients answer at once. `lie` changes replies; `held(client, round, now)` keeps them back, where `now` is the
    latest round asked for; `order` rearranges those that arrive together; each arrives `copies` times.

    `nodes` is who is here, `now` the latest round; `asked` and `true` record TRAIN messages and deltas by (client,
    round).
    """

    def __init__(
        self,
        lie: Lie = lambda name, round, reply: reply,
        held: Callable[[str, int, int], bool] = lambda name, round, now: False,
        order: Callable[[list[Message]], list[Message]] = lambda replies: replies,
        copies: int = 1,
        memory: str = "ram",
    ) -> None:
        super().__init__(self._client, memory=memory)  # type: ignore[arg-type]
        self.lie, self.held, self.order, self.copies = lie, held, order, copies
        self.asked: list[tuple[str, int]] = []
        self.true: dict[tuple[str, int], Tensor] = {}
        self.nodes: Callable[[], Iterable[int]] = super().get_node_ids
        self._ready: dict[str, tuple[str, int, Message]] = {}
        self.now = 0

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes()

    def _client(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        name, round = asked_of(message)
        if STATE in reply.content.array_records and "delta" in (sent := reply.content.array_records[STATE]):
            self.true[name, round] = wire.from_array(sent["delta"])
        return self.lie(name, round, reply)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message_id, message in zip(ids, messages, strict=True):
            name, round = asked_of(message)
            if message.metadata.message_type == MessageType.TRAIN:
                self.asked.append((name, round))
                self.now = max(self.now, round)
            self._ready[message_id] = name, round, answer(self._app, message, self._context)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        here = [m for m in message_ids if m in self._ready and not self.held(*self._ready[m][:2], self.now)]
        return self.order([self._ready[m][2] for m in here for _ in range(self.copies) if m in self._ready])


def asked_of(message: Message) -> tuple[str, int]:
    """Client and round of a message; "" and 0 of a roll call."""
    config = message.content.config_records[HEAD]
    return str(config.get("client", "")), int(config.get("round", 0))  # type: ignore[arg-type]


# --- runs


@dataclass
class Ran:
    """What a run left, also one that failed."""

    folder: RunFolder
    history: list[dict[str, Any]]
    said: list[str] = field(default_factory=list)
    error: Exception | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The newest one."""
        return self.at(max(int(path.stem) for path in self.folder.checkpoints.glob("*.safetensors")))

    def at(self, round: int) -> Checkpoint:
        """The checkpoint of a round."""
        loaded = read(self.folder.checkpoints / f"{round:09d}.safetensors")
        assert loaded is not None
        return loaded[0]

    @property
    def final(self) -> dict[str, bytes]:
        """All bits of the server's state and buffers."""
        kept: State = {**self.checkpoint.state, **self.checkpoint.buffers}
        return {name: f"{value.dtype} {tuple(value.shape)}".encode() + bits(value) for name, value in kept.items()}

    def dropped(self, round: int) -> dict[str, str]:
        """Name -> reason."""
        reasons: dict[str, str] = self.history[round - 1]["dropped"]
        return reasons


def bits(value: Tensor) -> bytes:
    return bytes(value.reshape(-1).view(torch.uint8).numpy().tobytes()) if value.numel() else b""


def run(
    folder: Path, settings: Experiment, grid: InProcessGrid | None = None, resume: bool = False, **more: Any
) -> Ran:
    """Run an experiment; its error is in what is returned."""
    place, said = RunFolder(folder), []
    error = None
    with place.open(resume):
        rounds = Rounds(grid or FaultyGrid(), prepare(settings), place, say=said.append, **more)
        try:
            rounds.run(resume)
        except Exception as raised:
            error = raised
    return Ran(place, place.history(), said, error)


def ran(folder: Path, settings: Experiment, grid: InProcessGrid | None = None, **more: Any) -> Ran:
    """As `run`, for runs that must not fail."""
    result = run(folder, settings, grid, **more)
    if result.error is not None:
        raise result.error
    return result


__all__ = [
    "BUFFERS",
    "SIZES",
    "FaultyGrid",
    "Net",
    "Ran",
    "asked_of",
    "bits",
    "fail",
    "head",
    "lies",
    "put",
    "ran",
    "run",
    "task",
    "toy",
]
