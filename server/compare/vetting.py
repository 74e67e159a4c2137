"""Every fault in a plan before anything runs, and every difference to what a folder holds from before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from common import tasks
from common.errors import SettingsError
from common.experiment import UNSEEN, Experiment
from common.settings import dotted
from server.compare.plan import Cell, Plan, final_cells, rows, tune_cells
from server.rounds.folder import SETTINGS, RunFolder
from server.rounds.prepare import assemble
from strategies.base import FederatedStrategy
from strategies.registry import settled, written_out

FREE = {"rounds", *UNSEEN}
"""What may differ between a plan and a cell that it finds: a run may be prolonged."""


def expand(plan: Plan) -> list[Cell]:
    """All cells, the final ones of a tuned row with its first candidate.

    Raises SettingsError with all faults, each with the first cell that has it: of the file, of pairs without meaning,
    of task, data and partition. Data is loaded once for each split, not for each cell.
    """
    cells = [cell for row in rows(plan) for cell in tune_cells(plan, row)]
    cells += [cell for row in rows(plan) for cell in final_cells(plan, row, row.candidates[0])]
    faults = Faults()
    sound = []
    for cell in cells:
        with faults.of(cell):
            sound.append((cell, *settled(cell.experiment)))
    prepared: set[str] = set()
    split: set[str] = set()
    for cell, strategy, experiment in sound:
        data = f"{experiment.task} {experiment.partition} {experiment.seed}"
        with faults.of(cell):
            if (kind := _kind(strategy, experiment)) not in prepared:
                prepared.add(kind)
                split.add(data)
                assemble(strategy, experiment)
            elif data not in split:
                split.add(data)
                tasks.create(experiment.task, experiment.partition, experiment.seed).names()
    faults.report()
    return cells


def _kind(strategy: FederatedStrategy, experiment: Experiment) -> str:
    """What `assemble` looks at beside the seed and what `settled` has checked: cells that differ elsewhere have no
    other faults. Of an algorithm it is what it asks of a model."""
    other = {"name", "seed", "strategy", "local", "server", "compression", "evaluate", *FREE}
    asked = f"{type(strategy).check_model.__qualname__} {type(strategy).arrange.__qualname__}"
    local = experiment.local
    muon = local.optimizer == "muon" and not local.nesterov
    return f"{experiment.model_dump(exclude=other)} {local.steps} {muon} {asked}"


class Faults:
    """Messages by cell; those that several cells of a variant share are told once."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], list[Cell]] = {}
        self._cell: Cell | None = None

    def of(self, cell: Cell) -> Faults:
        """A context whose SettingsError is a fault of this cell."""
        self._cell = cell
        return self

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert self._cell is not None
        if not isinstance(error, SettingsError):
            return False
        for line in str(error).splitlines():
            message = line.removeprefix(f"{self._cell.about()}: ")
            self._cells.setdefault((self._cell.variant, message), []).append(self._cell)
        return True

    def report(self) -> None:
        """Raise SettingsError with a line for each fault, if there is one."""
        if self._cells:
            raise SettingsError("\n".join(map(_fault, self._cells.values(), [m for _, m in self._cells])))


def _fault(cells: list[Cell], message: str) -> str:
    more = f" (and {len(cells) - 1} more of its cells)" if len(cells) > 1 else ""
    return f"{cells[0].about()}{more}: {message}"


def compare_with_folder(root: Path, cells: Iterable[Cell]) -> None:
    """Raise SettingsError naming what changed if a cell's folder holds a run of another experiment, or more rounds."""
    faults = Faults()
    for cell in cells:
        with faults.of(cell):
            folder = RunFolder(root / cell.folder)
            if changed := [*_changes(folder, settled(cell.experiment)[1])]:
                raise SettingsError(
                    f"{str(folder.path)!r} holds a run with {', '.join(changed)}; "
                    "give the plan another name or remove that folder"
                )
    faults.report()


def _changes(folder: RunFolder, wanted: Experiment) -> Iterator[str]:
    file = folder.path / SETTINGS
    if not folder.holds_run() or not file.exists():
        return
    held = Experiment.load(file)
    whole = (written_out(*settled(each)).model_dump(mode="json", exclude=FREE) for each in (held, wanted))
    before, after = (dict(dotted(each)) for each in whole)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key} = {before.get(key)!r}, the plan says {after.get(key)!r}"
    last = (folder.history() or [{}])[-1].get("round", 0)
    if last > wanted.rounds or (wanted.rates_need_rounds and held.rounds != wanted.rounds):
        yield f"rounds = {held.rounds}, the plan says {wanted.rounds}"
