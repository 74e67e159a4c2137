"""The best model of a run by its headline, kept apart from the checkpoints: best.safetensors, named in run.json.

Which round that is, the history alone says. A run that goes on from a checkpoint before the best round is without it
again, and with what was the best up to there: of the earlier ones the folder best/ has those that a kept checkpoint
may go back to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors.torch import save

from common.files import write_atomically
from common.tensor_files import Damaged, read_tensors
from common.vector import State
from server.rounds.ending import improves
from server.rounds.folder import BEST, EARLIER, RunFolder
from server.rounds.records import Record, headline


class Best:
    """What `records` up to now say is the best round, and its model where it is kept."""

    def __init__(self, folder: RunFolder, records: Iterable[Record] = ()) -> None:
        self._folder, self._path, self._earlier = folder, folder.path / BEST, folder.path / EARLIER
        self._metric, self._round = "", 0
        self._value: float | None = None
        for record in records:
            self._is_better(record)
        self._restore()

    def heed(self, record: Record, model: Callable[[], State], kept: Iterable[int]) -> None:
        """Keep the model of a record that is better than all before it: `model()` gives its named tensors, `kept` are
        the rounds of the checkpoints on disk. On return it is safely there."""
        before = self._round
        if not self._is_better(record):
            return
        content = save(model(), {"round": str(self._round), "metric": self._metric, "value": repr(self._value)})
        if self._path.exists():
            self._set_apart(before, kept)
        write_atomically(self._path, content)
        self._tell(BEST)

    def _is_better(self, record: Record) -> bool:
        found = headline(record)
        if not found.of:
            return False
        if found.metric != self._metric:
            self._metric, self._value, self._round = found.metric, None, 0
        if not improves(found, self._value):
            return False
        self._value, self._round = found.value, record["round"]
        return True

    def _set_apart(self, round: int, kept: Iterable[int]) -> None:
        """The best up to now becomes an earlier one; of those stay what a checkpoint goes back to."""
        self._earlier.mkdir(exist_ok=True)
        _link(self._path, self._place(round))
        rounds = {int(path.stem) for path in self._earlier.glob("*.safetensors")}
        wanted = {max((each for each in rounds if each <= checkpoint), default=0) for checkpoint in kept}
        for old in rounds - wanted:
            self._place(old).unlink(missing_ok=True)

    def _place(self, round: int) -> Path:
        return self._earlier / f"{round:09d}.safetensors"

    def _restore(self) -> None:
        """Make the file that of the round which the history names, from an earlier one if there is; remove any other.
        Later ones go: they belong to rounds that are run again."""
        for path in self._earlier.glob("*.safetensors"):
            if int(path.stem) > self._round:
                path.unlink()
        held = _round_of(self._path)
        if held != self._round:
            self._path.unlink(missing_ok=True)
            earlier = self._place(self._round)
            held = _round_of(earlier)
            if held == self._round:
                _link(earlier, self._path)
        if self._round or self._folder.status().get("best"):
            self._tell(BEST if self._round and held == self._round else None)

    def _tell(self, file: str | None) -> None:
        about = {"round": self._round, "metric": self._metric, "value": self._value, "file": file}
        self._folder.amend_status(best=about if self._round else None)


def _round_of(path: Path) -> int | None:
    """Which round a kept model is of; None if there is none that is whole."""
    try:
        return int(read_tensors(path)[1]["round"])
    except (Damaged, KeyError, ValueError):
        return None


def _link(source: Path, target: Path) -> None:
    """A second name of a file that never changes; a copy where the disk knows no such thing."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        temporary = target.with_suffix(".new")
        shutil.copyfile(source, temporary)
        temporary.replace(target)
