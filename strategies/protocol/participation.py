"""Unequal clients, simulated: who is there in a round, and how much of its local work each does.

All of it is a function of the run's seed, the client's name and the round, and is settled on the server, which tells
each client its own part. So it is the same in every engine, and a client needs no copy of a trace.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.data.places import find
from common.errors import SettingsError
from common.experiment import Experiment
from common.seeds import derive
from strategies.protocol.members import Member

V = TypeVar("V")


@dataclass(frozen=True)
class Budget:
    """A client's part in one round.

    `epochs` in place of the settings' local work (0: as they say), at most `steps` of it (0: no bound). `seconds`: how
    long the client is at it in simulated time. `late`: why nothing of it counts ("": it does).
    """

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    late: str = ""


class Participation:
    """`[speed]` and `[presence]` of an experiment. Raises SettingsError for a file that cannot be used."""

    def __init__(self, experiment: Experiment) -> None:
        self._seed = experiment.seed
        self._batch_size = experiment.local.batch_size
        self._speed = experiment.speed
        self._presence = experiment.presence
        self._speeds: dict[str, float] = {}
        self._trace: dict[str, list[tuple[int, int]]] = {}
        if self._speed.file:
            rows = _rows(self._speed.file, "speed.file", ("client", "speed"), float)
            self._speeds = {name: values[0] for name, values in rows}
            if unfit := {name: v for name, v in self._speeds.items() if not (v > 0 and math.isfinite(v))}:
                raise SettingsError(f"speed.file = {self._speed.file!r}: {unfit}; allowed: steps a second, above 0")
        if self._presence.file:
            for name, (first, last) in _rows(self._presence.file, "presence.file", ("client", "first", "last"), int):
                if not 1 <= first <= last:
                    raise SettingsError(
                        f"presence.file = {self._presence.file!r}: client {name!r} from round {first} to {last}; "
                        "allowed: 1 <= first <= last"
                    )
                self._trace.setdefault(name, []).append((first, last))

    def present(self, round: int, attempt: int, names: Iterable[str]) -> list[str]:
        """Those of `names` that are there in a try at a round. Each further try at it is one round later in a trace or
        a day, and another draw."""
        if self._presence.kind == "always":
            return list(names)
        return [name for name in names if self._is_present(round, attempt, name)]

    def _is_present(self, round: int, attempt: int, name: str) -> bool:
        settings, tick = self._presence, round + attempt
        if settings.kind == "trace":
            return any(first <= tick <= last for first, last in self._trace.get(name, ()))
        if settings.kind == "diurnal":
            begins = self._draw("day", name).random()
            return (tick / settings.period + begins) % 1.0 < settings.probability
        return self._draw("presence", name, round, attempt).random() < settings.probability

    def budget(self, round: int, member: Member) -> Budget:
        """A client's part in a round; its `steps` on the roll are the whole."""
        settings, whole = self._speed, member.steps
        if settings.kind == "uniform":
            return Budget(epochs=self._draw("epochs", member.name, round).randint(*settings.epochs))
        if settings.kind == "stragglers":
            draw = self._draw("straggler", member.name, round)
            if draw.random() >= settings.share:
                return Budget()
            return self._partial(draw.randint(1, max(1, whole)), whole, 0.0)
        if settings.kind == "profile":
            speed = self._speed_of(member.name, round)
            if speed is None:
                return Budget(late=f"speed.file = {settings.file!r} has no row for it")
            if settings.deadline_s is None:
                return Budget(seconds=whole / speed)
            done = min(whole, math.floor(speed * settings.deadline_s * (1 + 1e-9)))
            return self._partial(done, whole, settings.deadline_s if done < whole else whole / speed)
        return Budget()

    def _partial(self, done: int, whole: int, seconds: float) -> Budget:
        if done >= whole:
            return Budget(seconds=seconds)
        late = done < 1 or self._speed.late == "drop"
        return Budget(0, done, seconds, f"{done} of {whole} steps by the deadline" if late else "")

    def _speed_of(self, name: str, round: int) -> float | None:
        """Local steps a second of a client in a round; None if nothing is known of it."""
        settings, dealt = self._speed, self._draw("speed", name)
        speed = dealt.choice(settings.speeds) if settings.speeds else self._speeds.get(name)
        if speed is None:
            return None
        return speed * math.exp(settings.jitter * self._draw("jitter", name, round).gauss(0, 1))

    def most_steps(self, round: int, member: Member) -> int:
        """The most local steps that a client can take in a round: what it is asked for, else what the roll says."""
        budget = self.budget(round, member)
        if budget.epochs:
            return budget.epochs * -(-member.examples // self._batch_size)
        return budget.steps or member.steps

    def late(self, round: int, members: Iterable[Member]) -> dict[str, str]:
        """Name -> reason of those that come too late for a round: nobody waits for them."""
        found = {member.name: self.budget(round, member).late for member in members}
        return {name: reason for name, reason in found.items() if reason}

    def clock(self, round: int, members: Sequence[Member]) -> float | None:
        """Simulated seconds of a round's local work, until the last of `members` is done or the deadline has come; None
        without a profile of speeds."""
        if self._speed.kind != "profile":
            return None
        return max((self.budget(round, member).seconds for member in members), default=0.0)

    def most(self, members: Iterable[Member], epochs: int) -> int:
        """The most steps that one of `members` may be asked for in a round, where `epochs` are those of the roll."""
        factor = math.ceil(self._speed.epochs[1] / epochs) if self._speed.kind == "uniform" else 1
        return max((member.steps for member in members), default=0) * factor

    def check(self, names: Sequence[str]) -> None:
        """Raise SettingsError if the files lack a simulated client, or have none of them."""
        if missing := [name for name in names if self._speeds and name not in self._speeds]:
            raise SettingsError(f"speed.file = {self._speed.file!r}: no row for client {', '.join(missing[:5])}")
        if names and self._trace and not set(names) & self._trace.keys():
            raise SettingsError(
                f"presence.file = {self._presence.file!r}: none of the run's clients ({', '.join(names[:5])}, ...) "
                f"stands in it, but {', '.join(list(self._trace)[:5])}"
            )

    def _draw(self, *purpose: str | int) -> random.Random:
        return random.Random(derive(self._seed, *purpose))


def _rows(file: str, what: str, header: tuple[str, ...], kind: Callable[[str], V]) -> list[tuple[str, list[V]]]:
    """The rows of a CSV file: the first column's name, and the others as numbers."""
    path: Path = find(file, what)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.DictReader(stream)
            if tuple(rows.fieldnames or ()) != header:
                raise SettingsError(f"{what} = {file!r}: columns {rows.fieldnames}; needed: {', '.join(header)}")
            return [(row["client"], [kind(row[key] or "") for key in header[1:]]) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, TypeError) as error:
        raise SettingsError(f"{what} = {file!r} cannot be read: {error}") from None
