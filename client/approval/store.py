"""What a site remembers of runs: who waits, who was approved, denied or revoked, when and by whom. One JSON file.

A run is the same run if its settled experiment is, but for what concerns the server alone (`FREE`): started again or
resumed it needs no new word. `rounds` may fall, and above the approved number a person is asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from common.errors import ExperimentError, Sayable, SettingsError
from common.experiment import Experiment
from common.files import locked, replacing
from common.settings import Section, printable
from strategies.protocol.messages import read_experiment
from strategies.registry import settled

NAME = "approvals.json"
MOST_WAITING, MOST_ADMITTED, MOST_RUNS = 50, 200, 5
"""Entries that a server can cause, and names of runs in an entry: the oldest give way."""
MOST_TEXT = 100_000
"""Letters of an experiment that a person can be asked about."""
LOCK_S = 10.0

FREE = {"rounds", "checkpoint", "tracking", "round"}
"""Sections that a resumed run may change without a new word; of `round`, `SAMPLED` stay: they say how often a site is
asked."""
SAMPLED = {"sample", "over_select"}

State = Literal["waiting", "approved", "admitted", "denied", "revoked"]


class Entry(Section):
    """One run at this site. `rounds`: approved up to; `asked`: the server's number. Times are UTC, ISO 8601."""

    state: State
    experiment: dict[str, Any]
    runs: list[str] = []
    rounds: int = Field(0, ge=0)
    asked: int = Field(ge=1)
    first: str
    changed: str
    by: str = ""
    """Who decided: a user of the system, "policy" or "all"."""

    @property
    def name(self) -> str:
        """The experiment's."""
        return str(self.experiment.get("name", "experiment"))

    @property
    def waits(self) -> bool:
        """Whether a person is asked: anew, or for more rounds than were approved."""
        return self.state == "waiting" or (self.state == "approved" and self.asked > self.rounds)


class _File(Section):
    version: Literal[1]
    runs: dict[str, Entry]


Entries = Mapping[str, Entry]


@lru_cache(maxsize=8)
def resolved(text: str) -> tuple[str, Experiment]:
    """Key and settled experiment of a message's JSON text. Nothing that it names is imported or opened.

    Raises ExperimentError for what no person could read or no run could be.
    """
    if len(text) > MOST_TEXT:
        raise ExperimentError(f"the experiment has {len(text)} letters; for approval it may have {MOST_TEXT}")
    try:
        experiment = settled(read_experiment(text))[1]
    except Sayable:
        raise
    except (ValueError, RecursionError) as error:
        raise ExperimentError(str(error)) from error
    return key_of(experiment), experiment


