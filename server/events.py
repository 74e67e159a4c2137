"""TensorBoard events of a run, written beside the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from server.rounds import Record


class Events:
    """Writes each record's numbers as scalars in a thread of its own: loading TensorBoard takes seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "tensorboard")
        self._writer: Any = None

    def write(self, record: Record) -> None:
        """Queue a record of the history."""
        self._thread.submit(self._write, record)

    def _write(self, record: Record) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for tag, value in scalars(record):
            self._writer.add_scalar(tag, value, record["round"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(lambda: self._writer and self._writer.close()).result()
        self._thread.shutdown()


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Tag and value of everything in a record that makes a curve."""
    for group in ("central", "task", "seconds"):
        for key, value in (record.get(group) or {}).items():
            yield f"{group}/{key}", float(value)
    for group in ("train", "clients", "personal"):
        for key, summary in (record.get(group) or {}).items():
            for kind in ("weighted", "mean", "worst"):
                yield f"{group}/{key}/{kind}", float(summary[kind])
    for key in ("bytes_down", "bytes_up", "lr", "drift"):
        if record.get(key) is not None:
            yield f"round/{key}", float(record[key])
    yield "round/accepted", float(len(record["accepted"]))
    yield "round/dropped", float(len(record["dropped"]))
