"""The sites and the network that faults strike.

`Network` stands for the SuperLink and the lines to it. A client that is killed comes back as a new process that sees
only what is on its disk.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from client.app import app
from client.memory.versions import DiskMemory
from server.engines.inprocess import InProcessGrid, answer, stamp
from strategies.protocol.messages import HEAD
from tests.support.corruption import MESSAGE, REPLY, corrupted
from tests.support.schedules import Fault

if TYPE_CHECKING:
    from tests.support.world import World

ERRORS = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


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
        config: dict[str, bool | float | int | str] = {"name": self.name, "memory": str(new), "trusted": True}
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
