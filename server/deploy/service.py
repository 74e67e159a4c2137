"""A SuperLink that stays: runs come and go through its control port."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from common.deploy.addresses import answers, reachable
from common.errors import RunError
from server.deploy.admission import Admission
from server.deploy.control import Watcher
from server.deploy.queue import Queue
from server.deploy.register import book_of, registered
from server.deploy.superlink import LinkOptions, SuperLink
from server.deploy.turns import Turns
from server.rounds.records import unheard
from server.rounds.stopping import GRACE_S, Stop
from server.watch.tail import Tail

LOOK_S = 0.2
MOST_LOG_BYTES = 10 * 2**20

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def serve(
    options: LinkOptions,
    *,
    stop: Stop,
    say: Callable[[str], None],
    grace_s: float = GRACE_S,
    at_once: int = 1,
    watchers: Sequence[Watcher] = (),
) -> None:
    """Run a SuperLink until `stop`; then let the server apps behind it finish the round in hand first.

    What it and the server apps print goes through `say`, so that all lines have one form. Raises SettingsError before
    it starts, and RunError if it ends by itself. `at_once`: how many runs of its queue go on side by side. `watchers`
    are told how to ask it.
    """
    options.check()
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedkeel-"))) / "superlink.log"
        link, printed = SuperLink(log, options=options), Tail(log)
        book = book_of(options)
        stack.enter_context(registered(book, options, say))
        stack.callback(_repeat, printed, say)
        stack.enter_context(link)
        if options.nodes:
            event = book.try_record if book else unheard
            stack.enter_context(Admission(options.nodes, link.control, say, link.knocks, event=event))
        for told in watchers:
            told(link.control.look)
        turns = stack.enter_context(Turns(Queue(link.books), link.control, say, at_once))
        how = "TLS" if options.certificates else "plain text"
        runs = f"{options.control_host}:{link.control_port}"
        say(f"SuperLink: clients at {options.host}:{link.fleet_port}, runs at {runs} ({how})")
        while stop() is None:
            if not link.running:
                raise RunError("the SuperLink ended by itself")
            _repeat(printed, say)
            if log.stat().st_size > MOST_LOG_BYTES:
                os.truncate(log, 0)  # said already; it is opened for appending
            time.sleep(LOOK_S)
        turns.end()
        _let_finish(link.apps(), grace_s, say)


def _repeat(printed: Tail, say: Callable[[str], None]) -> None:
    for line in printed.lines():
        say(_COLOUR.sub("", line))


def _let_finish(apps: list[psutil.Process], grace_s: float, say: Callable[[str], None]) -> None:
    if apps:
        say(f"waiting up to {grace_s:g} s for the round in hand")
        for app in apps:
            app.terminate()
        psutil.wait_procs(apps, timeout=grace_s + 5)


def healthy(options: LinkOptions) -> bool:
    """Whether both ports of a SuperLink answer."""
    return all(
        answers(port or 0, reachable(host))
        for port, host in ((options.fleet_port, options.host), (options.control_port, options.control_host))
    )
