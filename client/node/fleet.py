"""Flower's Fleet API, the gRPC leg between server and node. Nothing outside this file knows the transport."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from flwr.app import Error, Message, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.common.serde_utils import metadata_from_proto
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
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.message_pb2 import (
    Message as ProtoMessage,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode
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
    ObjectUnavailableError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

from client.node.access import Access, server_address
from client.node.errors import (
    REGISTRATION_DISABLED,
    RunOver,
    SenderGone,
    ServerForgot,
    Stopping,
    TooLarge,
    brief,
    cause,
    details,
    flower_code,
    passing,
    raise_unless_connection,
    reason,
    wrong_tls,
)
from common.deploy.keys import fingerprint, load_private
from common.errors import RunError, SettingsError
from common.flower import PULL_BACKOFF_CAP_S, PULL_BACKOFF_S

log = logging.getLogger("client.node.resident")

CALL_TIMEOUT_S = 30.0

AGAIN_S = 2.0
REMIND_S = 600.0
"""Between two lines that say that a site still waits to be let in."""

OBJECT_TIMEOUT_S = 600.0

PART_S = 10.0
"""A gap this long between two parts of a message is looked into: if a newer message has come, or the server has called
the run over for want of heartbeats, its sender is gone. Otherwise it is slow."""
GONE_S = 120.0
"""A gap for which no sender is slow."""

PASSING_S = 60.0
"""How long a call is repeated whose failure is the server's own and may pass, such as a database that is locked."""

# The server takes a node for gone after two intervals; this is the shortest that it allows.
_HEARTBEAT_S = float(HEARTBEAT_MIN_INTERVAL)
ASLEEP_S = 2 * _HEARTBEAT_S
"""Between two heartbeats, a silence after which the server takes a node for gone."""


