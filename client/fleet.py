"""Flower's Fleet API, the gRPC leg between server and node. Nothing outside this file knows the transport."""

from __future__ import annotations

import ipaddress
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.address import parse_address
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

from common.errors import RunError, SettingsError
from common.flower import PULL_BACKOFF_CAP_S, PULL_BACKOFF_S

log = logging.getLogger("client.node")

CALL_TIMEOUT_S = 30.0
OBJECT_TIMEOUT_S = 600.0

# The server takes a node for gone after two intervals; this is the shortest that it allows.
_HEARTBEAT_S = float(HEARTBEAT_MIN_INTERVAL)

# A lost server is looked for about once a second; gRPC's own back-off goes up to two minutes.
_CHANNEL = [
    ("grpc.max_send_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", GRPC_MAX_MESSAGE_LENGTH),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class ServerForgot(Exception):
    """The server does not know this node: it restarted with an empty state."""


class RunOver(Exception):
    """The message's run has ended or was stopped; nobody waits for the answer."""


class Stopping(Exception):
    """The node is to stop, and there is no server to wait for."""


def server_address(server: str, insecure: bool) -> str:
    """The gRPC target of a HOST:PORT. Raises SettingsError if it is none, or is remote without `insecure`."""
    host, port, is_v6 = parse_address(server) or ("", 0, None)
    if port < 1 or not (is_v6 or re.fullmatch(r"[A-Za-z0-9_.-]+", host)):
        raise SettingsError(f"--server: {server!r} is not HOST:PORT, such as fl.example.org:9092")
    if not insecure and not _is_loopback(host):
        raise SettingsError(
            f"--server: {server} is another machine and the connection would not be encrypted; "
            "type --insecure if that is what you want"
        )
    return f"[{host}]:{port}" if is_v6 else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass
class Fleet:
    """The calls to one server under one key pair. Each call is repeated until a server answers it."""

    address: str
    max_wait_s: float | None
    stop: threading.Event
    node: Node = field(default_factory=Node)

    def __post_init__(self) -> None:
        private_key, public_key = generate_key_pairs()
        self._public_key = public_key_to_bytes(public_key)
        self._channel = grpc.insecure_channel(self.address, options=_CHANNEL)
        signer = NodeAuthClientInterceptor(private_key, public_key)
        self._stub = FleetStub(grpc.intercept_channel(self._channel, _VersionInterceptor(), signer))
        self._lock = threading.Lock()
        self._lost_since: float | None = None
        self._left = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def join(self) -> None:
        """Register and activate this node and start its heartbeat."""
        try:
            self._register()
            request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=_HEARTBEAT_S)
            self.node = Node(node_id=self._call("ActivateNode", request).node_id)
        except (grpc.RpcError, ServerForgot, RunOver) as error:
            text = f"the server at {self.address} refuses this node: {_details(error)}"
            raise SettingsError(text) from None
        self._heartbeat.start()

    def _register(self) -> None:
        try:
            self._call("RegisterNode", RegisterNodeFleetRequest(public_key=self._public_key))
        except grpc.RpcError as error:
            # The first answer was lost and the call repeated: the key is known because it is ours.
            if _flower_code(error) != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                raise

    def leave(self) -> None:
        """Say good-bye if a server is there, and close the connection."""
        self._left.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        try:
            if self.node.node_id:
                self._stub.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id), timeout=5)
                self._stub.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node.node_id), timeout=5)
        except grpc.RpcError:
            pass  # No server, or one that does not know us: then there is nothing to leave.
        self._channel.close()

    def next_message(self) -> tuple[int, ObjectTree] | None:
        """Run id and object ids of the next message for this node, if there is one."""
        try:
            found = self._call("PullMessages", PullMessagesRequest(node=self.node))
        except grpc.RpcError as error:
            log.warning("the server at %s failed: %s", self.address, _details(error))
            return None
        if not found.messages_list:
            return None
        return found.messages_list[0].metadata.run_id, found.message_object_trees[0]

    def receive(self, run_id: int, tree: ObjectTree) -> Message:
        """Fetch a message, waiting for what the server app has not uploaded yet."""
        contents = pull_objects(
            list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree))),
            make_pull_object_fn_protobuf(self._caller("PullObject"), self.node, run_id),
            initial_backoff=PULL_BACKOFF_S,
            backoff_cap=PULL_BACKOFF_CAP_S,
            max_tries_per_object=None,
        )
        got = ConfirmMessageReceivedRequest(node=self.node, run_id=run_id, message_object_id=tree.object_id)
        self._call("ConfirmMessageReceived", got)
        message = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(message, Message):
            raise TypeError(f"the server sent {type(message).__name__}, not a Message")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def send(self, reply: Message, runtime_s: float) -> None:
        """Upload a reply; `runtime_s`: seconds that the ClientApp took."""
        with no_object_id_recompute():  # Hash each object once.
            reply.metadata.__dict__["_message_id"] = reply.object_id
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[runtime_s],
            )
            answer = self._call("PushMessages", request)
            run_id, session = reply.metadata.run_id, answer.session_id
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(self._caller("PushObject"), self.node, run_id, session),
                object_ids_to_push=set(answer.objects_to_push),
            )

    def _caller(self, method: str) -> Callable[[Any], Any]:
        return lambda request: self._call(method, request, OBJECT_TIMEOUT_S)

    def _call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        wait_s = 0.1
        while True:
            try:
                answer = getattr(self._stub, method)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                _raise_unless_connection(error)
                self._without_server(error)
            else:
                self._lost_since = None
                return answer
            self.stop.wait(wait_s * random.uniform(0.8, 1.2))
            wait_s = min(wait_s * 1.5, 2.0)

    def _without_server(self, error: grpc.RpcError) -> None:
        if self.stop.is_set():
            raise Stopping
        with self._lock:
            now = time.monotonic()
            if self._lost_since is None:
                self._lost_since = now
                log.warning("no Flower server at %s yet (%s), retrying", self.address, _cause(error))
            if self.max_wait_s is not None and now - self._lost_since >= self.max_wait_s:
                waited = f"{self.max_wait_s:g} s"
                raise RunError(f"no Flower server at {self.address} for {waited}: {_cause(error)}")

    def _send_heartbeats(self) -> None:
        # In time for two tries within the interval. A failure is left to the next call of the main loop.
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=_HEARTBEAT_S)
        while not self._left.wait(_HEARTBEAT_S * random.uniform(0.35, 0.45)):
            try:
                self._stub.SendNodeHeartbeat(request, timeout=5)
            except grpc.RpcError as error:
                log.debug("heartbeat failed: %s", _details(error))


