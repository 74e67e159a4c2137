"""The /metrics and /health of a process, over HTTP in a thread of its own."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Self

from common.deploy.addresses import ip_address
from common.errors import SettingsError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger("common.deploy.endpoint")

Health = Callable[[], tuple[bool, dict[str, Any]]]

# A scraper asks in some hundred bytes and reads the answer at once.
MOST_REQUEST_BYTES = 16 * 1024
MOST_CONNECTIONS = 16
LONGEST_SILENCE_S, LONGEST_CONNECTION_S = 5.0, 10.0
LOOK_S = 0.1
HEALTH_S = 2.0
"""So long a question for the health waits for an earlier one; then that is the answer."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """Serves GET and HEAD of `/metrics` (Prometheus text) and `/health` (200 or 503, JSON); a context manager.

    `address` is [HOST:]PORT, HOST by default 127.0.0.1, IPv6 in brackets. `health()` says whether all is well, and
    details for the JSON body beside "healthy"; it is called in a thread per request and should take milliseconds.
    Entering raises SettingsError, naming --metrics, if the address is wrong or taken. Who connects can slow down
    neither other scrapers nor the end of the process.
    """

    def __init__(self, address: str, registry: CollectorRegistry, health: Health) -> None:
        self._address = address
        self._registry = registry
        self._health = health
        self._asking = threading.Lock()
        self._host, self._asked_port = parse(address)
        self._server: _Server | None = None

    @property
    def port(self) -> int:
        """The port that is bound; 0 before."""
        return int(self._server.server_address[1]) if self._server else 0

    def __enter__(self) -> Self:
        from prometheus_client import disable_created_metrics

        # They double the number of series, and nothing reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._server = self._bind()
        threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), name="metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_all()
        self._server = None

    def _bind(self) -> _Server:
        try:
            infos = socket.getaddrinfo(self._host, self._asked_port, type=socket.SOCK_STREAM)
            return _Server(infos[0][0], infos[0][4], self._answer)
        except socket.gaierror:
            reason = "this host name is unknown"
        except OSError as error:
            known = {
                errno.EADDRINUSE: "this port is in use",
                errno.EADDRNOTAVAIL: "this machine has no such address",
                errno.EACCES: "this user may not open this port",
            }
            reason = known.get(error.errno or 0, str(error))
        raise SettingsError(f"--metrics: {self._address}: {reason}") from None

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        if path == "/metrics":
            from prometheus_client import generate_latest

            return 200, _METRICS_TYPE, generate_latest(self._registry)
        if path == "/health":
            healthy, details = self._ask_health()
            body = json.dumps({"healthy": healthy, **details}, default=str)
            return 200 if healthy else 503, "application/json", body.encode() + b"\n"
        return 404, "text/plain", b"here are /metrics and /health\n"

    def _ask_health(self) -> tuple[bool, dict[str, Any]]:
        # One at a time: a health that hangs must not take all threads.
        if not self._asking.acquire(timeout=HEALTH_S):
            return False, {"error": f"an earlier question is unanswered after {HEALTH_S:g} s"}
        try:
            return self._health()
        except Exception as error:
            log.exception("the health of this process could not be told")
            return False, {"error": repr(error)}
        finally:
            self._asking.release()


def parse(address: str) -> tuple[str, int]:
    """Host and port of [HOST:]PORT. Raises SettingsError, naming --metrics, if it is none."""
    match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):)?([0-9]{1,5})", address)
    host = (match[1] or "127.0.0.1").strip("[]") if match else ""
    if (
        match is None
        or int(match[2]) > 65535
        or ((match[1] or "").startswith("[") and not isinstance(ip_address(host), ipaddress.IPv6Address))
    ):
        raise SettingsError(f"--metrics: {address!r} is not [HOST:]PORT, such as 9464, 0.0.0.0:9464 or [::]:9464")
    return host, int(match[2])


class _Server(socketserver.ThreadingTCPServer):
    """A thread a connection; of too many connections the oldest is cut off, and so is one that takes too long."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: int, address: Any, answer: Callable[[str], tuple[int, str, bytes]]) -> None:
        self.address_family = family
        self.answer = answer
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(LOOK_S)  # Out of file descriptors: the connection stays in the queue and would be tried at once.
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            for oldest in list(self._open)[: len(self._open) - MOST_CONNECTIONS + 1]:
                _drop(oldest)
            # Cut off and still there: its thread is inside `health`.
            if len(self._open) >= 2 * MOST_CONNECTIONS:
                request.close()
                return
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        with self._lock:
            for request, since in self._open.items():
                if time.monotonic() - since > LONGEST_CONNECTION_S:
                    _drop(request)

    def drop_all(self) -> None:
        """End all connections."""
        with self._lock:
            for request in self._open:
                _drop(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request of %s failed", client_address, exc_info=True)


def _drop(connection: socket.socket) -> None:
    """Wake the thread that reads or writes this connection; it then closes it."""
    with contextlib.suppress(OSError):  # The other side was faster.
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = LONGEST_SILENCE_S
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Bounded(self.rfile)

    def do_GET(self) -> None:
        try:
            status, kind, body = self.server.answer(self.path.partition("?")[0])
        except Exception:
            log.exception("the metrics of this process could not be told")
            status, kind, body = 500, "text/plain", b"see the log of this process\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "fedkeel"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Bounded:
    """The head of a request, of which no more than `MOST_REQUEST_BYTES` are read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = MOST_REQUEST_BYTES

    def readline(self, size: int) -> bytes:
        line: bytes = self._file.readline(min(size, self._left))
        self._left -= len(line)
        if not self._left:
            raise ConnectionAbortedError("the request is too long")
        return line

    def close(self) -> None:
        self._file.close()
