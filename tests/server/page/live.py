"""A page that is really served, and how tests look at it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from server.deploy import users as book
from server.deploy.users import Role, User
from server.page.hub import Hub
from server.page.serve import Page
from server.page.sources import OneRun
from server.rounds.folder import RunFolder
from tests.support.written_runs import record, write_run

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m\n"


def line(round: int, sites: int = 3, dropped: Sequence[int] = (), why: str = "timed out: no reply") -> dict[str, Any]:
    """A record of so many sites, of which some were dropped."""
    names = [f"site-{number}" for number in range(sites)]
    causes = {names[number]: why.partition(":")[0] for number in dropped}
    return record(
        round,
        1 - math.exp(-round / 100),
        sampled=names,
        accepted=[name for name in names if name not in causes],
        dropped=dict.fromkeys(causes, why),
        causes=causes,
        examples=dict.fromkeys(names, 100),
        time=f"2026-11-03T10:{round // 60 % 60:02}:{round % 60:02}.000Z",
    )


def add(folder: Path, *lines: dict[str, Any]) -> None:
    """Further rounds."""
    with (folder / "history.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in lines))


@contextmanager
def served(folder: Path, rounds: int = 20, **options: Any) -> Iterator[Page]:
    """A page of one run, at a free port of this machine."""
    with Page("127.0.0.1:0", "written", **options) as page:
        page.hub.follow(OneRun(RunFolder(folder), "written", rounds))
        yield page


def running(folder: Path, lines: Sequence[dict[str, Any]], rounds: int = 20) -> Path:
    """A run folder in the middle of its rounds."""
    return write_run(folder, lines, rounds=rounds, status={"status": "running"})


def token(file: Path, name: str, role: Role) -> dict[str, str]:
    """A new user, as the header of a call."""
    return {"Authorization": f"Bearer {book.add(file, name, role)}"}


@dataclass
class Reader:
    """What came of a stream, put together as the page does."""

    events: Iterator[tuple[str, dict[str, Any]]]
    last: str = ""
    run: str = ""
    rounds: list[list[Any]] = field(default_factory=list)
    sites: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)
    here: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    hello: dict[str, Any] = field(default_factory=dict)
    resets: int = 0

    def until(self, true: Any) -> dict[str, Any]:
        """Read until something holds of it; returns the last event."""
        for name, data in self.events:
            self._take(name, data)
            if true(self, name):
                return data
        raise AssertionError("the stream ended")

    def _take(self, name: str, data: dict[str, Any]) -> None:
        if name == "hello":
            self.hello = data
        if name != "news":
            return
        self.last = data["id"]
        self.run = data.get("run", self.run)
        if data.get("reset"):
            self.resets += 1
            self.rounds, self.sites, self.notes = [], {}, []
        self.rounds += data.get("rounds", [])
        self.notes += data.get("notes", [])
        self.state = data.get("state", self.state)
        for table in ("sites", "runs", "here"):
            rows, news = getattr(self, table), data.get(table, {})
            rows |= news.get("rows", {})
            setattr(self, table, {key: rows[key] for key in news.get("order", rows)})


def _events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    fields: dict[str, str] = {}
    for text in answer.iter_lines():
        if text:
            key, _, value = text.partition(": ")
            fields[key] = value
        elif fields:
            if "event" in fields:
                yield fields["event"], {**json.loads(fields["data"]), "id": fields.get("id", "")}
            fields = {}


@contextmanager
def reading(page: Any, run: str = "", headers: dict[str, str] | None = None, last: str = "") -> Iterator[Reader]:
    """A stream of a page, which has a `url`."""
    sent = (headers or {}) | ({"Last-Event-ID": last} if last else {})
    with (
        httpx.Client(timeout=10, trust_env=False) as client,
        client.stream("GET", f"{page.url}events", params={"run": run}, headers=sent) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        yield Reader(_events(answer))


def user_in_no_time() -> User:
    """Who stands for nobody, of a hash that takes no time."""
    return User("nobody", Role.look, f"scrypt$2$8$1${'A' * 22}==${'A' * 43}=")


def held(hub: Hub) -> dict[str, int]:
    """What a hub holds."""
    return {"trails": len(hub._trails), "watched": sum(hub._watched.values()), "listeners": hub.watching}
