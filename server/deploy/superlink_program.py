"""The SuperLink process: Flower's own program, without a line of log for each of a round's dozens of requests, with a
bound on what it takes in at once, and with words for whom it refuses."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from flwr.common.constant import PUBLIC_KEY_HEADER
from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.constant import NodeStatus
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.logger import update_console_handler

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

_told = Seldom()
_activating = threading.Lock()


def main() -> None:
    """Run a SuperLink with the options of `flower-superlink`."""
    update_console_handler(level=os.environ.get("FLWR_LOG_LEVEL", "WARNING").upper())
    program: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    program.GRPC_MAX_MESSAGE_LENGTH = MOST_CALL_BYTES
    front.install(program)
    _keep_alive()
    for each in ("flwr", "grpc._server", "uvicorn.error"):
        logging.getLogger(each).addFilter(_Passing())
    _explain("ActivateNode", _why_not_activated)
    _one_process_a_name()
    if os.environ.get(VARIABLE):
        _note_knocks(Knocks(Path(os.environ[VARIABLE])))
    _explain("RegisterNode", lambda servicer, key: f"key {_name(key)} is not registered")
    _tell_failed_signatures()
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


def _explain(method: str, why: Any) -> None:
    """Let a Fleet call that fails say why, to the node and in the log. Flower says neither."""
    original = getattr(FleetServicer, method)

    def explained(self: FleetServicer, request: Any, context: Any) -> Any:
        try:
            return original(self, request, context)
        except FlowerError as error:
            if error.code not in REFUSALS:
                raise
            reason = why(self, request.public_key)
            _tell(reason)
            raise FlowerError(error.code, error.message, error.public_details or reason) from error

    setattr(FleetServicer, method, explained)


def _why_not_activated(servicer: FleetServicer, key: bytes) -> str:
    state = servicer.state_factory.state()
    node = state.get_node_id_by_public_key(key)
    if node is None:
        return f"key {_name(key)} is not registered, or was removed"
    name = next((info.name for info in state.get_node_info(node_ids=[node])), "") or node
    return f"key {_name(key)} of {name} is in use by another process, or by one that ended seconds ago"


def _one_process_a_name() -> None:
    """A node is activated by the holder of its key alone, and not while another key of the same site is here: while
    keys change a site has two. Flower looks at neither."""
    original = FleetServicer.ActivateNode

    def guarded(self: FleetServicer, request: Any, context: Any) -> Any:
        signed = dict(context.invocation_metadata()).get(PUBLIC_KEY_HEADER, request.public_key)
        with _activating:
            state = self.state_factory.state()
            node = state.get_node_id_by_public_key(request.public_key)
            if reason := _whose(request.public_key, signed) or _twin(state, node):
                _tell(reason)
                raise FlowerError(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, reason, reason)
            return original(self, request, context)

    FleetServicer.ActivateNode = guarded  # type: ignore[method-assign]


def _whose(key: bytes, signed: bytes) -> str:
    return "" if key == signed else f"key {_name(key)} was named in a call that another key signed"


def _twin(state: Any, node: int | None) -> str:
    """Why a node cannot come in beside the others of its name that are online; "" if it can."""
    found = state.get_node_info(node_ids=[node]) if node is not None else []
    name = next((info.name for info in found), "")
    if not name:
        return ""
    here = state.get_node_info(statuses=[NodeStatus.ONLINE])
    twin = next((info for info in here if info.name == name and info.node_id != node), None)
    return f"{name} is in use with its other key, by a process that is here or ended seconds ago" if twin else ""


def _note_knocks(knocks: Knocks) -> None:
    """Keys that are refused wait to be let in. A doctor's look, with a heartbeat of 0, is none."""
    original = FleetServicer.ActivateNode

    def noted(self: FleetServicer, request: Any, context: Any) -> Any:
        try:
            return original(self, request, context)
        except FlowerError as error:
            signed = dict(context.invocation_metadata()).get(PUBLIC_KEY_HEADER)
            unknown = self.state_factory.state().get_node_id_by_public_key(request.public_key) is None
            if error.code in REFUSALS and unknown and request.heartbeat_interval > 0 and signed == request.public_key:
                knocks.add(request.public_key, str(context.peer()))
            raise

    FleetServicer.ActivateNode = noted  # type: ignore[method-assign]


def _tell_failed_signatures() -> None:
    module: Any = node_auth_server_interceptor
    original = module._unary_unary_rpc_terminator

    def told(message: str, *more: Any) -> Any:
        _tell(f"a call was not let in: {message}")
        return original(message, *more)

    module._unary_unary_rpc_terminator = told


def _tell(reason: str) -> None:
    if _told.due(reason):
        log.warning("refused a node: %s", reason)


def _name(key: bytes) -> str:
    return fingerprint_or(key, "that cannot be read")


if __name__ == "__main__":
    main()
