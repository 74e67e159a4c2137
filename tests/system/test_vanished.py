"""A connection whose packets vanish, as a firewall or NAT that has forgotten it drops them: nobody is told, and the
site must find out by itself. In a network namespace; skips where none can be made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

from common.flower import ROOT, keepalive

SITE = """
import sys, threading
from common import flower
flower.KEEPALIVE_S, flower.KEEPALIVE_ANSWER_S = 1, 1
from client.node.access import Access
from client.node.fleet import Fleet
from flwr.proto.fleet_pb2 import PullMessagesRequest
stop = threading.Event()
node = Fleet(Access(sys.argv[1], insecure=True), stop)
while not stop.wait(0.1):
    node._try("PullMessages", PullMessagesRequest(), 120.0)
"""


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=10)


@dataclass
class Network:
    """A namespace whose only way out is a cable to this one: 10.x.x.1 here, .2 there."""

    name: str
    here: str

    def inside(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "iptables"))):
        pytest.skip("needs root, ip and iptables")
    found = Network(f"fk{os.getpid()}", f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}.1")
    outer, inner = f"{found.name}a"[:15], f"{found.name}b"[:15]
    try:
        sh("ip", "netns", "add", found.name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace: {error.stderr.decode().strip()}")
    try:
        sh("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", found.name)
        sh("ip", "addr", "add", f"{found.here}/30", "dev", outer)
        sh("ip", "link", "set", outer, "up")
        sh(*found.inside("ip", "addr", "add", f"{found.here[:-1]}2/30", "dev", inner))
        sh(*found.inside("ip", "link", "set", inner, "up"))
        yield found
    finally:
        subprocess.run(["ip", "netns", "del", found.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", outer], check=False, capture_output=True)


class Pulled(FleetServicer):  # type: ignore[misc]
    """Notes from where and when it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def PullMessages(self, request: PullMessagesRequest, context: Any) -> PullMessagesResponse:
        self.calls.append((context.peer(), time.monotonic()))
        return PullMessagesResponse()


@pytest.mark.slow
@pytest.mark.processes
def test_a_connection_whose_packets_vanish_is_given_up(network: Network) -> None:
    """New connections pass, the old one is forgotten: within two keepalives the site is back on another."""
    servicer = Pulled()
    server = grpc.server(ThreadPoolExecutor(4), options=keepalive())
    add_FleetServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"{network.here}:0")
    server.start()
    site = subprocess.Popen(
        network.inside(sys.executable, "-c", SITE, f"{network.here}:{port}"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        _until(lambda: len(servicer.calls) > 3, 60)
        old = servicer.calls[-1][0]
        flow = old.rpartition(":")[2]
        for chain, side in (("OUTPUT", "--sport"), ("INPUT", "--dport")):
            sh(*network.inside("iptables", "-A", chain, "-p", "tcp", side, flow, "-j", "DROP"))
        vanished = time.monotonic()
        _until(lambda: servicer.calls[-1][0] != old, 30)
        assert servicer.calls[-1][1] - vanished < 15
        count = len(servicer.calls)
        _until(lambda: len(servicer.calls) > count + 3, 10)  # and it stays
    finally:
        site.kill()
        said = (site.communicate()[1] or b"").decode()
        server.stop(0).wait()
    assert "Too many pings" not in said


def _until(true: Any, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
