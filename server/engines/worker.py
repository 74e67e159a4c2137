"""A worker process of `server/engines/workers.py`: answers messages with the ClientApp until its input closes."""

from __future__ import annotations

import os
import sys
from pkgutil import resolve_name

from common import flower


def main(app: str, memory: str, device: str) -> None:
    """Serve over the standard streams; whatever the app prints goes to standard error."""
    flower.prepare()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    client = resolve_name(app)

    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage

    from server.engines.inprocess import answer, host_context
    from server.engines.workers import read_frame, write_frame

    context = host_context(memory, device)
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        message = message_from_proto(ProtoMessage.FromString(request))
        write_frame(replies, message_to_proto(answer(client, message, context)).SerializeToString())


if __name__ == "__main__":
    main(*sys.argv[1:])
