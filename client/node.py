"""The resident node: one long-lived process that joins a Flower server and runs the ClientApp in it.

It does what a stock SuperNode does, but starts no process per message, polls often while there is work and
rarely when there is none, and never fetches the code bundle: a site runs only what it installed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from client.fleet import Fleet, RunOver, ServerForgot, Stopping, server_address
from common.errors import RunError, SettingsError

log = logging.getLogger("client.node")

App = Callable[[Message, Context], Message]

# The in-memory `Context.state` of so many runs is kept.
RUNS_KEPT = 8


@dataclass(frozen=True)
class NodeOptions:
    """What a site says about itself. `max_wait_s`: longest time without a server; None: no limit.

    `device`, `data` and `memory` reach the ClientApp as `context.node_config`, together with `name`.
    """

    server: str
    name: str
    device: str = "cpu"
    data: str = ""
    memory: str = ""
    insecure: bool = False
    max_wait_s: float | None = None


def run_node(options: NodeOptions, app: App, stop: threading.Event) -> None:
    """Join the server and answer its messages until `stop` is set; the message in hand is finished first.

    Exceptions of the app become error replies. Raises SettingsError if the address is wrong or the server
    refuses this node, and RunError when no server was there for `max_wait_s` seconds.
    """
    address = server_address(options.server, options.insecure)
    while not stop.is_set():
        fleet = Fleet(address, options.max_wait_s, stop)
        try:
            fleet.join()
            log.info("joined %s as %s (node %d)", address, options.name, fleet.node.node_id)
            _serve(fleet, options, app, stop)
        except ServerForgot:
            log.warning("the server at %s does not know this node any more; joining again", address)
        except Stopping:
            break
        finally:
            fleet.leave()
    log.info("%s left %s", options.name, address)


def poll_delay(idle_s: float) -> float:
    """Seconds until the next look for a message, after `idle_s` seconds without one.

    A twentieth of the idle time, between 10 ms and 2 s: polling prolongs the gap between two rounds by 2 to 3 %,
    however long it is. One look costs the server about 1 ms, which it lacks for the other nodes' uploads.
    """
    return min(max(idle_s / 20, 0.01), 2.0) * random.uniform(0.8, 1.2)


def _serve(fleet: Fleet, options: NodeOptions, app: App, stop: threading.Event) -> None:
    contexts: dict[int, Context] = {}
    last_work = time.monotonic()
    while not stop.is_set():
        found = fleet.next_message()
        if found is None:
            stop.wait(poll_delay(time.monotonic() - last_work))
            continue
        run_id, tree = found
        try:
            message = fleet.receive(run_id, tree)
            start = time.monotonic()
            reply = _answer(app, message, _context(contexts, run_id, fleet.node.node_id, options))
            fleet.send(reply, time.monotonic() - start)
        except RunOver:
            log.info("run %d has ended; its message is dropped", run_id)
        except (ServerForgot, Stopping, RunError, SettingsError):
            raise
        except Exception:
            log.exception("run %d: a message could not be received or answered", run_id)
        last_work = time.monotonic()


def _context(contexts: dict[int, Context], run_id: int, node_id: int, options: NodeOptions) -> Context:
    if run_id not in contexts:
        contexts[run_id] = Context(
            run_id=run_id,
            node_id=node_id,
            node_config={key: getattr(options, key) for key in ("name", "device", "data", "memory")},
            state=RecordDict(),
            run_config={},
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
    except Exception as error:
        log.exception("run %d: the ClientApp failed", context.run_id)
        reason = f"{context.node_config['name']}: {type(error).__name__}: {error}"
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
