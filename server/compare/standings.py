"""What has become of each cell of a comparison: in cells.json, in words and for the progress bar."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import write_atomically
from server.compare.plan import Cell
from server.compare.progress import CellHistory, Progress, duration, remaining_s
from server.compare.tuning import Choice
from server.rounds.folder import MODEL, RunFolder

CELLS, TUNED, PLAN = "cells.json", "tuned.json", "plan.toml"


@dataclass
class Standing:
    """A cell and what became of it: waiting, running, finished, failed or stopped."""

    cell: Cell
    history: CellHistory
    status: str = "waiting"
    error: str = ""

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do for it."""
        return self.status in ("finished", "failed")

    def entry(self) -> dict[str, Any]:
        """As cells.json has it. `seconds`: of all its rounds together."""
        cell = self.cell
        return {
            "folder": cell.folder,
            "variant": cell.variant,
            "point": cell.point,
            "seed": cell.seed,
            "stage": cell.stage,
            "status": self.status,
            "error": self.error,
            "rounds": self.history.round,
            "seconds": round(self.history.seconds, 3),
        }


class Standings:
    """All cells of a plan by folder, in the order in which they were added."""

    def __init__(self, plan: str, root: Path) -> None:
        self._plan, self._root = plan, root
        self._all: dict[str, Standing] = {}

    def __getitem__(self, folder: str) -> Standing:
        return self._all[folder]

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Standing]:
        """In order."""
        return list(self._all.values())

    def add(self, cell: Cell) -> Standing:
        """A cell, or what a cell has become whose candidate is known now; finished if its folder says so."""
        path = self._root / cell.folder
        standing = self._all[cell.folder] = Standing(cell, CellHistory(path).look())
        status, rounds = RunFolder(path).status(), cell.experiment.rounds
        whole = standing.history.round >= rounds or status.get("ended")
        if status.get("status") == "finished" and (path / MODEL).exists() and whole:
            standing.status = "finished"
        return standing

    def tell(self, standing: Standing, progress: Progress) -> None:
        """A line about a cell that has ended."""
        history, ended = standing.history, sum(each.ended for each in self._all.values())
        what = standing.status if not standing.error else f"{standing.status}: {standing.error.splitlines()[0]}"
        found = None if standing.error else history.headline
        reached = "" if found is None else f", {found.metric} {found.text}"
        spent = f"{history.round} rounds in {duration(history.seconds)}"
        progress.say(f"[{ended}/{len(self)}] {standing.cell.folder}: {what}{reached}, {spent}")

    def show(self, progress: Progress, workers: int) -> None:
        """How far all of it is."""
        running, left, seen, done, total = [], [], [], 0, 0
        for standing in self._all.values():
            rounds, history = standing.cell.experiment.rounds, standing.history
            if standing.status == "running":
                running.append((standing.cell.folder, history.look(), rounds))
            seen.append((standing.cell.variant, history.round, history.seconds))
            if not standing.ended:
                left.append((standing.cell.variant, max(0, rounds - history.round)))
            done += rounds if standing.ended else min(rounds, history.round)
            total += rounds
        ended = sum(standing.ended for standing in self._all.values())
        progress.update((ended, len(self)), (done, total), remaining_s(left, seen, workers), running)

    def save(self, fairness: dict[str, Any]) -> None:
        """cells.json."""
        entries = [standing.entry() for standing in self._all.values()]
        content = {"plan": self._plan, "cells": entries, "fairness": fairness}
        write_atomically(self._root / CELLS, json.dumps(content, indent=1).encode(), durable=False)


@dataclass
class Result:
    """What came of a comparison. `stopped`: it was asked to end before all was done."""

    folder: Path
    standings: list[Standing] = field(default_factory=list)
    fairness: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    stopped: bool = False

    @property
    def failed(self) -> list[Standing]:
        """Cells that did not come to their end for a reason of their own."""
        return [standing for standing in self.standings if standing.status == "failed"]

    def save_choices(self) -> None:
        """tuned.json."""
        content = {
            slug: {"winner": choice.winner, "scores": choice.scores, "hints": choice.hints}
            for slug, choice in sorted(self.choices.items())
        }
        write_atomically(self.folder / TUNED, json.dumps(content, indent=1).encode())
