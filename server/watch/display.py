"""The rounds as they happen: a live table with a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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

from server.rounds.records import Record, headline, personal, size, train_loss, valued

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
        self._heads: tuple[str, ...] = ()
        self._live = Live(console=self.console, refresh_per_second=8, get_renderable=self._render)

    def show(self, record: Record) -> None:
        """One more round."""
        before, self._heads = self._heads, columns(record)
        if before != self._heads:
            self._rows.clear()
        self._rows.append(cells(record))
        self._bar.update(self._task, completed=record["round"])
        if not self.console.is_terminal:
            for text in lines(record, before):
                self.say(text)

    def tick(self, status: str) -> None:
        """Nothing to do: the clock on the terminal runs by itself."""

    def _render(self) -> Group:
        table = Table(title=self._title, title_justify="left", expand=False)
        for name in self._heads:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Group(table, self._bar)


def columns(record: Record) -> tuple[str, ...]:
    """The table's heads: the metric that stands for the run, the loss beside it, and that of training, which is
    another thing."""
    metric = headline(record).metric
    values = (metric,) if metric == "loss" else (metric, "loss")
    return ("round", *values, "train loss", "clients", "down", "up", "seconds")


def cells(record: Record) -> tuple[str, ...]:
    """A record as the table's cells. A metric is the server's, else that of the clients' examples; of how many clients
    it is stands beside it where some are missing."""
    accepted, sampled, found = len(record["accepted"]), len(record["sampled"]), headline(record)
    loss = () if found.metric == "loss" else (_number(valued(record, "loss"), "{:.4f}"),)
    return (
        str(record["round"]),
        found.text,
        *loss,
        _number(train_loss(record), "{:.4f}"),
        f"{accepted}/{sampled}",
        size(record["bytes_down"]),
        size(record["bytes_up"]),
        f"{record['seconds']['total']:.2f}",
    )


def lines(record: Record, told: Sequence[str]) -> list[str]:
    """A record as plain text, with the heads before it unless those are what was `told`: before its first evaluation a
    task of one's own may not have said what it is judged by."""
    heads = columns(record)
    rows = [cells(record)] if tuple(told) == heads else [heads, cells(record)]
    return [" ".join(f"{cell:>{max(10, len(head))}}" for cell, head in zip(row, heads, strict=True)) for row in rows]


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def summary(history: list[Record], folder: Path, plot: Path | None) -> str:
    """What a finished run prints."""
    last = history[-1]
    found = headline(last)
    whose = " of the clients' own models" if personal(last) else ""
    told = [
        f"{found.metric} {found.text}{whose} after round {last['round']}" if found.of else f"round {last['round']}",
        f"sent {size(sum(r['bytes_down'] for r in history))} down, {size(sum(r['bytes_up'] for r in history))} up",
        f"weights sha256 {last['sha256']}",
        f"run folder {folder}",
    ]
    if plot is not None:
        told.append(f"plot {plot}")
    return "\n".join(told)
