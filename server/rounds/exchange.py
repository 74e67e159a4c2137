"""Sending messages to clients and collecting their replies, with a deadline, through Flower's public Grid calls."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from server.rounds import reply_limits
from server.rounds.stopping import Stop

# A look costs a SuperLink up to 10 ms of the CPU time that uploads need.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S, SHARE_OF_WAIT = 0.005, 2.0, 0.02


def pause_after(waited_s: float, shortest_s: float = SHORTEST_PAUSE_S) -> float:
    """Seconds until the next look after so many without news: a fiftieth of them, which is all that waiting costs."""
    return min(LONGEST_PAUSE_S, max(shortest_s, waited_s * SHARE_OF_WAIT))


NODES_S = 2.0
"""Between two looks for nodes that started anew and so lost what they were asked."""


@dataclass
class Exchange:
    """The messages of one server to its clients; remembers what was asked so that late replies are recognized."""

    grid: Grid
    in_flight: Mapping[int, int] = field(default_factory=dict)
    """Node -> how many messages it takes at once; missing: any number."""
    stop: Stop = lambda: None
    restarted: Callable[[], set[int]] = lambda: set()
    """Nodes whose process is another one than when they were asked."""
    late: int = 0
    _forgotten: set[str] = field(default_factory=set)

    def run(
        self,
        messages: Mapping[str, Message],
        deadline_s: float,
        enough: Callable[[Mapping[str, Message]], bool] | None = None,
    ) -> dict[str, Message]:
        """Send all messages and return the replies by name, in order of arrival.

        Ends when all have replied, when `enough(replies)` is true, `deadline_s` seconds after the start, or when the
        run is asked to stop and its grace is over. A client that started anew counts as one that replied with an
        error. Never sleeps longer than a fiftieth of the time waited so far.
        """
        started = looked = time.monotonic()
        ends = started + deadline_s
        waiting: dict[int, deque[str]] = defaultdict(deque)
        for name, message in messages.items():
            waiting[message.metadata.dst_node_id].append(name)
        names: dict[str, str] = {}
        replies: dict[str, Message] = {}
        self._push([n for node in waiting for n in self._next(node, waiting)], messages, names)
        self._count_late()
        pause = SHORTEST_PAUSE_S
        while names:
            pulled = time.monotonic()
            with reply_limits.whole_by(lambda: self._until(ends)):
                arrived = list(self.grid.pull_messages(list(names)))
            if not arrived and time.monotonic() - looked > NODES_S:
                arrived, looked = self._crashed(messages, names), time.monotonic()
            freed: list[str] = []
            for reply in arrived:
                asked = reply.metadata.reply_to_message_id
                if asked not in names:
                    continue
                name = names.pop(asked)
                replies[name] = reply
                freed += self._next(messages[name].metadata.dst_node_id, waiting, 1)
            self._push(freed, messages, names)
            now, until = time.monotonic(), self._until(ends)
            if arrived and now >= until > pulled:
                continue  # One upload that trickled in may have hidden others that are here.
            if now >= until or (arrived and enough is not None and enough(replies)):
                break
            if not arrived:
                time.sleep(min(pause, max(0.0, until - now)))
                pause = pause_after(now - started)
        self._forgotten |= names.keys()
        return replies

    def _until(self, deadline: float) -> float:
        stop = self.stop()
        return deadline if stop is None else min(deadline, stop)

    def _next(self, node: int, waiting: Mapping[int, deque[str]], count: int | None = None) -> list[str]:
        queue = waiting[node]
        limit = self.in_flight.get(node) or len(queue)
        return [queue.popleft() for _ in range(min(len(queue), limit if count is None else count))]

    def _push(self, batch: list[str], messages: Mapping[str, Message], names: dict[str, str]) -> None:
        if not batch:
            return
        chosen = [messages[name] for name in batch]
        self.grid.push_messages(chosen)
        names |= {message.metadata.message_id: name for message, name in zip(chosen, batch, strict=True)}

    def _crashed(self, messages: Mapping[str, Message], names: Mapping[str, str]) -> list[Message]:
        """Error replies in place of those of nodes that started anew. Flower itself answers for those that are gone."""
        anew = self.restarted()
        error = Error(ErrorCode.CLIENT_APP_CRASHED, "its process started anew")
        return [
            Message(error, reply_to=messages[name])
            for name in names.values()
            if messages[name].metadata.dst_node_id in anew
        ]

    def _count_late(self) -> None:
        """Replies to what an earlier round asked: counted and dropped."""
        if self._forgotten:
            for reply in self.grid.pull_messages(list(self._forgotten)):
                self._forgotten.discard(reply.metadata.reply_to_message_id or "")
                self.late += not reply.has_error()