def key_of(experiment: Experiment) -> str:
    """sha256, hex, of a settled experiment: canonical JSON of what was set and is no default."""
    kept = experiment.model_dump(mode="json", exclude_defaults=True, exclude=FREE)
    rounds = experiment.round.model_dump(mode="json", exclude_defaults=True, include=SAMPLED)
    text = json.dumps({**kept, "round": rounds}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Approvals:
    """The file of one site or of several on this machine; may be used by several processes and threads at once.

    Every change is a whole new file (mode 0600), on the disk before it counts: a process killed at any point leaves the
    old one or the new one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self._lock = threading.Lock()
        self._read: tuple[tuple[int, ...], Entries] | None = None

    def entries(self) -> Entries:
        """What the file says, by key; read again when it has changed.

        Raises SettingsError, naming the file, if it is damaged or if others than its owner may write it: then nobody
        knows what was approved.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise SettingsError(f"approvals {str(self.path)!r} cannot be read: {error.strerror}") from None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
        held = self._read
        if held is None or held[0] != stamp:
            held = self._read = stamp, self._load(status.st_mode)
        return held[1]

    def _load(self, mode: int) -> Entries:
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SettingsError(
                f"approvals {str(self.path)!r} can be written by others (mode {mode & 0o777:03o}): look at what it "
                "says, then chmod 600"
            )
        try:
            return _File.model_validate_json(self.path.read_bytes()).runs
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error.errors()[0]["msg"])
            raise SettingsError(
                f"approvals {str(self.path)!r} cannot be used: {why}; put back a copy, or move it away and "
                "approve again"
            ) from None

    def ask(self, key: str, experiment: Experiment, run: str, admit: str = "") -> bool:
        """Note that a server asks for a run; with `admit` ("policy", "all") that it was taken. Whether that is new."""
        known = self.entries().get(key)
        if known is not None and asked(known, experiment, run, admit) == known:
            return False
        with self._change() as entries:
            old = entries.get(key)
            new = asked(old, experiment, run, admit)
            if new == old:
                return False
            entries[key] = new
            _bound(entries, "waiting", MOST_WAITING, key)
            _bound(entries, "admitted", MOST_ADMITTED, key)
            return old is None or (new.waits and not old.waits) or new.asked > old.asked

    def decide(self, key: str, state: Literal["approved", "denied", "revoked"], rounds: int = 0) -> Entry:
        """A person's word; `rounds`: how many were shown and are approved. Raises SettingsError for an unknown run."""
        with self._change() as entries:
            if key not in entries:
                raise SettingsError(f"run {key[:12]} is not in {str(self.path)!r} any more")
            update = {"state": state, "rounds": rounds, "changed": now(), "by": user()}
            entries[key] = entries[key].model_copy(update=update)
            return entries[key]

    @contextmanager
    def _change(self) -> Iterator[dict[str, Entry]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, self._held():
                before = self.entries()
                entries = dict(before)
                yield entries
                if entries != before:
                    self._write(entries)
        except OSError as error:
            raise SettingsError(f"approvals {str(self.path)!r} cannot be written: {error.strerror or error}") from None

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The file, for this process alone."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        with locked(lock, f"approvals {str(self.path)!r}", LOCK_S):
            self._own(lock)
            yield

    def _write(self, entries: Entries) -> None:
        for left in self.path.parent.glob(f".{self.path.name}.[0-9]*"):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
        text = _File(version=1, runs=dict(sorted(entries.items()))).model_dump_json(indent=1)
        with replacing(self.path) as temporary:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            self._own(temporary)

    def _own(self, path: Path) -> None:
        """Of root's making, but the site's: `sudo python -m client approve` must not lock the site out."""
        if os.geteuid() == 0:
            like = (self.path if self.path.exists() else self.path.parent).stat()
            with suppress(OSError):
                os.chown(path, like.st_uid, like.st_gid)


def asked(old: Entry | None, experiment: Experiment, run: str, admit: str) -> Entry:
    """An entry after a server asked once more."""
    run = printable(run[:120])
    if old is None:
        settings = json.loads(experiment.json())
        state: State = "admitted" if admit else "waiting"
        time_ = now()
        return Entry(
            state=state, experiment=settings, runs=[run], asked=experiment.rounds, first=time_, changed=time_, by=admit
        )
    update: dict[str, Any] = {}
    if run not in old.runs:
        update["runs"] = [*old.runs, run][-MOST_RUNS:]
    if experiment.rounds > old.asked:
        update |= {"asked": experiment.rounds, "experiment": json.loads(experiment.json())}
    if admit and old.state == "waiting":
        update |= {"state": "admitted", "by": admit, "changed": now()}
    if not admit and old.state == "admitted":  # taken by no person's word, and now one is asked
        update |= {"state": "waiting", "by": "", "changed": now()}
    return old.model_copy(update=update) if update else old


def _bound(entries: dict[str, Entry], state: State, most: int, newest: str) -> None:
    """Let the oldest of a state go: a server can ask for any number of runs."""
    found = sorted((key for key, entry in entries.items() if entry.state == state), key=lambda k: entries[k].changed)
    for key in [key for key in found if key != newest][: max(0, len(found) - most)]:
        del entries[key]


def matching(entries: Entries, run: str) -> dict[str, Entry]:
    """The entries that a person may mean by `run`: name of the run or of its experiment, or the beginning of the key,
    four digits at least. A server chooses both names: no kind of match goes before another."""
    prefix = run.lower() if len(run) >= 4 else "none"
    return {k: e for k, e in entries.items() if run in (*e.runs, e.name) or k.startswith(prefix)}


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def user() -> str:
    """Who this process runs as, as the system says, not the environment."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user id {os.getuid()}"