class _VersionInterceptor(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Tells the server our flwr version. Flower's own interceptor would end the process on a refusal."""

    def __init__(self) -> None:
        self._version = RuntimeVersionMetadata.from_local_component("SuperNode")

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = self._version.append_to_grpc_metadata(details.metadata)
        return continuation(details._replace(metadata=metadata), request)


def _raise_unless_connection(error: grpc.RpcError) -> None:
    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return
    if code == grpc.StatusCode.PERMISSION_DENIED:
        raise RunOver from None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        raise ServerForgot(error.details()) from None
    if _flower_code(error) == ApiErrorCode.RUNTIME_VERSION_INCOMPATIBLE:
        raise SettingsError(f"the server refuses this node's flwr version: {_details(error)}") from None
    raise error


def _flower_code(error: grpc.RpcError) -> int | None:
    flower_error = FlowerError.from_json(error.details())
    return flower_error.code if flower_error else None


def _details(error: Exception) -> str:
    text = (error.details() or error.code().name) if isinstance(error, grpc.RpcError) else str(error)
    flower_error = FlowerError.from_json(text)
    if flower_error:
        text = " ".join(filter(None, (flower_error.message, flower_error.public_details)))
    return f"{text} (is this machine's clock right?)" if "timestamp" in text else str(text)


def _cause(error: grpc.RpcError) -> str:
    text = error.details() or ""
    known = {"refused": "connection refused", "DNS": "unknown host name", "Deadline": "no answer"}
    return next((short for word, short in known.items() if word in text), text.rpartition(": ")[2])
