"""What stays warm in a client process between messages: task, model, data, device and memory."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context

from client.memory.cache import StateCache
from client.memory.versions import ContextMemory, DiskMemory, Memory, RamMemory
from client.policy import Policy
from client.training.device import Staging, choose, free, out_of_memory, settle
from client.training.forward import Forward
from client.training.work import local_steps
from common import tasks
from common.arithmetic import describe, require
from common.compression.feedback import Codec
from common.data.examples import ClientData, Examples
from common.data.grant import EVERYTHING, Grant, granted
from common.data.places import own as own_file
from common.data.schema import schema_hash
from common.errors import ExperimentError, Sayable, SettingsError, SiteError, located
from common.experiment import Experiment, LocalSettings
from common.flower import versions
from common.model import FlatModel, build
from common.tasks.base import NO_CLIENTS, Task
from common.tasks.scoring import Scoring
from strategies.base import FederatedStrategy
from strategies.protocol.downlink import Downlink
from strategies.protocol.messages import RollReply, read_experiment
from strategies.registry import settled

log = logging.getLogger("client.session")

MOST_CLASSES = 10_000
VERSIONS = versions()


@dataclass
class Session:
    """One experiment on one device of a process, shared by all clients that it hosts: one model for all of them."""

    text: str
    experiment: Experiment
    strategy: FederatedStrategy
    task: Task
    model: FlatModel
    scoring: Scoring
    device: torch.device
    codec: Codec
    downlink: Downlink
    wire: Staging
    disk: Staging
    """Its own: a disk writes while a reply is built, and both know vectors of one name."""
    forward: Callable[[Task, FlatModel, LocalSettings], Forward] = Forward
    """Makes the passes of a round."""
    grant: Grant = EVERYTHING
    """What could be named when it was built."""
    told: dict[str, str] = field(default_factory=dict)
    """What each client has told of its data for the task's census: once told, it stays the same."""
    _data: dict[tuple[str, str], ClientData] = field(default_factory=dict)
    _schemas: dict[tuple[str, str], str] = field(default_factory=dict)
    _sound: bool = False

    @classmethod
    def of(cls, text: str, context: Context) -> Session:
        """The session of an experiment (JSON) on a node's device; built once, then kept. Another experiment on that
        device replaces it.

        Raises Denied if the node's policy forbids it, before anything that it names is imported or opened.
        """
        target = device_of(context)
        held = _sessions.get(target)
        same = held is not None and (held.text, held.grant) == (text, granted())
        experiment = held.experiment if held and same else read_experiment(text)
        policy_of(context).check(experiment, granted())
        settle(experiment.local)
        require(experiment.local.arithmetic, target)
        if held is None or not same:
            strategy = _strategy_of(experiment)
            task = tasks.create(experiment.task, experiment.partition, experiment.seed)
            task = strategy.arrange(task, experiment)
            model = build(task, experiment.seed, target, experiment.personal.parts, strategy.check_model)
            held = _sessions[target] = cls(
                text,
                experiment,
                strategy,
                task,
                model,
                Scoring(task, model.module, experiment.evaluate),
                target,
                Codec(experiment.compression, model.layout),
                Downlink(strategy, experiment, model.layout),
                Staging(target),
                Staging(target),
                grant=granted(),
            )
        held.scoring.require(trusts(context) or shares_labels(context))
        return held

    def data(self, name: str, file: str) -> ClientData:
        """A client's examples on the device; loaded once."""
        if (name, file) not in self._data:
            held = self.task.client(name, file or None)
            train, evaluate = held.train.to(self.device), held.evaluate.to(self.device)
            self._data[name, file] = replace(held, train=train, evaluate=evaluate)
        return self._data[name, file]

    def roll(self, names: list[str], file: str, share_labels: bool, in_flight: int) -> RollReply:
        """The answer to a roll call for the clients that this node hosts."""
        held = [self.data(name, file) for name in names]
        self._check_loss(held, bool(file))
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
            arithmetic=describe(self.device),
        )

    def data_schema(self, names: Sequence[str], file: str, run: str) -> str:
        """A hash of what the data of this node look like; "" where it cannot be made: no data are refused for it."""
        if (run, file) not in self._schemas:
            self._schemas.clear()
            path = own_file(file, "--data", folders=True) if file else None
            try:
                self._schemas[run, file] = schema_hash(path, self.data(names[0], file).train, run)
            except Exception as error:
                log.info("what these data look like could not be hashed: %s", error)
                self._schemas[run, file] = ""
        return self._schemas[run, file]

    def _check_loss(self, held: Sequence[ClientData], own: bool) -> None:
        """Raise SettingsError for a loss that no optimizer can follow, told by two examples, as in training.

        Whatever else goes wrong belongs to the round, where it costs one client, unless the site brings the data `own`:
        then the server could not try it, and what this site cannot learn from is told at once.
        """
        data = next((data.train for data in held if len(data.train)), None)
        if data is None or self._sound:
            return
        loss, done = None, False
        tried = own and len(data) > 1 and self.task.census is None
        try:
            with torch.no_grad(), self.model.trial():
                batch = data.batch(torch.arange(min(2, len(data))))
                loss, done = self.forward(self.task, self.model, self.experiment.local).loss(batch), True
        except Exception as error:
            if tried and not out_of_memory(error):
                raise SiteError("data-unfit", f"the model cannot learn from these data: {located(error)}") from error
        self._sound = isinstance(loss, torch.Tensor) and loss.ndim == 0
        if done and not self._sound:
            told = f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise SettingsError(
                f"{type(self.task).__name__}.loss() returned {told}; allowed: a 0-d tensor, the mean over the batch"
            )


