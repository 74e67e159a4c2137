"""Resident nodes: one long-lived process that joins a Flower server and runs the ClientApp in it.

Each does what a stock SuperNode does, but starts no process per message, polls often while there is work and rarely
when there is none, and never fetches the code bundle: a site runs only what it installed. A process may host many
clients: each its own node with its own memory, all on one connection, at work one at a time.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from client.memory.folder import OpenMemory, open_memory
from client.node.access import Access
from client.node.audited import AuditFailed, SiteLog
from client.node.errors import RunOver, SenderGone, ServerForgot, Stopping, TooLarge, brief
from client.node.fleet import Fleet
from common.errors import RunError, SettingsError
from strategies.protocol import wire
from strategies.protocol.messages import notice_of, outline

log = logging.getLogger("client.node.resident")

App = Callable[[Message, Context], Message]

# The in-memory `Context.state` of so many runs is kept.
RUNS_KEPT = 8


class Watch(Protocol):
    """Who counts what the nodes of a process do; called from several threads."""

    def connected(self, name: str, yes: bool) -> None:
        """Whether the server holds a client for present."""

    def answered(
        self,
        name: str,
        kind: str,
        status: str,
        seconds: Mapping[str, float],
        bytes_down: int,
        bytes_up: int,
        metrics: Mapping[str, float],
    ) -> None:
        """One more message was answered."""

    def told(self, name: str, notice: str) -> None:
        """The server said why it refuses a client, or dropped its upload."""


@dataclass(frozen=True)
class NodeOptions:
    """What a client says about itself. All but `access` and `audit`, the file of its audit log ("": none), reaches the
    ClientApp as `context.node_config`."""

    access: Access
    name: str
    device: str = "cpu"
    data: str = ""
    memory: str = ""
    policy: str = ""
    gpu_memory_fraction: float = 0.0
    allow_tasks: tuple[str, ...] = ()
    trusted: bool = False
    approve: str = ""
    approvals: str = ""
    held: OpenMemory | None = None
    """The memory folder, if it has been taken already."""
    audit: str = ""

    @property
    def config(self) -> dict[str, bool | int | float | str]:
        """The settings as Flower passes them on."""
        plain = {
            key: getattr(self, key) for key in ("name", "device", "data", "memory", "policy", "approve", "approvals")
        }
        allowed = {"allow-tasks": " ".join(self.allow_tasks), "trusted": self.trusted}
        return {**plain, **allowed, "gpu-memory-fraction": self.gpu_memory_fraction}


@dataclass
class Process:
    """What the nodes of one process share."""

    app: App
    stop: threading.Event
    clients: int = 1
    watch: Watch | None = None
    at_work: threading.Lock = field(default_factory=threading.Lock)
    """Held while a message is worked on: model, device and random numbers are the process's."""
    _news: threading.Condition = field(default_factory=threading.Condition)

    def pause(self, idle_s: float) -> None:
        """Wait before the next look for a message, but not once another client here has received one."""
        with self._news:
            if not self.stop.is_set():
                self._news.wait(poll_delay(idle_s, self.clients))

    def wake(self) -> None:
        """A message has come, so others will have come too; or it is time to stop."""
        with self._news:
            self._news.notify_all()