def awake_s() -> float:
    """Seconds by a clock that goes on while the machine sleeps, and that nobody sets, where there is such a one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True)
class Found:
    """A message that lies at the server: what is known before it is fetched."""

    proto: ProtoMessage
    tree: ObjectTree

    @property
    def run_id(self) -> int:
        """Flower's number of the message's run."""
        return int(self.proto.metadata.run_id)


@dataclass
class Fleet:
    """The calls to one server under one key pair. Each call is repeated until a server answers it."""

    access: Access
    stop: threading.Event
    changed: Callable[[bool], None] = lambda connected: None
    """Told at once when the server stops answering, and when it answers again."""
    node: Node = field(default_factory=Node)

    def __post_init__(self) -> None:
        self.address = server_address(self.access.server)
        private_key = load_private(Path(self.access.key)) if self.access.key else generate_key_pairs()[0]
        self._public_key = public_key_to_bytes(private_key.public_key())
        self._channel = self.access.channel()
        signer = NodeAuthClientInterceptor(private_key, private_key.public_key())
        self._stub = FleetStub(grpc.intercept_channel(self._channel, _VersionInterceptor(), signer))
        self._lock = threading.Lock()
        self._lost_since: float | None = None
        self._ahead: Found | None = None
        self._left = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    @property
    def _way(self) -> str:
        proxy = self.access.proxy
        return f", through the proxy {proxy.address} ({proxy.variable})" if proxy else ""

    @property
    def connected(self) -> bool:
        """Whether the server let this node in and answered the latest call."""
        return bool(self.node.node_id) and self._lost_since is None

    def join(self) -> None:
        """Register and activate this node and start its heartbeat.

        A refusal is told at once and then tried again for `patience_s` of its access: the server may have just started
        and not know its sites yet, or still hold a process of this site that was killed. Raises SettingsError then.
        """
        patience, told, until = self.access.patience_s, "", 0.0
        end = time.monotonic() + patience
        while not self.node.node_id:
            try:
                self.node = Node(node_id=self._enter())
            except (grpc.RpcError, ServerForgot, RunOver) as error:
                refused = f"the server at {self.address} refuses this node: {reason(error)}"
                if time.monotonic() > end or not self.access.key:
                    raise SettingsError(refused) from None
                if refused != told or time.monotonic() > until:
                    log.warning("%s; %s", refused, self._how_long(patience))
                    told, until = refused, time.monotonic() + REMIND_S
                if self.stop.wait(AGAIN_S):
                    raise Stopping from None
        self._heartbeat.start()

    def _how_long(self, patience_s: float) -> str:
        if patience_s < math.inf:
            return f"trying again for {patience_s:.0f} s"
        return (
            "waiting, and joining by itself when its operator lets this site in: python -m server nodes add NAME "
            f"--fingerprint {fingerprint(self._public_key)}"
        )

    def _enter(self) -> int:
        if not self.access.key:
            self._register()
            return self._activate()
        try:
            return self._activate()
        except grpc.RpcError as refusal:
            if "in use" in details(refusal):
                raise
            try:
                # A server that lets anybody in does not know the key yet.
                self._register()
            except grpc.RpcError as error:
                raise (refusal if flower_code(error) == REGISTRATION_DISABLED else error) from None
        return self._activate()

    def _activate(self) -> int:
        request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=_HEARTBEAT_S)
        return int(self._call("ActivateNode", request).node_id)

    def _register(self) -> None:
        try:
            self._call("RegisterNode", RegisterNodeFleetRequest(public_key=self._public_key))
        except grpc.RpcError as error:
            # The first answer was lost and the call repeated, or this site was here before: the key is known.
            if flower_code(error) != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                raise

    def leave(self) -> None:
        """Say good-bye if a server is there, and close the connection."""
        self._left.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        try:
            if self.node.node_id:
                self._stub.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id), timeout=5)
            # Flower never takes a key back that was unregistered: one that will be used again stays.
            if self.node.node_id and not self.access.key:
                self._stub.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node.node_id), timeout=5)
        except grpc.RpcError:
            pass  # No server, or one that does not know us: then there is nothing to leave.
        self._channel.close()

    def next_message(self) -> Found | None:
        """The next message for this node, if there is one."""
        if self._ahead is not None:
            found, self._ahead = self._ahead, None
            return found
        return self._look()

    def _newer(self) -> bool:
        """Whether another message has come for this node; it is the next one then."""
        self._ahead = self._ahead or self._look()
        return self._ahead is not None

    def _look(self) -> Found | None:
        try:
            found = self._call("PullMessages", PullMessagesRequest(node=self.node))
        except grpc.RpcError as error:
            log.warning("the server at %s failed: %s", self.address, details(error))
            return None
        if not found.messages_list:
            return None
        return Found(found.messages_list[0], found.message_object_trees[0])

    def refusal(self, found: Found, why: str) -> Message:
        """An answer to a message that is not fetched: nobody has to wait for the deadline."""
        self._confirm(found)
        asked = make_message(metadata_from_proto(found.proto.metadata), content=RecordDict())
        asked.metadata.__dict__["_message_id"] = found.tree.object_id
        return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, why), reply_to=asked)

    def _confirm(self, found: Found) -> None:
        got = ConfirmMessageReceivedRequest(node=self.node, run_id=found.run_id, message_object_id=found.tree.object_id)
        self._call("ConfirmMessageReceived", got)

    def receive(self, found: Found) -> Message:
        """Fetch a message, waiting for what the server app has not uploaded yet. Raises TooLarge."""
        run_id, tree = found.run_id, found.tree
        pull = make_pull_object_fn_protobuf(self._caller("PullObject"), self.node, run_id)
        contents = pull_objects(
            list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree))),
            _bounded(_patient(pull, self._newer), self.access.most_bytes),
            initial_backoff=PULL_BACKOFF_S,
            backoff_cap=PULL_BACKOFF_CAP_S,
            max_tries_per_object=None,
        )
        self._confirm(found)
        message = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(message, Message):
            raise TypeError(f"the server sent {type(message).__name__}, not a Message")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def send(self, reply: Message, runtime_s: float, leaving: Callable[[str], None] = lambda sha256: None) -> None:
        """Upload a reply; `runtime_s`: seconds that the ClientApp took.

        `leaving` is told the reply's SHA-256, by its parts, before a byte of it is sent; what it raises ends this.
        """
        with no_object_id_recompute():  # Hash each object once.
            reply.metadata.__dict__["_message_id"] = reply.object_id
            leaving(reply.object_id)
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[runtime_s],
            )
            answer, repeated = self._try("PushMessages", request)
            parts, session = get_all_nested_objects(reply), answer.session_id
            wanted = set(answer.objects_to_push)
            if repeated and not wanted:
                # The first answer was lost, and the server app has taken the message since: it waits for parts of a
                # session whose id never came. Without an id the server looks for it.
                wanted, session = set(parts), ""
            push = make_push_object_fn_protobuf(self._push_object, self.node, reply.metadata.run_id, session)
            push_objects(parts, push, object_ids_to_push=wanted)

    def _push_object(self, request: PushObjectRequest) -> PushObjectResponse:
        answer, repeated = self._try("PushObject", request, OBJECT_TIMEOUT_S)
        # A part that has come is refused when it comes again: if this call was repeated, its first answer was lost.
        return PushObjectResponse(stored=answer.stored or repeated or not request.session_id)

    def _caller(self, method: str) -> Callable[[Any], Any]:
        return lambda request: self._call(method, request, OBJECT_TIMEOUT_S)

    def _call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return self._try(method, request, timeout_s)[0]

    def _try(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> tuple[Any, bool]:
        """The answer, and whether the call was repeated: the server may have heard it before."""
        wait_s, repeated = 0.1, False
        failing_since: float | None = None
        while True:
            try:
                answer = getattr(self._stub, method)(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if passing(error):
                    failing_since = failing_since or time.monotonic()
                    if time.monotonic() - failing_since > PASSING_S or self.stop.is_set():
                        raise
                    log.info("the server at %s failed (%s); %s again", self.address, brief(error), method)
                else:
                    raise_unless_connection(error)
                    self._without_server(error)
                repeated = True
            else:
                self._with_server()
                return answer, repeated
            self.stop.wait(wait_s * random.uniform(0.8, 1.2))
            wait_s = min(wait_s * 1.5, 2.0)

    def _with_server(self) -> None:
        if self._lost_since is None:
            return
        with self._lock:
            since, self._lost_since = self._lost_since, None
        if since is not None:
            log.info("the server at %s answers again after %.0f s", self.address, time.monotonic() - since)
            self.changed(self.connected)

    def _without_server(self, error: grpc.RpcError) -> None:
        if self.stop.is_set():
            raise Stopping
        with self._lock:
            now = time.monotonic()
            if self._lost_since is None:
                self._lost_since = now
                if not self.node.node_id and (wrong := wrong_tls(error, self.access)):
                    raise SettingsError(f"--server: {self.address}: {wrong}")
                yet = "any more" if self.node.node_id else "yet"
                log.warning("no Flower server at %s %s (%s%s), retrying", self.address, yet, cause(error), self._way)
                self.changed(False)
            most = self.access.max_wait_s
            if most is not None and now - self._lost_since >= most:
                waited = f"{most:g} s"
                raise RunError(f"no Flower server at {self.address} for {waited}: {cause(error)}{self._way}")

    def _send_heartbeats(self) -> None:
        # In time for two tries within the interval. A failure is left to the next call of the main loop.
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=_HEARTBEAT_S)
        last = awake_s()
        while not self._left.wait(_HEARTBEAT_S * random.uniform(0.35, 0.45)):
            asleep, last = awake_s() - last, awake_s()
            if asleep > ASLEEP_S:
                log.warning(
                    "this process did not run for %.0f s: the machine slept, or had no time for it; the server at %s "
                    "may have taken it for gone meanwhile, and hears of it now",
                    asleep,
                    self.address,
                )
            try:
                self._stub.SendNodeHeartbeat(request, timeout=5)
            except grpc.RpcError as error:
                log.debug("heartbeat failed: %s", details(error))


class _VersionInterceptor(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Tells the server our flwr version. Flower's own interceptor would end the process on a refusal."""

    def __init__(self) -> None:
        self._version = RuntimeVersionMetadata.from_local_component("SuperNode")

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = self._version.append_to_grpc_metadata(details.metadata)
        return continuation(details._replace(metadata=metadata), request)


