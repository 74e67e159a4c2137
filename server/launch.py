"""A Flower server and clients as real processes on this machine."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from common.errors import RunError, SettingsError
from common.flower import environment
from server.control import ROOT, RunStatus, bundle, run_log, run_status, stop_run, submit_run
from server.processes import Family, free_ports, stop

__all__ = [
    "ROOT",
    "Clients",
    "RunStatus",
    "SuperLink",
    "bundle",
    "check_ports",
    "free_ports",
    "run_log",
    "run_status",
    "start_clients",
    "stop_run",
    "submit_run",
]


# Its own program, but without a line of log for each of the dozens of requests of a round.
_START = """
import os
from flwr.supercore.logger import update_console_handler
from flwr.superlink.cli.flower_superlink import flower_superlink
update_console_handler(level=os.environ.get("FLWR_LOG_LEVEL", "WARNING").upper())
flower_superlink()
"""


class SuperLink:
    """A `flower-superlink` of this environment on 127.0.0.1; a context manager that stops all it started.

    `control_address`: for `submit_run`; `fleet_address`: for clients. `home`: Flower's own folder, by default
    a temporary one. Entering waits until both ports answer, or raises RunError with the end of the log.
    """

    def __init__(
        self,
        log: Path,
        *,
        control_port: int | None = None,
        fleet_port: int | None = None,
        home: Path | None = None,
        start_timeout_s: float = 60.0,
    ):
        spare = free_ports(2)
        self.control_port = control_port or spare[0]
        self.fleet_port = fleet_port or spare[1]
        self.log = log
        self._home = home
        self._start_timeout_s = start_timeout_s
        self._stack = ExitStack()

    @property
    def control_address(self) -> str:
        """Where runs are submitted, HOST:PORT."""
        return f"127.0.0.1:{self.control_port}"

    @property
    def fleet_address(self) -> str:
        """Where clients join, HOST:PORT."""
        return f"127.0.0.1:{self.fleet_port}"

    def __enter__(self) -> Self:
        for port in (self.control_port, self.fleet_port):
            if _answers(port):
                raise RunError(f"port {port} of 127.0.0.1 is in use; is another server running?")
        with ExitStack() as stack:
            home = self._home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedkeel-")))
            self.family = Family(self._command(), _server_environment(home), self.log)
            stack.callback(stop, [self.family], 3.0)
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

    def _command(self) -> list[str]:
        options = "--insecure --isolation subprocess --disable-runtime-dependency-installation --host 127.0.0.1"
        ports = ["--port", str(self.control_port), "--fleet-api-address", self.fleet_address]
        return [sys.executable, "-c", _START, *options.split(), *ports]

    def _wait(self) -> None:
        end = time.monotonic() + self._start_timeout_s
        while not (_answers(self.control_port) and _answers(self.fleet_port)):
            if not self.running:
                raise RunError(f"the Flower server ended while starting:\n{self.family.tail()}")
            if time.monotonic() > end:
                waited = f"{self._start_timeout_s:g} s"
                raise RunError(f"the Flower server did not start in {waited}:\n{self.family.tail()}")
            time.sleep(0.02)


def _server_environment(home: Path) -> dict[str, str]:
    # Flower starts its helpers by name: they must be the ones of this environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**environment(), "FLWR_HOME": str(home.resolve()), "PATH": path}


def check_ports(ports: Mapping[str, int | None]) -> None:
    """Raise SettingsError for a port of 127.0.0.1 that is taken; `ports`: what it is called -> number."""
    for name, port in ports.items():
        if port is not None and _answers(port):
            raise SettingsError(f"{name} = {port}: this port of 127.0.0.1 is in use; is another server running?")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Clients:
    """Client processes of this machine, by name."""

    def __init__(self, families: Mapping[str, Family]):
        self._families = dict(families)

    def ended(self) -> dict[str, str]:
        """Clients whose process is gone: name -> exit code and the end of its log."""
        return {
            name: f"exit code {family.process.returncode}\n{family.tail()}"
            for name, family in self._families.items()
            if not family.running
        }

    def pid(self, name: str) -> int:
        """The process id of a client."""
        return self._families[name].process.pid

    def stop(self, grace_s: float = 10.0) -> None:
        """Let all finish the message in hand for up to `grace_s` seconds, then kill them."""
        stop(list(self._families.values()), grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_clients(
    address: str,
    names: Sequence[str],
    *,
    memory_root: Path,
    log_dir: Path,
    device: str = "cpu",
    module: str = "client",
    options: Sequence[str] = (),
    cwd: Path = ROOT,
) -> Clients:
    """Start `python -m client join` for each name; use the result in a `with` statement.

    `memory_root`/NAME is a client's memory, `log_dir`/client-NAME.log its output. `options` go to all.
    """
    families = {}
    for name in names:
        command = [sys.executable, "-m", module, "join", "--server", address, "--name", name]
        command += ["--memory", str((memory_root / name).resolve()), "--device", device, *options]
        families[name] = Family(command, environment(), log_dir / f"client-{name}.log", cwd)
    return Clients(families)
