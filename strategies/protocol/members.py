"""The roll: who is here, what each client holds, and who is asked in a round."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

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

MOST_EXAMPLES = 2**40
"""More than any data set of a site holds."""
MOST_TIMES = 1000
"""How many times the others' usual number of examples one site may announce, where shares are not bounded."""


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
    columns_hash: str = ""
    """Hash of the columns of its site's own table, "" if it brings none."""
    columns: str = ""
    """Their names, a JSON list, where the site lets them out."""
    sums: str = ""
    """What it tells for the task's census."""
    data_schema: str = ""
    """A hash of what its data look like; "" where it is not told."""


def sample(seed: int, round: int, attempt: int, names: Iterable[str], count: int) -> list[str]:
    """The clients of a round: a function of seed, round, try and sorted names alone; sorted."""
    ordered = sorted(names)
    if count >= len(ordered):
        return ordered
    return sorted(random.Random(derive(seed, "sample", round, attempt)).sample(ordered, count))


def roll_messages(
    experiment: Experiment, run: str, nodes: Iterable[int], ttl: float, columns: Sequence[str] = (), facts: str = ""
) -> list[Message]:
    """One roll call for each node. `columns` and `facts`: as of `RollHead`, what is known of them."""
    head = RollHead(experiment.json(), run, columns=json.dumps(columns) if columns else "", facts=facts)
    return [
        Message(RecordDict({HEAD: write_head(head)}), dst_node_id=node, message_type=MessageType.QUERY, ttl=ttl)
        for node in nodes
    ]


def notices(run: str, reasons: Mapping[int, str], ttl: float) -> list[Message]:
    """For each node the reason why it was refused, or why its client's upload was dropped."""
    return [
        Message(
            RecordDict({HEAD: write_head(RollHead("", run, reason))}),
            dst_node_id=node,
            message_type=MessageType.QUERY,
            ttl=ttl,
        )
        for node, reason in reasons.items()
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
    sums = answer.sums or [""] * len(answer.names)
    parts = (answer.names, answer.examples, answer.evaluation, answer.steps, answer.labels, sums)
    lengths = {len(part) for part in parts}
    if len(lengths) != 1:
        raise Refused("malformed", f"roll of clients {str(answer.names[:5])[:200]}: lists of different lengths")
    for name, count in Counter(answer.names).items():
        if fault := name_fault(name):
            raise Refused("name", fault)
        if count > 1:
            raise Refused("name", f"one node hosts {count} clients called {name!r}: each client has its own name")
    if min([0, *answer.examples, *answer.evaluation]) < 0:
        raise Refused("examples", f"negative numbers in the roll of clients {answer.names[:5]}")
    if (most := max([0, *answer.examples, *answer.evaluation])) > MOST_EXAMPLES:
        raise Refused("examples", f"{most} examples in the roll of clients {answer.names[:5]}: no site holds so many")
    for name, labels in zip(answer.names, answer.labels, strict=True):
        if labels and not _class_counts(labels):
            raise Refused("labels", f"class counts of {name!r}, {labels[:100]!r}, are no JSON list of numbers from 0")
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
    if answer.columns and (names_of(answer.columns) is None or not answer.columns_hash):
        raise Refused("malformed", f"{who} says that its columns are {answer.columns[:100]!r}")
    data_schema = answer.data_schema if re.fullmatch("[0-9a-f]*", answer.data_schema) else ""
    alike = {key: getattr(answer, key) for key in ("device", "versions", "arithmetic", "columns_hash", "columns")}
    return [
        Member(name, node, examples, evaluation, steps, labels=labels, sums=told, data_schema=data_schema, **alike)
        for name, examples, evaluation, steps, labels, told in zip(*parts, strict=True)
    ], answer.in_flight


def names_of(text: str) -> list[str] | None:
    """The names of columns that a site told as JSON; None if they are none."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _class_counts(text: str) -> bool:
    """Whether a text is a JSON list of class counts."""
    try:
        counts = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(counts, list) and all(type(each) is int and 0 <= each <= MOST_EXAMPLES for each in counts)


def implausible(name: str, known: Mapping[str, int]) -> str:
    """Why the examples that `name` announced are not believed beside those of the others, "" if they are.

    Nobody can count a site's examples from outside: this stops a slip and a crude lie, and `round.most_share` bounds
    what a site gains by a fine one. It takes two others to say what is usual.
    """
    others = [examples for other, examples in known.items() if other != name and examples]
    if len(others) < 2 or known[name] <= MOST_TIMES * (usual := median_low(others)):
        return ""
    return (
        f"client {name!r} announced {known[name]} training examples, {known[name] / usual:.3g} times the usual {usual} "
        f"of the other {len(others)}; with round.most_share it would be taken at a bounded weight (1: at any)"
    )


def shares(examples: Sequence[int], most: float | None = None) -> list[float]:
    """What each client counts in an average by data: n_i / n, and none more than `most`.

    What one is cut is spread over those below `most`, in proportion to their examples, until nobody is above it; where
    `most` times the clients is not above 1, all count the same.
    """
    total = sum(examples)
    if most is None:
        return [each / total for each in examples]
    if most * len(examples) <= 1:
        return [1 / len(examples)] * len(examples)
    bound: set[int] = set()
    while True:
        rest = sum(each for index, each in enumerate(examples) if index not in bound)
        mass = 1 - most * len(bound)
        over = {i for i, each in enumerate(examples) if i not in bound and each * mass > most * rest}
        if not over:
            return [most if i in bound else each * mass / rest for i, each in enumerate(examples)]
        bound |= over
