"""The control port asks who calls: users, roles, the door before Flower's API, the queue and what is known of runs."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.proto.control_pb2 import StartRunResponse, StopRunRequest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from common.deploy.audit import AuditLog
from common.errors import RunError, SettingsError
from server.__main__ import cli
from server.commands.runs import _marked
from server.deploy import users as book
from server.deploy.control import RunStatus
from server.deploy.gate import Gate, Owners, needed, user_of
from server.deploy.queue import Queue
from server.deploy.runs_api import Books, Fault, routes
from server.deploy.turns import MOST_TRIES, Turns
from server.deploy.users import MOST_FAILURES, Role, User, Users, Wrong
from server.rounds.folder import RunFolder
from tests.support.faults import FaultyGrid, ran, toy


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that take no time: the numbers stand in each, so a file with others is read just as well."""
    monkeypatch.setattr(book, "N", 2)
    monkeypatch.setattr(book, "NOBODY", User("nobody", Role.look, f"scrypt$2$8$1${'A' * 22}==${'A' * 43}="))


# --- the file


def test_users_come_and_go(tmp_path: Path) -> None:
    file, run = tmp_path / "users.toml", CliRunner().invoke
    AuditLog(tmp_path / "audit.jsonl")
    added = run(cli, ["users", "add", "alice", "--role", "submit", "--file", str(file)])
    assert added.exit_code == 0, added.output
    token = added.stdout.strip().splitlines()[0]
    assert token.startswith("alice:")
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o77 == 0
    assert book.read(file)["alice"].knows(token)
    assert not book.read(file)["alice"].knows(token[:-1])
    assert "alice" in run(cli, ["users", "list", "--file", str(file)]).output
    again = run(cli, ["users", "add", "alice", "--role", "look", "--file", str(file)])
    assert (again.exit_code, "remove 'alice' first" in again.output) == (2, True)
    assert run(cli, ["users", "remove", "alice", "--file", str(file)]).exit_code == 0
    assert book.read(file) == {}
    noted = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["what"], line["user"]) for line in noted] == [("user added", "alice"), ("user removed", "alice")]
    gone = run(cli, ["users", "remove", "alice", "--file", str(file)])
    assert (gone.exit_code, "has no 'alice'" in gone.output) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "users = 3",
        "[other]",
        "[users.alice]\nrole = 'submit'",
        "[users.alice]\nrole = 'root'\ntoken = 'scrypt$2$8$1$AA$AA'",
        "[users.alice]\nrole = 'look'\ntoken = 'secret'",
        "[users.'a b']\nrole = 'look'\ntoken = 'scrypt$2$8$1$AA$AA'",
    ],
)
def test_a_file_of_users_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "users.toml").write_text(text)
    with pytest.raises(SettingsError, match="users file"):
        book.read(tmp_path / "users.toml")


def test_a_removed_user_is_out_at_once_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    alice, bob = (book.add(file, name, Role.look) for name in ("alice", "bob"))
    known = Users(file)
    assert known.user(f"Bearer {alice}", "a").name == "alice"
    file.write_text("[users")
    assert known.user(f"Bearer {alice}", "a").name == "alice"
    file.unlink()
    bob = book.add(file, "bob", Role.look)
    with pytest.raises(Wrong, match="not known"):
        known.user(f"Bearer {alice}", "a")
    assert known.user(f"Bearer {bob}", "a").name == "bob"


def test_who_guesses_is_slowed_down_and_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    token = book.add(file, "alice", Role.look)
    known = Users(file)
    assert known.user(f"Bearer {token}", "a").name == "alice"
    for number in range(MOST_FAILURES):
        with pytest.raises(Wrong, match="not known") as error:
            known.user(f"Bearer alice:{number}", "a")
        assert error.value.status == 401
    with pytest.raises(Wrong, match="too many") as error:
        known.user("Bearer alice:x", "a")
    assert error.value.status == 429
    assert known.user(f"Bearer {token}", "a").name == "alice"
    with pytest.raises(Wrong, match="not known"):
        known.user("Bearer bob:x", "b")


# --- the door

CALLS = ("start-run", "stop-run", "list-runs", "list-nodes", "stream-logs", "register-node", "unregister-node", "later")


async def _flower(request: Request) -> Response:
    if request.url.path.endswith("start-run"):
        return Response(StartRunResponse(run_id=7).SerializeToString())
    body = await request.body()
    return PlainTextResponse(f"{user_of(request).name} {len(body)}")