def run_nodes(clients: Sequence[NodeOptions], app: App, stop: threading.Event, watch: Watch | None = None) -> None:
    """Join the server as each of these clients and answer its messages until `stop` is set; messages in hand are
    finished first.

    Exceptions of the app become error replies. Raises SettingsError if an address, key or memory folder cannot be used
    or when the server refuses a client, and RunError when no server was there for `max_wait_s` seconds: the other
    clients of the process go on, and the first error is raised when all have ended.
    """
    process = Process(app, stop, len(clients), watch)
    errors: list[Exception] = []
    with ExitStack() as stack:
        for client in clients:
            client.access.check()
            if client.memory:
                stack.enter_context(client.held or open_memory(client.memory))
        threads = [
            threading.Thread(target=_guarded, args=(client, process, errors), name=client.name, daemon=True)
            for client in clients
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if stop.wait(0.2):
                process.wake()
            for thread in threads:
                thread.join(0.05 if stop.is_set() else 0)
    if errors:
        raise errors[0]


def poll_delay(idle_s: float, clients: int = 1) -> float:
    """Seconds until the next look for a message, after `idle_s` seconds without one, in a process of `clients`.

    A twentieth of the idle time, between 10 ms and 2 s: polling prolongs the gap between two rounds by 2 to 3 %,
    however long it is. One look costs the server about 1 ms, which it lacks for the other nodes' uploads: so all
    clients of a process together look as often as one would.
    """
    return min(max(idle_s / 20, 0.01 * clients), 2.0) * random.uniform(0.8, 1.2)


def _guarded(options: NodeOptions, process: Process, errors: list[Exception]) -> None:
    try:
        _run(options, process)
    except Exception as error:
        if process.clients > 1:
            log.error("%s ends: %s", options.name, error)
        errors.append(error)


def _run(options: NodeOptions, process: Process) -> None:
    book = SiteLog(Path(options.audit), options.name, options.access, options.policy) if options.audit else None
    tell = book.tell if book else _unheard
    try:
        _join_and_serve(options, process, book)
    except Exception as error:
        tell("ended", "refused" if isinstance(error, SettingsError) else "failed", why=str(error))
        raise
    tell("stopped")


def _unnoted(sha256: str) -> None:
    pass


def _unheard(what: str, outcome: str = "ok", **more: Any) -> None:
    pass


def _join_and_serve(options: NodeOptions, process: Process, book: SiteLog | None) -> None:
    tell = book.tell if book else _unheard
    while not process.stop.is_set():
        fleet = Fleet(options.access, process.stop, lambda yes: _present(process, options, yes))
        try:
            fleet.join()
            log.info("joined %s as %s (node %d)", fleet.address, options.name, fleet.node.node_id)
            tell("joined", server=fleet.address, node=fleet.node.node_id)
            _serve(fleet, options, process, book)
        except ServerForgot:
            tell("left", "the server forgot this node")
            log.warning("the server at %s does not know this node any more; joining again", fleet.address)
        except Stopping:
            break
        finally:
            fleet.leave()
            _present(process, options, False)
    log.info("%s left %s", options.name, options.access.server)


def _present(process: Process, options: NodeOptions, yes: bool) -> None:
    if process.watch:
        process.watch.connected(options.name, yes)


def _serve(fleet: Fleet, options: NodeOptions, process: Process, book: SiteLog | None = None) -> None:
    contexts: dict[int, Context] = {}
    last_work = time.monotonic()
    while not process.stop.is_set():
        found = fleet.next_message()
        _present(process, options, fleet.connected)
        if found is None:
            process.pause(time.monotonic() - last_work)
            continue
        process.wake()
        run_id = found.run_id
        try:
            started = time.monotonic()
            message = fleet.receive(found)
            received = time.monotonic()
            if book:
                book.received(message)
            with process.at_work:
                begun = time.monotonic()
                reply = _answer(process.app, message, _context(contexts, run_id, fleet.node.node_id, options))
            done = time.monotonic()
            fleet.send(reply, done - begun, partial(book.leaving, reply) if book else _unnoted)
            seconds = {"receive": received - started, "work": done - begun, "send": time.monotonic() - done}
            _count(process.watch, options.name, message, reply, seconds)
        except RunOver:
            log.info("run %d has ended; its message is dropped", run_id)
        except SenderGone as error:
            log.warning("run %d: %s", run_id, error)
        except TooLarge as error:
            log.warning("run %d: %s; the server is told", run_id, error)
            fleet.send(fleet.refusal(found, f"{options.name}: {error}"), 0.0)
        except AuditFailed as error:
            log.error("nothing is sent that cannot be written down: %s", error)
            why = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{options.name}: its audit log cannot be written")
            fleet.send(Message(why, reply_to=message), 0.0)
        except (ServerForgot, Stopping, RunError, SettingsError):
            raise
        except Exception as error:
            log.warning("run %d: a message could not be received or answered: %s", run_id, brief(error))
            log.debug("the whole of it:", exc_info=True)
        last_work = time.monotonic()


def _count(watch: Watch | None, name: str, message: Message, reply: Message, seconds: Mapping[str, float]) -> None:
    if watch is not None:
        if notice := notice_of(message):
            watch.told(name, notice)
            return
        status, metrics = outline(reply)
        kind = message.metadata.message_type.partition(".")[0]
        down, up = (wire.size(each.content) if each.has_content() else 0 for each in (message, reply))
        watch.answered(name, kind, status, seconds, down, up, metrics)


def _context(contexts: dict[int, Context], run_id: int, node_id: int, options: NodeOptions) -> Context:
    if run_id not in contexts:
        contexts[run_id] = Context(
            run_id=run_id, node_id=node_id, node_config=options.config, state=RecordDict(), run_config={}
        )
        if len(contexts) > RUNS_KEPT:
            del contexts[next(iter(contexts))]
    return contexts[run_id]


def _answer(app: App, message: Message, context: Context) -> Message:
    try:
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
        return reply
    except Exception:
        # Its text may hold what is this site's alone; client/reasons.py says what may leave.
        log.exception("run %d: the ClientApp failed", context.run_id)
        reason = f"client {context.node_config['name']}: failed: something went wrong at the site; its log has more"
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
