"""A Flower server as a real process on this machine."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from common.deploy.addresses import LOOPBACK, answers, bracketed, is_loopback, reachable
from common.deploy.audit import NAME
from common.errors import RunError, SettingsError
from common.files import locked
from common.flower import ROOT, environment
from server.deploy import waiting
from server.deploy.certs import Certificates, fits
from server.deploy.control import Control
from server.deploy.processes import Family, held_ports
from server.deploy.processes import stop as stop_families
from server.deploy.users import read as read_users
from server.rounds.stopping import Stop, heed


@dataclass(frozen=True)
class LinkOptions:
    """Where a SuperLink listens and whom it lets in.

    `host`: for clients, over gRPC; `control_host`: for submitting runs, which is running code: not for the world.
    `certificates`: folder of `python -m server certs`; TLS on both legs. `nodes`: only sites of this file may join.
    `users`: the control port is for those of this file. `state`: folder for Flower's database and home, the queue and
    the audit log; without it they end with the process. `audit`: another file for the log. None as a port: a free one.
    """

    host: str = LOOPBACK
    fleet_port: int | None = None
    control_host: str = LOOPBACK
    control_port: int | None = None
    certificates: Path | None = None
    insecure: bool = False
    nodes: Path | None = None
    state: Path | None = None
    users: Path | None = None
    audit: Path | None = None

    @property
    def book(self) -> Path | None:
        """The file of the audit log, None if it ends with the process."""
        return self.audit or (self.state / NAME if self.state else None)

    def check(self) -> None:
        """Raise SettingsError for options that cannot work or would leave a connection open to all."""
        if self.certificates and self.insecure:
            raise SettingsError("--certs and --insecure contradict each other")
        if self.certificates:
            fits(Certificates(self.certificates).require())
        for option, host in (("--host", self.host), ("--control-host", self.control_host)):
            if not (self.certificates or self.insecure or is_loopback(host)):
                raise SettingsError(
                    f"{option} {host} is open to other machines and nothing would be encrypted: make certificates "
                    "with `python -m server certs` and pass --certs, or type --insecure if that is what you want"
                )
        if self.users:
            read_users(self.users)
        if self.nodes:
            if not self.certificates:
                raise SettingsError("--nodes needs --certs: Flower checks node keys over TLS only")
            if not self.nodes.is_file():
                raise SettingsError(
                    f"--nodes: there is no file {str(self.nodes)!r}; make it with: python -m server nodes add NAME KEY"
                )
        for name, host, port in (
            ("--fleet-port", self.host, self.fleet_port),
            ("--control-port", self.control_host, self.control_port),
        ):
            if port is not None and answers(port, reachable(host)):
                raise SettingsError(f"{name} = {port}: this port of {host} is in use; is another server running?")


class SuperLink:
    """A `flower-superlink` of this environment; a context manager that stops all it started.

    `control`: for submitting runs; `fleet_address`: for clients. Entering waits until both ports answer, or raises
    RunError with the end of the log, or Stopped if `stop` asks for it meanwhile.
    """

    def __init__(
        self,
        log: Path,
        *,
        fleet_port: int | None = None,
        control_port: int | None = None,
        options: LinkOptions | None = None,
        start_timeout_s: float = 60.0,
        stop: Stop = lambda: None,
    ):
        spare = held_ports(2)
        given = options or LinkOptions(fleet_port=fleet_port, control_port=control_port)
        self.options = replace(
            given, fleet_port=given.fleet_port or spare[0], control_port=given.control_port or spare[1]
        )
        self.log = log
        self._start_timeout_s = start_timeout_s
        self._stop = stop
        self._stack = ExitStack()
        self._token = secrets.token_urlsafe(32) if self.options.users else ""
        self.books = Path()
        """Where the queue, the audit log and who owns which run lie, once entered."""

    @property
    def fleet_port(self) -> int:
        """Where clients join."""
        return self.options.fleet_port or 0

    @property
    def control_port(self) -> int:
        """Where runs are submitted."""
        return self.options.control_port or 0

    @property
    def knocks(self) -> Path | None:
        """The file of the keys that were refused and wait to be let in."""
        return waiting.place(self.options.nodes, self.options.state) if self.options.nodes else None

    @property
    def control(self) -> Control:
        """Where runs are submitted, from this machine."""
        certificates = self.options.certificates
        return Control(self.control_address, Certificates(certificates).ca if certificates else None, self._token)

    @property
    def control_address(self) -> str:
        """Where runs are submitted from this machine, HOST:PORT."""
        return f"{reachable(self.options.control_host)}:{self.control_port}"

    @property
    def fleet_address(self) -> str:
        """Where clients of this machine join, HOST:PORT."""
        return f"{reachable(self.options.host)}:{self.fleet_port}"

    def __enter__(self) -> Self:
        for port, host in ((self.control_port, self.options.control_host), (self.fleet_port, self.options.host)):
            if answers(port, reachable(host)):
                raise RunError(f"port {port} of {reachable(host)} is in use; is another server running?")
        with ExitStack() as stack:
            home = self._home(stack)
            self.books = self.options.state.resolve() if self.options.state else home
            about = {"FEDKEEL_BOOKS": str(self.books)}
            if self.options.book:
                about |= {"FEDKEEL_AUDIT": str(self.options.book.absolute())}
            if self.options.users:
                about |= {"FEDKEEL_USERS": str(self.options.users.resolve()), "FEDKEEL_OWN_TOKEN": self._token}
            self.family = Family(self._command(), _server_environment(home, self.knocks) | about, self.log)
            stack.callback(stop_families, [self.family], 3.0)
            self._wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def running(self) -> bool:
        """Whether the server process is alive."""
        return self.family.running

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.family.process.pid

    def apps(self) -> list[psutil.Process]:
        """The server apps that run behind it."""
        return [each for each in self.family.members() if any("flwr-serverapp" in word for word in _command_of(each))]

    def _home(self, stack: ExitStack) -> Path:
        if self.options.state is None:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedkeel-")))
        home = self.options.state.resolve() / "flower"
        try:
            home.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(self.options.state / ".lock", f"state folder {str(self.options.state)!r}"))
        except OSError as error:
            raise SettingsError(f"--state: {str(self.options.state)!r} cannot be written: {error}") from None
        return home

    def _command(self) -> list[str]:
        options, made = self.options, self.options.certificates and Certificates(self.options.certificates.resolve())
        words = ["--isolation", "subprocess", "--disable-runtime-dependency-installation"]
        words += ["--host", options.control_host, "--port", str(self.control_port)]
        words += ["--fleet-api-address", f"{bracketed(options.host)}:{self.fleet_port}"]
        if made:
            words += ["--ssl-ca-certfile", str(made.ca)]
            words += ["--ssl-certfile", str(made.certificate), "--ssl-keyfile", str(made.key)]
        else:
            words += ["--insecure"]
        words += ["--enable-supernode-auth"] if options.nodes else []
        words += ["--database", str(options.state.resolve() / "superlink.db")] if options.state else []
        # By code and not by file, so that the folder it runs in can be imported from, as with any Python command.
        start = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from server.deploy.superlink_program import main; main()"
        )
        return [sys.executable, "-c", start, *words]

    def _wait(self) -> None:
        end = time.monotonic() + self._start_timeout_s
        ports = ((self.control_port, self.options.control_host), (self.fleet_port, self.options.host))
        while not all(answers(port, reachable(host)) for port, host in ports):
            heed(self._stop)
            if not self.running:
                raise RunError(f"the Flower server ended while starting:\n{self.family.tail()}")
            if time.monotonic() > end:
                waited = f"{self._start_timeout_s:g} s"
                raise RunError(f"the Flower server did not start in {waited}:\n{self.family.tail()}")
            time.sleep(0.02)


def _server_environment(home: Path, knocks: Path | None) -> dict[str, str]:
    # Flower starts its helpers by name: they must be the ones of this environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    told = {waiting.VARIABLE: str(knocks)} if knocks else {}
    return {**environment(), "FLWR_HOME": str(home.resolve()), "PATH": path, **told}


def _command_of(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        words = []
    return words
