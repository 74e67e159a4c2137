"""Schedules of faults. `tests/support/world.py` lets a run live through one.

Everything in it is real but what lies between the processes: the round loop, the ClientApp, client memory on disk,
checkpoints and history.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.support.corruption import REPLY

ON_MESSAGE = (
    "message dropped",
    "message delayed",  # comes a try or more later, but before any newer one to its client
    "message overtaken",  # comes a try or more later, also after newer ones
    "message doubled",
    "message doubled late",  # comes again a try or more later, also after newer ones
    "message corrupted",
)
ON_REPLY = ("reply dropped", "reply failed", "reply delayed", "reply doubled", "reply doubled late", "reply corrupted")
ON_CLIENT = (
    "killed before training",
    "killed in training",
    "killed before the save",
    "killed in the save",
    "killed after the save",
    "disk wiped",
    "version truncated",
    "version damaged",
    "node left",
)
ON_ORDER = ("reordered", "one by one")
ON_SERVER = (
    "silent at the roll call",
    "server killed after sampling",
    "server killed after the push",
    "server killed while collecting",
    "server killed after the aggregate",
    "server killed in the line",
    "server killed after the line",
    "server killed in the checkpoint",
    "server killed after the checkpoint",
    "newest checkpoint damaged",
)
KINDS = ON_MESSAGE + ON_REPLY + ON_CLIENT + ON_ORDER + ON_SERVER
DEADLINE_S = 5.0  # of virtual time
LAST_TRY = 9
JOINS_AT = 3


class Killed(BaseException):
    """A process is gone: no handler of exceptions sees this."""


@dataclass(frozen=True)
class Fault:
    """At try number `at` (counted over all lives of the server) something happens to the `who`-th of those sampled,
    or to the server; `how` chooses among the variants of a kind."""

    kind: str
    at: int
    who: int = 0
    how: int = 0


@dataclass(frozen=True)
class Schedule:
    """What goes wrong among `clients` clients, the last `late` of whom join at try 3.

    `slow_disk`: a checkpoint is under way until somebody waits for it; else it is there at once. `tables` are the
    experiment's `[round]`, `[server]` and `[checkpoint]`, `seed`, `rounds` and the `weights` of its strategy.
    """

    faults: Sequence[Fault] = ()
    clients: int = 4
    late: int = 0
    slow_disk: bool = False
    weights: str = "uniform"
    tables: Mapping[str, Any] = field(default_factory=dict)


def one_of_each(name: str) -> list[Fault]:
    """A fault of every kind; `name` decides what they are. Left to draw kinds, hypothesis prefers a few of them."""
    chance = random.Random(name)
    return [
        Fault(kind, chance.randint(1, LAST_TRY), chance.randrange(5), chance.randrange(2 * len(REPLY)))
        for kind in KINDS
    ]


@st.composite
def schedules(draw: st.DrawFn, offered: Sequence[Fault]) -> Schedule:
    """Any small federation, and any of the faults offered."""
    clients = draw(st.integers(3, 5))
    late = draw(st.integers(0, 1))
    sample = draw(st.none() | st.integers(2, clients - late))
    most = sample or clients - late
    return Schedule(
        [fault for fault in offered if draw(st.booleans())],
        clients,
        late,
        draw(st.booleans()),
        draw(st.sampled_from(["uniform", "data"])),
        {
            "seed": draw(st.integers(0, 3)),
            "rounds": draw(st.integers(3, 6)),
            "round": {
                **({} if sample is None else {"sample": sample, "over_select": draw(st.integers(0, 1))}),
                "quorum": draw(st.integers(1, most)),
            },
            "server": {"optimizer": draw(st.sampled_from(["sgd", "momentum"]))},
            "checkpoint": {"every": draw(st.integers(1, 2)), "keep": draw(st.integers(1, 3))},
        },
    )
