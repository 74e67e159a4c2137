"""What all who look at the page share: one thread looks at runs and sites, and only while somebody looks at it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from common.errors import RunError, SettingsError
from server.page.sources import OVER, Look, Source, sites
from server.page.table import Row, Table
from server.page.trail import Trail

log = logging.getLogger("server.page")

LOOK_S, SITES_S = 0.5, 2.0
MOST_TRAILS = 8
SHARE = 10
"""What a look took, times this, passes until the next: nobody who looks takes more than a tenth of a SuperLink."""


class Hub:
    """Sources and trails, each change stamped with a tick; from any thread. Before `follow` there is nothing."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(4)
        self.ended = False
        self.source: Source | None = None
        self._ask: Look | None = None
        self._lock, self._looking, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._tick = 0
        self._runs, self._here = Table(), Table()
        self._silent = {"runs": "", "sites": ""}
        self._silent_tick = 0
        self._trails: dict[str, Trail] = {}
        self._watched: Counter[str] = Counter()
        self._listeners: set[Callable[[], None]] = set()
        self._due = {"runs": 0.0, "sites": 0.0}
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="page looks", daemon=True)
        self._started = False

    # --- who is told

    @property
    def watching(self) -> int:
        """How many look."""
        return len(self._listeners)

    def follow(self, source: Source | None, ask: Look | None = None) -> None:
        """From now on this is shown; `ask`: a SuperLink that knows sites."""
        self.source, self._ask = source or self.source, ask or self._ask
        self._wake.set()

    @contextmanager
    def listening(self, changed: Callable[[], None]) -> Iterator[None]:
        """`changed` is called, from another thread, whenever there is something new."""
        with self._lock:
            self._listeners.add(changed)
            if not self._started:
                self._started = True
                self._thread.start()
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._listeners.discard(changed)

    def watch(self, key: str, before: str = "") -> None:
        """One who looked at the run `before` looks at this one; "" is none."""
        with self._lock:
            self._watched[key] += bool(key)
            self._watched[before] -= bool(before)
            self._watched = +self._watched
        self._wake.set()

    def chosen(self, wanted: str) -> str:
        """The run that is meant: the one wanted, else one that goes on, else the first that has begun; "" for none."""
        with self._lock:
            rows = self._runs.rows()
        if wanted:
            return wanted if wanted in rows else ""
        begun = [key for key, row in rows.items() if row["status"] != "waiting"] or list(rows)
        return next((key for key in begun if rows[key]["status"] not in OVER), begun[0] if begun else "")

    def since(self, key: str, tick: int, trail_tick: int) -> tuple[Row, int]:
        """What changed after a tick of runs and sites, after another of the run `key`; and the tick that it is now."""
        with self._lock:
            found: Row = {}
            if runs := self._runs.since(tick):
                found["runs"] = runs
            if here := self._here.since(tick):
                found["here"] = here
            if self._silent_tick > tick:
                found["silent"] = self._silent["runs"] or self._silent["sites"]
            if trail := self._trails.get(key):
                found |= trail.since(trail_tick)
            return found, self._tick

    # --- who looks

    def _work(self) -> None:
        while not self.ended:
            if not self._listeners:
                self._wake.wait()
            self._wake.clear()
            if self.ended:
                break
            self.look()
            self._wake.wait(LOOK_S)

    def look(self) -> None:
        """Look once at what is due, and tell."""
        if self.source is None:
            return
        with self._looking:
            with self._lock:
                watched = list(self._watched)
            source = self.source
            looks = [lambda: self._look_at_runs(source), self._look_at_sites]
            looks += [partial(self._look_at, key) for key in watched]
            changed = False
            for look in looks:
                changed |= self._tried(look)
            for key in [key for key in self._trails if key not in watched][:-MOST_TRAILS]:
                with self._lock:
                    del self._trails[key]
        if changed:
            self._tell()

    def _tried(self, look: Callable[[], bool]) -> bool:
        """What a look found; one that fails keeps none of the others from what it finds."""
        try:
            return look()
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("the page cannot show everything; the run goes on")
            return False

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for changed in listeners:
            changed()

    def _look_at_runs(self, source: Source) -> bool:
        with self._timed("runs", source.every_s) as due:
            if due:
                rows = self._answer("runs", source.runs)
                return rows is not None and self._put(self._runs, rows)
        return False

    def _look_at_sites(self) -> bool:
        ask = self._ask
        with self._timed("sites", SITES_S) as due:
            if due and ask is not None:
                rows = self._answer("sites", lambda: sites(ask))
                return rows is not None and self._put(self._here, rows)
        return False

    def _answer(self, what: str, question: Callable[[], list[tuple[str, Row]]]) -> list[tuple[str, Row]] | None:
        """What a SuperLink says; None, and why, if it does not."""
        why, rows = "", None
        try:
            rows = question()
        except (RunError, SettingsError) as error:
            why = str(error)[:500]
        if why != self._silent[what]:
            with self._lock:
                self._tick += 1
                self._silent[what], self._silent_tick = why, self._tick
            self._tell()
        return rows

    def _put(self, table: Table, rows: list[tuple[str, Row]]) -> bool:
        with self._lock:
            changed = table.put(rows, self._tick + 1)
            self._tick += changed
        return changed

    def _look_at(self, key: str) -> bool:
        trail = self._trails.get(key)
        if trail is None:
            folder = self.source.folder(key) if self.source else None
            if folder is None:
                return False
            trail = Trail(folder)
        news = trail.look()
        with self._lock:
            self._tick += 1
            if key not in self._trails:
                trail.begin(self._tick)
                self._trails[key] = trail
            return trail.take(news, self._tick)

    @contextmanager
    def _timed(self, what: str, every_s: float) -> Iterator[bool]:
        started = time.monotonic()
        if started < self._due[what]:
            yield False
            return
        yield True
        took = time.monotonic() - started
        self._due[what] = time.monotonic() + max(every_s, SHARE * took if every_s else 0.0)

    def close(self, within_s: float) -> None:
        """The command ends: a last look, then all are told so. Returns at the latest after so long."""
        last = threading.Thread(target=self._last, name="page ends", daemon=True)
        if self._listeners:
            last.start()
            last.join(within_s)
        self.ended = True
        self._wake.set()
        with contextlib.suppress(RuntimeError):
            self._tell()

    def _last(self) -> None:
        self._due["runs"] = 0.0
        self._due["sites"] = float("inf")
        with contextlib.suppress(Exception):
            self.look()