_sessions: dict[torch.device, Session] = {}
_ram = RamMemory()
_cache = StateCache()


def device_of(context: Context) -> torch.device:
    """The device of a node, from its settings "device" and "gpu-memory-fraction"."""
    config = context.node_config
    return choose(str(config.get("device", "cpu")), float(config.get("gpu-memory-fraction", 0.0)))


def policy_of(context: Context) -> Policy:
    """The policy of a node, from its setting "policy"."""
    return Policy.load(str(context.node_config.get("policy", "")))


def trusts(context: Context) -> bool:
    """Whether server and node are one owner's, on one machine: as the node's setting "trusted" says, which engines set,
    else where Ray runs the node (`flwr run` of a simulation)."""
    ray: Any = sys.modules.get("ray")
    simulated = "name" not in context.node_config and ray is not None and ray.is_initialized()
    return bool(context.node_config.get("trusted", simulated))


def grant_of(context: Context) -> Grant:
    """What an experiment may name at a node: as its policy and its setting "allow-tasks" (references, with spaces
    between) say."""
    allowed = str(context.node_config.get("allow-tasks", "")).split()
    return policy_of(context).grant(allowed, trusts(context))


def shares_labels(context: Context) -> bool:
    """Whether class counts may leave this node: as its policy says, else its setting "share-labels", else only in a
    simulation."""
    config, allowed = context.node_config, policy_of(context).share_labels
    return bool(config.get("share-labels", "name" not in config)) if allowed is None else allowed


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
    own, nodes, names = int(config["partition-id"]), int(config.get("num-partitions", 1)), task.names()
    if not names:
        raise SettingsError(NO_CLIENTS)
    return names[own::nodes]


def memory_of(context: Context, session: Session) -> Memory:
    """The memory's home, from the node's setting "memory": "ram", a folder, or Flower's context by default.

    With "durable" = false, as in simulations, a folder's files are not flushed to the disk, and what lies in it is
    read anew each time: other processes share it.
    """
    home = str(context.node_config.get("memory", ""))
    if home == "ram":
        return _ram
    if not home:
        return ContextMemory(context.state)
    durable = bool(context.node_config.get("durable", True))
    return DiskMemory(
        Path(home).expanduser(),
        durable,
        layout=session.model.layout_hash,
        device=session.device,
        to_host=session.disk.to_host,
        cache=_cache if durable else None,
    )


def _strategy_of(experiment: Experiment) -> FederatedStrategy:
    """The algorithm. Of this site nothing has been seen: faults are of the experiment's words."""
    try:
        return settled(experiment)[0]
    except Sayable:
        raise
    except SettingsError as error:
        raise ExperimentError(str(error)) from error


def release() -> None:
    """After memory ran out: give up what can be read or built again."""
    _cache.clear()
    free()


def _class_counts(examples: Examples) -> str:
    targets = getattr(examples, "targets", None)
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.ndim != 1 or not len(targets):
        return ""
    if int(targets.min()) < 0 or int(targets.max()) >= MOST_CLASSES:
        return ""  # no class numbers
    return json.dumps(torch.bincount(targets.long()).tolist())
