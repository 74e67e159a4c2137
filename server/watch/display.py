"""The rounds as they happen: a live table with a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from server.rounds.records import Record, headline, personal, size

ROWS = 12


class Shown:
    """Something live on a terminal, lines elsewhere; a context manager."""

    console: Console
    _live: Live

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()


class Display(Shown):
    """Shows records of the history."""

    def __init__(self, title: str, rounds: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self._title = title
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS)
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("rounds", total=rounds)
        self._live = Live(console=self.console, refresh_per_second=8, get_renderable=self._render)
        self._plain_header = False

    def show(self, record: Record) -> None:
        """One more round."""
        row = cells(record)
        self._rows.append(row)
        self._bar.update(self._task, completed=record["round"])
        if not self.console.is_terminal:
            if not self._plain_header:
                self.say(" ".join(f"{name:>10}" for name in COLUMNS))
                self._plain_header = True
            self.say(line(record))

    def tick(self, status: str) -> None:
        """Nothing to do: the clock on the terminal runs by itself."""

    def _render(self) -> Group:
        table = Table(title=self._title, title_justify="left", expand=False)
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Group(table, self._bar)


COLUMNS = ("round", "accuracy", "loss", "clients", "down", "up", "seconds")


def cells(record: Record) -> tuple[str, ...]:
    """A record as the table's cells. Accuracy and loss are the server's, else the clients' weighted means, else the
    training loss."""
    accepted, sampled = len(record["accepted"]), len(record["sampled"])
    return (
        str(record["round"]),
        _number(headline(record, "accuracy"), "{:.4f}"),
        _number(headline(record, "loss"), "{:.4f}"),
        f"{accepted}/{sampled}",
        size(record["bytes_down"]),
        size(record["bytes_up"]),
        f"{record['seconds']['total']:.2f}",
    )


def line(record: Record) -> str:
    """A record as a line of plain text."""
    return " ".join(f"{cell:>10}" for cell in cells(record))


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def summary(history: list[Record], folder: Path, plot: Path | None) -> str:
    """What a finished run prints."""
    last = history[-1]
    accuracy = headline(last, "accuracy")
    whose = " of the clients' own models" if personal(last) else ""
    lines = [
        f"accuracy {accuracy:.4f}{whose} after round {last['round']}"
        if accuracy is not None
        else f"round {last['round']}",
        f"sent {size(sum(r['bytes_down'] for r in history))} down, {size(sum(r['bytes_up'] for r in history))} up",
        f"weights sha256 {last['sha256']}",
        f"run folder {folder}",
    ]
    if plot is not None:
        lines.append(f"plot {plot}")
    return "\n".join(lines)
