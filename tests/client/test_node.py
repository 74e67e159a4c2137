"""The resident node against a real SuperLink, over gRPC on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from client.__main__ import cli
from client.node.access import Access, server_address
from client.node.resident import poll_delay
from common import flower
from common.errors import RunError, SettingsError
from common.flower import ROOT
from server.deploy.control import bundle
from server.deploy.processes import Family, held_ports, stop
from server.deploy.superlink import SuperLink
from tests.support import patience

STANDIN = ROOT / "tests" / "support" / "standin"

# Flower's bundle builder.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


def until(true: Callable[[], object], seconds: float = 30.0, what: str = "") -> None:
    patience.until(true, what, seconds)


@contextmanager
def node(address: str, name: str, folder: Path) -> Iterator[Family]:
    env = {**flower.environment(), "PYTHONPATH": str(ROOT)}
    family = Family([sys.executable, str(STANDIN / "node.py"), address, name], env, folder / f"{name}.log")
    try:
        yield family
    finally:
        stop([family], 5)


def start(link: SuperLink, out: Path, plan: str, nodes: int = 1) -> int:
    config = {"plan": plan, "nodes": nodes, "out": str(out)}
    return link.control.submit(STANDIN / "project", config)


def finish(link: SuperLink, run_id: int, out: Path) -> list[dict[str, object]]:
    until(lambda: link.control.status(run_id).over, 60)
    assert link.control.status(run_id).completed, link.control.log(run_id)
    return json.loads(out.read_text())


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_messages_go_round_and_a_failing_app_only_costs_its_message(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with (
        SuperLink(tmp_path / "link.log") as link,
        node(link.fleet_address, "a", tmp_path),
        node(link.fleet_address, "b", tmp_path),
    ):
        first, failed, last = finish(link, start(link, out, "echo fail echo", nodes=2), out)
    for step, seen in ((first, 1), (last, 2)):
        replies = sorted(step["replies"], key=lambda reply: reply["name"])
        assert replies == [{"same": True, "seen": seen, "name": name} for name in "ab"]
    assert sorted(reply["error"] for reply in failed["replies"]) == [
        f"client {name}: failed: something went wrong at the site; its log has more" for name in "ab"
    ]


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.rest
def test_a_node_waits_for_its_server_and_joins_again_after_a_restart(tmp_path: Path) -> None:
    control, fleet = held_ports(2)
    log = tmp_path / "a.log"
    with node(f"127.0.0.1:{fleet}", "a", tmp_path) as family:
        until(lambda: "no Flower server" in log.read_text())
        joined = []
        for life in range(2):
            with SuperLink(tmp_path / f"{life}.log", control_port=control, fleet_port=fleet) as link:
                until(lambda: link.control.online())
                joined += link.control.online()
        assert len(set(joined)) == 2
        with SuperLink(tmp_path / "2.log", control_port=control, fleet_port=fleet) as link:
            until(lambda: link.control.online())
            family.process.terminate()
            assert family.process.wait(patience.limit(10)) == 0
            assert not link.control.online()
    text = log.read_text()
    assert text.count("no Flower server") <= 4
    assert "Traceback" not in text


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_sigterm_lets_the_node_answer_first(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with SuperLink(tmp_path / "link.log") as link, node(link.fleet_address, "a", tmp_path) as family:
        run_id = start(link, out, "sleep2")
        until(lambda: "doing sleep2" in family.tail())
        family.process.terminate()
        [step] = finish(link, run_id, out)
        assert step["replies"] == [{"same": True, "seen": 1, "name": "a"}]
        assert family.process.wait(patience.limit(10)) == 0
        assert not link.control.online()


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.rest
def test_a_node_outlives_a_stopped_run_and_a_server_that_dies_while_it_works(tmp_path: Path) -> None:
    control, fleet = held_ports(2)
    log = tmp_path / "a.log"
    with node(f"127.0.0.1:{fleet}", "a", tmp_path):
        with SuperLink(tmp_path / "1.log", control_port=control, fleet_port=fleet) as link:
            run_id = start(link, tmp_path / "1.json", "sleep1")
            until(lambda: "doing sleep1" in log.read_text())
            link.control.stop(run_id)
            until(lambda: f"run {run_id} has ended" in log.read_text())
            start(link, tmp_path / "2.json", "sleep2")
            until(lambda: "doing sleep2" in log.read_text())
            os.kill(link.pid, signal.SIGKILL)
        with SuperLink(tmp_path / "2.log", control_port=control, fleet_port=fleet) as link:
            out = tmp_path / "3.json"
            [step] = finish(link, start(link, out, "echo"), out)
    assert step["replies"] == [{"same": True, "seen": 1, "name": "a"}]
    assert "does not know this node any more" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_sigterm_ends_a_node_that_waits_for_its_server(tmp_path: Path) -> None:
    with node(f"127.0.0.1:{held_ports(1)[0]}", "a", tmp_path) as family:
        until(lambda: "no Flower server" in family.tail())
        family.process.terminate()
        assert family.process.wait(patience.limit(5)) == 0


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.rest
def test_a_second_signal_ends_the_node_at_once(tmp_path: Path) -> None:
    with SuperLink(tmp_path / "link.log") as link, node(link.fleet_address, "a", tmp_path) as family:
        run_id = start(link, tmp_path / "out.json", "sleep60")
        until(lambda: "doing sleep60" in family.tail())
        family.process.terminate()
        until(lambda: "stopping" in family.tail())
        family.process.terminate()
        assert family.process.wait(patience.limit(5)) == 128 + signal.SIGTERM
        assert not link.control.status(run_id).over


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.rest
def test_an_idle_node_takes_next_to_no_cpu(tmp_path: Path) -> None:
    with SuperLink(tmp_path / "link.log") as link, node(link.fleet_address, "a", tmp_path) as family:
        until(lambda: link.control.online())
        time.sleep(10)
        process = psutil.Process(family.process.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(5)
        assert (sum(process.cpu_times()[:2]) - before) / 5 < 0.02


def test_the_gap_between_polls_grows_with_the_idle_time_only() -> None:
    assert all(poll_delay(0.4) <= 0.025 for _ in range(100))
    assert all(0.4 <= poll_delay(10) <= 0.6 for _ in range(100))
    assert all(1.6 <= poll_delay(10_000) <= 2.4 for _ in range(100))


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_nobody_there_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    address = f"127.0.0.1:{held_ports(1)[0]}"
    command = [sys.executable, "-m", "client", "join", "--server", address, "--name", "a", "--max-wait", "1"]
    ended = subprocess.run(command, cwd=ROOT, env=flower.environment(), capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"error: no Flower server at {address} for 1 s: connection refused"
    assert "Traceback" not in ended.stderr


def test_another_flwr_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "installed_version", lambda: "1.42.0")
    ended = CliRunner().invoke(cli, ["join", "--server", "127.0.0.1:1", "--name", "a"])
    assert ended.exit_code == 2
    assert "flwr 1.42.0 is installed, but Fedkeel needs flwr 1.39.x" in ended.output


@pytest.mark.parametrize("server", ["", "nowhere", "host:", "host:0", "host:70000", "a b:1", ":9092", "::1"])
def test_what_is_no_address_is_told(server: str) -> None:
    ended = CliRunner().invoke(cli, ["join", f"--server={server}", "--name", "a"])
    assert ended.exit_code == 2
    assert f"{server!r} is not HOST:PORT" in ended.output


@pytest.mark.parametrize("words", [["--name", "a"], ["--server", "127.0.0.1:1"], []])
def test_what_join_cannot_do_without_is_told(words: list[str]) -> None:
    """Half of it is no address that is wrong, but something that was left out."""
    ended = CliRunner().invoke(cli, ["join", *words])
    assert ended.exit_code == 2
    assert "join: give the kit of the server's operator, or --server and --name" in ended.output


def test_addresses() -> None:
    for address in ("fl.example.org:9092", "[::1]:9092", "localhost:9092", "10.0.0.7:1"):
        assert server_address(address) == address
    for wrong in ("fl.example.org", "http://a:1", "a:0", "a b:1", ":9092", "a:99999"):
        with pytest.raises(SettingsError, match="HOST:PORT"):
            server_address(wrong)


@pytest.mark.parametrize(
    ("access", "encrypted"),
    [
        (Access("fl.example.org:9092"), True),
        (Access("fl.example.org:9092", insecure=True), False),
        (Access("127.0.0.1:9092"), False),
        (Access("[::1]:9092"), False),
        (Access("localhost:9092"), False),
        (Access("localhost.example.org:9092"), True),
        (Access("127.0.0.1:9092", ca="ca.pem"), True),
    ],
)
def test_beyond_this_machine_all_is_encrypted_unless_one_types_otherwise(access: Access, encrypted: bool) -> None:
    assert access.encrypted is encrypted


@pytest.mark.parametrize("name", ["", ".a", "a/b", "a" * 101])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    ended = CliRunner().invoke(cli, ["join", "--server", "127.0.0.1:1", "--name", name])
    assert ended.exit_code == 2


def test_help_has_an_example() -> None:
    for command in ([], ["join"]):
        assert "Example: python -m client join" in CliRunner().invoke(cli, [*command, "--help"]).output


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.rest
def test_no_process_outlives_the_superlink(tmp_path: Path) -> None:
    with SuperLink(tmp_path / "link.log") as link:
        start(link, tmp_path / "out.json", "echo")  # Its server app waits for a node for ever.
        until(lambda: len(link.family.members()) >= 3)  # SuperLink, SuperExec, server app
        members = link.family.members()
    assert not [process for process in members if process.is_running()]
    assert not link.family.members()


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="a signal at the parent's death is Linux's")
def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from server.deploy.superlink import SuperLink\n"
        f"with SuperLink(Path({str(tmp_path / 'link.log')!r})) as link: print(link.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        link = psutil.Process(int(parent.stdout.readline()))
        family = [link, *link.children(recursive=True)]
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=patience.limit(10))
    assert not alive


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with SuperLink(tmp_path / "1.log") as link, pytest.raises(RunError, match=f"port {link.fleet_port} .* in use"):
        SuperLink(tmp_path / "2.log", fleet_port=link.fleet_port).__enter__()


def test_a_folder_that_is_no_app_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=re.escape(str(tmp_path))):
        bundle(tmp_path)
