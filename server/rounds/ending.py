"""When a run ends before its last round (`[stop]`), told by its history alone: a resumed run decides as it would have.

`max_seconds` is the exception: it adds up what the records say that rounds took, over resumes, and another machine
takes another time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.errors import SettingsError
from common.experiment import StopSettings
from common.metrics.target import Target
from server.rounds.records import EVALUATED, Headline, Record, headline, valued

Finish = Callable[[Record], bool | None]
"""Told of each record; True, or StopIteration raised, ends the run after that round."""


def improves(found: Headline, best: float | None, by: float = 0.0) -> bool:
    """Whether a round's headline is better than the best value before it by more than `by`; None is never better."""
    if found.value is None or best is None:
        return found.value is not None
    return (found.value - best if found.higher else best - found.value) > by


def told_to_finish(finish: Finish, record: Record) -> str:
    """Why the run ends after a record if `finish` says so, "" if not."""
    try:
        done = finish(record)
    except StopIteration:
        done = True
    return "the callback asked for it" if done is True else ""


def target_of(settings: StopSettings) -> Target | None:
    """`stop.target`. Raises SettingsError."""
    try:
        return None if settings.target is None else Target.parse(settings.target)
    except ValueError as error:
        raise SettingsError(f"stop.target: {error}") from None


class Ending:
    """What the records up to now say of `[stop]`. `why`: the reason to end after the last one, "" for none.

    `higher(metric)`: whether more is better. Raises SettingsError for a target that means nothing.
    """

    def __init__(self, settings: StopSettings, higher: Callable[[str], bool], records: Iterable[Record] = ()) -> None:
        self._settings, self._higher, self._target = settings, higher, target_of(settings)
        self._metric = ""
        self._best: float | None = None
        self._round = self._idle = 0
        self._seconds = 0.0
        self.why = ""
        for record in records:
            self.heed(record)

    def overdue(self, seconds: float = 0.0) -> bool:
        """Whether the time is up, `seconds` into a round that has no record yet."""
        most = self._settings.max_seconds
        return most is not None and self._seconds + seconds >= most

    def heed(self, record: Record) -> str:
        """Count one more record in; returns `why`. Raises SettingsError for a target of an unknown metric."""
        self._seconds += float((record.get("seconds") or {}).get("total") or 0.0)
        self.why = ""
        if not any(group in record for group in EVALUATED):
            return ""  # a run ends with an evaluated model
        found = headline(record)
        if found.of:
            self._count(record["round"], found)
            self.why = self._reached(record, found) or self._stuck(found)
        if not self.why and self.overdue():
            self.why = f"its rounds took {self._seconds:.1f} s, stop.max_seconds = {self._settings.max_seconds:g}"
        return self.why

    def _count(self, round: int, found: Headline) -> None:
        if found.metric != self._metric:
            self._metric, self._best = found.metric, None
        if improves(found, self._best, self._settings.min_change):
            self._best, self._round, self._idle = found.value, round, 0
        else:
            self._idle += 1

    def _reached(self, record: Record, found: Headline) -> str:
        target = self._target
        if target is None:
            return ""
        metric = target.metric or found.metric
        if not any(metric in (record.get(group) or {}) for group in EVALUATED):
            known = sorted({name for group in EVALUATED for name in record.get(group) or {}})
            raise SettingsError(
                f"stop.target = {str(self._settings.target)!r}: {metric!r} is no metric of this run; allowed: "
                f"{', '.join(known)}"
            )
        value = valued(record, metric)
        if value is None or not (value >= target.value if self._higher(metric) else value <= target.value):
            return ""
        return f"{metric} {value:.6g} has reached stop.target = {target}"

    def _stuck(self, found: Headline) -> str:
        patience = self._settings.patience
        if patience is None or self._idle < patience:
            return ""
        by = f" by more than {self._settings.min_change:g}" if self._settings.min_change else ""
        best = "no evaluation gave a number" if self._best is None else f"best {self._best:.6g} in round {self._round}"
        return f"{found.metric} did not improve{by} in {self._idle} evaluations, stop.patience = {patience}: {best}"
