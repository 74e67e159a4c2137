"""The SuperLink process: Flower's own program, without a line of log for each of a round's dozens of requests, with a
bound on what it takes in at once, and with words for whom it refuses."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from flwr.common.constant import PUBLIC_KEY_HEADER
from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.constant import NodeStatus
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.logger import update_console_handler

from common.deploy.audit import AuditLog
from common.deploy.keys import fingerprint_or
from common.flower import MOST_CALL_BYTES, keepalive
from server.deploy import front
from server.deploy.seldom import Seldom
from server.deploy.waiting import VARIABLE, Knocks

log = logging.getLogger("flwr")

REFUSALS = (
    ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED,
    ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED,
)


def main() -> None:
    """Run a SuperLink with the options of `flower-superlink`."""
    update_console_handler(level=os.environ.get("FLWR_LOG_LEVEL", "WARNING").upper())
    program: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    program.GRPC_MAX_MESSAGE_LENGTH = MOST_CALL_BYTES
    refusals = Refusals(front.install(program))
    _keep_alive()
    for each in ("flwr", "grpc._server", "uvicorn.error"):
        logging.getLogger(each).addFilter(_Passing())
    waiting = [knocking(Knocks(Path(os.environ[VARIABLE])))] if os.environ.get(VARIABLE) else []
    wrap("ActivateNode", why_not_activated, [whose, twin], [refusals.of_a_call, *waiting])
    wrap("RegisterNode", lambda servicer, key: f"key {_name(key)} is not registered", [], [refusals.of_a_call])
    _tell_failed_signatures(refusals)
    # What Flower says of the same refusals, at every try, with the whole key.
    log.addFilter(lambda record: "Attempted to register SuperNode" not in record.getMessage())
    program.flower_superlink()


def _keep_alive() -> None:
    """Let the gRPC server ask quiet nodes whether they are there, and let them ask. Flower has no option for it."""
    made = grpc.server

    def kept_alive(*args: Any, options: Any = (), **more: Any) -> Any:
        return made(*args, options=[*(dict(options) | dict(keepalive())).items()], **more)

    grpc.server = kept_alive


class _Passing(logging.Filter):
    """Of a database that was locked for a moment one line is enough: who called tries again."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and any(word in str(error) for word in ("database is locked", "database table is locked")):
            record.msg, record.args, record.exc_info, record.exc_text = BUSY, (), None, None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


BUSY = "Flower's database was busy; whoever asked tries again"


Check = Callable[[FleetServicer, Any, Any], str]
"""Why a call (servicer, request, context) may not go on; "" if it may."""
Listener = Callable[[FleetServicer, Any, Any, str], None]
"""Hears of a call that was refused, and why."""


class Refusals:
    """Who was refused and why, now and then: in the process's log and in the audit log."""

    def __init__(self, book: AuditLog | None = None) -> None:
        self._book, self._told = book, Seldom()

    def of_a_call(self, servicer: FleetServicer, request: Any, context: Any, reason: str) -> None:
        """A listener."""
        self.tell(reason, _site_of(servicer, request.public_key), fingerprint_or(request.public_key, ""))

    def tell(self, reason: str, site: str = "", key: str = "") -> None:
        """A reason, of a site and a key where they are known."""
        if not self._told.due(reason):
            return
        log.warning("refused a node: %s", reason)
        if self._book:
            self._book.try_record("refused", site=site, key=key, why=reason)


def wrap(
    method: str, why: Callable[[FleetServicer, bytes], str], checks: Sequence[Check], listeners: Sequence[Listener]
) -> None:
    """Let a Fleet call be checked before Flower answers it, one at a time, and let one that fails say why, to the node
    and to all listeners. Flower says neither."""
    original = getattr(FleetServicer, method)
    alone = threading.Lock() if checks else nullcontext()

    def wrapped(self: FleetServicer, request: Any, context: Any) -> Any:
        reason = ""
        try:
            with alone:
                if reason := next(filter(None, (check(self, request, context) for check in checks)), ""):
                    raise FlowerError(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, reason, reason)
                return original(self, request, context)
        except FlowerError as error:
            if error.code not in REFUSALS:
                raise
            reason = reason or why(self, request.public_key)
            for listener in listeners:
                listener(self, request, context, reason)
            raise FlowerError(error.code, error.message, error.public_details or reason) from error

    setattr(FleetServicer, method, wrapped)


def why_not_activated(servicer: FleetServicer, key: bytes) -> str:
    """Why Flower did not activate the node of a key."""
    node = servicer.state_factory.state().get_node_id_by_public_key(key)
    if node is None:
        return f"key {_name(key)} is not registered, or was removed"
    name = _site_of(servicer, key) or node
    return f"key {_name(key)} of {name} is in use by another process, or by one that ended seconds ago"


def whose(servicer: FleetServicer, request: Any, context: Any) -> str:
    """A check: a node is activated by the holder of its key alone."""
    key = request.public_key
    return "" if _signed(context, key) == key else f"key {_name(key)} was named in a call that another key signed"


def twin(servicer: FleetServicer, request: Any, context: Any) -> str:
    """A check: nor is it while another key of the same site is here. While keys change a site has two."""
    state = servicer.state_factory.state()
    name, node = _site_of(servicer, request.public_key), state.get_node_id_by_public_key(request.public_key)
    if not name:
        return ""
    here = state.get_node_info(statuses=[NodeStatus.ONLINE])
    other = next((info for info in here if info.name == name and info.node_id != node), None)
    return f"{name} is in use with its other key, by a process that is here or ended seconds ago" if other else ""


def knocking(knocks: Knocks) -> Listener:
    """A listener: keys that nobody knows wait to be let in. A doctor's look, with a heartbeat of 0, is none."""

    def noted(servicer: FleetServicer, request: Any, context: Any, reason: str) -> None:
        key = request.public_key
        unknown = servicer.state_factory.state().get_node_id_by_public_key(key) is None
        if unknown and request.heartbeat_interval > 0 and _signed(context, None) == key:
            knocks.add(key, str(context.peer()))

    return noted


def _signed(context: Any, otherwise: bytes | None) -> bytes | None:
    """The key that signed a call."""
    found: bytes | None = dict(context.invocation_metadata()).get(PUBLIC_KEY_HEADER, otherwise)
    return found


def _site_of(servicer: FleetServicer, key: bytes) -> str:
    """The name of the site of a key, "" where there is none."""
    state = servicer.state_factory.state()
    node = state.get_node_id_by_public_key(key)
    found = state.get_node_info(node_ids=[node]) if node is not None else []
    return next((str(info.name) for info in found if info.name), "")


def _tell_failed_signatures(refusals: Refusals) -> None:
    module: Any = node_auth_server_interceptor
    original = module._unary_unary_rpc_terminator

    def told(message: str, *more: Any) -> Any:
        refusals.tell(f"a call was not let in: {message}")
        return original(message, *more)

    module._unary_unary_rpc_terminator = told


def _name(key: bytes) -> str:
    return fingerprint_or(key, "that cannot be read")


if __name__ == "__main__":
    main()
