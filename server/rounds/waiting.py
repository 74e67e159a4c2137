"""Sites that take no part as yet because a person there decides: asked now and then, and nothing waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from strategies.protocol.messages import WAITING, Undecided

AGAIN_S = 5.0
"""Between an answer and the next question. A person approves in minutes or days; a question costs a site next to
nothing, as it loads no data for it."""


@dataclass
class _Site:
    info: NodeInfo
    name: str
    state: str
    ask_at: float
    asked: str = ""
    """Id of the question on its way, "" if there is none."""


@dataclass
class Waiting:
    """The nodes that answered the roll call with "not yet" or "no".

    `questions(nodes, ttl_s)` makes roll calls; `ttl_s` is how long an answer is kept, which a whole round may be.
    """

    grid: Grid
    questions: Callable[[Iterable[int], float], list[Message]]
    ttl_s: float
    say: Callable[[str], None]
    show: Callable[[list[str]], None] = lambda names: None
    """Told of `names` whenever they have changed since the last look."""
    _shown: list[str] = field(default_factory=list)
    _sites: dict[int, _Site] = field(default_factory=dict)
    _came: dict[int, Message] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> set[int]:
        """All that have not taken the run."""
        return set(self._sites)

    @property
    def names(self) -> list[str]:
        """Clients whose sites have not decided, sorted; those that said no are not among them."""
        return sorted(site.name for site in self._sites.values() if site.state == WAITING)

    def put(self, info: NodeInfo, word: Undecided) -> None:
        """A node answered "not yet" or "no"."""
        name = info.name or word.client or f"node {info.node_id}"
        site = self._sites.setdefault(info.node_id, _Site(info, name, word.state, time.monotonic() + AGAIN_S))
        site.state = word.state
        if self._said.get(name) != word.state:
            self._said[name] = word.state
            self.say(f"{name}: {word}")

    def settle(self, node: int) -> None:
        """A node has taken the run, or has been refused for another reason."""
        if site := self._sites.pop(node, None):
            self._said.pop(site.name, None)

    def keep(self, online: Mapping[int, NodeInfo]) -> None:
        """Forget the nodes that left or started anew: these are called like any other that joins."""
        for node, site in list(self._sites.items()):
            now = online.get(node)
            if now is None or str(now.last_activated_at) != str(site.info.last_activated_at):
                del self._sites[node]

    def look(self) -> None:
        """Take up answers that have come, and ask again whoever was not asked for a while; never waits.

        Called within a round, too: otherwise an answer would be one of a round ago.
        """
        if self._shown != self.names:
            self._shown = self.names
            self.show(self._shown)
        now = time.monotonic()
        if on_way := {site.asked: node for node, site in self._sites.items() if site.asked}:
            for reply in self.grid.pull_messages(list(on_way)):
                node = on_way[reply.metadata.reply_to_message_id]
                self._came[node] = reply
                self._sites[node].asked, self._sites[node].ask_at = "", now + AGAIN_S
        due = [node for node, site in self._sites.items() if now >= site.ask_at]
        if due:
            ids = self.grid.push_messages(self.questions(due, self.ttl_s))
            for node, message_id in zip(due, ids, strict=True):
                # One that is lost on its way is asked once more when it has been given up.
                self._sites[node].asked, self._sites[node].ask_at = message_id, now + self.ttl_s

    def answers(self) -> dict[int, Message]:
        """The latest answers that have come since the last call, by node."""
        self.look()
        came, self._came = self._came, {}
        return {node: reply for node, reply in came.items() if node in self._sites}
