"""`--page` of the commands: a port that is taken, a run that is looked at, a button down to the SuperLink's books."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from typer.testing import CliRunner

from common.deploy.addresses import answers
from common.deploy.audit import AuditLog
from common.errors import RunError
from common.flower import ROOT
from server.__main__ import cli
from server.deploy import users as book
from server.deploy.control import Control
from server.deploy.gate import Gate, Owners
from server.deploy.processes import held_ports
from server.deploy.queue import Queue
from server.deploy.runs_api import routes
from server.deploy.users import Role, Users
from server.page.serve import Page
from server.page.sources import LinkRuns
from server.rounds.folder import RunFolder
from tests.server.page.live import Reader, reading, token, user_in_no_time
from tests.support.patience import limit, until

TEXT = """
name = "seen"
rounds = {rounds}
task.name = "tests.support.faults:task"
local.epochs = 1
"""


def experiment(folder: Path, rounds: int = 3) -> Path:
    """A file of a run that takes no time."""
    path = folder / "seen.toml"
    path.write_text(TEXT.format(rounds=rounds))
    return path


def look(port: int, seen: list[Reader]) -> None:
    """Look at a page that is about to be there, to its end."""
    end = time.monotonic() + 120
    while not answers(port) and time.monotonic() < end:
        time.sleep(0.01)
    with suppress(httpx.TransportError), reading(SimpleNamespace(url=f"http://127.0.0.1:{port}/")) as reader:
        seen.append(reader)
        reader.until(lambda _, name: name == "end")


@pytest.mark.parametrize("command", ["simulate", "local", "run", "superlink"])
def test_a_port_in_use_is_one_line_before_anything_begins(tmp_path: Path, command: str) -> None:
    words = [] if command == "superlink" else [str(experiment(tmp_path)), "--run-dir", str(tmp_path / "run")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, [command, *words, "--page", port])
    assert result.exit_code == 2
    assert result.output.strip() == f"error: --page: {port}: this port is in use"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["simulate", "local"])
def test_a_page_for_others_is_not_for_commands_without_users(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(cli, [command, str(experiment(tmp_path)), "--page", "0.0.0.0:0"])
    assert (result.exit_code, "open to other machines" in result.output) == (2, True)


def test_a_run_that_is_looked_at_has_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last round, which the one who looks is told of before the command ends."""
    append = RunFolder.append

    def once_looked_at(self: RunFolder, record: dict[str, Any]) -> dict[str, Any]:
        if self.path.name == "seen":
            until(lambda: seen and seen[-1].run, "somebody looks", 10)
        return append(self, record)

    monkeypatch.setattr(RunFolder, "append", once_looked_at)
    (port,) = held_ports(1)
    words = ["simulate", str(experiment(tmp_path)), "--run-dir"]
    seen: list[Reader] = []
    thread = threading.Thread(target=look, args=(port, seen), daemon=True)
    thread.start()
    watched = CliRunner().invoke(cli, [*words, str(tmp_path / "seen"), "--page", str(port)])
    assert watched.exit_code == 0, watched.output
    assert f"page: http://127.0.0.1:{port}/" in watched.output
    thread.join(10)
    alone = CliRunner().invoke(cli, [*words, str(tmp_path / "alone")])
    assert alone.exit_code == 0, alone.output
    assert [RunFolder(tmp_path / each).status()["sha256"] for each in ("seen", "alone")] == [
        RunFolder(tmp_path / "alone").history()[-1]["sha256"]
    ] * 2
    assert [point[0] for point in seen[-1].rounds] == [1, 2, 3]


def test_the_superlink_decides_and_writes_down_who_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the button through the door of the control port to its queue and its audit log."""
    monkeypatch.setattr(book, "N", 2)
    monkeypatch.setattr(book, "NOBODY", user_in_no_time())
    file, queue, audit = tmp_path / "users.toml", Queue(tmp_path), AuditLog(tmp_path / "audit.jsonl", "superlink")
    who = {name: token(file, name, role) for name, role in (("sam", Role.submit), ("olga", Role.operate))}
    owners = Owners(tmp_path / "owners.json")
    door = Middleware(Gate, users=Users(file, "own"), owners=owners, told=lambda *_: None)
    app = Starlette(middleware=[door])
    flower = SimpleNamespace(get_run_info=list, get_node_info=list)
    app.state.linkstate_factory = SimpleNamespace(state=lambda: flower)
    app.router.routes.extend(routes(app, queue, owners, audit))

    def call(self: Control, method: str, path: str, body: Any = None, timeout_s: float = 30) -> Any:
        async def one() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://link") as client:
                return await client.request(
                    method, path, json=body or {}, headers={"authorization": f"Bearer {self.token}"}
                )

        answer = asyncio.run(one())
        if answer.is_error:
            raise RunError(f"the server at {self.address}: {answer.json()['detail']}")
        return answer.json()

    monkeypatch.setattr(Control, "ask", call)
    queue.add("mine", experiment(tmp_path).read_text(), "sam")
    queue.add("other", experiment(tmp_path).read_text(), "mira")
    control = Control("127.0.0.1:1")
    with Page("127.0.0.1:0", users=file) as page, httpx.Client(trust_env=False) as client:
        ask = Control("127.0.0.1:1", token="own").look
        page.hub.follow(LinkRuns(ask, control), ask)
        with reading(page, headers=who["sam"]) as seen:
            seen.until(lambda seen, _: len(seen.runs) == 2)
            assert client.post(f"{page.url}runs/q1/stop", headers=who["sam"]).json() == {"status": "withdrawn"}
            refused = client.post(f"{page.url}runs/q2/stop", headers=who["sam"])
            assert (refused.status_code, refused.json()["detail"]) == (409, "other is mira's; this needs operate")
            assert client.post(f"{page.url}runs/q2/stop", headers=who["olga"]).json() == {"status": "withdrawn"}
    assert [entry.state for entry in queue.entries()] == ["withdrawn"] * 2
    written = audit.last("stopped")
    assert written is not None
    assert (written["actor"], written["run"], written["outcome"]) == ("olga", "other", "withdrawn")


@pytest.mark.processes
@pytest.mark.rest
@pytest.mark.timeout(300)
def test_a_federation_of_processes_with_a_page(tmp_path: Path) -> None:
    """Rounds and sites that are here come; SIGTERM ends the command with streams open, and they are told."""
    (port,) = held_ports(1)
    path = tmp_path / "seen.toml"
    path.write_text('name = "seen"\nrounds = 1000\npartition.clients = 2\n')
    words = ["local", str(path), "--run-dir", str(tmp_path / "run"), "--page", str(port)]
    command = [sys.executable, "-m", "server", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seen: list[Reader] = []
    thread = threading.Thread(target=look, args=(port, seen), daemon=True)
    thread.start()
    try:
        until(lambda: seen and len(seen[-1].rounds) >= 2 and set(seen[-1].here) == {"0", "1"}, lambda: seen, 60)
        assert {site["status"] for site in seen[-1].here.values()} == {"online"}
        assert set(seen[-1].sites) == {"0", "1"}
    finally:
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=limit(60))
    assert process.returncode == 0, output
    assert f"page: http://127.0.0.1:{port}/" in output
    assert "Traceback" not in output
    thread.join(10)
    assert not thread.is_alive()
    last = RunFolder(tmp_path / "run").history()[-1]["round"]
    assert seen[-1].rounds[-1][0] == last
