"""Run a plan: all its cells, each a standard run folder, whatever becomes of the others."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from common.errors import SettingsError
from common.files import locked, write_atomically
from server.compare import fairness
from server.compare.cell import Job, Outcome, reason, tidy
from server.compare.plan import Cell, Plan, Point, Row, final_cells, rows, tune_cells
from server.compare.pools import Pool
from server.compare.progress import Progress
from server.compare.standings import PLAN, Result, Standing, Standings
from server.compare.tuning import choose
from server.compare.vetting import compare_with_folder
from server.rounds.folder import CELL, RunFolder
from server.rounds.stopping import Stop

POLL_S = 0.25
END_S = 5.0
"""How long running cells may take to end when they are asked to."""


class Comparison:
    """A plan, `text` as it was written, in its folder `root`; `client` is the ClientApp by name.

    Cells that have finished before stay as they are, half-done ones go on from their checkpoints. With `tidied`
    client memory and checkpoints of finished cells go: to prolong such a cell is to run it anew.
    """

    def __init__(
        self, plan: Plan, text: str, root: Path, client: str, device: str, progress: Progress, *, tidied: bool = False
    ) -> None:
        self._plan, self._text, self._root = plan, text, root.resolve()
        self._client, self._device, self._tidied = client, device, tidied
        self._progress = progress
        self._standings = Standings(plan.name, self._root)
        self._queue: deque[Standing] = deque()
        self._running: dict[Future[Outcome], Standing] = {}
        self._open: list[Row] = []
        self._result = Result(self._root)

    def run(self, pool: Callable[[int], Pool], stop: Stop = lambda: None) -> Result:
        """Run what has not run yet; `pool` makes one for so many cells at most.

        KeyboardInterrupt and `stop` end all that runs within seconds; the next run goes on. Raises SettingsError if the
        folder is in use or holds runs of other experiments in these cells' places.
        """
        with ExitStack() as stack:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self._root / ".lock", f"plan folder {str(self._root)!r}"))
            except OSError as error:
                raise SettingsError(f"plan folder {str(self._root)!r} cannot be written: {error}") from None
            self._begin()
            most = len(self._queue) + len(self._open) * len(self._plan.seeds)
            if most:
                workers = pool(most)
                try:
                    self._loop(workers, stop)
                finally:
                    self._end(workers)
            return self._conclude()

    def _begin(self) -> None:
        self._open = [row for row in rows(self._plan) if row.variant.tune]
        fixed = [row for row in rows(self._plan) if not row.variant.tune]
        cells = [cell for row in self._open for cell in tune_cells(self._plan, row)]
        cells += [cell for row in fixed for cell in final_cells(self._plan, row, {})]
        compare_with_folder(self._root, cells)
        write_atomically(self._root / PLAN, self._text.encode())
        for cell in cells:
            self._add(cell)
        for row in self._open:
            # So that all are counted from the start; what they run is known when their candidates have run.
            for cell in final_cells(self._plan, row, row.candidates[0]):
                self._standings.add(cell).status = "waiting"
        self._settle_rows()
        self._standings.save({})

    def _add(self, cell: Cell) -> None:
        standing = self._standings.add(cell)
        if standing.ended:
            path, content = self._root / cell.folder / CELL, json.dumps(self._about(cell), indent=1)
            write_atomically(path, content.encode(), durable=False)  # the plan's targets may be others now
        else:
            self._queue.append(standing)

    def _loop(self, pool: Pool, stop: Stop) -> None:
        while (self._queue or self._running) and stop() is None:
            while self._queue and len(self._running) < pool.size:
                self._start(pool, self._queue.popleft())
            done, _ = wait(self._running, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                self._ended(future)
            self._standings.show(self._progress, pool.size)

    def _start(self, pool: Pool, standing: Standing) -> None:
        cell = standing.cell
        standing.status = "running"
        folder = str(self._root / cell.folder)
        job = Job(folder, cell.experiment.toml(), self._about(cell), self._client, self._device)
        self._running[pool.submit(job)] = standing

    def _ended(self, future: Future[Outcome]) -> None:
        standing = self._running.pop(future)
        try:
            outcome = future.result()
        except Exception as error:  # a pool's own: a lost machine of a cluster, a killed process
            outcome = {"error": reason(error)}
        standing.status, standing.error = outcome.get("status", "failed"), outcome.get("error", "")
        standing.history.look()
        if standing.status == "finished" and self._tidied:
            tidy(self._root / standing.cell.folder)
        self._standings.tell(standing, self._progress)
        self._settle_rows()
        self._standings.save({})

    def _settle_rows(self) -> None:
        """Choose the winner of each row whose candidates have all run, and queue its final cells."""
        for row in list(self._open):
            cells = tune_cells(self._plan, row)
            if not all(self._standings[cell.folder].ended for cell in cells):
                continue
            self._open.remove(row)
            choice = choose(row, self._plan.tuning, self._histories(cells))
            self._result.choices[row.slug] = choice
            self._result.save_choices()
            if choice.winner is None:
                self._fail(row, "none of its candidates finished with a finite score")
                continue
            hints = "".join(f"; {hint}" for hint in choice.hints)
            self._progress.say(f"{row.slug}: best of {len(choice.scores)} is {json.dumps(choice.winner)}{hints}")
            self._queue_final(row, choice.winner)

    def _histories(self, cells: Sequence[Cell]) -> Callable[[Point, int], list[dict[str, Any]] | None]:
        standings = {json.dumps([cell.tuned, cell.seed]): self._standings[cell.folder] for cell in cells}

        def of(candidate: Point, seed: int) -> list[dict[str, Any]] | None:
            standing = standings[json.dumps([candidate, seed])]
            finished = standing.status == "finished"
            return RunFolder(self._root / standing.cell.folder).history() if finished else None

        return of

    def _queue_final(self, row: Row, winner: Point) -> None:
        cells = final_cells(self._plan, row, winner)
        try:
            compare_with_folder(self._root, cells)
        except SettingsError as error:
            self._fail(row, f"the best candidate is now {json.dumps(winner)}: {error}")
            return
        for cell in cells:
            self._add(cell)

    def _fail(self, row: Row, why: str) -> None:
        for cell in final_cells(self._plan, row, row.candidates[0]):
            standing = self._standings[cell.folder]
            standing.status, standing.error = "failed", why
            self._standings.tell(standing, self._progress)

    def _about(self, cell: Cell) -> dict[str, Any]:
        """What cell.json says. `tuned`: what the tuning chose, or the candidate that this cell tries."""
        about = {
            "plan": self._plan.name,
            "variant": cell.variant,
            "point": cell.point,
            "seed": cell.seed,
            "stage": cell.stage,
            "tuned": cell.tuned,
            "targets": self._plan.targets,
        }
        choice = self._result.choices.get(cell.folder.rpartition("/")[0])
        return about | ({"scores": choice.scores} if choice and cell.stage == "final" else {})

    def _end(self, pool: Pool) -> None:
        """Ask what still runs to end at its next message, then end it anyway; checkpoints make both safe."""
        self._result.stopped = bool(self._queue or self._running)
        with suppress(OSError):
            for standing in self._running.values():
                RunFolder(self._root / standing.cell.folder).stop.ask(0)
        try:
            done, _ = wait(self._running, timeout=END_S)
            for future in done:
                self._ended(future)
        finally:
            pool.close()
            for standing in self._running.values():
                standing.status = "stopped"
                standing.history.look()
            self._standings.save({})

    def _conclude(self) -> Result:
        result = self._result
        result.standings = self._standings.all()
        done = [s.cell for s in result.standings if s.status == "finished" and s.cell.stage == "final"]
        result.fairness = fairness.verify(self._root, done)
        self._standings.save(result.fairness)
        return result
