"""The page's place in a command: a port that is taken at once, a thread that begins with the first who looks."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.deploy.addresses import bracketed, is_loopback, reachable
from common.deploy.serving import listening, parse
from common.errors import SettingsError
from server.page.hub import Hub

if TYPE_CHECKING:
    from common.experiment import Experiment
    from server.deploy.control import Watcher
    from server.deploy.superlink import LinkOptions
    from server.rounds.folder import RunFolder

# Imported where used: starlette, uvicorn and cryptography take half a second, which is spent once somebody looks.

log = logging.getLogger("server.page")

OPTION = "--page"
MOST_CONNECTIONS = 200
LAST_S, END_S = 0.3, 0.3
"""So long the end of a command waits for a last look, and for browsers to be told of it."""


class Page:
    """A page that listens; a context manager. `hub.follow` says what it shows. Entering raises SettingsError for an
    address that is wrong, taken, or open to others without saying who may look. Signals stay the command's own."""

    def __init__(
        self,
        address: str,
        title: str = "",
        *,
        users: Path | None = None,
        certificates: Path | None = None,
        insecure: bool = False,
    ) -> None:
        self.hub = Hub()
        self._address, self._title = address, title
        self._users, self._certificates = users, certificates
        self._host, _ = parse(address, OPTION)
        self._open = not is_loopback(self._host)
        if self._open and not insecure:
            if not certificates:
                raise SettingsError(
                    f"{OPTION} {address} is open to other machines and nothing would be encrypted: pass --certs and "
                    "--users, or type --insecure if that is what you want"
                )
            if not users:
                raise SettingsError(f"{OPTION} {address} is open to other machines: say with --users who may look")

    @property
    def url(self) -> str:
        """Where it is, once entered."""
        scheme = "https" if self._tls else "http"
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self._host, bracketed(self._host))
        return f"{scheme}://{host}:{self._socket.getsockname()[1]}/"

    @property
    def _tls(self) -> bool:
        return self._open and self._certificates is not None

    def __enter__(self) -> Page:
        self._socket = listening(self._address, OPTION)
        self._woken, self._waker = socket.socketpair()
        self._server: Any = None
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="page", daemon=True)
        self._thread.start()
        return self

    def show_run(self, folder: RunFolder, experiment: Experiment, say: Callable[[str], None]) -> Watcher:
        """Say where the page is and show the run of this command; returns what shows a SuperLink's sites, too."""
        from server.page.sources import OneRun

        self.hub.follow(OneRun(folder, experiment.name, experiment.rounds))
        say(f"page: {self.url}")
        return lambda ask: self.hub.follow(None, ask)

    def show_link(self, options: LinkOptions, say: Callable[[str], None]) -> Watcher:
        """Say where the page is; returns what shows the runs and sites of a SuperLink with these options."""
        from server.deploy.certs import Certificates
        from server.deploy.control import Control
        from server.page.sources import LinkRuns

        say(f"page: {self.url}")
        authority = Certificates(options.certificates).ca if options.certificates else None
        control = Control(f"{reachable(options.control_host)}:{options.control_port}", authority)
        return lambda ask: self.hub.follow(LinkRuns(ask, control), ask)

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._waker.close()
        self.hub.close(LAST_S)
        end = time.monotonic() + END_S
        while self.hub.watching and time.monotonic() < end:
            time.sleep(0.01)
        if server := self._server:
            # At once, whatever is under way.
            server.should_exit = server.force_exit = True
        self._thread.join(END_S)

    def _work(self) -> None:
        with self._socket, self._woken:
            try:
                ready, _, _ = select.select([self._socket, self._woken], [], [])
                if self._woken not in ready:
                    self._serve()
            except Exception:
                log.exception("the page has ended; the run goes on")

    def _serve(self) -> None:
        import uvicorn

        from server.deploy.users import Users
        from server.page.connection import Connection
        from server.page.web import application

        users = Users(self._users) if self._users else None
        tls: dict[str, Any] = {}
        names = [self._host, *((socket.gethostname(),) if self._open else ())]
        if self._tls and self._certificates:
            from server.deploy.certs import Certificates, certified

            made = Certificates(self._certificates)
            tls = {"ssl_certfile": str(made.certificate), "ssl_keyfile": str(made.key)}
            names += certified(made.certificate)
        server = uvicorn.Server(
            uvicorn.Config(
                application(self.hub, users, self._title, names),
                http=Connection,
                ws="none",
                lifespan="off",
                limit_concurrency=MOST_CONNECTIONS,
                h11_max_incomplete_event_size=16 * 1024,
                server_header=False,
                proxy_headers=False,
                # What strangers send is no event of this process.
                access_log=False,
                log_config=None,
                log_level=logging.CRITICAL,
                **tls,
            )
        )
        self._server = server
        if not self._ending:
            asyncio.run(server.serve([self._socket]))
