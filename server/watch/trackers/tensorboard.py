"""TensorBoard events in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.experiment import Experiment
from server.rounds.records import Record
from server.watch.tracking import Tracker, scalars

# Imported where used: a second that a run without events can do without.


class TensorBoard(Tracker):
    """Each round's numbers as scalars, step = round. After a resume, what an earlier process wrote from there on is
    hidden."""

    def open(self, experiment: Experiment, folder: Path) -> None:
        """The writer follows with the first record, which says from where on earlier events count no more."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._type = folder, SummaryWriter
        self._writer: Any = None

    def write(self, record: Record) -> None:
        """Scalars of a round."""
        if self._writer is None:
            self._writer = self._type(str(self._folder), purge_step=record["round"] if record["round"] > 1 else None)
        for tag, value in scalars(record):
            self._writer.add_scalar(tag, value, record["round"])

    def close(self, status: str) -> None:
        """Everything on disk."""
        if self._writer is not None:
            self._writer.close()