def door(folder: Path, told: list[tuple[str, str, str]]) -> tuple[Starlette, dict[str, str]]:
    file = folder / "users.toml"
    tokens = {role.value: book.add(file, f"{role.value}er", role) for role in Role} | {"own": "secret", "wrong": "x:y"}
    names = [f"/v1/control/{call}" for call in CALLS] + ["/v1/runtime/claim-task", "/docs", "/health"]
    gate = Middleware(
        Gate, users=Users(file, "secret"), owners=Owners(folder / "owners.json"), told=lambda *words: told.append(words)
    )
    return Starlette(routes=[Route(n, _flower, methods=["GET", "POST"]) for n in names], middleware=[gate]), tokens


def call(app: Any, path: str, token: str = "", content: bytes = b"", method: str = "POST") -> httpx.Response:
    async def one() -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(one())


def test_each_call_needs_its_role(tmp_path: Path) -> None:
    """All of Flower's calls, also those of a later release: what is unknown needs the highest role."""
    app, tokens = door(tmp_path, told := [])
    least = {"list-runs": "look", "list-nodes": "look", "stream-logs": "look", "start-run": "submit"}
    for name in CALLS:
        for role in Role:
            wanted = Role(least.get(name, "operate"))
            answer = call(app, f"/v1/control/{name}", tokens[role.value])
            assert (answer.status_code == 200) == role.covers(wanted), (name, role, answer.text)
        for token in ("", tokens["wrong"]):
            assert call(app, f"/v1/control/{name}", token).status_code == 401
        assert call(app, f"/v1/control/{name}", tokens["own"]).status_code == 200
    assert "FEDKEEL_TOKEN" in call(app, "/v1/control/list-runs").json()["detail"]
    assert "may look; this needs submit" in call(app, "/v1/control/start-run", tokens["look"]).json()["detail"]
    assert call(app, "/docs").status_code == 401
    assert call(app, "/health").status_code == 200
    assert needed("POST", "/v1/runtime/claim-task") is None
    assert ("looker", "/v1/control/start-run", "looker may look; this needs submit") in told


def test_a_user_stops_runs_of_ones_own(tmp_path: Path) -> None:
    app, tokens = door(tmp_path, [])
    assert call(app, "/v1/control/start-run", tokens["submit"]).status_code == 200
    own, other = (StopRunRequest(run_id=number).SerializeToString() for number in (7, 8))
    answer = call(app, "/v1/control/stop-run", tokens["submit"], own)
    assert (answer.status_code, answer.text) == (200, f"submiter {len(own)}")
    assert call(app, "/v1/control/stop-run", tokens["submit"], other).status_code == 403
    assert call(app, "/v1/control/stop-run", tokens["submit"], b"\xff\xff").status_code == 403
    assert call(app, "/v1/control/stop-run", tokens["operate"], other).status_code == 200


# --- the queue


