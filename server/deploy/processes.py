"""Child processes that end when they are told to, when their parent dies, and never stay behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from common.deploy.addresses import LOOPBACK
from server.rounds.stopping import patience

_TAG = "FEDKEEL_FAMILY"

# Linux only: SIGTERM for the child when its parent dies, asked for before it becomes the command.
_TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


_held = contextlib.ExitStack()
atexit.register(_held.close)


def held_ports(count: int) -> list[int]:
    """So many different TCP ports of 127.0.0.1 for servers to come. Nobody else is given them while this process lives.

    They lie below those that the system gives to outgoing connections and to who asks for any port. Another process of
    this program takes none of them: each is claimed by a local socket of its name, which ends with this process."""
    first = _first_given_away()
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(first // 2, first), first // 2):
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind((LOOPBACK, port))
            _claim(port)
            ports.append(port)
    return ports


def _first_given_away() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 49152  # elsewhere, as IANA has it


def _claim(port: int) -> None:
    """Raises OSError if another process has. Linux only: its abstract names need no file."""
    if sys.platform == "linux":
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0fedkeel-port-{port}")
        except OSError:
            claim.close()
            raise
        _held.callback(claim.close)


class Family:
    """A command and all processes that come from it, in a session of their own.

    Ctrl-C in the terminal reaches only the parent, which then calls `stop`. If the parent is killed, the
    command gets SIGTERM on Linux; note that there "the parent" is the thread that called this.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None):
        self.log = log
        self._tag = uuid.uuid4().hex
        tied = [sys.executable, "-ISc", _TIED, str(os.getpid())] if sys.platform == "linux" else []
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*tied, *command],
                env={**env, _TAG: self._tag},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the command itself still runs."""
        return self.process.poll() is None

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        text = self.log.read_text("utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def members(self) -> list[psutil.Process]:
        """The processes of this family that are alive, also those whose parents are gone."""
        found = []
        for process in psutil.process_iter():
            # Other users' processes hide their environment.
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_TAG) == self._tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def stop(families: Sequence[Family], grace_s: float) -> None:
    """Ask all families to end, wait up to `grace_s` seconds, then kill what is left of them."""
    members = [process for family in families for process in family.members()]
    for process in members:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    try:
        psutil.wait_procs(members, timeout=patience(grace_s))
    finally:  # also when somebody asks a second time, and does not want to wait
        # Anew: a member may have started another one meanwhile.
        rest = [process for family in families for process in family.members()]
        for process in rest:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(rest, timeout=5)
    for family in families:
        with contextlib.suppress(subprocess.TimeoutExpired):
            family.process.wait(timeout=5)
