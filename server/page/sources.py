"""Where the page's runs come from: one folder, or a SuperLink; and how a button reaches a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import quote

from common.deploy.audit import AuditLog
from common.errors import RunError, SettingsError
from server.deploy.control import Control
from server.deploy.users import Role, User, Wrong
from server.page.table import Row, number, text
from server.rounds.folder import RunFolder
from server.rounds.stopping import GRACE_S
from server.watch.audited import audit_of

log = logging.getLogger("server.page")

Look = Callable[[str], Any]
RUNS, SITES = "/fedkeel/v1/runs", "/fedkeel/v1/sites"
MOST_RUNS = 200
OVER = ("finished", "failed", "stopped", "lost", "withdrawn")
ACTIONS = ("stop", "resume")


class Source(Protocol):
    """Runs that can be shown."""

    every_s: float
    """How often it is worth asking."""
    actions: tuple[str, ...]
    """Which of `ACTIONS` there are."""

    def runs(self) -> list[tuple[str, Row]]:
        """Key and row of each run, the first to be shown first."""

    def folder(self, key: str) -> RunFolder | None:
        """Where a run writes what it does; None as long as it has no place."""

    def act(self, user: User, token: str, key: str, action: str) -> str:
        """Do it for a user; returns the run's status then. Raises Wrong for one who may not, RunError if it fails."""


class OneRun:
    """The run of this command."""

    every_s: float = 0.0
    actions: tuple[str, ...] = ("stop",)

    def __init__(self, folder: RunFolder, name: str, rounds: int) -> None:
        self._folder = folder
        self._row = {"name": text(name), "folder": text(folder.path), "rounds": rounds, "owner": "", "queue": ""}

    def runs(self) -> list[tuple[str, Row]]:
        """It alone."""
        status = self._folder.status()
        word = text(status.get("status") or "starting")
        return [("run", self._row | {"status": word, "error": text(status.get("error"), 2000)})]

    def folder(self, key: str) -> RunFolder | None:
        """Its folder."""
        return self._folder if key == "run" else None

    def act(self, user: User, token: str, key: str, action: str) -> str:
        """Stop it as SIGTERM does."""
        if user.role is not Role.operate:
            raise Wrong(403, f"{user.name} may {user.role}; this needs {Role.operate}")
        if key != "run" or action != "stop":
            raise Wrong(404, "there is no such run or button here")
        if (word := self._folder.status().get("status")) in OVER:
            raise RunError(f"the run is {word} already")
        self._folder.stop.ask(GRACE_S, user.name)
        try:
            book = AuditLog(audit_of(self._folder), user.name)
            book.try_record("stopped", "asked", run=self._folder.path.name, grace_s=GRACE_S, through="page")
        except SettingsError as error:
            log.error("page: %s", error)
        return "stopping"


class LinkRuns:
    """Whatever runs behind a SuperLink, and its queue. `control`: its address; a button calls it with the token of who
    pressed it, so that the SuperLink decides who may and writes down who it was."""

    every_s: float = 2.0
    actions: tuple[str, ...] = ACTIONS

    def __init__(self, look: Look, control: Control) -> None:
        self._look, self._control = look, control
        self._folders: dict[str, str] = {}

    def runs(self) -> list[tuple[str, Row]]:
        """What waits first, then the newest."""
        rows, folders = [], {}
        for run in self._look(RUNS):
            key = str(run["queue"] or run["id"])
            if key in folders:
                continue  # an earlier try of the same place in the queue
            folders[key] = str(run["folder"])
            words = {each: text(run[each]) for each in ("id", "queue", "name", "status", "since", "owner", "folder")}
            numbers = {each: number(run[each]) for each in ("round", "rounds")}
            rows.append((key, words | numbers | {"error": text(run["error"], 2000)}))
        self._folders = folders
        return rows[:MOST_RUNS]

    def folder(self, key: str) -> RunFolder | None:
        """Where the SuperLink says that it is."""
        return RunFolder(place) if (place := self._folders.get(key)) else None

    def act(self, user: User, token: str, key: str, action: str) -> str:
        """Ask the SuperLink."""
        if key not in self._folders or action not in ACTIONS:
            raise Wrong(404, "there is no such run or button here")
        body = {"grace_s": GRACE_S} if action == "stop" else {}
        try:
            found = replace(self._control, token=token).ask("POST", f"{RUNS}/{quote(key, safe='')}/{action}", body)
        except RunError as error:
            raise RunError(str(error).removeprefix(f"the server at {self._control.address}: ")) from None
        return str(found["status"])


def sites(look: Look) -> list[tuple[str, Row]]:
    """Name and row of each site that the SuperLink knows; one without a key has a name once it is on a roll."""
    rows: dict[str, Row] = {}
    for site in look(SITES):
        row = {key: text(site[key]) for key in ("status", "seen", "versions", "arithmetic", "device", "refused")}
        rows.setdefault(text(site["name"] or f"node {site['node']}", 100), row | {"examples": number(site["examples"])})
    return list(rows.items())
