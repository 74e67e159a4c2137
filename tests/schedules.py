"""Schedules of faults, and the network and the sites that they strike. `tests/world.py` runs the server among them.

Everything is real but what lies between the processes: the round loop, the ClientApp, client memory on disk,
checkpoints and history. `Network` stands for the SuperLink. A client that is killed comes back as a new process that
sees only what is on its disk.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import strategies as st

from client.app import app
from client.memory import DiskMemory
from server.inprocess import InProcessGrid, answer, stamp
from strategies.messages import HEAD
from tests.corruption import MESSAGE, REPLY, corrupted

if TYPE_CHECKING:
    from tests.world import World

ON_MESSAGE = (
    "message dropped",
    "message delayed",  # comes a try or more later, but before any newer one to its client
    "message overtaken",  # comes a try or more later, also after newer ones
    "message doubled",
    "message doubled late",  # comes again a try or more later, also after newer ones
    "message corrupted",
)
ON_REPLY = ("reply dropped", "reply failed", "reply delayed", "reply doubled", "reply doubled late", "reply corrupted")
ON_CLIENT = (
    "killed before training",
    "killed in training",
    "killed before the save",
    "killed in the save",
    "killed after the save",
    "disk wiped",
    "version truncated",
    "version damaged",
    "node left",
)
ON_ORDER = ("reordered", "one by one")
ON_SERVER = (
    "silent at the roll call",
    "server killed after sampling",
    "server killed after the push",
    "server killed while collecting",
    "server killed after the aggregate",
    "server killed in the line",
    "server killed after the line",
    "server killed in the checkpoint",
    "server killed after the checkpoint",
    "newest checkpoint damaged",
)
KINDS = ON_MESSAGE + ON_REPLY + ON_CLIENT + ON_ORDER + ON_SERVER
DEADLINE_S = 5.0  # of virtual time
LAST_TRY = 9
JOINS_AT = 3
ERRORS = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


class Killed(BaseException):
    """A process is gone: no handler of exceptions sees this."""


@dataclass(frozen=True)
class Fault:
    """At try number `at` (counted over all lives of the server) something happens to the `who`-th of those sampled,
    or to the server; `how` chooses among the variants of a kind."""

    kind: str
    at: int
    who: int = 0
    how: int = 0


@dataclass(frozen=True)
class Schedule:
    """What goes wrong among `clients` clients, the last `late` of whom join at try 3.

    `slow_disk`: a checkpoint is under way until somebody waits for it; else it is there at once. `tables` are the
    experiment's `[round]`, `[server]` and `[checkpoint]`, `seed`, `rounds` and the `weights` of its strategy.
    """

    faults: Sequence[Fault] = ()
    clients: int = 4
    late: int = 0
    slow_disk: bool = False
    weights: str = "uniform"
    tables: Mapping[str, Any] = field(default_factory=dict)


def faults() -> st.SearchStrategy[Fault]:
    return st.builds(
        Fault, st.sampled_from(KINDS), st.integers(1, LAST_TRY), st.integers(0, 4), st.integers(0, 2 * len(REPLY) - 1)
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any small federation and up to a dozen faults."""
    clients = draw(st.integers(3, 5))
    late = draw(st.integers(0, 1))
    sample = draw(st.none() | st.integers(2, clients - late))
    most = sample or clients - late
    return Schedule(
        draw(st.lists(faults(), min_size=2, max_size=12)),
        clients,
        late,
        draw(st.booleans()),
        draw(st.sampled_from(["uniform", "data"])),
        {
            "seed": draw(st.integers(0, 3)),
            "rounds": draw(st.integers(3, 6)),
            "round": {
                **({} if sample is None else {"sample": sample, "over_select": draw(st.integers(0, 1))}),
                "quorum": draw(st.integers(1, most)),
            },
            "server": {"optimizer": draw(st.sampled_from(["sgd", "momentum"]))},
            "checkpoint": {"every": draw(st.integers(1, 2)), "keep": draw(st.integers(1, 3))},
        },
    )


# --- a site


