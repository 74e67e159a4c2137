"""A comparison as it runs: how far it is, how long it will take, which cells run; lines when not on a terminal."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from server.compare.plan import Tuning
from server.rounds.folder import HISTORY
from server.rounds.records import Headline, headline
from server.watch.display import Shown
from server.watch.tail import Tail

LINES_EVERY_S = 30.0


class CellHistory:
    """What the history of a cell says so far."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / HISTORY)
        self.round = 0
        self.seconds = 0.0
        self.headline: Headline | None = None
        """The last evaluation's."""
        self.recent: deque[float] = deque(maxlen=Tuning().window)
        """The last headlines, of whose mean a run's score is made."""

    def look(self) -> CellHistory:
        """Read the new whole lines; a history that was cut by a resumed run is read anew."""
        lines = self._tail.lines()
        if self._tail.anew:
            self.round, self.seconds = 0, 0.0
            self.recent.clear()
        for line in lines:
            self._take(line)
        return self

    def _take(self, line: str) -> None:
        with suppress(json.JSONDecodeError, KeyError):
            record = json.loads(line)
            self.round = record["round"]
            self.seconds += record["seconds"]["total"]
            if (found := headline(record)).value is not None:
                self.headline = found
                self.recent.append(found.value)


def remaining_s(left: Iterable[tuple[str, int]], seen: Iterable[tuple[str, int, float]], workers: int) -> float | None:
    """Seconds until all cells have run, at the pace so far.

    `left`: variant and rounds of each cell that has not ended; `seen`: variant, rounds, seconds of what has run. A
    variant that has not begun takes as long a round as the others do; None before any round.
    """
    pace: dict[str, list[float]] = {}
    for variant, rounds, seconds in seen:
        for key in (variant, ""):
            total = pace.setdefault(key, [0.0, 0.0])
            total[0], total[1] = total[0] + rounds, total[1] + seconds
    if not pace.get("", [0.0])[0]:
        return None
    per_round = {key: seconds / rounds for key, (rounds, seconds) in pace.items() if rounds}
    costs = [rounds * per_round.get(variant, per_round[""]) for variant, rounds in left]
    # No cell is split over workers, so the longest one bounds the end.
    return max([sum(costs) / workers, *costs]) if costs else 0.0


def duration(seconds: float | None) -> str:
    """Hours, minutes, seconds."""
    if seconds is None:
        return "-:--:--"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Progress(Shown):
    """Shows a comparison. `quiet` shows nothing."""

    def __init__(self, name: str, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(quiet=quiet)
        self._name = name
        self._started = time.monotonic()
        self._told = self._started
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)

    def update(
        self, cells: tuple[int, int], rounds: tuple[int, int], left_s: float | None, running: list[tuple[str, Any, int]]
    ) -> None:
        """`cells`, `rounds`: done and all; `running`: folder, history, rounds of each cell under way."""
        text = (
            f"{self._name}  cells {cells[0]}/{cells[1]}  rounds {rounds[0]}/{rounds[1]}  "
            f"{duration(time.monotonic() - self._started)}  left {duration(left_s)}"
        )
        if self.console.is_terminal:
            bar = ProgressBar(total=max(1, rounds[1]), completed=rounds[0], width=min(60, self.console.width))
            self._live.update(Group(Text(text), bar, *_running(running)))
        elif time.monotonic() - self._told >= LINES_EVERY_S:
            self._told = time.monotonic()
            self.say(text)


def _running(running: list[tuple[str, Any, int]]) -> Iterator[Text]:
    for folder, history, rounds in running:
        reached = "" if history.headline is None else f"  {history.headline.metric} {history.headline.text}"
        yield Text(f"  {folder}  {history.round}/{rounds}{reached}", no_wrap=True, overflow="ellipsis")
