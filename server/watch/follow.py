"""A run that another process works on, seen in its folder: its rounds, its notes, its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from common.errors import RunError, SettingsError
from server.rounds.folder import HISTORY, NOTES, RunFolder
from server.rounds.provenance import unstamped
from server.rounds.stopping import Stop
from server.watch.tail import Tail
from server.watch.viewers import Viewer

LOOK_S = 0.1
ASK_S = 2.0
AT_ONCE_S = 2.0
MARGIN_S = 15.0
"""How long after the grace of a stop the server app may take to write its state and end."""


def follow(
    folder: RunFolder,
    display: Viewer,
    stop: Stop,
    trouble: Callable[[], str | None],
    dead: Callable[[], str | None],
    claim: str = "",
) -> None:
    """Show the history as it grows until the run is over; raise its error. Pass a request to stop on to it.

    `trouble()`: why it cannot go on, looked at all the time; `dead()`: why it has ended without a word, every
    `ASK_S` seconds. Ctrl-C stops the run at once. With `claim` (see `RunFolder.claimed`) a run that has not begun by
    then never will.
    """
    try:
        _follow(folder, display, stop, trouble, dead, claim)
    except KeyboardInterrupt:
        folder.stop.ask(0)
        end = time.monotonic() + AT_ONCE_S
        while not (claim and folder.withdraw(claim)) and folder.in_use() and time.monotonic() < end:
            time.sleep(LOOK_S)
        raise


def _follow(
    folder: RunFolder,
    display: Viewer,
    stop: Stop,
    trouble: Callable[[], str | None],
    dead: Callable[[], str | None],
    claim: str,
) -> None:
    history, notes = Tail(folder.path / HISTORY), Tail(folder.path / NOTES, skip=True)
    asked, stopping = time.monotonic(), False
    after: int | None = None
    while True:
        status = folder.status()
        display.tick(str(status.get("status", "unknown")))
        after = status.get("after", after)
        if after is not None:
            for line in history.lines():
                if (record := json.loads(line))["round"] > after:
                    display.show(record)
        for line in notes.lines():
            display.say(unstamped(line))
        if status.get("status") in ("finished", "stopped"):
            return
        if status.get("status") == "failed":
            raise failure(folder)
        if (why := trouble()) is not None:
            raise RunError(why)
        if (until := stop()) is not None:
            if not stopping:
                stopping = True
                if claim and folder.withdraw(claim):
                    display.say("stopped before it began")
                    continue
                grace_s = max(0.0, until - time.monotonic())
                folder.stop.ask(grace_s)
                display.say(f"stopping after the round in hand, within {grace_s:.0f} s; once more to stop at once")
            if time.monotonic() > until + MARGIN_S:
                raise RunError("the run did not stop in time; go on with --resume")
        if time.monotonic() - asked > ASK_S:
            asked = time.monotonic()
            if (why := dead()) and folder.status().get("status") not in ("finished", "failed", "stopped"):
                raise RunError(why)
        time.sleep(LOOK_S)


def failure(folder: RunFolder) -> Exception:
    """The error that a run left in its folder."""
    status = folder.status()
    text = str(status.get("error", "the run failed"))
    return SettingsError(text) if status.get("exit_code") == 2 else RunError(text)
