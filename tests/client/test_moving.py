"""Servers that move: a name that leads elsewhere, a load balancer, outages, a machine that sleeps."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server

from client.node import fleet as fleets
from client.node.access import Access
from client.node.fleet import ASLEEP_S, Fleet, awake_s
from common.errors import RunError
from common.experiment import Experiment
from common.flower import ROOT
from server.deploy import federation
from server.rounds.folder import RunFolder
from tests.client.test_network import Servicer, serving

DAY_S = 86_400.0


class Clock:
    """Time that passes when somebody waits for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


# --- a load balancer


class Balancer:
    """TCP at one port, passed to the backend of the moment."""

    def __init__(self, backend: int) -> None:
        self.backend, self._open = backend, list[socket.socket]()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer = self._socket.accept()[0]
            except OSError:
                return
            try:
                target = socket.create_connection(("127.0.0.1", self.backend))
            except OSError:  # there is no backend at the moment
                peer.close()
                continue
            self._open += [peer, target]
            for source, sink in ((peer, target), (target, peer)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                sink.sendall(piece)
        except OSError:
            pass

    def move(self, backend: int) -> None:
        """Reset every connection; new ones lead elsewhere."""
        self.backend = backend
        for each in self._open:
            # No linger: the peer gets a reset, not an end of file.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            each.shutdown(socket.SHUT_RD)
            each.close()
        self._open.clear()

    def close(self) -> None:
        self.move(1)
        self._socket.close()


def test_a_load_balancer_resets_the_connection_and_leads_elsewhere() -> None:
    with serving() as (first, one), serving() as (second, two):
        balancer = Balancer(first)
        node = Fleet(Access(f"127.0.0.1:{balancer.port}"), threading.Event())
        try:
            for backend, servicer in ((second, two), (first, one), (second, two)):
                node._call("PullMessages", PullMessagesRequest())
                before = servicer.calls
                balancer.move(backend)
                node._call("PullMessages", PullMessagesRequest())
                assert servicer.calls == before + 1
        finally:
            node._channel.close()
            balancer.close()


def test_a_backend_that_is_slow_to_come_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Between two backends there is none: connections are taken and reset at once."""
    with serving() as (port, servicer):
        balancer = Balancer(port)
        node = Fleet(Access(f"127.0.0.1:{balancer.port}"), threading.Event())
        try:
            node._call("PullMessages", PullMessagesRequest())
            balancer.move(1)
            threading.Timer(0.5, lambda: setattr(balancer, "backend", port)).start()
            with caplog.at_level(logging.INFO, "client.node.resident"):
                node._call("PullMessages", PullMessagesRequest())
            assert "answers again after" in caplog.messages[-1]
            assert servicer.calls == 2
        finally:
            node._channel.close()
            balancer.close()


# --- a name

SITE = """
import sys, threading
from client.node.access import Access
from client.node.fleet import Fleet
from flwr.proto.fleet_pb2 import PullMessagesRequest
stop = threading.Event()
node = Fleet(Access(sys.argv[1], insecure=True), stop)
while not stop.wait(0.05):
    node._try("PullMessages", PullMessagesRequest())
"""


@pytest.mark.processes
@pytest.mark.rest
@pytest.mark.timeout(120)
def test_a_name_that_leads_to_another_address_is_followed(tmp_path: Path) -> None:
    """The server moves, the name is changed after it, and the site asks for the name again. Its /etc/hosts is its own:
    in a namespace of mounts."""
    private = ["unshare", "--mount", "--propagation", "private"]
    if os.geteuid() or not shutil.which("unshare") or subprocess.run([*private, "true"]).returncode:
        pytest.skip("no namespace of mounts here")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 fl.moving.test\n")
    servicers, servers = (Servicer(), Servicer()), []
    port = 0
    for address, servicer in zip(("127.0.0.2", "127.0.0.3"), servicers, strict=True):
        server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        add_FleetServicer_to_server(servicer, server)
        port = server.add_insecure_port(f"{address}:{port}")
        server.start()
        servers.append(server)
    start = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} -c '{SITE}' fl.moving.test:{port}"
    site = subprocess.Popen([*private, "sh", "-c", start], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        end = time.monotonic() + 60
        while servicers[0].calls < 3:
            assert time.monotonic() < end, "it never came"
            time.sleep(0.05)
        assert not servicers[1].calls
        with hosts.open("r+") as file:  # the same file: it is what was mounted
            file.write("127.0.0.3")
        servers[0].stop(0).wait()
        while servicers[1].calls < 3:
            assert time.monotonic() < end, "it did not follow"
            time.sleep(0.05)
    finally:
        site.kill()
        site.wait()
        for server in servers:
            server.stop(0).wait()


# --- outages


@pytest.mark.parametrize("outage_s", [101.0, 3600.0, 7 * DAY_S])
def test_a_run_waits_out_an_outage_of_any_length(
    outage_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start and in the middle: it never ends, so no supervisor counts a try."""
    clock, said = Clock(), list[str]()
    monkeypatch.setattr(federation, "time", clock)
    monkeypatch.setattr(federation, "LOOK_S", outage_s / 500)
    monkeypatch.setattr(federation, "AGAIN_S", outage_s / 100)
    down = [(clock.now, clock.now + outage_s), (clock.now + 2 * outage_s, clock.now + 3 * outage_s)]

    def absent() -> str:
        return "connection refused" if any(start <= clock.now < end for start, end in down) else ""

    lives = iter([RunError("no answer"), None])

    def attached(*_: Any) -> None:
        if isinstance(end := next(lives), Exception):
            clock.now = down[1][0]
            raise end

    monkeypatch.setattr(federation, "_attached", attached)
    control: Any = SimpleNamespace(absent=absent, address="superlink:8000")
    viewer: Any = SimpleNamespace(say=said.append)
    federation.attach(Experiment(), RunFolder(tmp_path / "run"), viewer, resume=False, control=control)
    assert clock.now >= down[1][1]
    assert sum("waiting" in line for line in said) == sum("is here" in line for line in said) == 2


@pytest.mark.parametrize("outage_s", [101.0, 7 * DAY_S])
def test_a_site_waits_out_an_outage_of_any_length(
    outage_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    up = clock.now + outage_s
    gone = grpc.RpcError("gone")
    gone.code = lambda: grpc.StatusCode.UNAVAILABLE
    gone.details = lambda: "connection refused"
    scale = max(1.0, outage_s / 1000)

    def pull(request: Any, timeout: float) -> str:
        if clock.now < up:
            raise gone
        return "answer"

    monkeypatch.setattr(fleets.time, "monotonic", clock.monotonic)
    stop: Any = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: clock.wait(seconds * scale))
    node = Fleet(Access("127.0.0.1:9"), stop)
    node._stub = SimpleNamespace(PullMessages=pull)
    with caplog.at_level(logging.INFO, "client.node.resident"):
        assert node._try("PullMessages", None) == ("answer", True)
    node._channel.close()
    assert clock.now >= up
    assert len(caplog.messages) == 2  # gone, and back: whatever lies between
    assert "answers again after" in caplog.messages[1]


# --- a machine that sleeps


class Left:
    """Waits as an Event does, while a clock goes on by what is given; the last wait says that the node has left."""

    def __init__(self, clock: Clock, *naps: float) -> None:
        self._clock, self._naps = clock, list(naps)

    def wait(self, seconds: float) -> bool:
        if not self._naps:
            return True
        self._clock.now += seconds + self._naps.pop(0)
        return False


def beaten(monkeypatch: pytest.MonkeyPatch, *naps: float) -> int:
    """Heartbeats of a node whose machine sleeps so many seconds in each pause."""
    clock, beats = Clock(), list[Any]()
    monkeypatch.setattr(fleets, "awake_s", clock.monotonic)
    node = Fleet(Access("127.0.0.1:9"), threading.Event())
    node._stub = SimpleNamespace(SendNodeHeartbeat=lambda request, timeout: beats.append(request))
    node._left = Left(clock, *naps)  # type: ignore[assignment]
    node._send_heartbeats()
    node._channel.close()
    return len(beats)


def test_a_site_that_slept_says_so_and_is_heard_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert beaten(monkeypatch, 0, 0, 8 * 3600, 0) == 4
    (line,) = caplog.messages
    assert "did not run for 288" in line
    assert "hears of it now" in line


def test_a_busy_machine_is_not_asleep(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert beaten(monkeypatch, *[ASLEEP_S / 2] * 5) == 5
    assert not caplog.messages


@pytest.mark.parametrize("jump_s", [-30 * DAY_S, -1.0, 1.0, 30 * DAY_S])
def test_a_clock_that_is_set_is_no_sleep_and_ends_no_wait(
    jump_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wall clocks are set, by hand or by NTP after a sleep; nothing here is measured by them."""
    wall, waits, now = 0.0, 3, time.time

    def wait(seconds: float) -> bool:
        nonlocal wall, waits
        wall, waits = wall + jump_s, waits - 1
        return not waits

    node = Fleet(Access("127.0.0.1:9"), threading.Event())
    beats = list[Any]()
    node._stub = SimpleNamespace(SendNodeHeartbeat=lambda request, timeout: beats.append(request))
    node._left = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    monkeypatch.setattr(time, "time", lambda: now() + wall)
    before = awake_s()
    node._send_heartbeats()
    assert 0 <= awake_s() - before < 60
    assert len(beats) == 2
    assert not caplog.messages
    node._channel.close()
