"""Asking a Fleet service who it would let in, without joining it. Like `fleet.py` it knows the transport."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc  # type: ignore[import-untyped]

from client.node.access import Access
from common.deploy.checks import Check

# Imported where used: torch and Flower take seconds, which --help and an error in what was typed need not wait for.


CALL_S = 4.0
MOST_SHIFTS = 12


class FleetProbe:
    """A connection to a server; a context manager."""

    def __init__(self, access: Access) -> None:
        from flwr.proto.fleet_pb2_grpc import FleetStub

        self._channel = access.channel()
        self._stub = FleetStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def look(self, keys: Sequence[tuple[Path, Any]]) -> Iterator[Check]:
        """Whether this is a Fleet service, takes this flwr and this clock, and lets in the holders of `keys`."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.supercore.error import ApiErrorCode
        from flwr.supercore.primitives.asymmetric import generate_key_pairs

        stranger, _ = generate_key_pairs()
        # A heartbeat interval of 0 is never taken, but only looked at once the key is found to be known.
        code, text = self._call("ActivateNode", stranger, ActivateNodeRequest(public_key=_pem(stranger)))
        if "timestamp" in text:
            yield Check("fleet", True, "this is Flower's Fleet service")
            yield self._clock(stranger)
            return
        if code == ApiErrorCode.RUNTIME_VERSION_INCOMPATIBLE:
            yield Check(
                "fleet", False, f"the server refuses this flwr: {text}", "install the server's flwr series here"
            )
            return
        if code != ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            words = "this is a gRPC server, but not Flower's Fleet service" if "UNIMPLEMENTED" in text else text
            advice = "is this the Fleet port of `python -m server superlink` (9092), of the same flwr series?"
            yield Check("fleet", False, words, advice)
            return
        yield Check("fleet", True, "this is Flower's Fleet service; it takes this flwr")
        yield Check("clock", True, "at most 5 s ahead of the server's and 5 min behind")
        yield from self._keys(stranger, keys)

    def _keys(self, stranger: Any, keys: Sequence[tuple[Path, Any]]) -> Iterator[Check]:
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.supercore.error import ApiErrorCode

        if not self._keys_needed(stranger):
            yield Check("node key", True, "the server asks for none")
            return
        if not keys:
            advice = "make one with `python -m client keygen`, have its .pub added at the server, and give --key"
            yield Check("node key", False, "the server lets in registered keys alone and no --key was given", advice)
        for path, key in keys:
            code, _ = self._call("ActivateNode", key, ActivateNodeRequest(public_key=_pem(key)))
            if code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
                yield Check("node key", True, f"the server knows the key {path}")
            else:
                advice = (
                    f"at the server: python -m server nodes add NAME {path.name}.pub (a removed key never comes back)"
                )
                yield Check("node key", False, f"the server does not know the key {path}", advice)

    def _keys_needed(self, stranger: Any) -> bool:
        """Whether only registered keys may join: a key that nobody knows tries, and is taken out again."""
        from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest, UnregisterNodeFleetRequest

        answers: list[Any] = []
        self._call("RegisterNode", stranger, RegisterNodeFleetRequest(public_key=_pem(stranger)), answers=answers)
        for answer in answers:
            self._call("UnregisterNode", stranger, UnregisterNodeFleetRequest(node_id=answer.node_id))
        return not answers

    def _clock(self, key: Any) -> Check:
        """How far this clock is off: the server takes timestamps from 305 s ago to 5 s ahead, and looks come in
        steps of 300 s."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest

        advice = "set this machine's clock, or the server's: run a time service (chrony, systemd-timesyncd) on both"
        for step in range(1, MOST_SHIFTS + 1):
            for sign, word in ((-1, "ahead of"), (1, "behind")):
                request = ActivateNodeRequest(public_key=_pem(key))
                if "timestamp" not in self._call("ActivateNode", key, request, sign * step * 300.0)[1]:
                    least, most = (step - 1, step) if sign < 0 else (step, step + 1)
                    detail = f"this clock is {least * 5} to {most * 5} min {word} the server's"
                    return Check("clock", False, detail, advice)
        return Check("clock", False, f"this clock is more than {MOST_SHIFTS * 5} min off the server's", advice)

    def _call(
        self, method: str, key: Any, request: Any, shift_s: float = 0.0, answers: list[Any] | None = None
    ) -> tuple[int | None, str]:
        """Make a call signed by `key` at a time `shift_s` seconds from now; returns Flower's error code and a text."""
        from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
        from flwr.supercore.date import now
        from flwr.supercore.error import FlowerError
        from flwr.supercore.primitives.asymmetric import sign_message
        from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

        stamp = (now() + datetime.timedelta(seconds=shift_s)).isoformat()
        signed: list[tuple[str, str | bytes]] = [
            (PUBLIC_KEY_HEADER, _pem(key)),
            (TIMESTAMP_HEADER, stamp),
            (SIGNATURE_HEADER, sign_message(key, stamp.encode("ascii"))),
        ]
        metadata = list(RuntimeVersionMetadata.from_local_component("SuperNode").append_to_grpc_metadata(signed))
        try:
            answer = getattr(self._stub, method)(request, timeout=CALL_S, metadata=metadata)
        except grpc.RpcError as error:
            flower_error = FlowerError.from_json(error.details() or "")
            if flower_error:
                text = " ".join(filter(None, (flower_error.message, flower_error.public_details)))
                return flower_error.code, text
            return None, f"{error.code().name}: {error.details()}"
        if answers is not None:
            answers.append(answer)
        return None, ""


def _pem(key: Any) -> bytes:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(key.public_key())
