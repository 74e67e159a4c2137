"""Whose turn it is: submits queued experiments to a SuperLink as places become free, and looks after them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from server.deploy.control import Control, RunStatus
from server.deploy.queue import Entry, Queue
from server.rounds.folder import RunFolder, choose_folder

log = logging.getLogger("server.deploy.turns")

LOOK_S = 1.0
MOST_TRIES = 3
"""A run that was begun so often without a further round is given up."""

Known = Mapping[int, tuple[RunStatus, str]]
"""Run id -> how Flower says it is, and the claim that it was submitted with."""


class Turns:
    """Works through a queue, in a thread of its own; a context manager.

    At most `at_once` runs go on behind the SuperLink at a time, those counted that others submitted. A run that ended
    with its SuperLink is resumed; one that somebody stopped, or that failed by itself, is not.
    """

    def __init__(self, queue: Queue, control: Control, say: Callable[[str], None], at_once: int = 1) -> None:
        self._queue, self._control, self._say, self._at_once = queue, control, say, at_once
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="queue", daemon=True)

    def __enter__(self) -> Turns:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Nothing begins any more: the SuperLink is about to go."""
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                self.look()
            except RunError as error:
                log.warning("queue: %s; trying again", error)
            except Exception:
                log.exception("queue; trying again")

    def look(self) -> None:
        """Settle what has ended, then begin what has its turn."""
        entries = self._queue.entries()
        if all(entry.state in ("done", "withdrawn") for entry in entries):
            return
        known = self._control.runs()
        for entry in entries:
            if entry.state in ("submitting", "submitted"):
                self._settle(entry, known)
        going = sum(not status.over for status, _ in known.values())
        for entry in self._queue.entries():
            if entry.state == "waiting" and going < self._at_once and not self._end.is_set():
                going += self._begin(entry)

    def _settle(self, entry: Entry, known: Known) -> None:
        if entry.state == "submitting":  # this process was killed between two lines
            run = next((id for id, (_, claim) in known.items() if claim == entry.claim), 0)
            entry = self._queue.change(entry.id, state="submitted" if run else "waiting", run=run) or entry
            if not run:
                return
        if entry.run in known and not known[entry.run][0].over:
            return
        folder = RunFolder(entry.folder)
        if folder.in_use():
            return
        status, reached = folder.status(), max((line["round"] for line in folder.history()), default=0)
        word = str(status.get("status"))
        tries = entry.tries + 1 if reached <= entry.reached else 1
        ended = word in ("finished", "failed") or entry.stop or status.get("by")
        if ended or tries > MOST_TRIES:
            error = str(status.get("error", "")) if ended else f"it ended {MOST_TRIES} times before a further round"
            self._queue.change(entry.id, state="done", error=error)
            self._say(f"{entry.id} {entry.name}: {word if ended else 'given up'} after round {reached}")
            return
        self._queue.change(
            entry.id, state="waiting", resume=folder.holds_run(), tries=tries, reached=reached, run=0, claim=""
        )
        self._say(f"{entry.id} {entry.name}: it ended with its server after round {reached} and waits for its turn")

    def _begin(self, entry: Entry) -> bool:
        """Whether it goes on now."""
        try:
            experiment = Experiment.parse(entry.experiment, entry.name)
            folder = RunFolder(entry.folder or choose_folder("runs", experiment.name, False))
            resume = entry.resume and folder.holds_run()
            claim = folder.claim(resume)
            taken = self._queue.take(entry.id, claim, str(folder.path))
            if taken is None:
                return False
            run = self._control.submit(
                ROOT,
                {
                    "experiment-toml": entry.experiment,
                    "run-dir": str(folder.path),
                    "resume": resume,
                    "claim": claim,
                },
            )
        except SettingsError as error:
            self._queue.change(entry.id, state="done", error=str(error))
            self._say(f"{entry.id} {entry.name}: {error}")
            return False
        self._queue.change(entry.id, state="submitted", run=run)
        self._say(f"{entry.id} {entry.name}: begun as run {run} in {folder.path}")
        return True
