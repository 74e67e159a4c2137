"""The round loop: sample, broadcast, collect, validate, aggregate, acknowledge, checkpoint, evaluate, record."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from common import vector
from common.errors import RunError, SettingsError
from common.vector import State
from server.rounds.checkpoint import Checkpoints
from server.rounds.evaluate import Evaluation, describe, each, summarize
from server.rounds.exchange import Exchange
from server.rounds.folder import RunFolder
from server.rounds.prepare import Prepared
from server.rounds.records import Record
from server.rounds.roster import Roster
from server.rounds.stopping import Stop, Stopped
from strategies.base import Upload
from strategies.protocol import wire
from strategies.protocol.acceptance import judge
from strategies.protocol.coordinator import Coordinator, NotFinite
from strategies.protocol.members import sample
from strategies.protocol.messages import usable
from strategies.registry import cautions, identities, written_out

TTL_MARGIN_S = 60.0


@dataclass
class Attempt:
    """What came of one try at a round."""

    sampled: list[str]
    clock: float | None = None
    uploads: list[Upload] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    cause: str = ""
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Rounds:
    """One run, from the roll call to the final model."""

    def __init__(
        self,
        grid: Grid,
        prepared: Prepared,
        folder: RunFolder,
        *,
        say: Callable[[str], None],
        show: Callable[[Record], None] = lambda record: None,
        stop: Stop = lambda: None,
        strict: bool = True,
    ) -> None:
        self._grid = grid
        self._experiment = prepared.experiment
        self._task = prepared.task
        self._model = prepared.model
        self._strategy = prepared.strategy
        self._folder = folder
        self._say = say
        self._show = show
        self._stop = stop
        self._strict = strict
        self._evaluation = Evaluation(prepared.task, prepared.model, prepared.experiment)
        self._written = written_out(prepared.strategy, prepared.experiment)
        # Runs of before kept the settings, and their hash, without the hyperparameters that nobody set.
        known = self._written.identity, *identities(prepared.experiment)
        self._checkpoints = Checkpoints(folder.checkpoints, known, prepared.experiment.checkpoint.keep)

    def run(self, resume: bool = False) -> Record:
        """Run to the last round; returns the last line of the history, {} if there was nothing to do.

        Raises SettingsError before round 1, RunError when rounds bring no progress, and Stopped if `stop` asked for
        it: then the round in hand is either finished or as if it had never begun.
        """
        coordinator = self._resumed() if resume else self._fresh()
        # Whoever follows the history from outside shows what comes after this round.
        about = {"rounds": self._experiment.rounds, "after": coordinator.round, "plan": self._task.plan_hash()}
        if not resume:
            about["initial"] = vector.sha256({"model": coordinator.state["model"], **coordinator.buffers})
        self._folder.set_status("running", **about)
        self._folder.save_settings(self._written)
        try:
            if coordinator.round >= self._experiment.rounds:
                return self._conclude(coordinator)
            roster = self._roll(coordinator)
            exchange = Exchange(self._grid, roster.in_flight, self._stop, roster.restarted)
            if not resume:
                self._checkpoints.save(coordinator)
            for round in range(coordinator.round + 1, self._experiment.rounds + 1):
                if self._stop() is not None:
                    raise Stopped
                self._round(round, coordinator, roster, exchange)
            return self._conclude(coordinator)
        finally:
            self._checkpoints.close()

    def _conclude(self, coordinator: Coordinator) -> Record:
        self._model.load(coordinator.state["model"], coordinator.buffers)
        self._folder.save_model(self._model.named_tensors())
        return (self._folder.history() or [{}])[-1]

    def _fresh(self) -> Coordinator:
        # The name of a run tells its clients' memories from those of every other run of the same experiment.
        name = f"{self._experiment.name}-{uuid.uuid4().hex[:12]}"
        return Coordinator.begin(self._strategy, self._experiment, name, self._model)

    def _resumed(self) -> Coordinator:
        kept = self._checkpoints.latest()
        before, now = self._folder.status().get("plan", ""), self._task.plan_hash()
        if before and before != now:
            raise SettingsError(
                f"the data are split as plan {now[:12]!r} and this run began with {before[:12]!r}: the data or the "
                "plan file changed; start a new run"
            )
        self._folder.cut_history(kept.round)
        model = self._model
        coordinator = Coordinator(
            self._strategy,
            self._experiment,
            kept.run,
            model.layout_hash,
            model.layout,
            kept.state,
            kept.buffers,
            kept.copies,
            kept.downlink,
        )
        coordinator.known, coordinator.accepted = kept.known, kept.accepted
        coordinator.generation, coordinator.round = kept.generation, kept.round
        self._say(f"resuming after round {kept.round}")
        return coordinator

    def _roll(self, coordinator: Coordinator) -> Roster:
        settings = self._experiment.round
        roster = Roster(self._grid, self._experiment, coordinator, self._task.plan_hash(), self._say, self._stop)
        count = settings.wait_for or len(self._task.names()) or settings.sample or 1
        roster.wait(count, settings.deadline_s, self._strict)
        trainers = roster.trainers
        if not trainers:
            raise SettingsError("no client on the roll holds a training example")
        if settings.sample is not None and settings.sample > len(trainers):
            raise SettingsError(
                f"round.sample = {settings.sample}: only {len(trainers)} clients on the roll hold training examples"
            )
        self._folder.save_roll([asdict(member) for _, member in sorted(roster.members.items())])
        if idle := sorted(roster.members.keys() - set(trainers)):
            more = ", ..." if len(idle) > 10 else ""
            self._say(f"{len(idle)} clients hold no training example and are never asked: {', '.join(idle[:10])}{more}")
        steps = coordinator.participation.most(roster.members.values(), self._experiment.local.epochs)
        for warning in cautions(self._strategy, self._experiment, steps):
            self._say(f"warning: {warning}")
        return roster

    def _round(self, round: int, coordinator: Coordinator, roster: Roster, exchange: Exchange) -> None:
        started = time.perf_counter()
        void: list[Record] = []
        for number in range(self._experiment.round.max_void):
            attempt = self._attempt(round, number, coordinator, roster, exchange)
            if not attempt.cause:
                break
            void.append(
                {
                    "sampled": attempt.sampled,
                    "dropped": attempt.dropped,
                    "causes": attempt.causes,
                    "cause": attempt.cause,
                }
            )
            self._say(f"round {round} is void: {attempt.cause}")
        else:
            raise RunError(f"no progress in round {round} after {len(void)} tries; the last one: {attempt.cause}")
        record = self._record(round, coordinator, attempt, void, exchange)
        with _timed(attempt.seconds, "evaluate"):
            if self._evaluation.due(round):
                record["central"] = self._evaluation.central(coordinator)
                found = self._evaluation.clients(coordinator, roster, exchange, attempt.sampled)
                # A client's own model is another thing than the global one on its data.
                record["personal" if self._experiment.personal.active else "clients"] = summarize(found)
                record["each"] = each(found)
                record["task"] = describe(self._task, coordinator.state["model"])
        with _timed(attempt.seconds, "checkpoint"):
            self._checkpoints.wait()
        record["seconds"] = attempt.seconds | {"total": time.perf_counter() - started}
        # First the line, then the checkpoint: a crash between them costs a round that is run again, never a line.
        self._folder.append(record)
        if round % self._experiment.checkpoint.every == 0 or round == self._experiment.rounds:
            self._checkpoints.save(coordinator)
        self._show(record)

    def _attempt(
        self, round: int, number: int, coordinator: Coordinator, roster: Roster, exchange: Exchange
    ) -> Attempt:
        settings = self._experiment.round
        quorum = settings.quorum or ((settings.sample or coordinator.trainers) + 1) // 2
        if not roster.gather(quorum, settings.deadline_s):
            here = ", ".join(sorted(roster.trainers)) or "none"
            return Attempt([], cause=f"{len(roster.trainers)} clients are here, quorum {quorum} ({here})")
        present = coordinator.participation.present(round, number, roster.trainers)
        if len(present) < quorum:
            return Attempt([], cause=f"{len(present)} of {len(roster.trainers)} clients are present, quorum {quorum}")
        wanted = min(settings.sample or len(roster.trainers), len(present))
        everyone = sample(self._experiment.seed, round, number, present, wanted + settings.over_select)
        attempt, informed = Attempt(everyone), None
        members = [roster.members[name] for name in everyone]
        late = coordinator.participation.late(round, members)
        attempt.clock = coordinator.participation.clock(round, members)
        attempt.dropped, attempt.causes = late, dict.fromkeys(late, "late")
        sampled = [name for name in everyone if name not in late]
        wanted = min(wanted, len(sampled))
        enough = (lambda replies: sum(map(usable, replies.values())) >= wanted) if settings.over_select else None
        if self._strategy.survey:
            uploads = self._ask(round, attempt, coordinator, roster, exchange, sampled, enough, phase="survey")
            sampled = [upload.name for upload in uploads]
            with _timed(attempt.seconds, "aggregate"):
                informed = self._inform(round, coordinator, attempt, uploads, quorum)
        if not attempt.cause:
            attempt.uploads = self._ask(round, attempt, coordinator, roster, exchange, sampled, enough, informed)
            with _timed(attempt.seconds, "aggregate"):
                self._advance(round, coordinator, attempt, quorum, informed)
        roster.overdue(name for name, cause in attempt.causes.items() if cause == "timed out")
        return attempt

    def _ask(
        self,
        round: int,
        attempt: Attempt,
        coordinator: Coordinator,
        roster: Roster,
        exchange: Exchange,
        names: list[str],
        enough: Callable[[Mapping[str, Message]], bool] | None,
        informed: State | None = None,
        phase: str = "",
    ) -> list[Upload]:
        """One exchange with the clients named, with a deadline of its own: their valid uploads."""
        with _timed(attempt.seconds, "broadcast"):
            coordinator.keep = self._checkpoints.asked(coordinator.generation)
            members = [roster.members[name] for name in names]
            ttl = self._experiment.round.deadline_s + TTL_MARGIN_S
            messages = coordinator.messages(round, members, ttl, informed, phase)
            attempt.bytes_down += sum(wire.size(message.content) for message in messages.values())
        with _timed(attempt.seconds, "collect"):
            replies = exchange.run(messages, self._experiment.round.deadline_s, enough)
            if self._stop() is not None and len(replies) < len(messages) and not (enough and enough(replies)):
                raise Stopped
        with _timed(attempt.seconds, "aggregate"):
            missing = "late" if enough and enough(replies) else "timed out"
            return self._judge(round, coordinator, attempt, replies, names, missing, phase)

    def _judge(
        self,
        round: int,
        coordinator: Coordinator,
        attempt: Attempt,
        replies: Mapping[str, Message],
        names: list[str],
        missing: str,
        phase: str,
    ) -> list[Upload]:
        verdict = judge(coordinator, round, {name: replies.get(name) for name in names}, phase, missing)
        attempt.bytes_up += verdict.bytes
        attempt.dropped |= {name: str(error) for name, error in verdict.refused.items()}
        attempt.causes |= {name: error.kind for name, error in verdict.refused.items()}
        attempt.lost += verdict.lost
        return verdict.uploads

    def _inform(
        self, round: int, coordinator: Coordinator, attempt: Attempt, uploads: list[Upload], quorum: int
    ) -> State | None:
        """The state after a first exchange, or None and the cause for which the try is void."""
        if attempt.lost or len(uploads) < quorum:
            attempt.uploads = uploads
            self._advance(round, coordinator, attempt, quorum, None)
            return None
        try:
            return coordinator.inform(round, uploads)
        except NotFinite as error:
            attempt.cause = str(error)
            return None

    def _advance(
        self, round: int, coordinator: Coordinator, attempt: Attempt, quorum: int, informed: State | None
    ) -> None:
        if attempt.lost:
            coordinator.new_generation()
            attempt.cause = (
                f"client memory of {', '.join(attempt.lost)} is lost: new generation {coordinator.generation}"
            )
        elif len(attempt.uploads) < quorum:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in attempt.dropped.items())
            attempt.cause = f"{len(attempt.uploads)} valid uploads, quorum {quorum} ({reasons})"
        else:
            try:
                attempt.uploads = coordinator.advance(round, attempt.uploads, informed)
            except NotFinite as error:
                attempt.cause = str(error)

    def _record(
        self, round: int, coordinator: Coordinator, attempt: Attempt, void: list[Record], exchange: Exchange
    ) -> Record:
        uploads = attempt.uploads
        leading = next(iter(self._strategy.expects({})))
        norms = [upload.metrics[f"norm.{leading}"] for upload in uploads]
        drift = vector.mean_pairwise_cosine([upload.vectors[leading] for upload in uploads], norms)
        return {
            "round": round,
            "generation": coordinator.generation,
            "sampled": attempt.sampled,
            "accepted": [upload.name for upload in uploads],
            "dropped": attempt.dropped,
            "causes": attempt.causes,
            "void": void,
            "late": exchange.late,
            "lr": coordinator.lr(round),
            "clock": attempt.clock,
            "steps": {upload.name: upload.steps for upload in uploads},
            "examples": {upload.name: upload.examples for upload in uploads},
            "losses": {upload.name: upload.metrics.get("loss") for upload in uploads},
            "train": summarize({upload.name: (upload.examples, upload.metrics) for upload in uploads}),
            "bytes_down": attempt.bytes_down,
            "bytes_up": attempt.bytes_up,
            "drift": drift,
            "sha256": vector.sha256({"model": coordinator.state["model"], **coordinator.buffers}),
        }


class _timed:
    """Add the seconds of a block to `seconds[phase]`."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds = seconds
        self._phase = phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + time.perf_counter() - self._started
