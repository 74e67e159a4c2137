"""A run as the page shows it, read from its folder as it grows: points of curves, sites, notes, state."""

from __future__ import annotations

import json
import tomllib
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.page.table import Row, Table, number, text
from server.rounds.folder import HISTORY, NOTES, ROLL, SETTINGS, RunFolder
from server.rounds.records import Record, headline, train_loss, valued
from server.watch.tail import Tail

MOST_POINTS = 1000
"""Rounds of a long run that are sent at first, evenly spread. The last ones are among them, with who was dropped."""
DETAILED = 60
STRANGE = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""What comes of a line that is not as those that this release writes."""
MOST_NOTES, MOST_SITES, MOST_NAMES = 100, 1000, 12


def shown(record: Record) -> tuple[str, float | None]:
    """The name ("" where a round does not tell it) and the value of what a run is judged by: the only place where the
    page knows that."""
    found = headline(record)
    named = record.get("headline") or found.value is not None
    return text(found.metric, 100) if named else "", number(found.value)


@dataclass
class Site:
    """What a run knows of a site."""

    row: Row
    causes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class News:
    """What a look at a folder found."""

    anew: bool
    records: list[Record]
    notes: list[str]
    roll: list[Row] | None
    state: Row


class Trail:
    """`look` reads the folder and changes nothing, `take` makes what it found part of the trail: two steps, so that
    nobody waits for a disk. What was read is kept in short form."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._history, self._notes_file = Tail(folder.path / HISTORY), Tail(folder.path / NOTES)
        self._stamps: dict[str, tuple[int, int]] = {}
        self._about: Row = {}
        self.begin(0)

    def begin(self, tick: int) -> None:
        """Nothing is known any more; who looked before this tick is told to forget."""
        self._points: list[list[Any]] = []
        self._ticks: list[int] = []
        self._sites: dict[str, Site] = {}
        self._table = Table()
        self._metric = "loss"
        self._reset = tick
        self._notes: deque[tuple[int, str]] = deque(maxlen=MOST_NOTES)
        self._state: tuple[int, Row] = (tick, {})

    def look(self) -> News:
        """What the folder holds that it did not before."""
        lines = self._history.lines()
        anew = self._history.anew
        records = []
        for line in lines:
            with suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    records.append(found)
        notes = self._notes_file.lines()
        roll = self._changed(ROLL)
        if self._changed(SETTINGS, json_file=False) is not None:
            self._about = _about(self._folder.path / SETTINGS)
        status = self._folder.status()
        state: Row = {key: text(status[key]) for key in ("status", "time", "by") if status.get(key)}
        state |= {"error": text(status["error"], 2000)} if status.get("error") else {}
        state |= {key: number(status[key]) for key in ("rounds", "exit_code") if key in status}
        if isinstance(waiting := status.get("waiting"), list):
            state["waiting"] = [text(name) for name in waiting[:MOST_NAMES]]
        return News(anew, records, notes[-MOST_NOTES:], roll, self._about | state)

    def _changed(self, name: str, json_file: bool = True) -> list[Row] | None:
        path = self._folder.path / name
        with suppress(OSError, ValueError):
            about = path.stat()
            stamp = about.st_mtime_ns, about.st_ino
            if self._stamps.get(name) != stamp:
                found = json.loads(path.read_text("utf-8")) if json_file else []
                self._stamps[name] = stamp
                return found if isinstance(found, list) else []
        return None

    def take(self, news: News, tick: int) -> bool:
        """Whether anything is new."""
        changed = bool(news.records or news.notes)
        if news.anew and self._points:
            self.begin(tick)  # cut and gone on with: what was sent of it is no more
            changed = True
        for member in news.roll or []:
            with suppress(*STRANGE):
                self._site(str(member["name"])).row |= {"examples": number(member.get("examples"))}
        for record in news.records:
            # A line of another release, or one that somebody changed, is no reason to show nothing.
            with suppress(*STRANGE):
                point = self._point(record)
                self._points.append(point)
                self._ticks.append(tick)
        for note in news.notes:
            self._notes.append((tick, text(note, 1000)))
        if news.records or news.roll:
            self._table.put(((name, site.row | {"causes": dict(site.causes)}) for name, site in self._rows()), tick)
            changed = True
        state = news.state | {"metric": self._metric, "more_sites": max(0, len(self._sites) - MOST_SITES)}
        if state != self._state[1]:
            self._state, changed = (tick, state), True
        return changed

    def since(self, tick: int) -> Row:
        """What changed after `tick`: any of "reset" (forget what was before), "rounds", "sites", "notes", "state"."""
        found: Row = {}
        if tick < self._reset:
            tick, found["reset"] = -1, True
        first = bisect_right(self._ticks, tick)
        if first < len(self._points):
            found["rounds"] = self._thinned(first)
        if sites := self._table.since(tick):
            found["sites"] = sites
        if notes := [note for stamp, note in self._notes if stamp > tick]:
            found["notes"] = notes
        if self._state[0] > tick:
            found["state"] = self._state[1]
        return found

    def _thinned(self, first: int) -> list[list[Any]]:
        points, detailed = self._points[first:], len(self._points) - DETAILED
        last = max(0, detailed - first)
        old = points[:last]
        step = -(-len(old) // (MOST_POINTS - DETAILED)) or 1
        # Who was dropped long ago stands in sums beside the sites.
        return [[*point[:-1], None] for point in old[::step]] + points[last:]

    def _rows(self) -> list[tuple[str, Site]]:
        return list(self._sites.items())[:MOST_SITES]

    def _site(self, name: str) -> Site:
        name = text(name, 100)
        if name not in self._sites:
            row: Row = {"rounds": 0, "dropped": 0, "last": 0, "seen": "", "state": "waiting", "why": ""}
            self._sites[name] = Site(row)
        return self._sites[name]

    def _point(self, record: Record) -> list[Any]:
        """A round: number, value, loss, training loss, seconds, accepted, sampled, bytes down and up, void tries, time,
        drops as [cause, names, how many]."""
        round, moment = int(record["round"]), text(record.get("time"))
        name, value = shown(record)
        self._metric = name or self._metric
        accepted, sampled = record.get("accepted") or [], record.get("sampled") or []
        for name in accepted:
            examples = (record.get("examples") or {}).get(name)
            row = self._site(name).row
            row |= {"rounds": row["rounds"] + 1, "last": round, "state": "in", "why": ""}
            row |= {"seen": moment} if moment else {}
            row |= {"examples": number(examples)} if examples is not None else {}
        by_cause: dict[str, list[str]] = {}
        void = record.get("void") or []
        for part in (*void, record):
            causes = part.get("causes") or {}
            for name, why in (part.get("dropped") or {}).items():
                cause = text(causes.get(name) or str(why).partition(":")[0], 60)
                site = self._site(name)
                site.causes[cause] = site.causes.get(cause, 0) + 1
                site.row["dropped"] += 1
                if name not in accepted:
                    site.row |= {"state": cause, "why": text(why)}
                by_cause.setdefault(cause, []).append(text(name, 100))
        seconds = number((record.get("seconds") or {}).get("total"))
        sizes = number(record.get("bytes_down")), number(record.get("bytes_up"))
        drops = [[cause, names[:MOST_NAMES], len(names)] for cause, names in by_cause.items()]
        loss = None if self._metric == "loss" else number(valued(record, "loss"))
        values = value, loss, number(train_loss(record)), seconds
        return [round, *values, len(accepted), len(sampled), *sizes, len(void), moment, drops]


def _about(path: Path) -> Row:
    """Of the experiment's settings what a title is made of."""
    with suppress(OSError, *STRANGE):
        found = tomllib.loads(path.read_text("utf-8"))
        words = {"algorithm": found.get("strategy", {}).get("name"), "task": found.get("task", {}).get("name")}
        return {key: text(word) for key, word in words.items() if word}
    return {}
