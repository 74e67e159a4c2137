"""The roll: who is here, what each client holds, and who is asked in a round."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict

from common.experiment import Experiment
from common.flower import FLWR_SERIES, versions
from common.seeds import derive
from common.settings import name_fault
from strategies.protocol.messages import (
    DENIED,
    HEAD,
    WAITING,
    Refused,
    RollHead,
    RollReply,
    Undecided,
    read_head,
    write_head,
)

MOST_ARITHMETIC = 300
"""Letters of a client's line about its arithmetic."""


@dataclass(frozen=True)
class Member:
    """A client on the roll, by name."""

    name: str
    node: int
    examples: int
    evaluation: int
    steps: int
    device: str = ""
    versions: str = ""
    labels: str = ""
    arithmetic: str = ""
    """How it computes, a line; "" of a client from before it was told."""


def sample(seed: int, round: int, attempt: int, names: Iterable[str], count: int) -> list[str]:
    """The clients of a round: a function of seed, round, try and sorted names alone; sorted."""
    ordered = sorted(names)
    if count >= len(ordered):
        return ordered
    return sorted(random.Random(derive(seed, "sample", round, attempt)).sample(ordered, count))


def roll_messages(experiment: Experiment, run: str, nodes: Iterable[int], ttl: float) -> list[Message]:
    """One roll call for each node."""
    head = RollHead(experiment.json(), run)
    return [
        Message(RecordDict({HEAD: write_head(head)}), dst_node_id=node, message_type=MessageType.QUERY, ttl=ttl)
        for node in nodes
    ]


def members_of(node: int, reply: Message, layout: str, plan: str) -> tuple[list[Member], int]:
    """The clients in a node's answer to the roll call, and how many messages it takes at once (0: any number).

    Raises Refused if the node holds another model or another split of the data, or cannot take part; Undecided where
    its people have not approved the run.
    """
    if reply.has_error():
        raise Refused("roll call failed", reply.error.reason or f"code {reply.error.code}")
    answer = read_head(RollReply, reply.content)
    if answer.state in (WAITING, DENIED):
        raise Undecided(answer.state, next(iter(answer.names), ""))
    if answer.error:
        raise Refused("roll call failed", answer.error)
    lengths = {len(part) for part in (answer.names, answer.examples, answer.evaluation, answer.steps, answer.labels)}
    if len(lengths) != 1:
        raise Refused("malformed", f"roll of clients {str(answer.names[:5])[:200]}: lists of different lengths")
    for name, count in Counter(answer.names).items():
        if fault := name_fault(name):
            raise Refused("name", fault)
        if count > 1:
            raise Refused("name", f"one node hosts {count} clients called {name!r}: each client has its own name")
    if min([0, *answer.examples, *answer.evaluation]) < 0:
        raise Refused("examples", f"negative numbers in the roll of clients {answer.names[:5]}")
    if any(steps < 1 for steps, examples in zip(answer.steps, answer.examples, strict=True) if examples):
        raise Refused("steps", f"no local steps in the roll of clients {answer.names[:5]}")
    who = f"client {', '.join(map(repr, answer.names[:3]))}"
    if not answer.versions.startswith(f"flwr {FLWR_SERIES}."):
        raise Refused("versions", f"{who} runs {answer.versions[:100]!r}, the server {versions()!r}")
    if answer.layout != layout:
        raise Refused(
            "layout",
            f"{who} holds a model with layout {answer.layout}, the server's is {layout}: the task's settings, "
            "code or frozen weights differ",
        )
    if plan and answer.plan and answer.plan != plan:
        raise Refused("plan", f"{who} split the data as {answer.plan[:12]!r}, the server as {plan[:12]!r}")
    arithmetic = "".join(each if each.isprintable() else "?" for each in answer.arithmetic[:MOST_ARITHMETIC])
    columns = zip(answer.names, answer.examples, answer.evaluation, answer.steps, answer.labels, strict=True)
    return [
        Member(name, node, examples, evaluation, steps, answer.device, answer.versions, labels, arithmetic)
        for name, examples, evaluation, steps, labels in columns
    ], answer.in_flight