@dataclass
class Client:
    """A disk, a process, and a node at the SuperLink."""

    name: str
    disk: Path
    node: int = 0
    context: Context = None  # type: ignore[assignment]
    up: bool = True
    listed: bool = True
    back_s: float = 0.0
    lives: int = 0
    joins_at: int = 0
    dies: Fault | None = None
    """At which step this process is killed next."""
    lost: set[tuple[str, int, int]] = field(default_factory=set)
    """Versions (run, generation, version) that were on the disk and were destroyed."""

    def start(self) -> None:
        """A new process. Its disk lies under a new path: what an old process may have kept in mind does not count."""
        self.lives += 1
        new = self.disk.with_name(f"{self.name}.{self.lives}")
        if self.disk.exists():
            shutil.copytree(self.disk, new)
            shutil.rmtree(self.disk)
        self.disk = new
        config: dict[str, bool | float | int | str] = {"name": self.name, "memory": str(new)}
        self.context = Context(0, self.node, config, RecordDict(), {})
        self.up, self.dies = True, None

    def load(self, run: str, generation: int, version: int) -> Any:
        """A version as it is on the disk; None if it is not."""
        return DiskMemory(self.disk, durable=False).load(run, self.name, generation, version)

    def versions(self) -> dict[Path, tuple[str, int, int]]:
        """The files on the disk and what each is."""
        found = {}
        for path in sorted(self.disk.rglob("*.safetensors")):
            run, _, generation, version = path.relative_to(self.disk).with_suffix("").parts
            found[path] = run, int(generation), int(version)
        return found

    def damage(self, fault: Fault) -> bool:
        """Destroy what is on the disk, or one version; whether there was any. The process starts anew."""
        versions = self.versions()
        if not versions:
            return False
        if fault.kind == "disk wiped":
            shutil.rmtree(self.disk)
            self.lost |= set(versions.values())
        else:
            path = list(versions)[fault.how % len(versions)]
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.unlink()  # never in place: loaded tensors are views of a file
            path.write_bytes(content[: len(content) // 2] if fault.kind == "version truncated" else content)
            self.lost.add(versions[path])
        self.start()
        return True


# --- what lies between


class Network(InProcessGrid):
    """The SuperLink and the lines to it. A client works on a message as soon as it comes."""

    def __init__(self, world: World) -> None:
        self._identify()
        self._world = world
        self._replies: dict[str, list[tuple[int, Message]]] = defaultdict(list)  # message -> (from which try on, reply)
        self._late: list[tuple[int, bool, Message]] = []  # (at which try, after the newer ones, message)
        self._current: dict[str, Message] = {}
        self._order: Fault | None = None

    def get_node_ids(self) -> Iterable[int]:
        return [info.node_id for info in self.get_nodes()]

    def get_nodes(self) -> Iterable[NodeInfo]:
        # Another time of activation tells the server that a node's process is another one.
        return [NodeInfo(node_id=c.node, last_activated_at=str(c.lives)) for c in self._world.online()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = [stamp(message) for message in messages]
        if messages and messages[0].metadata.message_type == MessageType.TRAIN:
            self._train(messages)
        else:
            for message in messages:
                client = self._world.at(message.metadata.dst_node_id)
                if client is not None and not self._world.due("silent at the roll call"):
                    self._put(0, answer(app, message, client.context))
        return ids

    def _train(self, messages: list[Message]) -> None:
        world = self._world
        world.tries += 1
        world.kill("server killed after sampling")
        self._current = {message.metadata.message_id: message for message in messages}
        mine, orders = world.struck([name_of(message) for message in messages])
        self._order = orders[0] if orders else None
        self._deliver_late(False, {message.metadata.dst_node_id for message in messages})
        for message in messages[::-1] if self._order and self._order.how % 2 else messages:
            self._send(message, mine[name_of(message)])
        self._deliver_late(True, set())
        world.kill("server killed after the push")

    def _send(self, message: Message, faults: Mapping[str, Fault]) -> None:
        world = self._world
        for fault in faults.values():
            world.strike(name_of(message), fault)
        if "message dropped" in faults:
            return
        for kind in ("message delayed", "message overtaken", "message doubled late"):
            if kind in faults:
                self._late.append((world.tries + 1 + faults[kind].how % 2, kind != "message delayed", message))
        if "message delayed" in faults or "message overtaken" in faults:
            return
        if "message corrupted" in faults:
            message = corrupted(message, chosen(MESSAGE, faults["message corrupted"]))
        for _ in range(2 if "message doubled" in faults else 1):
            self._back(world.train(message), faults)

    def _back(self, reply: Message | None, faults: Mapping[str, Fault]) -> None:
        if reply is None or "reply dropped" in faults:
            return
        if "reply failed" in faults:
            reply = Message(error=Error(ERRORS[faults["reply failed"].how % 3], "gone"), metadata=reply.metadata)
        elif "reply corrupted" in faults and not reply.has_error():
            reply = corrupted(reply, chosen(REPLY, faults["reply corrupted"]))
        now = self._world.tries
        if "reply delayed" in faults:
            now += 1 + faults["reply delayed"].how % 2
        self._put(now, reply)
        if "reply doubled" in faults:
            self._put(now, reply)
        if "reply doubled late" in faults:
            self._put(now + 1, reply)

    def _put(self, at: int, reply: Message) -> None:
        self._replies[reply.metadata.reply_to_message_id].append((at, reply))

    def _deliver_late(self, after: bool, nodes: set[int]) -> None:
        """What is due, and what must not be overtaken by a new message to one of `nodes`."""
        for late in self._late.copy():
            at, overtaken, message = late
            due = at <= self._world.tries or message.metadata.dst_node_id in nodes
            if due and overtaken == after:
                self._late.remove(late)
                self._back(self._world.train(message), {})

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        world = self._world
        world.pulled()
        here = []
        for message_id in message_ids:
            ready = self._replies.pop(message_id, [])
            here += [reply for at, reply in ready if at <= world.tries]
            self._replies[message_id] = [later for later in ready if later[0] > world.tries]
            if not ready and message_id in self._current and not world.listed(self._current[message_id]):
                # The SuperLink answers for a node that is gone.
                gone = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=self._current.pop(message_id))
                here.append(gone)
        if not (here and {reply.metadata.reply_to_message_id for reply in here} <= self._current.keys()):
            return here
        if self._order and self._order.kind == "reordered":
            cut = self._order.how // 2 % len(here)
            here = (here[cut:] + here[:cut])[:: -1 if self._order.how % 2 else 1]
        ends = world.due("server killed while collecting", keep=True)
        if ends and len(here) < len(self._current):  # the others have come before
            world.kill("server killed while collecting")
        if ends or (self._order and self._order.kind == "one by one"):
            for reply in here[1:]:
                self._put(0, reply)
            here = here[:1]
        return here


def name_of(message: Message) -> str:
    return str(message.content.config_records[HEAD]["client"])


def chosen(changes: Mapping[str, Any], fault: Fault) -> Any:
    """The change that a fault makes."""
    return list(changes.values())[fault.how % len(changes)]
