"""One try at a round: sample, broadcast, collect, judge, aggregate. It changes the model or is void."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from common.experiment import Experiment
from common.vector import State
from server.rounds.exchange import Exchange
from server.rounds.roster import Roster
from server.rounds.stopping import Stop, Stopped
from strategies.base import Upload
from strategies.protocol import wire
from strategies.protocol.acceptance import judge
from strategies.protocol.coordinator import Coordinator, NotFinite
from strategies.protocol.messages import Undecided, usable
from strategies.protocol.selection import Selection

TTL_MARGIN_S = 60.0

Enough = Callable[[Mapping[str, Message]], bool]
"""Whether these replies by name end the waiting."""


@dataclass
class Attempt:
    """What came of one try at a round. `cause`: why it is void and changed nothing, "" if it is not."""

    round: int
    sampled: list[str] = field(default_factory=list)
    clock: float | None = None
    uploads: list[Upload] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    cause: str = ""
    bytes_down: int = 0
    bytes_up: int = 0
    received: dict[str, str] = field(default_factory=dict)
    """Whose replies came -> the SHA-256 by which Flower knows that message, at both ends."""
    seconds: dict[str, float] = field(default_factory=dict)


class Attempts:
    """Tries at the rounds of one run, with the clients of its roster.

    `kept(generation)`: for each client the versions of its memory that checkpoints of this generation go on from.
    """

    def __init__(
        self,
        experiment: Experiment,
        coordinator: Coordinator,
        roster: Roster,
        exchange: Exchange,
        kept: Callable[[int], dict[str, set[int]]],
        stop: Stop,
        selection: Selection,
    ) -> None:
        self._experiment = experiment
        self.coordinator = coordinator
        self.roster = roster
        self.exchange = exchange
        self._kept = kept
        self._stop = stop
        self._selection = selection
        self._closes = 0.0
        """When the try at hand ends: one deadline for all of its exchanges."""

    def make(self, round: int, number: int) -> Attempt:
        """The try `number` (from 0) at a round. Raises Stopped if `stop` asked for it before all have replied."""
        settings, coordinator, roster = self._experiment.round, self.coordinator, self.roster
        quorum = settings.quorum or ((settings.sample or coordinator.trainers) + 1) // 2
        if not roster.gather(quorum, settings.deadline_s):
            names = ", ".join(sorted(roster.trainers)) or "none"
            return Attempt(round, cause=f"{len(roster.trainers)} clients are here, quorum {quorum} ({names})")
        present = coordinator.participation.present(round, number, roster.trainers)
        if len(present) < quorum:
            cause = f"{len(present)} of {len(roster.trainers)} clients are present, quorum {quorum}"
            return Attempt(round, cause=cause)
        wanted = min(settings.sample or len(roster.trainers), len(present))
        here = [roster.members[name] for name in present]
        everyone = self._selection.choose(coordinator.state, here, round, number, wanted + settings.over_select)
        members = [roster.members[name] for name in everyone]
        late = coordinator.participation.late(round, members)
        attempt = Attempt(round, everyone, coordinator.participation.clock(round, members), dropped=late)
        attempt.causes = dict.fromkeys(late, "late")
        on_time = [name for name in everyone if name not in late]
        wanted = min(wanted, len(on_time))
        enough = (lambda replies: sum(map(usable, replies.values())) >= wanted) if settings.over_select else None
        self._closes = time.monotonic() + settings.deadline_s
        self._exchange_with(attempt, on_time, quorum, enough)
        roster.overdue(name for name, cause in attempt.causes.items() if cause == "timed out")
        roster.tell({name: f"round {round}: {why}" for name, why in attempt.dropped.items() if name not in late})
        return attempt

    def _exchange_with(self, attempt: Attempt, names: list[str], quorum: int, enough: Enough | None) -> None:
        """The exchanges of a round, two for an algorithm that asks first, and the step that they lead to."""
        informed = None
        if self.coordinator.strategy.survey:
            uploads = self._ask(attempt, names, enough, phase="survey")
            names = [upload.name for upload in uploads]
            with timed(attempt.seconds, "aggregate"):
                informed = self._inform(attempt, uploads, quorum)
        if not attempt.cause:
            attempt.uploads = self._ask(attempt, names, enough, informed)
            with timed(attempt.seconds, "aggregate"):
                self._advance(attempt, quorum, informed)

    def _ask(
        self, attempt: Attempt, names: list[str], enough: Enough | None, informed: State | None = None, phase: str = ""
    ) -> list[Upload]:
        """One exchange with the clients named, until the round's deadline: their valid uploads. A first exchange has
        half of it, so that who is silent then leaves the others the rest."""
        coordinator, deadline_s = self.coordinator, max(0.0, self._closes - time.monotonic())
        if phase:
            deadline_s = min(deadline_s, self._experiment.round.deadline_s / 2)
        with timed(attempt.seconds, "broadcast"):
            coordinator.keep = self._kept(coordinator.generation)
            members = [self.roster.members[name] for name in names]
            messages = coordinator.messages(attempt.round, members, deadline_s + TTL_MARGIN_S, informed, phase)
            attempt.bytes_down += sum(wire.size(message.content) for message in messages.values())
        with timed(attempt.seconds, "collect"):
            replies = self.exchange.run(messages, deadline_s, enough)
            if self._stop() is not None and len(replies) < len(messages) and not (enough and enough(replies)):
                raise Stopped
        with timed(attempt.seconds, "aggregate"):
            missing = "late" if enough and enough(replies) else "timed out"
            return self._judge(attempt, replies, names, missing, phase)

    def _judge(
        self, attempt: Attempt, replies: Mapping[str, Message], names: list[str], missing: str, phase: str
    ) -> list[Upload]:
        """The valid ones among the replies; `missing`: why there is none of a client."""
        asked = {name: replies.get(name) for name in names}
        verdict = judge(self.coordinator, attempt.round, asked, phase, missing)
        attempt.received |= {name: reply.metadata.message_id for name, reply in replies.items()}
        attempt.bytes_up += verdict.bytes
        attempt.dropped |= {name: str(error) for name, error in verdict.refused.items()}
        attempt.causes |= {name: error.kind for name, error in verdict.refused.items()}
        attempt.lost += verdict.lost
        self.roster.withdraw({name: each for name, each in verdict.refused.items() if isinstance(each, Undecided)})
        return verdict.uploads

    def _inform(self, attempt: Attempt, uploads: list[Upload], quorum: int) -> State | None:
        """The state after a first exchange, or None and the cause for which the try is void."""
        if attempt.lost or len(uploads) < quorum:
            attempt.uploads = uploads
            self._advance(attempt, quorum, None)
            return None
        try:
            return self.coordinator.inform(attempt.round, uploads)
        except NotFinite as error:
            attempt.cause = str(error)
            return None

    def _advance(self, attempt: Attempt, quorum: int, informed: State | None) -> None:
        """Aggregate the try's uploads into the coordinator, or say why not."""
        coordinator = self.coordinator
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
                attempt.uploads = coordinator.advance(attempt.round, attempt.uploads, informed)
            except NotFinite as error:
                attempt.cause = str(error)


class timed:
    """Add the seconds of a block to `seconds[phase]`."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds = seconds
        self._phase = phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + time.perf_counter() - self._started
