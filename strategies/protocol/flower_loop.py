"""Any strategy under Flower's own loop, `strategy.start(grid, arrays, train_config=config_of(experiment))`.

Plain rounds without quorum, retry or resume; the weights are those of `server/rounds/loop.py`, which adds these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from common import tasks
from common.errors import RunError, SettingsError
from common.model import build
from common.tasks.scoring import Measured, Scoring
from common.vector import BUFFERS, State
from strategies.protocol import wire
from strategies.protocol.acceptance import judge, measured
from strategies.protocol.algorithm import Algorithm
from strategies.protocol.coordinator import Coordinator, NotFinite
from strategies.protocol.members import Member, members_of, roll_messages
from strategies.protocol.messages import Refused, read_experiment, read_reply
from strategies.protocol.selection import Selection
from strategies.protocol.work import Upload

MODEL = "model"


class FlowerLoop:
    """The coordinator behind one call of `start`."""

    def __init__(self, coordinator: Coordinator, members: Mapping[str, Member], scoring: Scoring) -> None:
        self._coordinator = coordinator
        self._scoring = scoring
        self._members = members
        self._asked: dict[str, Message] = {}
        self._informed: State | None = None
        self._selection = Selection(coordinator.experiment)
        self._sampled: list[str] = []

    @classmethod
    def begin(cls, strategy: Algorithm, config: ConfigRecord, arrays: ArrayRecord, grid: Grid) -> FlowerLoop:
        """Call the roll once and start a coordinator from the initial arrays ("model", "buffers.*").

        Raises SettingsError for a node that must not take part and RunError if there is none.
        """
        if "experiment" not in config:
            raise RunError("start(...) needs train_config=config_of(experiment)")
        experiment = read_experiment(str(config["experiment"]))
        task = strategy.arrange(tasks.create(experiment.task, experiment.partition, experiment.seed), experiment)
        model = build(task, experiment.seed, personal=experiment.personal.parts, check=strategy.check_model)
        layout, given = model.layout_hash, wire.from_records(arrays)
        model.load(given[MODEL], {name: value for name, value in given.items() if name.startswith(BUFFERS)})
        coordinator = Coordinator.begin(strategy, experiment, experiment.name, model)
        deadline = experiment.round.deadline_s
        replies = grid.send_and_receive(
            roll_messages(experiment, coordinator.run, grid.get_node_ids(), deadline), timeout=deadline
        )
        members: dict[str, Member] = {}
        for reply in replies:
            try:
                entering, _ = members_of(reply.metadata.src_node_id, reply, layout, task.plan_hash())
            except Refused as error:
                raise SettingsError(str(error)) from None
            for member in entering:
                node = members.setdefault(member.name, member).node
                if node != member.node:
                    raise SettingsError(f"client {member.name!r} is here twice, on nodes {node} and {member.node}")
        if not any(member.examples for member in members.values()):
            raise RunError("no client answered the roll call")
        if task.census is not None:
            coordinator.facts = task.census.settle({m.name: m.sums for m in members.values() if m.examples})
        coordinator.admit(members.values())
        return cls(coordinator, members, Scoring(task, model.module, experiment.evaluate))

    def open_round(self, round: int, grid: Grid) -> Iterable[Message]:
        """TRAIN messages for the clients of this round, after a first exchange with them if the algorithm has one."""
        coordinator = self._coordinator
        trainers = [name for name, member in self._members.items() if member.examples]
        settings = coordinator.experiment.round
        present = coordinator.participation.present(round, 0, trainers)
        here = [self._members[name] for name in present]
        chosen = self._selection.choose(coordinator.state, here, round, 0, settings.sample or len(trainers))
        self._sampled = chosen
        late = coordinator.participation.late(round, [self._members[name] for name in chosen])
        chosen = [name for name in chosen if name not in late]
        self._informed = None
        if coordinator.strategy.survey:
            self._asked = self._messages(round, chosen, phase="survey")
            replies = grid.send_and_receive(self._asked.values(), timeout=settings.deadline_s)
            uploads, lost = self._judge(round, replies, "survey")
            if lost:
                coordinator.new_generation()
                uploads = []
            chosen = sorted(upload.name for upload in uploads)
            try:
                self._informed = coordinator.inform(round, uploads) if uploads else None
            except NotFinite as error:
                chosen = []
                print(f"round {round} is void: {error}", flush=True)
        self._asked = self._messages(round, chosen) if chosen else {}
        return list(self._asked.values())

    def _messages(self, round: int, names: Iterable[str], phase: str = "") -> dict[str, Message]:
        members = [self._members[name] for name in names]
        return self._coordinator.messages(
            round, members, self._coordinator.experiment.round.deadline_s, self._informed, phase=phase
        )

    def close_round(self, round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies; lost client memory starts a new generation and leaves the model as it is."""
        uploads, lost = self._judge(round, replies)
        if lost:
            self._coordinator.new_generation()
            return None, None
        if not uploads:
            return None, None
        try:
            uploads = self._coordinator.advance(round, uploads, self._informed)
        except NotFinite as error:
            print(f"round {round} is void: {error}", flush=True)
            return None, None
        self._selection.note(
            {
                "round": round,
                "sampled": self._sampled,
                "accepted": [upload.name for upload in uploads],
                "losses": {upload.name: upload.metrics.get("loss") for upload in uploads},
            }
        )
        total = sum(upload.examples for upload in uploads)
        loss = sum(upload.examples * upload.metrics["loss"] for upload in uploads) / total
        return self._arrays(), MetricRecord({"loss": loss, "clients": len(uploads)})

    def _judge(self, round: int, replies: Iterable[Message], phase: str = "") -> tuple[list[Upload], bool]:
        """The valid uploads, and whether memory is lost that server state is bound to."""
        names = {message.metadata.message_id: name for name, message in self._asked.items()}
        found: dict[str, Message] = {}
        for message in replies:
            name = names.pop(message.metadata.reply_to_message_id, None)
            if name is None:
                _dropped(round, message, Refused("mismatch", "a reply to no message of this round, or a second one"))
            else:
                found[name] = message
        verdict = judge(self._coordinator, round, found, phase)
        for name, error in verdict.refused.items():
            _dropped(round, found[name], error)
        return verdict.uploads, bool(verdict.lost)

    def open_evaluation(self, round: int) -> Iterable[Message]:
        """EVALUATE messages for all clients that hold evaluation examples."""
        holders = [member for _, member in sorted(self._members.items()) if member.evaluation]
        deadline = self._coordinator.experiment.round.deadline_s
        return list(self._coordinator.evaluation_messages(round, holders, deadline).values())

    def close_evaluation(self, replies: Iterable[Message]) -> MetricRecord | None:
        """All metrics over the clients' evaluation examples."""
        results: dict[str, Measured] = {}
        for message in replies:
            try:
                reply = read_reply(message)
                if member := self._members.get(reply.head.client):
                    results[member.name] = measured(self._coordinator, member, reply, self._scoring.metrics)
            except Refused as error:
                _dropped(self._coordinator.round, message, error)
        if not results:
            return None
        held = [each for _, each in sorted(results.items())]
        found: dict[str, int | float | list[int] | list[float]] = {}
        for key in sorted({key for each in held for key in each.means}):
            having = [each for each in held if key in each.means]
            found[key] = sum(each.means[key] * each.examples for each in having) / sum(h.examples for h in having)
        found.update(self._scoring.pooled(held))
        return MetricRecord(found)

    def _arrays(self) -> ArrayRecord:
        return wire.to_records({MODEL: self._coordinator.state[MODEL], **self._coordinator.buffers})


def _dropped(round: int, reply: Message, error: Refused) -> None:
    print(f"round {round}: reply of node {reply.metadata.src_node_id} dropped: {error}", flush=True)
