"""The endpoint over real connections: what it answers, and who cannot hold it up."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from common.deploy import endpoint
from common.deploy.endpoint import Endpoint
from common.deploy.serving import parse
from common.errors import SettingsError
from common.flower import ROOT

pytestmark = pytest.mark.timeout(60)

PROMPT_S = 4.0
"""Less than any time that the endpoint grants a connection; ten times what is seen on a busy machine."""


class Process:
    """A process's state, as far as an endpoint asks for it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counter = Counter("fedkeel_rounds", "Rounds.", registry=self.registry)
        self.healthy = True

    def health(self) -> tuple[bool, dict[str, Any]]:
        return self.healthy, {"round": 7}


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def port(process: Process) -> Iterator[int]:
    with Endpoint("127.0.0.1:0", process.registry, process.health) as served:
        yield served.port


def ask(port: int, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read()
    finally:
        connection.close()


def test_metrics_are_prometheus_text(process: Process, port: int) -> None:
    process.counter.inc(3)
    status, kind, body = ask(port, "/metrics?x=1")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert [(sample.name, sample.value) for sample in families["fedkeel_rounds"].samples] == [
        ("fedkeel_rounds_total", 3)
    ]


def test_health_is_200_or_503_with_details(process: Process, port: int) -> None:
    status, kind, body = ask(port, "/health")
    assert (status, kind, json.loads(body)) == (200, "application/json", {"healthy": True, "round": 7})
    process.healthy = False
    status, _, body = ask(port, "/health")
    assert (status, json.loads(body)) == (503, {"healthy": False, "round": 7})


def test_a_health_that_fails_is_unhealthy(process: Process) -> None:
    def broken() -> tuple[bool, dict[str, Any]]:
        raise ZeroDivisionError("by zero")

    with Endpoint("0", process.registry, broken) as served:
        status, _, body = ask(served.port, "/health")
    assert status == 503
    assert "ZeroDivisionError" in json.loads(body)["error"]


def test_metrics_that_fail_are_an_error_and_the_next_request_is_answered(process: Process) -> None:
    class Broken:
        def collect(self) -> list[Any]:
            raise ZeroDivisionError("by zero")

    process.registry.register(Broken())  # type: ignore[arg-type]
    with Endpoint("0", process.registry, process.health) as served:
        assert ask(served.port, "/metrics")[0] == 500
        assert ask(served.port, "/health")[0] == 200


def test_head_has_the_headers_and_no_body(port: int) -> None:
    for path in ("/metrics", "/health", "/"):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert body == b""
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        # The counter's value may be longer by a digit in another answer; here nothing changes.
        assert int(length.split()[1]) == len(ask(port, path)[2])


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/health/../metrics", "/metrics%00"])
def test_other_paths_are_404(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(port: int, method: str) -> None:
    assert ask(port, "/metrics", method)[0] == 501


def test_nothing_is_logged_of_requests(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    ask(port, "/metrics")
    ask(port, "/nothing")
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        read_all(connection)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("localhost:1", ("localhost", 1)),
        ("[::]:9464", ("::", 9464)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert parse(address, "--metrics") == expected


NO_ADDRESSES = ["", ":", ":9464", "host", "host:", "host:x", "host:-1", "65536", "99999999", "::1:9464", "[::1]"]
NO_ADDRESSES += ["[x]:1", "[1.2.3.4]:1", "http://host:9464", "a b:1", "9464 ", "٣"]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_addresses_that_are_none_name_the_option(process: Process, address: str) -> None:
    with pytest.raises(SettingsError, match="--metrics"):
        Endpoint(address, process.registry, process.health)


def test_ipv6(process: Process) -> None:
    with Endpoint("[::1]:0", process.registry, process.health) as served:
        assert ask(served.port, "/health", host="::1")[0] == 200


def test_the_default_host_is_loopback_alone(process: Process) -> None:
    with Endpoint("0", process.registry, process.health) as served, socket.socket() as other:
        # 127.0.0.2 is loopback too, but another address: a socket bound to all addresses would answer there.
        assert other.connect_ex(("127.0.0.2", served.port)) != 0


def test_a_port_in_use_is_named(process: Process, port: int) -> None:
    with pytest.raises(SettingsError, match=rf"--metrics: {port}: this port is in use"):
        Endpoint(str(port), process.registry, process.health).__enter__()


@pytest.mark.parametrize(
    ("address", "reason"),
    [("192.0.2.1:0", "this machine has no such address"), ("no-such-host.invalid:0", "this host name is unknown")],
)
def test_an_address_of_another_machine_is_named(process: Process, address: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=rf"--metrics: {address}: {reason}"):
        Endpoint(address, process.registry, process.health).__enter__()


def test_a_port_is_free_again_at_once(process: Process) -> None:
    with Endpoint("0", process.registry, process.health) as served:
        port = served.port
        ask(port, "/metrics")
    with Endpoint(str(port), process.registry, process.health):
        assert ask(port, "/metrics")[0] == 200


def test_slow_and_silent_scrapers_block_nobody(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many half requests as connections are kept: the next scraper is answered, and the end is quick."""
    with Endpoint("0", process.registry, process.health) as served:
        hostile = [
            socket.create_connection(("127.0.0.1", served.port), 5) for _ in range(4 * endpoint.MOST_CONNECTIONS)
        ]
        for connection in hostile:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        started = time.monotonic()
        assert ask(served.port, "/metrics")[0] == 200
        assert time.monotonic() - started < PROMPT_S
        assert threads() <= endpoint.MOST_CONNECTIONS + 2
        until(lambda: sum(map(alive, hostile)) <= endpoint.MOST_CONNECTIONS)
        started = time.monotonic()
    assert time.monotonic() - started < PROMPT_S
    for connection in hostile:
        assert ended(connection)
    until(lambda: threads() == 0)


def test_a_request_byte_by_byte_is_cut_off(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte restarts the timeout of a read, but not the age of the connection."""
    monkeypatch.setattr(endpoint, "LONGEST_CONNECTION_S", 0.5)
    with Endpoint("0", process.registry, process.health) as served:
        connection = socket.create_connection(("127.0.0.1", served.port), 5)
        started = time.monotonic()
        assert cut_off(connection, b"G", 0.02)
        assert time.monotonic() - started < PROMPT_S


def test_a_scraper_that_never_reads_is_cut_off(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer larger than all buffers, to one who does not read it."""
    monkeypatch.setattr(endpoint, "LONGEST_CONNECTION_S", 0.5)
    monkeypatch.setattr(process, "health", lambda: (True, {"much": "x" * 20_000_000}))
    with Endpoint("0", process.registry, process.health) as served:
        connection = socket.create_connection(("127.0.0.1", served.port), 5)
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert ask(served.port, "/metrics")[0] == 200
        until(lambda: threads() == 1)
        time.sleep(2 * endpoint.LONGEST_CONNECTION_S)
        assert len(read_all(connection)) < 20_000_000  # what was on its way
        connection.close()


def test_a_request_without_end_is_cut_off(port: int) -> None:
    for head in (b"GET /", b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 90, b"GET /metrics HTTP/1.1\r\nX: "):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(head)
            assert cut_off(connection, b"x" * 4096)
    assert ask(port, "/metrics")[0] == 200


def test_a_health_that_hangs_is_told_and_blocks_neither_metrics_nor_the_end(process: Process) -> None:
    hanging = threading.Event()

    def hang() -> tuple[bool, dict[str, Any]]:
        hanging.wait(60)
        return True, {}

    def patient(path: str) -> tuple[int, str, bytes]:
        """While too many wait for the health, connections are refused: asks again."""
        end = time.monotonic() + 20
        while True:
            try:
                return ask(served.port, path)
            except (ConnectionError, http.client.HTTPException):
                assert time.monotonic() < end

    with Endpoint("0", process.registry, hang) as served:
        waiting = []
        for _ in range(10 * endpoint.MOST_CONNECTIONS):
            waiting.append(socket.create_connection(("127.0.0.1", served.port), 5))
            with contextlib.suppress(ConnectionError):
                waiting[-1].sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert threads() <= 2 * endpoint.MOST_CONNECTIONS + 1
        assert patient("/metrics")[0] == 200
        status, _, body = patient("/health")
        assert status == 503
        assert "unanswered" in json.loads(body)["error"]
        started = time.monotonic()
    assert time.monotonic() - started < PROMPT_S
    hanging.set()
    until(lambda: threads() == 0)
    for connection in waiting:
        connection.close()


def test_signals_stay_the_process_s_own(process: Process) -> None:
    """Ctrl-C and SIGTERM end a run as they do without an endpoint, while it serves and after."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with Endpoint("0", process.registry, process.health) as served:
        assert ask(served.port, "/health")[0] == 200
        assert [signal.getsignal(number) for number in numbers] == before
    assert [signal.getsignal(number) for number in numbers] == before


def test_the_end_is_prompt_even_before_the_beginning(process: Process) -> None:
    """Entered and left again and again, with no thread left: also before the thread serves."""
    started = time.monotonic()
    for _ in range(5):
        with Endpoint("0", process.registry, process.health):
            pass
        assert threads() == 0
    assert time.monotonic() - started < PROMPT_S


def test_commands_that_serve_nothing_do_not_load_it() -> None:
    """It takes as long to load as all that a client's command needs to begin."""
    code = "import sys, server.__main__, client.__main__; print({'uvicorn', 'starlette', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def threads() -> int:
    """Threads of endpoints: the one that serves and one a question."""
    return sum(t.name == "metrics" for t in threading.enumerate())


def alive(connection: socket.socket) -> bool:
    """Whether the other side has not closed it yet."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    with connection:
        connection.settimeout(5)
        try:
            return connection.recv(65536) == b""
        except ConnectionError:
            return True


def cut_off(connection: socket.socket, piece: bytes, pause_s: float = 0.0) -> bool:
    """Send a piece again and again; whether the other side ends that within five seconds."""
    end = time.monotonic() + 5
    try:
        while time.monotonic() < end:
            connection.sendall(piece)
            time.sleep(pause_s)
    except ConnectionError:
        return True
    return False


def read_all(connection: socket.socket) -> bytes:
    content = b""
    while part := connection.recv(65536):
        content += part
    return content


def until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.02)