class Flower:
    """Runs as Flower knows them; each goes on until it is ended."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[RunStatus, str]] = {}
        self.config: dict[int, dict[str, Any]] = {}
        self.refuse = False

    def runs(self) -> dict[int, tuple[RunStatus, str]]:
        return dict(self.known)

    def submit(self, project: Path, config: dict[str, Any]) -> int:
        if self.refuse:
            raise RunError("no answer")
        run = len(self.known) + 1
        self.known[run], self.config[run] = (RunStatus("running", "", ""), config["claim"]), config
        return run

    def end(self, run: int, status: str, **more: Any) -> None:
        self.known[run] = RunStatus("finished", "completed", ""), self.known[run][1]
        RunFolder(self.config[run]["run-dir"]).set_status(status, **more)

    def infos(self) -> list[Any]:
        return [
            SimpleNamespace(
                run_id=run, override_config=self.config[run], status=status, pending_at=f"2026-01-0{run}",
                starting_at="", running_at="",
            )
            for run, (status, _) in self.known.items()
        ]  # fmt: skip


class World:
    """A queue, who works through it, and the books."""

    def __init__(self, folder: Path, at_once: int = 1) -> None:
        self.flower, self.said = Flower(), list[str]()
        self.queue = Queue(folder)
        self.turns = Turns(self.queue, self.flower, self.said.append, at_once)  # type: ignore[arg-type]
        self.owners, self.audit = Owners(folder / "owners.json"), AuditLog(folder / "audit.jsonl")
        self.nodes: list[Any] = []
        self.books = Books(self.queue, self.owners, self.audit, self.flower.infos, lambda: self.nodes)

    def states(self) -> list[str]:
        return [entry.state for entry in self.queue.entries()]


ALICE, BOB, ROOT = User("alice", Role.submit, ""), User("bob", Role.submit, ""), User("root", Role.operate, "")


def text(name: str) -> str:
    return toy().model_copy(update={"name": name}).toml()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path / "books")


def test_one_after_another_and_a_restart_forgets_none(world: World, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        world.books.add(ALICE, text(name))
    world.turns.look()
    world.turns.look()
    assert world.states() == ["submitted", "waiting", "waiting"]
    world.flower.end(1, "finished")
    again = Turns(Queue(tmp_path / "books"), world.flower, world.said.append)  # type: ignore[arg-type]
    again.look()
    assert world.states() == ["done", "submitted", "waiting"]
    assert [Path(config["run-dir"]).name for config in world.flower.config.values()] == ["a", "b"]
    listed = world.books.everything()
    assert [(run["name"], run["status"], run["owner"]) for run in listed] == [
        ("c", "waiting", "alice"),
        ("b", "starting", "alice"),
        ("a", "finished", "alice"),
    ]


def test_side_by_side_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path / "books", at_once=2)
    for name in ("a", "b", "c"):
        world.books.add(ALICE, text(name))
    world.turns.look()
    assert world.states() == ["submitted", "submitted", "waiting"]
    world.flower.end(2, "failed", error="no")
    world.turns.look()
    assert world.states() == ["submitted", "done", "submitted"]
    assert world.queue.entries()[1].error == "no"


def test_a_run_that_ended_with_its_server_goes_on_and_one_that_was_stopped_does_not(world: World) -> None:
    world.books.add(ALICE, text("a"))
    world.turns.look()
    folder = RunFolder(world.flower.config[1]["run-dir"])
    folder.append({"round": 1})
    world.flower.end(1, "stopped")
    world.turns.look()
    assert (world.states(), world.flower.config[2]["resume"]) == (["submitted"], True)
    with pytest.raises(Fault, match="alice's"):
        world.books.stop(BOB, "a", 5)
    assert world.books.stop(ALICE, "a", 5)["status"] == "stopping"
    assert folder.stop.by() == "alice"
    world.flower.end(2, "stopped", by="alice")
    world.turns.look()
    assert world.states() == ["done"]
    assert world.books.resume(ROOT, "a")["queue"] == "q2"
    world.turns.look()
    assert (world.states(), world.flower.config[3]["resume"]) == (["done", "submitted"], True)


def test_a_run_that_gets_nowhere_is_given_up(world: World) -> None:
    world.books.add(ALICE, text("a"))
    for run in range(1, MOST_TRIES + 2):
        world.turns.look()
        world.flower.end(run, "running")
    world.turns.look()
    assert world.states() == ["done"]
    assert "before a further round" in world.queue.entries()[0].error


def test_killed_between_two_lines(world: World) -> None:
    """Submitted and not noted, or noted and not submitted: it runs once."""
    world.books.add(ALICE, text("a"))
    world.turns.look()
    world.queue.change("q1", state="submitting", run=0)
    world.turns.look()
    assert (world.states(), world.queue.entries()[0].run, len(world.flower.known)) == (["submitted"], 1, 1)
    world.flower.end(1, "finished")
    world.turns.look()
    world.books.add(ALICE, text("b"))
    world.flower.refuse = True
    with pytest.raises(RunError):
        world.turns.look()
    assert world.states() == ["done", "submitting"]
    world.flower.refuse = False
    world.turns.look()
    world.turns.look()
    assert (world.states(), len(world.flower.known)) == (["done", "submitted"], 2)


def test_what_waits_can_be_taken_back(world: World) -> None:
    for name in ("a", "b"):
        world.books.add(ALICE, text(name))
    world.turns.look()
    assert world.books.stop(ALICE, "q2", 5)["status"] == "withdrawn"
    world.flower.end(1, "finished")
    world.turns.look()
    assert world.states() == ["done", "withdrawn"]
    with pytest.raises(Fault, match="finished already"):
        world.books.stop(ALICE, "a", 5)
    with pytest.raises(Fault, match="no run 'z'"):
        world.books.show("z")
    with pytest.raises(SettingsError):
        world.books.add(ALICE, "rounds = 'x'")


def test_show_and_sites(world: World, tmp_path: Path) -> None:
    """What a real run left: its rounds, causes and roll; and a node that was refused."""
    world.books.add(ALICE, text("a"))
    world.turns.look()
    path = Path(world.flower.config[1]["run-dir"])
    ran(tmp_path / "other", toy(rounds=2), FaultyGrid(memory=str(tmp_path / "memory")))
    for file in (tmp_path / "other").glob("*.*"):
        if file.name != "run.json":
            (path / file.name).write_bytes(file.read_bytes())
    RunFolder(path).note("refused node 5: no such layout")
    shown = world.books.show("a")
    assert [line["round"] for line in shown["rounds_done"]] == [1, 2]
    assert (shown["round"], "[task]" in shown["settings"]) == (2, True)
    roll = json.loads((path / "roll.json").read_text())
    roll = [{**roll[0], "node": roll[0]["node"] + 10 * i, "data_schema": "baa"[i]} for i in range(3)]
    (path / "roll.json").write_text(json.dumps(roll))
    about = {"last_deactivated_at": "yesterday", "online_until": 0.0}
    world.nodes = [
        SimpleNamespace(node_id=roll[0]["node"], name="", status="online", **about),
        SimpleNamespace(node_id=5, name="site-5", status="offline", **about),
    ]
    here, away = world.books.sites()
    assert (here["status"], here["seen"], here["versions"]) == ("online", "now", roll[0]["versions"])
    assert (here["schema"], here["schema_differs"], away["schema_differs"]) == ("b", True, False)
    assert _marked(here)["schema"] == "b differs"
    assert _marked(away)["schema"] == ""
    assert (away["name"], away["seen"], away["refused"]) == ("site-5", "yesterday", "no such layout")


def test_the_calls_over_http(world: World, tmp_path: Path) -> None:
    app = Starlette()
    app.state.linkstate_factory = SimpleNamespace(
        state=lambda: SimpleNamespace(get_run_info=world.flower.infos, get_node_info=list)
    )
    app.router.routes.extend(routes(app, world.queue, world.owners, world.audit))
    body = json.dumps({"experiment": text("a")}).encode()
    assert call(app, "/fedkeel/v1/queue", content=body).json()["queue"] == "q1"
    assert call(app, "/fedkeel/v1/queue", content=b'{"experiment": "rounds = 0"}').status_code == 400
    assert call(app, "/fedkeel/v1/queue", content=b"[").status_code == 400
    assert [run["name"] for run in call(app, "/fedkeel/v1/runs", method="GET").json()] == ["a"]
    assert call(app, "/fedkeel/v1/runs/q1", method="GET").json()["status"] == "waiting"
    assert call(app, "/fedkeel/v1/runs/q9", method="GET").status_code == 404
    assert call(app, "/fedkeel/v1/sites", method="GET").json() == []
    assert call(app, "/fedkeel/v1/runs/q1/resume").status_code == 409
    assert call(app, "/fedkeel/v1/runs/q1/stop").json()["status"] == "withdrawn"
    what = [json.loads(line)["what"] for line in (tmp_path / "books" / "audit.jsonl").read_text().splitlines()]
    assert what == ["queued", "stopped"]
    assert time.time() - world.queue.entries()[0].since < 60


SHARED = {"superlink", "ca", "insecure", "token_file"}


@pytest.mark.parametrize("words", [["runs", "list"], ["runs", "show", "a"], ["runs", "stop", "a"], ["sites"]])
def test_every_command_that_asks_a_superlink_has_the_same_options(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each reaches the one that is named, as who is named; what does not fit ends in one line."""
    asked: list[Any] = []
    refused = RunError("nobody is there")

    def running_link(*given: Any) -> Any:
        asked.append(given)
        raise refused

    monkeypatch.setattr("server.deploy.federation.running_link", running_link)
    (tmp_path / "token").write_text("alice:t\n")
    options = ["--superlink", "fl:1", "--insecure", "--token-file", str(tmp_path / "token")]
    done = CliRunner().invoke(cli, [*words, *options])
    assert (done.exit_code, "nobody is there" in done.output) == (1, True)
    ((address, ca, given, token),) = asked
    assert (address, ca, given.insecure, token) == ("fl:1", None, True, "alice:t")
    helped = CliRunner().invoke(cli, [*words[: 1 + (words[0] == "runs")], "--help"], env={"COLUMNS": "200"}).output
    assert all(f"--{name.replace('_', '-')}" in helped for name in SHARED)
    assert "127.0.0.1:8000" in helped
