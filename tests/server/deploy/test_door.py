"""A real SuperLink with `--users`: nobody without a token, nor as Flower's own helper; a queue that outlives it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient

from common.errors import RunError
from common.experiment import Experiment
from server.deploy import users
from server.deploy.control import Control, Node
from server.deploy.queue import Queue
from server.deploy.superlink import LinkOptions, SuperLink
from server.deploy.turns import Turns
from server.deploy.users import Role
from server.rounds.folder import RunFolder
from tests.support.patience import until

pytestmark = [pytest.mark.processes, pytest.mark.rest, pytest.mark.timeout(300)]


def test_a_queue_outlives_its_superlink_and_the_port_asks_who_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    token = users.add(tmp_path / "users.toml", "alice", Role.submit)
    options = LinkOptions(state=tmp_path / "state", users=tmp_path / "users.toml")
    text = Experiment.model_validate({"name": "q", "round": {"wait_for": 1}, "partition": {"clients": 2}}).toml()
    folder = RunFolder(tmp_path / "runs" / "q")
    with SuperLink(tmp_path / "first.log", options=options) as link:
        nobody, alice = Control(link.control_address), Control(link.control_address, token=token)
        for call in (nobody.runs, nobody.online, lambda: nobody.ask("GET", "/fedkeel/v1/runs"), lambda: nobody.stop(1)):
            with pytest.raises(RunError, match="asks who you are"):
                call()
        with pytest.raises(RunError, match="this needs operate"):
            alice.unregister(Node(1, "x", b""))
        claim = RuntimeHttpClient.from_server_address(
            link.control_address, True, None, [RuntimeVersionHttpInterceptor("flower-superexec")]
        )
        with pytest.raises(Exception, match=r"40[13]"):
            claim.AcquireTask(AcquireTaskRequest())
        claim.close()
        assert alice.ask("POST", "/fedkeel/v1/queue", {"experiment": text})["queue"] == "q1"
        turns = Turns(Queue(link.books), link.control, lambda line: None)
        turns.look()
        until(lambda: folder.status().get("status") == "running", lambda: link.family.tail(), 60)
        assert alice.ask("GET", "/fedkeel/v1/runs")[0]["owner"] == "alice"
        os.kill(link.pid, signal.SIGKILL)
    with SuperLink(tmp_path / "second.log", options=options) as link:
        turns = Turns(Queue(link.books), link.control, lambda line: None)
        before = folder.status()["claim"]

        def again() -> bool:
            turns.look()
            status = folder.status()
            return status.get("claim") != before and status.get("status") == "running"

        until(again, lambda: link.family.tail(), 90)
        control = Control(link.control_address, token=token)
        assert control.ask("POST", "/fedkeel/v1/runs/q/stop", {"grace_s": 0})["status"] == "stopping"
        until(lambda: folder.status().get("by") == "alice", lambda: link.family.tail(), 60)
