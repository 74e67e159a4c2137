"""Networks as they are: proxies in the environment, servers that go away and come back, failures that pass."""

from __future__ import annotations

import base64
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PullMessagesRequest, PullMessagesResponse
from flwr.proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

from client.node import fleet as fleets
from client.node.access import Access
from client.node.errors import SenderGone, brief
from client.node.fleet import Fleet
from client.node.metrics import ClientMetrics
from common import flower
from common.deploy import probe
from common.deploy.proxies import HttpProxy, proxy_for, unusable

VARIABLES = ("grpc", "https", "http", "all")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "no"):
        for variable in (f"{name}_proxy", f"{name}_PROXY".upper()):
            monkeypatch.delenv(variable, raising=False)


class Servicer(FleetServicer):  # type: ignore[misc]
    """Lets anybody in and has no messages; `failing` calls fail before with `code`."""

    def __init__(self) -> None:
        self.failing, self.code, self.text, self.calls = 0, grpc.StatusCode.INTERNAL, "database is locked", 0

    def ActivateNode(self, request: ActivateNodeRequest, context: Any) -> ActivateNodeResponse:
        return ActivateNodeResponse(node_id=7)

    def PullMessages(self, request: PullMessagesRequest, context: Any) -> PullMessagesResponse:
        self.calls += 1
        if self.failing:
            self.failing -= 1
            context.abort(self.code, self.text)
        return PullMessagesResponse()


@contextmanager
def serving(port: int = 0, servicer: Servicer | None = None) -> Iterator[tuple[int, Servicer]]:
    server, found = grpc.server(ThreadPoolExecutor(4)), servicer or Servicer()
    add_FleetServicer_to_server(found, server)
    taken = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield taken, found
    finally:
        server.stop(0).wait()


