"""What can go wrong between a node and a server, and what it means for the node."""

from __future__ import annotations

import grpc  # type: ignore[import-untyped]
from flwr.supercore.error import ApiErrorCode, FlowerError

from client.node.access import Access
from common.errors import SettingsError

REGISTRATION_DISABLED = ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED


class ServerForgot(Exception):
    """The server does not know this node: it restarted with an empty state."""


class RunOver(Exception):
    """The message's run has ended or was stopped; nobody waits for the answer."""


class TooLarge(Exception):
    """A message that holds more than this site takes."""


class SenderGone(Exception):
    """A message whose server app died while it sent it."""


class Stopping(Exception):
    """The node is to stop, and there is no server to wait for."""


def raise_unless_connection(error: grpc.RpcError) -> None:
    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return
    if code == grpc.StatusCode.PERMISSION_DENIED:
        raise RunOver from None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        raise ServerForgot(error.details()) from None
    if flower_code(error) == ApiErrorCode.RUNTIME_VERSION_INCOMPATIBLE:
        raise SettingsError(f"the server refuses this node's flwr version: {details(error)}") from None
    raise error


def passing(error: grpc.RpcError) -> bool:
    """Whether the server failed in a way that is its own and may pass: Flower's database was locked, say."""
    own = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return error.code() in own and flower_code(error) is None and "larger than max" not in (error.details() or "")


def reason(error: Exception) -> str:
    if flower_code(error) == REGISTRATION_DISABLED:
        return (
            "it lets in only sites whose keys it knows; make one with `python -m client keygen`, give the .pub file to "
            "its operator and join with --key"
        )
    if flower_code(error) == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED and "key" not in details(error):
        return "it does not know this key, or another process uses it"
    return details(error)


def wrong_tls(error: grpc.RpcError, access: Access) -> str:
    """What is wrong with the encryption, if that is why a first call failed; trying again would not help."""
    text = error.details() or ""
    host = access.host
    if "CERTIFICATE_VERIFY_FAILED" in text:
        said = text.rpartition("CERTIFICATE_VERIFY_FAILED:")[2].strip(" :")
        hint = "is this the ca.pem of that server?" if access.ca else "pass the ca.pem of its operator as --ca"
        return f"its certificate is not to be trusted ({said}); {hint}"
    if "not in peer certificate" in text or "Hostname Verification" in text:
        return f"its certificate is not for {host!r}; its operator makes another with: python -m server certs"
    if "WRONG_VERSION_NUMBER" in text:
        return "it speaks plain text; with --insecure nothing would be encrypted"
    return ""


def flower_code(error: Exception) -> int | None:
    flower_error = FlowerError.from_json(error.details()) if isinstance(error, grpc.RpcError) else None
    return flower_error.code if flower_error else None


def details(error: Exception) -> str:
    text = (error.details() or error.code().name) if isinstance(error, grpc.RpcError) else str(error)
    flower_error = FlowerError.from_json(text)
    if flower_error:
        text = " ".join(filter(None, (flower_error.message, flower_error.public_details)))
    return f"{text} (is this machine's clock right?)" if "timestamp" in text else str(text)


def cause(error: grpc.RpcError) -> str:
    text = error.details() or ""
    known = {"refused": "connection refused", "DNS": "unknown host name", "Deadline": "no answer"}
    return next((short for word, short in known.items() if word in text), text.rpartition(": ")[2])


def brief(error: BaseException) -> str:
    """An error in a line: passing ones are no reason for a page of where they came from."""
    text = details(error) if isinstance(error, grpc.RpcError) else str(error)
    line = " ".join(text.split())
    return f"{type(error).__name__}: {line[:300]}" if not isinstance(error, grpc.RpcError) else line[:300]
