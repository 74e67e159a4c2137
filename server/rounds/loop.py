"""The round loop: sample, broadcast, collect, validate, aggregate, acknowledge, checkpoint, evaluate, record."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from flwr.serverapp import Grid

from common import vector
from common.errors import RunError, SettingsError
from common.vector import State
from server.rounds.attempt import Attempt, Attempts, timed
from server.rounds.best import Best
from server.rounds.changes import begun_as, differences, record_changes
from server.rounds.checkpoint import Checkpoints
from server.rounds.drops import Drops
from server.rounds.ending import Finish, told_to_finish
from server.rounds.evaluate import Evaluation, describe, described, of_training
from server.rounds.exchange import Exchange
from server.rounds.folder import RunFolder
from server.rounds.machines import Machines
from server.rounds.prepare import Prepared
from server.rounds.provenance import now
from server.rounds.records import Event, Record, unheard
from server.rounds.roster import Roster
from server.rounds.stopping import Stop, Stopped
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.members import Member
from strategies.protocol.selection import Selection
from strategies.registry import cautions, identities, written_out


def about_member(member: Member) -> dict[str, Any]:
    """What the roll's file says of a client: not its sums, which are but parts of columns.json."""
    return {key: value for key, value in asdict(member).items() if key != "sums"}


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
        event: Event = unheard,
        finish: Finish = lambda record: None,
    ) -> None:
        """`finish`: told of each record, it may end the run."""
        self._event = event
        self._finish = finish
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
        self._evaluation = Evaluation(prepared)
        self.ended: Record = {}
        """With `why` it ended before its last round; {} if it did not."""
        self._written = written_out(prepared.strategy, prepared.experiment)
        # Runs of before kept the settings, and their hash, without the hyperparameters that nobody set.
        known = self._written.identity, *identities(prepared.experiment)
        self._heavy: set[str] = set()
        self._notes = prepared.notes
        self._headline = self._evaluation.scoring.headline([]) or "loss"
        self._told: dict[str, bool] = {}
        self._drops = Drops(say)
        self._changed: list[Record] = []
        self._checkpoints = Checkpoints(folder.checkpoints, known, prepared.experiment.checkpoint.keep)

    def run(self, resume: bool = False) -> Record:
        """Run to the last round, or until `[stop]` or `finish` ends it before; returns the last line of the history, {}
        if there was nothing to do.

        Raises SettingsError before round 1, RunError when rounds bring no progress, and Stopped if `stop` asked for
        it: then the round in hand is either finished or as if it had never begun.
        """
        coordinator = self._resumed() if resume else self._fresh()
        # Whoever follows the history from outside shows what comes after this round.
        about = {"rounds": self._experiment.rounds, "after": coordinator.round, "plan": self._task.plan_hash()}
        for note in () if resume else self._notes:
            self._say(note)
        if not resume:
            about["initial"] = vector.sha256({"model": coordinator.state["model"], **coordinator.buffers})
        self._folder.set_status("running", **about)
        self._folder.save_settings(self._written)
        try:
            records = self._folder.history()
            self._ending = self._evaluation.ending(self._experiment.stop, records)
            self._best = Best(self._folder, records) if self._experiment.checkpoint.best else None
            if coordinator.round >= self._experiment.rounds or self._ending.why:
                return self._conclude(coordinator, self._ending.why)
            roster = self._roll(coordinator, resume)
            exchange = Exchange(self._grid, roster.in_flight, self._stop, roster.restarted)
            self._selection = Selection(self._experiment)
            for record in records:
                self._selection.note(record)
            attempts = Attempts(
                self._experiment, coordinator, roster, exchange, self._checkpoints.asked, self._stop, self._selection
            )
            if not resume:
                self._checkpoints.save(coordinator)
            for round in range(coordinator.round + 1, self._experiment.rounds + 1):
                if self._stop() is not None:
                    raise Stopped
                if why := self._round(round, attempts):
                    return self._conclude(coordinator, why)
            return self._conclude(coordinator)
        finally:
            self._checkpoints.close()

    def _conclude(self, coordinator: Coordinator, why: str = "") -> Record:
        """Save the model. `why` the run ends before its last round."""
        if why and coordinator.round < self._experiment.rounds:
            self.ended = {"round": coordinator.round, "why": why}
            self._say(f"ended after round {coordinator.round} of {self._experiment.rounds}: {why}")
        self._folder.save_model(self._named(coordinator))
        return (self._folder.history() or [{}])[-1]

    def _named(self, coordinator: Coordinator) -> State:
        self._model.load(coordinator.state["model"], coordinator.buffers)
        return self._model.named_tensors()

    def _fresh(self) -> Coordinator:
        # The name of a run tells its clients' memories from those of every other run of the same experiment.
        name = f"{self._experiment.name}-{uuid.uuid4().hex[:12]}"
        return Coordinator.begin(self._strategy, self._experiment, name, self._model)

    def _resumed(self) -> Coordinator:
        written, begun = begun_as(self._folder, self._written), begun_as(self._folder, self._experiment)
        kept = self._checkpoints.latest(
            (written.identity, *identities(begun)), differences(self._folder, self._written)
        )
        before, now = self._folder.status().get("plan", ""), self._task.plan_hash()
        if before and before != now:
            raise SettingsError(
                f"the data are split as plan {now[:12]!r} and this run began with {before[:12]!r}: the data or the "
                "plan file changed; start a new run"
            )
        self._folder.cut_history(kept.round)
        status = self._folder.status()
        self._headline, self._told = status.get("headline", self._headline), dict(status.get("metrics", {}))
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
        coordinator.stands, coordinator.facts, coordinator.columns_hash = kept.stands, kept.facts, kept.columns_hash
        coordinator.generation, coordinator.round, coordinator.usual = kept.generation, kept.round, kept.usual
        why = "".join(f"; {each}" for each in self._checkpoints.passed_over)
        self._say(f"resuming after round {kept.round}{why}")
        self._changed = record_changes(self._folder, self._written, kept.round)
        for change in self._changed:
            self._say(f"from round {change['round']} on {change['key']} is {change['to']}, it was {change['from']}")
        return coordinator

    def _roll(self, coordinator: Coordinator, resume: bool) -> Roster:
        settings = self._experiment.round
        named = self._task.names()
        plan = self._task.plan_hash()
        census = self._task.census
        roster = Roster(
            self._grid,
            self._experiment,
            coordinator,
            plan,
            self._say,
            self._stop,
            not named,
            self._event,
            self._task.columns(),
            census,
        )
        roster.undecided.show = lambda names: self._folder.amend_status(waiting=names)
        count = settings.wait_for or len(named) or settings.sample or 1
        agreed = False
        while not agreed:
            roster.wait(count, settings.deadline_s, self._strict, named if count == len(named) else ())
            if not resume:
                roster.doubt()
            agreed = roster.agree(self._strict)
        trainers = roster.trainers
        if not trainers:
            raise SettingsError("no client on the roll holds a training example")
        if settings.sample is not None and settings.sample > len(trainers):
            raise SettingsError(
                f"round.sample = {settings.sample}: only {len(trainers)} clients on the roll hold training examples"
            )
        if census is not None:
            if not coordinator.facts:
                coordinator.facts = roster.settle()
            census.adopt(coordinator.facts)
            self._folder.save_facts(coordinator.facts)
        self._folder.save_roll([about_member(member) for _, member in sorted(roster.members.items())])
        self._machines = Machines(self._folder, self._say, resume)
        self._machines.heed(roster.members)
        if idle := sorted(roster.members.keys() - set(trainers)):
            more = ", ..." if len(idle) > 10 else ""
            self._say(f"{len(idle)} clients hold no training example and are never asked: {', '.join(idle[:10])}{more}")
        steps = coordinator.participation.most(roster.members.values(), self._experiment.local.epochs)
        for warning in cautions(self._strategy, self._experiment, steps):
            self._say(f"warning: {warning}")
        self._heed_shares(coordinator)
        return roster

    def _heed_shares(self, coordinator: Coordinator) -> None:
        """Say once of each client that it outweighs all others together."""
        most = self._experiment.round.most_share
        if most is not None or coordinator.strategy.weights == "uniform" or len(coordinator.known) < 2:
            return
        name, examples = max(coordinator.known.items(), key=itemgetter(1))
        total = coordinator.total
        if 2 * examples > total and name not in self._heavy:
            self._heavy.add(name)
            self._say(
                f"warning: client {name} holds {examples} of {total} training examples, {examples / total:.1%}: the "
                "model is mostly its own; round.most_share bounds that"
            )

    def _round(self, round: int, attempts: Attempts) -> str:
        """One round, to its line and checkpoint. Returns why the run ends with it, "" if it goes on."""
        started, coordinator = time.perf_counter(), attempts.coordinator
        attempt, void = self._valid(round, attempts)
        record = self._record(coordinator, attempt, void, attempts.exchange.late)
        if about := described(self._strategy, coordinator.state):
            record["strategy"] = about
        if waiting := attempts.roster.undecided.names:
            record["waiting"] = waiting
        if coordinator.grown:
            record["grown"] = {name: list(change) for name, change in coordinator.grown.items()}
            for name, (before, after) in coordinator.grown.items():
                self._say(f"from round {round} on {name} counts with {after} training examples, it had {before}")
            coordinator.grown.clear()
        if self._changed:
            record["changed"], self._changed = self._changed, []
        with timed(attempt.seconds, "evaluate"):
            if self._evaluation.due(round) or self._ending.overdue(time.perf_counter() - started):
                self._evaluate(record, attempts, attempt)
        record["headline"] = {"metric": self._headline, "higher": self._evaluation.scoring.higher(self._headline)}
        self._drops.tell("upload", round, attempt.dropped, attempt.causes)
        with timed(attempt.seconds, "checkpoint"):
            self._checkpoints.wait()
        record["time"] = now()
        record["seconds"] = attempt.seconds | {"total": time.perf_counter() - started}
        # First the line, then the checkpoint: a crash between them costs a round that is run again, never a line.
        record = self._folder.append(record)
        self._selection.note(record)
        self._tell(record, attempt)
        why = self._ending.heed(record)
        if self._best:
            self._best.heed(record, lambda: self._named(coordinator), self._checkpoints.kept)
        due = round % self._experiment.checkpoint.every == 0 or round == self._experiment.rounds
        if due or why:
            self._checkpoints.save(coordinator)
        self._show(record)
        if (asked := told_to_finish(self._finish, record)) and not (due or why):
            self._checkpoints.save(coordinator)
        return why or asked

    def _evaluate(self, record: Record, attempts: Attempts, attempt: Attempt) -> None:
        """Add what the model of this round is by the metrics, at the server and at clients."""
        evaluation, coordinator = self._evaluation, attempts.coordinator
        central = evaluation.central(coordinator)
        record["central"] = central
        answers = evaluation.clients(coordinator, attempts.roster, attempts.exchange, attempt.sampled)
        # A client's own model is another thing than the global one on its data.
        of = "personal" if self._strategy.own_models(self._experiment) else "clients"
        each = evaluation.each(answers)
        record[of], record["each"] = evaluation.summary(answers, each), each
        if answers.asked:
            record["evaluated"] = {"asked": len(answers.asked), "dropped": answers.dropped, "causes": answers.causes}
        self._drops.tell("evaluation", attempt.round, answers.dropped, answers.causes)
        record["task"] = describe(self._task, coordinator.state["model"])
        names = [*central, *record[of]]
        self._headline = evaluation.scoring.headline(names) or self._headline
        known = {name: evaluation.scoring.higher(name) for name in sorted(names)}
        if known.items() - self._told.items():
            self._told |= known
            self._folder.amend_status(headline=self._headline, metrics=self._told)

    def _tell(self, record: Record, attempt: Attempt) -> None:
        """The audit log's line of a round: which message of each client came in, by the SHA-256 that it noted too."""
        about = {key: record[key] for key in ("round", "generation", "accepted", "causes", "bytes_down", "bytes_up")}
        self._event("round", "ended", uploads=attempt.received, weights=record["sha256"], **about)

    def _valid(self, round: int, attempts: Attempts) -> tuple[Attempt, list[Record]]:
        """The first try at a round that is not void, and of those before it what the history tells."""
        void: list[Record] = []
        for number in range(self._experiment.round.max_void):
            attempt = attempts.make(round, number)
            self._machines.heed(attempts.roster.members)
            self._heed_shares(attempts.coordinator)
            if not attempt.cause:
                return attempt, void
            void.append({key: getattr(attempt, key) for key in ("sampled", "dropped", "causes", "cause")})
            self._say(f"round {round} is void: {attempt.cause}")
            self._event(
                "round", "void", round=round, uploads=attempt.received, causes=attempt.causes, why=attempt.cause
            )
        why = f"no progress in round {round} after {len(void)} tries; the last one: {void[-1]['cause']}"
        raise RunError(why + self._spoilt(round - 1, void[-1]["dropped"]))

    def _spoilt(self, round: int, dropped: dict[str, str]) -> str:
        """Where nothing finite came of the model of `round`: its checkpoint is set aside. Says who may have spoilt it,
        and how to go on."""
        if not dropped or not all(reason.startswith("not finite") for reason in dropped.values()):
            return ""
        before = self._checkpoints.set_aside(round)
        last: Record = next((line for line in reversed(self._folder.history()) if line["round"] == round), {})
        norms = sorted(last.get("norms", {}).items(), key=lambda item: item[1], reverse=True)
        longest = ", ".join(f"{name} {size:.3g}" for name, size in norms[:5])
        who = f"; norms of the uploads that made it, the longest first: {longest}" if longest else ""
        then = f"; --resume goes on from round {before} and leaves out round {round}" if before is not None else ""
        return f". No upload made from the model of round {round} is finite, so it was spoilt or diverged{who}{then}"

    def _record(self, coordinator: Coordinator, attempt: Attempt, void: list[Record], late: int) -> Record:
        uploads = attempt.uploads
        leading = next(iter(self._strategy.expects({})), None)  # None: nothing leaves the clients
        norms = [upload.metrics.get(f"norm.{leading}", 0.0) for upload in uploads]
        drift = vector.mean_pairwise_cosine([upload.vectors[leading] for upload in uploads], norms) if leading else None
        return {
            "round": attempt.round,
            "generation": coordinator.generation,
            "sampled": attempt.sampled,
            "accepted": [upload.name for upload in uploads],
            "dropped": attempt.dropped,
            "causes": attempt.causes,
            "void": void,
            "late": late,
            "lr": coordinator.lr(attempt.round),
            **({} if (server_lr := coordinator.server_lr(attempt.round)) is None else {"server_lr": server_lr}),
            "clock": attempt.clock,
            "steps": {upload.name: upload.steps for upload in uploads},
            "examples": {upload.name: upload.examples for upload in uploads},
            "norms": dict(zip((upload.name for upload in uploads), norms, strict=True)),
            "losses": {upload.name: upload.metrics.get("loss") for upload in uploads},
            "train": of_training(uploads),
            "bytes_down": attempt.bytes_down,
            "bytes_up": attempt.bytes_up,
            "drift": drift,
            "sha256": vector.sha256({"model": coordinator.state["model"], **coordinator.buffers}),
        }
