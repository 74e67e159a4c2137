"""Cohort mode: the clients of a round side by side in one process, their gradients those of one batched model.

Each client runs the same code as always, in a greenlet and on a model of its own (a lane). Where it needs a gradient it
waits; when all wait, the largest number of requests that are alike is computed in one pass (batched_pass.py) and
those clients go on. What nobody else asks for, or cannot be batched, a client computes alone, as always. Batches,
random numbers, memory, algorithms and optimizers are those of one client after the other; sums of floating-point
numbers are taken in another order, so weights agree to rounding and not bit for bit.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from flwr.app import Context, Message
from greenlet import getcurrent, greenlet
from torch import Tensor

from client.app import train_in
from client.session import Session, device_of
from client.training.batched_pass import LaneForward, Wanted, batched
from client.training.device import Staging
from common.model import build

log = logging.getLogger("client.cohort")


def answer_all(messages: Sequence[Message], context: Context, most: int = 0) -> list[Message]:
    """The replies to TRAIN messages of one experiment, in their order; `most` clients at once (0: all)."""
    return pool(device_of(context)).run(messages, context, min(most or len(messages), len(messages)))


def pool(device: torch.device | str) -> Pool:
    """The lanes of a device."""
    return _pools.setdefault(torch.device(device), Pool(torch.device(device)))


class Pool:
    """The lanes of one device, kept from round to round."""

    def __init__(self, device: torch.device) -> None:
        self.together = self.apart = 0
        """Gradients that were computed with others, and alone."""
        self.base: Session | None = None
        self.device = device
        self._lanes: list[Lane] = []
        self._alone: set[Hashable] = set()
        """Keys of what turned out not to be batchable."""

    def adopt(self, base: Session) -> None:
        """What was learned of another experiment does not count."""
        if self.base is not base:
            self.base = base
            self._alone.clear()

    def run(self, messages: Sequence[Message], context: Context, count: int) -> list[Message]:
        """Answer all messages on `count` lanes."""
        self._lanes = (self._lanes + [Lane(self) for _ in range(count)])[:count]
        replies: dict[int, Message] = {}
        queue = deque(enumerate(messages))
        waiting: dict[Lane, Wanted] = {}

        def settle(lane: Lane, outcome: Wanted | Message | None) -> None:
            """Until the lane waits for a gradient or nothing is left to begin."""
            while not isinstance(outcome, Wanted):
                if outcome is not None:
                    replies[lane.number] = outcome
                if not queue:
                    return
                lane.number, message = queue.popleft()
                outcome = lane.begin(message, context)
            waiting[lane] = outcome

        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            try:
                for lane in self._lanes:
                    settle(lane, None)
                while waiting:
                    for lane, loss in self._answers(waiting):
                        del waiting[lane]
                        settle(lane, lane.go_on(loss))
            finally:
                for lane in self._lanes:
                    lane.end()
        return [replies[number] for number in range(len(messages))]

    def _answers(self, waiting: dict[Lane, Wanted]) -> Iterable[tuple[Lane, Tensor | None]]:
        """Who goes on, each with the loss of its gradient, or None to compute it alone.

        Those alone first: what they ask for next may join the others.
        """
        groups: dict[Hashable, list[Lane]] = defaultdict(list)
        for lane, wanted in waiting.items():
            groups[wanted.key].append(lane)
        alone = [
            lane for k, lanes in groups.items() if len(lanes) == 1 or k is None or k in self._alone for lane in lanes
        ]
        if alone:
            self.apart += len(alone)
            return [(lane, None) for lane in alone]
        key, lanes = max(groups.items(), key=lambda item: len(item[1]))
        try:
            losses = batched([waiting[lane] for lane in lanes])
            self.together += len(lanes)
            return list(zip(lanes, losses, strict=True))
        except Exception as error:  # whatever it is, each client meets it in its own pass if it is no matter of vmap
            if not self._alone:
                log.warning("cohort mode: clients train one after the other: %s", str(error).split("\n")[0][:300])
            self._alone.add(key)
            self.apart += len(lanes)
            return [(lane, None) for lane in lanes]


class Lane:
    """The place of one client at a time: a session with a model of its own, and the client's stream of random
    numbers while others run."""

    def __init__(self, pool: Pool) -> None:
        self.number = 0
        """Of the message in work."""
        self._pool = pool
        self._base: Session | None = None
        self._session: Session | None = None
        self._greenlet: Any = None
        self._random: list[Tensor] = []

    def begin(self, message: Message, context: Context) -> Wanted | Message:
        """Work on a message until it needs a gradient or is done."""
        self._greenlet = greenlet(train_in)
        return self._switch(self._session_of, message, context)

    def go_on(self, loss: Tensor | None) -> Wanted | Message:
        """The same with what it waited for."""
        torch.set_rng_state(self._random[0])
        for state in self._random[1:]:
            torch.cuda.set_rng_state(state, self._pool.device)
        return self._switch(loss)

    def end(self) -> None:
        """Give up what is unfinished, as after Ctrl-C."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw()
        self._greenlet = None

    def _switch(self, *given: Any) -> Wanted | Message:
        outcome: Wanted | Message = self._greenlet.switch(*given)
        self._random = [torch.get_rng_state()]
        if self._pool.device.type == "cuda":
            self._random.append(torch.cuda.get_rng_state(self._pool.device))
        return outcome

    def _session_of(self, text: str, context: Context) -> Session:
        base = Session.of(text, context)
        if self._session is None or self._base is not base:
            self._pool.adopt(base)
            parts, check = base.experiment.personal.parts, base.strategy.check_model
            model = build(base.task, base.experiment.seed, base.device, parts, check)
            forward = partial(LaneForward, _ask)
            staging = [Staging(base.device) for _ in range(2)]
            self._session = replace(base, model=model, wire=staging[0], disk=staging[1], forward=forward)
            self._base = base
        return self._session


def _ask(wanted: Wanted) -> Tensor | None:
    """Wait, in a lane, for a gradient."""
    loss: Tensor | None = getcurrent().parent.switch(wanted)
    return loss


_pools: dict[torch.device, Pool] = {}
