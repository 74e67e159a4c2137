"""The coordinator of a run: server state, clients and acknowledgements, and how one round changes them.

Here the four methods are carried over messages, once for all algorithms. `server/rounds/loop.py` adds the waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import torch
from flwr.app import Message, MessageType

from common import vector
from common.compression.feedback import Codec
from common.experiment import Experiment
from common.model import FlatModel
from common.vector import Layout, State
from strategies.protocol import wire
from strategies.protocol.algorithm import Algorithm, all_finite
from strategies.protocol.downlink import Downlink
from strategies.protocol.members import Member, shares
from strategies.protocol.messages import EvaluateHead, Refused, TrainHead, content_of
from strategies.protocol.participation import Participation
from strategies.protocol.rates import rate, scheduled
from strategies.protocol.work import Upload

FEWEST_JUDGED = 3
"""Uploads that can be held against each other: of two nobody can say which is wrong."""


class NotFinite(ArithmeticError):
    """An aggregate with NaN or Inf: the round is rolled back."""


@dataclass
class Coordinator:
    """Everything of a run that changes, on the server's side.

    `layout` is the model's hash, `slots` name -> slot in it. `state` and `buffers` are the model and what the algorithm
    keeps; `copies` what the server holds of each client's uploads ("client/copy.group", EF21), `downlink` of what
    clients hold; `known` name -> training examples of every client that was ever on the roll (the N and n of
    trackers); `accepted` name -> last accepted round of this generation; `keep` name -> versions that kept checkpoints
    may ask for; `stands` name -> the examples with which its trackers still stand in the averages, where that is
    another number than `known`; `grown` name -> examples before and now, of those that changed and were not told of
    yet; `usual` the largest median norm so far of each vector that clients send; `facts` what the run learned of all
    clients' data before round 1 (`Task.census`), `columns_hash` that of their tables' columns, "" where there are none;
    `order` that of the last messages; `assigned` what each client was assigned in them, `bounds` the most steps that it
    was asked for (0: any number). Whether a reply is taken is decided in `acceptance.py`.
    """

    strategy: Algorithm
    experiment: Experiment
    run: str
    layout: str
    slots: Layout
    state: State
    buffers: State
    copies: State = field(default_factory=dict)
    downlink: State = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    keep: dict[str, set[int]] = field(default_factory=dict)
    stands: dict[str, int] = field(default_factory=dict)
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)
    usual: dict[str, float] = field(default_factory=dict)
    generation: int = 1
    round: int = 0
    order: int = 0
    facts: str = ""
    columns_hash: str = ""
    assigned: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.codec = Codec(self.experiment.compression, self.slots)
        self._down = Downlink(self.strategy, self.experiment, self.slots)
        self._looked: dict[str, State] = {}
        self._looked_norms: list[dict[str, float]] = []
        self.participation = Participation(self.experiment)
        self.bounds: dict[str, int] = {}
        self.downlink = self.downlink or self._down.start(self.strategy.broadcast(self.state))

    @classmethod
    def begin(cls, strategy: Algorithm, experiment: Experiment, run: str, model: FlatModel) -> Coordinator:
        """The coordinator before round 1, with the model's present weights and buffers."""
        buffers = {name: value.clone() for name, value in model.buffers.items()}
        state = strategy.init(model.vector.clone())
        return cls(strategy, experiment, run, model.layout_hash, model.layout, state, buffers)

    @property
    def total(self) -> int:
        """n: training examples of all known clients."""
        return sum(self.known.values())

    @property
    def trainers(self) -> int:
        """How many known clients hold training examples."""
        return sum(examples > 0 for examples in self.known.values())

    def admit(self, members: Iterable[Member]) -> None:
        """Put new clients on the roll. A tracker is an average over all of them, so it shrinks as they join: a new
        client's own part is zero.

        Where data may grow, a client's n_i may become n_i'. A tracker of clients weighted by data is
        c = sum_j n_j c_j / n, and the server knows c alone. So c is first scaled by n/n', which makes every other part
        n_j c_j / n'; the client's own then stands in it with n_i/n_i' (`TrainHead.part`, rho) of its share. With its
        next upload it sends c_i+ - rho c_i in place of c_i+ - c_i, and c + (n_i'/n') (c_i+ - rho c_i) holds
        n_i' c_i+ / n': exact, as if the new weights had been there from the beginning.

        Raises Refused if a known client announces another number of examples and that is not allowed.
        """
        before, new = self._mass(), {member.name: member.examples for member in members}
        other = {name: examples for name, examples in new.items() if self.known.get(name, examples) != examples}
        for name, examples in other.items():
            if not (self.experiment.data.may_grow and examples and self.known[name]):
                advice = "" if self.experiment.data.may_grow else ", or allow it with data.may_grow = true and --resume"
                raise Refused(
                    "changed",
                    f"client {name!r} announced {self.known[name]} training examples at first and {examples} now; "
                    f"start a new run{advice}",
                )
        for name, examples in other.items():
            self.grown[name] = self.grown.get(name, (self.known[name], 0))[0], examples
            if self.strategy.weights == "data" and self.strategy.trackers and self.accepted.get(name):
                self.stands.setdefault(name, self.known[name])
        self.known |= new
        after = self._mass()
        if before and after != before:
            held = [name for name in self.strategy.trackers if name in self.state]
            self.state |= {name: self.state[name] * (before / after) for name in held}

    def dismiss(self, names: Iterable[str]) -> None:
        """Take clients off the roll that have sent nothing yet."""
        gone = set(names)
        self.known = {name: examples for name, examples in self.known.items() if name not in gone}

    def part(self, name: str) -> float:
        """The part of a client's own trackers that the server's averages hold, in units of its present share."""
        return self.stands.get(name, self.known[name]) / self.known[name] if self.known[name] else 1.0

    def _mass(self) -> int:
        """N or n. One who holds no training example can never send a tracker: counted, it would dilute all others'."""
        return self.trainers if self.strategy.weights == "uniform" else self.total

    def lr(self, round: int) -> float:
        """The local rate of a round: from the server's round, also for a client that skipped some."""
        return rate(self.experiment.local, round, self.experiment.rounds)

    def server_lr(self, round: int) -> float | None:
        """The server's rate of a round; None where it is the same in all."""
        server = self.experiment.server
        return rate(server, round, self.experiment.rounds) if scheduled(server) else None

    def _stepping(self, round: int) -> Algorithm:
        """The algorithm with the server's rate of a round."""
        lr = self.server_lr(round)
        if lr is None:
            return self.strategy
        return replace(self.strategy, server=self.strategy.server.model_copy(update={"lr": lr}))

    def new_generation(self) -> None:
        """Zero every tracker on both sides: after a client lost memory that is bound to server state."""
        self.generation += 1
        self.state = self.strategy.reset(self.state)
        self.copies = {}
        self.downlink = self._down.start(self.strategy.broadcast(self.state))
        self.accepted.clear()
        self.keep.clear()
        self.stands.clear()

    def lost_memory(self, name: str) -> bool:
        """A client lost its memory. Returns whether server state is bound to it, so that a new generation is due; if it
        is the client's own affair, it starts from nothing and is sent everything."""
        if self.strategy.memory_kind(self.experiment) == "bound":
            return True
        self.accepted.pop(name, None)
        return False

    def messages(
        self, round: int, members: Sequence[Member], ttl: float, informed: State | None = None, phase: str = ""
    ) -> dict[str, Message]:
        """One TRAIN message for each member, by name. All that hold the same share one copy of the broadcast.

        `informed`: the state after a round's first exchange; `phase` = "survey" is that exchange.
        """
        broadcast = self.strategy.broadcast(self.state if informed is None else informed)
        holders: set[str] = set()
        if self._down.saves and round > 1 and not phase:
            holders = {m.name for m in members if self.accepted.get(m.name) == round - 1}
        # A record is a copy of all that it holds: only those that somebody is sent.
        whole = rest = None
        digest = ""
        if len(holders) < len(members):
            whole = wire.to_records(self._down.whole(broadcast, self.downlink))
        if holders:
            left, digest = self._down.rest(broadcast, self.downlink)
            rest = wire.to_records(left)
        buffers = wire.to_records(self.buffers)
        self.assigned = self.strategy.assign(self.state, [m.name for m in members], round, self.experiment.seed)
        text, total = self.experiment.json(), self.total
        budgets = {member.name: self.participation.budget(round, member) for member in members}
        most = {member.name: self.participation.most_steps(round, member) for member in members}
        self.bounds = {name: self.strategy.passes * steps for name, steps in most.items()}
        # By the clock, so that what a server sent before it was killed comes before all that it sends once resumed.
        self.order = max(self.order + 1, time.time_ns())
        return {
            member.name: Message(
                content_of(
                    TrainHead(
                        experiment=text,
                        run=self.run,
                        client=member.name,
                        generation=self.generation,
                        round=round,
                        accepted=self.accepted.get(member.name, 0),
                        keep=self._kept(member.name),
                        share=self.known[member.name] / total,
                        lr=self.lr(round),
                        layout=self.layout,
                        order=self.order,
                        phase=phase,
                        holds=round - 1 if member.name in holders else 0,
                        digest=digest if member.name in holders else "",
                        epochs=budgets[member.name].epochs,
                        steps=budgets[member.name].steps,
                        part=self.part(member.name),
                        facts=self.facts,
                    ),
                    rest if member.name in holders else whole,
                    buffers,
                    self.assigned.get(member.name, {}),
                ),
                dst_node_id=member.node,
                message_type=MessageType.TRAIN,
                group_id=str(round),
                ttl=ttl,
            )
            for member in members
        }

    def _kept(self, name: str) -> list[int]:
        return sorted({*self.keep.get(name, ()), self.accepted.get(name, 0)} - {0})

    def evaluation_messages(self, round: int, members: Sequence[Member], ttl: float) -> dict[str, Message]:
        """One EVALUATE message for each member, by name."""
        state = wire.to_records({"model": self.state["model"]})
        buffers = wire.to_records(self.buffers)
        text = self.experiment.json()
        return {
            member.name: Message(
                content_of(
                    EvaluateHead(
                        text,
                        self.run,
                        member.name,
                        round,
                        self.layout,
                        self.generation,
                        self.accepted.get(member.name, 0),
                        self.facts,
                    ),
                    state,
                    buffers,
                    {},
                ),
                dst_node_id=member.node,
                message_type=MessageType.EVALUATE,
                group_id=str(round),
                ttl=ttl,
            )
            for member in members
        }

    def inform(self, round: int, uploads: Sequence[Upload]) -> State:
        """The state of this round after its first exchange. Raises NotFinite."""
        state = self._applied(round, self._weighted(uploads), self.state, self.strategy.inform)
        if not all_finite(state):
            raise NotFinite(f"the first exchange of round {round} is not finite")
        self._looked = {upload.name: upload.copies for upload in uploads}
        self._looked_norms = [upload.norms for upload in uploads]
        return state

    def advance(self, round: int, uploads: Sequence[Upload], informed: State | None = None) -> list[Upload]:
        """Aggregate in name order, acknowledge and move on to `round`; returns the uploads in the order summed.

        `informed`: the state after the round's first exchange, if it has one. Raises NotFinite and changes nothing if
        the aggregate is not finite.
        """
        ordered = self._weighted(uploads)
        before = self.state if informed is None else informed
        state = self._applied(round, ordered, before, self._stepping(round).aggregate)
        buffers = mean_buffers(self.buffers, ordered)
        if not all_finite(state) or any(spoilt(value, self.buffers[name]) for name, value in buffers.items()):
            raise NotFinite(f"the aggregate of round {round} is not finite")
        downlink = self._down.follow(self.downlink, self.strategy.broadcast(state), round + 1)
        if not all_finite({name: value for name, value in downlink.items() if "/" not in name}):
            raise NotFinite(f"the compressed model of round {round} is not finite")
        self.state, self.buffers, self.downlink, self.round = state, buffers, downlink, round
        for upload in ordered:
            self.copies |= upload.copies | (self._looked[upload.name] if informed is not None else {})
            self.accepted[upload.name] = round
            if set(self.strategy.trackers) <= upload.vectors.keys():
                self.stands.pop(upload.name, None)
        self._remember([upload.norms for upload in ordered] + (self._looked_norms if informed is not None else []))
        return ordered

    def _remember(self, norms: Sequence[Mapping[str, float]]) -> None:
        """What is usual, for the rounds to come: of vectors that enough clients sent to be held against each other."""
        for group in {group for each in norms for group in each}:
            sizes = [each[group] for each in norms if group in each]
            if len(sizes) >= FEWEST_JUDGED:
                self.usual[group] = max(self.usual.get(group, 0.0), median_low(sizes))

    def _weighted(self, uploads: Sequence[Upload]) -> list[Upload]:
        """The uploads in name order, each with what it counts."""
        ordered = sorted(uploads, key=lambda upload: upload.name)
        uniform = self.strategy.weights == "uniform"
        mass = self._mass()
        counts = shares([upload.examples for upload in ordered], self.experiment.round.most_share)
        for upload, share in zip(ordered, counts, strict=True):
            upload.weight = 1 / len(ordered) if uniform else share
            upload.tracker_weight = 1 / mass if uniform else self.known[upload.name] / mass
        return ordered

    def _applied(
        self, round: int, uploads: list[Upload], state: State, step: Callable[[State, Sequence[Upload]], State]
    ) -> State:
        try:
            return step(state, uploads)
        except ArithmeticError as error:
            raise NotFinite(f"the aggregate of round {round} has no value: {error}") from error


def mean_buffers(buffers: State, uploads: Sequence[Upload]) -> State:
    """Cohort means of floating buffers. Integer and boolean ones (counters, masks) take the largest value sent and
    keep their dtype: an average of counters is no counter."""
    result: State = {}
    for name, own in buffers.items():
        sent = [upload.buffers[name] for upload in uploads]
        if own.is_floating_point():
            result[name] = vector.weighted_sum(sent, [upload.weight for upload in uploads])
        else:
            result[name] = torch.stack(list(sent)).amax(dim=0).to(own.dtype)
    return result


def spoilt(new: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether a buffer holds NaN or Inf where the server's does not: a causal mask is -inf and stays so."""
    if not new.is_floating_point() or bool((finite := torch.isfinite(new)).all()):
        return False
    same = (new == held) | (new.isnan() & held.isnan())
    return not bool((finite | same).all())
