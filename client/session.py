"""What stays warm in a client process between messages: task, model, data, device and memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from flwr.app import Context

from client.memory import ContextMemory, DiskMemory, Memory, RamMemory
from client.work import local_steps
from common import tasks
from common.errors import SettingsError
from common.experiment import Experiment
from common.models import build
from common.tasks.base import ClientData, Examples, Task
from common.vector import FlatModel
from strategies import create
from strategies.base import FederatedStrategy
from strategies.messages import RollReply, read_experiment

MOST_CLASSES = 10_000
VERSIONS = f"flwr {version('flwr')}, torch {torch.__version__}"


@dataclass
class Session:
    """One experiment in one process, shared by all clients that the process hosts: one model for all of them."""

    experiment: Experiment
    strategy: FederatedStrategy
    task: Task
    model: FlatModel
    device: torch.device
    _data: dict[tuple[str, str], ClientData] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, device: str) -> Session:
        """The session of an experiment (JSON); built once, then kept. Another experiment replaces it."""
        if (text, device) not in _sessions:
            experiment = read_experiment(text)
            torch.set_num_threads(experiment.local.threads)
            task = tasks.create(experiment.task, experiment.partition, experiment.seed)
            target = _device(device)
            session = cls(experiment, create(experiment), task, build(task, experiment.seed, target), target)
            _sessions.clear()
            _sessions[text, device] = session
        return _sessions[text, device]

    def data(self, name: str, file: str) -> ClientData:
        """A client's examples on the device; loaded once."""
        if (name, file) not in self._data:
            held = self.task.client(name, file or None)
            self._data[name, file] = ClientData(held.train.to(self.device), held.evaluate.to(self.device), held.steps)
        return self._data[name, file]

    def roll(self, names: list[str], file: str, share_labels: bool, in_flight: int) -> RollReply:
        """The answer to a roll call for the clients that this node hosts."""
        held = [self.data(name, file) for name in names]
        return RollReply(
            names=names,
            examples=[len(data.train) for data in held],
            evaluation=[len(data.evaluate) for data in held],
            steps=[local_steps(data, self.experiment.local) for data in held],
            labels=[_class_counts(data.train) if share_labels else "" for data in held],
            layout=self.model.layout_hash,
            plan=self.task.plan_hash(),
            device=str(self.device),
            versions=VERSIONS,
            in_flight=in_flight,
        )


_sessions: dict[tuple[str, str], Session] = {}
_ram = RamMemory()


def hosted(context: Context, task: Task) -> list[str]:
    """The names of the clients that a node hosts.

    A deployed node has one name. A simulated node, "partition-id" of "num-partitions", hosts every client whose
    number is its own modulo the number of nodes, so that any number of nodes serves any number of clients.
    """
    config = context.node_config
    if name := config.get("name"):
        return [str(name)]
    if "partition-id" not in config:
        raise SettingsError("this node has neither a name nor a partition-id; start it with a name")
    own, nodes = int(config["partition-id"]), int(config.get("num-partitions", 1))
    return task.names()[own::nodes]


def memory_of(context: Context) -> Memory:
    """The memory's home, from the node's setting "memory": "ram", a folder, or Flower's context by default.

    With "durable" = false a folder's files are not flushed to the disk.
    """
    home = str(context.node_config.get("memory", ""))
    if home == "ram":
        return _ram
    if home:
        return DiskMemory(Path(home).expanduser(), durable=bool(context.node_config.get("durable", True)))
    return ContextMemory(context.state)


def _class_counts(examples: Examples) -> str:
    targets = getattr(examples, "targets", None)
    if targets is None or targets.is_floating_point() or targets.ndim != 1 or not len(targets):
        return ""
    if int(targets.min()) < 0 or int(targets.max()) >= MOST_CLASSES:
        return ""  # no class numbers
    return json.dumps(torch.bincount(targets.long()).tolist())


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(f"device {name!r} is unknown; allowed: cpu, auto, cuda, cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"device {name!r} was asked for and this machine has no usable CUDA device")
    return device
