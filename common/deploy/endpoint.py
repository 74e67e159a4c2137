"""The /metrics and /health of a process, over HTTP in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

import uvicorn
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.deploy.serving import in_thread, listening, parse

log = logging.getLogger("common.deploy.endpoint")

Health = Callable[[], tuple[bool, dict[str, Any]]]

# A scraper asks in some hundred bytes and reads the answer at once.
MOST_REQUEST_BYTES = 16 * 1024
MOST_CONNECTIONS = 16
LONGEST_CONNECTION_S = 10.0
HEALTH_S = 2.0
"""So long a question for the health waits for an earlier one; then that is the answer."""

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """Serves GET and HEAD of `/metrics` (Prometheus text) and `/health` (200 or 503, JSON); a context manager.

    `address` is [HOST:]PORT, HOST by default 127.0.0.1, IPv6 in brackets. `health()` says whether all is well, and
    details for the JSON body beside "healthy"; it is called in a thread of its own and should take milliseconds.
    Entering raises SettingsError, naming --metrics, if the address is wrong or taken. Who connects can slow down
    neither other scrapers nor the end of the process. Signals stay the process's own.
    """

    def __init__(self, address: str, registry: CollectorRegistry, health: Health) -> None:
        self._address = address
        self._registry = registry
        self._health = health
        self._asking = asyncio.Lock()
        parse(address, "--metrics")
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port that is bound; 0 before."""
        return int(self._socket.getsockname()[1]) if self._socket else 0

    def __enter__(self) -> Self:
        # They double the number of series, and nothing reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._socket = listening(self._address, "--metrics")
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
                http=_Connection,
                ws="none",
                lifespan="off",
                h11_max_incomplete_event_size=MOST_REQUEST_BYTES,
                # Each connection is for one request: none that waits for a next one takes another's place.
                headers=[("Server", "fedkeel"), ("Connection", "close")],
                server_header=False,
                proxy_headers=False,
                # What strangers send is no event of this process.
                access_log=False,
                log_config=None,
                log_level=logging.CRITICAL,
            )
        )
        self._thread = threading.Thread(target=self._serve, args=(self._socket,), name="metrics", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # At once, whatever is under way.
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket = None

    def _serve(self, bound: socket.socket) -> None:
        with bound:
            asyncio.run(self._server.serve([bound]))

    def _app(self) -> Starlette:
        app = Starlette(
            routes=[Route("/metrics", self._tell_metrics), Route("/health", self._tell_health)],
            exception_handlers={404: _not_found, 405: _not_implemented, 500: _failed},
        )
        app.router.redirect_slashes = False
        return app

    async def _tell_metrics(self, _: Request) -> Response:
        return Response(await in_thread(lambda: generate_latest(self._registry), "metrics"), media_type=_METRICS_TYPE)

    async def _tell_health(self, _: Request) -> Response:
        healthy, details = await self._ask_health()
        body = json.dumps({"healthy": healthy, **details}, default=str)
        return Response(body + "\n", 200 if healthy else 503, media_type="application/json")

    async def _ask_health(self) -> tuple[bool, dict[str, Any]]:
        try:
            # One at a time: a health that hangs must not take a thread for each who asks.
            await asyncio.wait_for(self._asking.acquire(), HEALTH_S)
        except TimeoutError:
            return False, {"error": f"an earlier question is unanswered after {HEALTH_S:g} s"}
        try:
            return await in_thread(self._health, "metrics")
        except Exception as error:
            log.exception("the health of this process could not be told")
            return False, {"error": repr(error)}
        finally:
            self._asking.release()


async def _not_found(_: Request, __: Exception) -> Response:
    return Response("here are /metrics and /health\n", 404, media_type="text/plain")


async def _not_implemented(_: Request, __: Exception) -> Response:
    return Response("GET and HEAD\n", 501, media_type="text/plain")


async def _failed(_: Request, error: Exception) -> Response:
    log.error("the metrics of this process could not be told", exc_info=error)
    return Response("see the log of this process\n", 500, media_type="text/plain")


class _Connection(H11Protocol):
    """Of too many connections the oldest is cut off, and so is one that takes too long."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(LONGEST_CONNECTION_S, transport.abort)
        if len(self.connections) > MOST_CONNECTIONS:
            min(self.connections, key=lambda one: one._end.when())._cut_off()  # type: ignore[union-attr]
        # Cut off and still there: they wait for `health`.
        if len(self.tasks) >= 2 * MOST_CONNECTIONS:
            self._cut_off()

    def connection_lost(self, error: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(error)

    def shutdown(self) -> None:
        """The server ends."""
        self._cut_off()

    def _cut_off(self) -> None:
        self.connections.discard(self)
        self.transport.abort()
