"""Sites without processes: a node for each, with its own file and policy, over the real client app."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from client import session
from client.app import app
from server.engines.inprocess import InProcessGrid, answer
from strategies.protocol.messages import notice_of


class SiteGrid(InProcessGrid):
    """Nodes by site; `heard`: what the server let a site know. A site's session is its own, as its process would be."""

    def __init__(self, files: dict[str, Path], policy: str | dict[str, str] = "statistics = true\n", **config: Any):
        super().__init__(app)
        self.contexts: dict[int, Context] = {}
        self.heard: dict[str, list[str]] = {}
        self._sessions: dict[int, dict[torch.device, session.Session]] = {}
        for name, file in files.items():
            self.join(name, file, policy if isinstance(policy, str) else policy[name], **config)

    def join(self, name: str, file: Path, policy: str = "", **config: Any) -> None:
        """A further site."""
        place = file.with_name(f"{name}-{len(policy)}.policy.toml")  # a process reads a policy once
        place.write_text(policy)
        values = {"name": name, "data": str(file), "policy": str(place), "device": "cpu", **config}
        number = len(self.contexts) + 1
        memory = str(file.with_name(f"{name}-memory"))
        self.contexts[number] = Context(
            run_id=0, node_id=number, node_config={**values, "memory": memory}, state=RecordDict(), run_config={}
        )

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=n, name=str(c.node_config["name"]), last_activated_at="2026-01-01")
            for n, c in self.contexts.items()
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        kept = []
        for message in messages:
            if notice := notice_of(message):
                name = str(self.contexts[message.metadata.dst_node_id].node_config["name"])
                self.heard.setdefault(name, []).append(notice)
            kept.append(message)
        return super().push_messages(kept)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            if (message := self._waiting.pop(message_id, None)) is not None:
                node = message.metadata.dst_node_id
                before = session._sessions
                session._sessions = self._sessions.setdefault(node, {})
                try:
                    return [answer(app, message, self.contexts[node])]
                finally:
                    session._sessions = before
        return []