def _patient(pull: Callable[[str], bytes], newer: Callable[[], bool]) -> Callable[[str], bytes]:
    """`pull`, that raises SenderGone where the parts of a message stopped coming because its server app died.

    `newer()`: whether another message has come meanwhile, which it would not while this one is being sent.
    """
    latest = looked = time.monotonic()
    lock = threading.Lock()

    def patient(object_id: str) -> bytes:
        nonlocal latest, looked
        try:
            content = pull(object_id)
        except ObjectUnavailableError:
            now = time.monotonic()
            with lock:
                due = now - max(latest, looked) > PART_S
                looked = now if due else looked
            if now - latest > GONE_S or (due and newer()):
                raise SenderGone(
                    f"no part of a message has come for {now - latest:.0f} s; its sender is gone"
                ) from None
            raise
        latest = time.monotonic()
        return content

    return patient


def _bounded(pull: Callable[[str], bytes], most: int) -> Callable[[str], bytes]:
    """`pull`, that raises once the parts of a message hold more than `most` bytes together."""
    taken = 0

    def bounded(object_id: str) -> bytes:
        nonlocal taken
        content = pull(object_id)
        taken += len(content)
        if taken > most:
            raise TooLarge(f"a message holds more than {most / 1e6:.0f} MB, this site's limit")
        return content

    return bounded