class Tunnel:
    """A proxy that opens tunnels to 127.0.0.1, whatever name is asked for; `answer`: what it says instead."""

    def __init__(self, answer: str = "", user: str = "") -> None:
        self.asked: list[str] = []
        self._answer, self._user = answer, user
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer = self._socket.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._tunnel, args=(peer,), daemon=True).start()

    def _tunnel(self, peer: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (more := peer.recv(4096)):
                return None
            head += more
        self.asked.append(head.decode().splitlines()[0])
        word = base64.b64encode(self._user.encode()).decode()
        if self._user and f"Basic {word}" not in head.decode():
            peer.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return peer.close()
        if self._answer:
            peer.sendall(f"HTTP/1.1 {self._answer}\r\n\r\n".encode())
            return peer.close()
        target = socket.create_connection(("127.0.0.1", int(self.asked[-1].split()[1].rpartition(":")[2])))
        peer.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        for source, sink in ((peer, target), (target, peer)):
            threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()
        return None

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                sink.sendall(piece)
        except OSError:
            pass
        for each in (source, sink):
            each.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def tunnel() -> Iterator[Tunnel]:
    found = Tunnel()
    yield found
    found.close()


# --- which proxy


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("kind", VARIABLES)
def test_every_spelling_names_a_proxy_and_loopback_never_has_one(
    kind: str, upper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"{kind}_proxy"
    monkeypatch.setenv(variable.upper() if upper else variable, "http://proxy.example.org:3128")
    found = proxy_for("fl.example.org")
    assert found == HttpProxy("proxy.example.org", 3128, None, "", variable)
    for here in ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]"):
        assert proxy_for(here) is None


@pytest.mark.parametrize(
    ("hosts", "direct"),
    [
        ("fl.example.org", True),
        (".example.org", True),
        ("other.org, example.org", True),
        ("*", True),
        ("ample.org.uk", False),
        ("10.0.0.0/8", False),
    ],
)
def test_no_proxy(hosts: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy:1")
    monkeypatch.setenv("no_proxy", hosts)
    assert (proxy_for("fl.example.org") is None) == direct
    assert (proxy_for("10.1.2.3") is None) == (hosts in ("10.0.0.0/8", "*"))


def test_a_password_is_used_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://me:se%40cret@proxy:8080")
    found = proxy_for("fl.example.org")
    assert found is not None
    assert (found.address, found.url) == ("proxy:8080", "http://me:se%40cret@proxy:8080")


@pytest.mark.parametrize("text", ["socks5://proxy:1080", "https://proxy:443"])
def test_other_kinds_are_passed_over_and_told(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", text)
    assert proxy_for("fl.example.org") is None
    assert unusable("fl.example.org") == "all_proxy"
    assert probe.name_resolves("fl.example.org").ok is None
    assert not unusable("localhost")


@pytest.mark.parametrize("before", [None, "", "example.org", "localhost,example.org", "*"])
def test_loopback_is_kept_from_the_proxies_of_every_library(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both spellings say it, and say all that was said before."""
    if before is not None:
        monkeypatch.setenv("NO_PROXY", before)
    found = flower.past_proxies()
    assert found["no_proxy"] == found["NO_PROXY"]
    assert found["no_proxy"] == "*" or set(found["no_proxy"].split(",")) >= {"localhost", "127.0.0.1", "::1"}
    assert not before or set(found["no_proxy"].split(",")) >= set(before.split(","))
    monkeypatch.setattr(os, "environ", os.environ | found)
    assert flower.past_proxies() == found  # children of children


@pytest.mark.parametrize("kind", VARIABLES)
def test_this_machine_is_reached_with_a_dead_proxy_in_the_environment(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `server local` and `make demo` must."""
    monkeypatch.setenv(f"{kind}_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv(f"{kind}_PROXY".upper(), "http://127.0.0.1:9")
    with serving() as (port, _):
        node = Fleet(Access(f"127.0.0.1:{port}"), threading.Event())
        assert node._call("ActivateNode", ActivateNodeRequest(), 5.0).node_id == 7
        node._channel.close()


# --- through a proxy


@pytest.mark.parametrize("user", ["", "me:se cret@"])
def test_a_site_behind_a_proxy_joins_through_it(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's name is the proxy's affair: nobody here knows it."""
    proxy = Tunnel(user=user)
    who = "me:se%20cret%40@" if user else ""
    monkeypatch.setenv("HTTPS_PROXY", f"http://{who}127.0.0.1:{proxy.port}")
    with serving() as (port, _):
        access = Access(f"fl.unknown.invalid:{port}", insecure=True)
        node = Fleet(access, threading.Event())
        assert node._call("ActivateNode", ActivateNodeRequest(), 5.0).node_id == 7
        node._channel.close()
        assert proxy.asked == [f"CONNECT fl.unknown.invalid:{port} HTTP/1.1"]
        look = probe.port_opens("fl.unknown.invalid", port)
        assert look.ok, look
        assert f"through the proxy 127.0.0.1:{proxy.port}" in look.detail
        assert probe.spoken("fl.unknown.invalid", port) == "http2"
        assert probe.name_resolves("fl.unknown.invalid").ok
    proxy.close()


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ("403 Forbidden", "ask for CONNECT to fl.invalid:9092 to be allowed"),
        ("407 Proxy Authentication Required", "https_proxy=http://USER:PASSWORD@"),
        ("502 Bad Gateway", "the proxy does not reach the server"),
    ],
)
def test_what_a_proxy_refuses_is_told(answer: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Tunnel(answer)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    found = probe.port_opens("fl.invalid", 9092)
    proxy.close()
    assert found.ok is False
    assert answer in found.detail
    assert advice in found.advice


def test_a_proxy_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    found = probe.port_opens("fl.invalid", 9092)
    assert found.ok is False
    assert "is not reached through the proxy 127.0.0.1:9" in found.detail


# --- servers that go and come, and fail


def test_health_says_at_once_that_the_server_is_gone_and_that_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    """While a call is being repeated, too: that is when it matters."""
    watch, stop = ClientMetrics(names=["a"]), threading.Event()
    servicer = Servicer()
    with serving(servicer=servicer) as (port, _):
        node = Fleet(Access(f"127.0.0.1:{port}"), stop, lambda yes: watch.connected("a", yes))
        node.node.node_id = 7
        assert node.next_message() is None
        watch.connected("a", node.connected)
        assert watch.health()[0]
    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=node.next_message, daemon=True)
        thread.start()
        _until(lambda: not watch.health()[0])
        with serving(port, servicer):
            thread.join(20)
            assert not thread.is_alive()
            assert watch.health()[0]
    assert [text for text in caplog.messages if "no Flower server at" in text and "any more" in text]
    assert [text for text in caplog.messages if "answers again after" in text]
    node._channel.close()


def _until(true: Any, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_a_failure_of_the_server_that_passes_is_repeated(
    code: grpc.StatusCode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's database was locked; one line each, no page of SQL."""
    with serving() as (port, servicer):
        servicer.failing, servicer.code = 3, code
        servicer.text = "(sqlite3.OperationalError) database is locked\n[SQL: INSERT INTO " + "x" * 5000
        node = Fleet(Access(f"127.0.0.1:{port}"), threading.Event())
        with caplog.at_level(logging.INFO):
            _, repeated = node._try("PullMessages", PullMessagesRequest())
        assert repeated
        assert servicer.calls == 4
        assert all(len(text) < 500 and "\n" not in text for text in caplog.messages)
        servicer.failing = 1000
        monkeypatch.setattr(fleets, "PASSING_S", 0.3)
        with pytest.raises(grpc.RpcError):
            node._try("PullMessages", PullMessagesRequest())
        node._channel.close()


def test_a_slow_sender_is_not_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap alone says nothing; a newer message does, and so does a gap beyond all measure."""
    monkeypatch.setattr(fleets, "PART_S", 0.02)

    def never(object_id: str) -> bytes:
        raise fleets.ObjectUnavailableError(object_id)

    asked: list[int] = []
    slow = fleets._patient(never, lambda: bool(asked.append(1)))
    for _ in range(5):
        time.sleep(0.03)
        with pytest.raises(fleets.ObjectUnavailableError):
            slow("a")
    assert len(asked) == 5
    dead = fleets._patient(never, lambda: True)
    time.sleep(0.03)
    with pytest.raises(SenderGone, match="its sender is gone"):
        dead("a")
    monkeypatch.setattr(fleets, "GONE_S", 0.01)
    time.sleep(0.03)
    with pytest.raises(SenderGone):
        slow("a")


def test_a_newer_message_that_was_seen_is_the_next_one() -> None:
    node = object.__new__(Fleet)
    node._ahead = None
    found: Any = object()
    looks = [found, None]
    node._look = lambda: looks.pop(0)  # type: ignore[method-assign]
    assert node._newer()
    assert node._newer()
    assert node.next_message() is found
    assert node.next_message() is None


def test_an_error_is_one_line() -> None:
    assert brief(RuntimeError("a\nb" + "c" * 9000)) == "RuntimeError: a b" + "c" * 297
