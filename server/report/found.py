"""Where the runs of a report lie: run folders, and folders that hold such."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import SettingsError
from server.compare.standings import CELLS
from server.report.runs import Run, read, read_json
from server.rounds.folder import CELL, HISTORY

ENDED = (None, "finished")
"""States of a cell in cells.json of which there is nothing to tell."""


def find(folders: Sequence[Path]) -> list[Run]:
    """The runs in run folders and in folders that hold such (a plan's), each once, in the order of the folders.

    Raises SettingsError for a folder without any.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        cells = _cells(folder)
        order = {path: place for place, path in enumerate(cells)}
        paths = sorted(_walk(folder), key=lambda path: order.get(path.resolve(), len(order)))
        if not paths and not cells:
            raise SettingsError(f"{str(folder)!r} holds no run: no line in {HISTORY}")
        for path in paths:
            found.setdefault(path.resolve(), read(path))
        for path, cell in cells.items():
            if cell.get("status") not in ENDED:
                run = found.setdefault(path, Run(path))
                run.error = run.error or str(cell.get("error") or "")
                run.cell = {**cell, **run.cell}
    if not any(run.has_history for run in found.values()):
        raise SettingsError(f"{', '.join(repr(str(f)) for f in folders)} holds no run: no line in {HISTORY}")
    return list(found.values())


def _walk(folder: Path) -> Iterator[Path]:
    if (folder / HISTORY).exists() or (folder / CELL).exists():
        yield folder
        return
    for path, folders, _ in os.walk(folder):
        folders.sort(key=_natural)
        for name in list(folders):
            inner = Path(path) / name
            if (inner / HISTORY).exists() or (inner / CELL).exists():
                folders.remove(name)
                yield inner


def _natural(name: str) -> list[tuple[float, str]]:
    """seed-2 before seed-10, lr-0.05 before lr-0.1."""
    parts = enumerate(re.split(r"(\d+(?:\.\d+)?)", name))
    return [(float(part), "") if place % 2 else (-1.0, part) for place, part in parts]


def _cells(folder: Path) -> dict[Path, dict[str, Any]]:
    """What a plan's cells.json says of each of its folders, in the plan's order."""
    table = read_json(folder / CELLS)
    cells = table.get("cells") if isinstance(table, dict) else None
    known = [cell for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []
    return {
        (folder / str(cell["folder"])).resolve(): {"plan": table.get("plan"), **cell}
        for cell in known
        if cell.get("folder")
    }
