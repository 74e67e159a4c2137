"""Clients as real processes on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from common.flower import ROOT, environment
from server.deploy.processes import Family, stop


class Clients:
    """Client processes of this machine, by name."""

    def __init__(self, families: Mapping[str, Family]):
        self._families = dict(families)
        self._told: set[str] = set()

    def ended(self) -> dict[str, str]:
        """Clients whose process is gone: name -> exit code and the end of its log."""
        return {
            name: f"exit code {family.process.returncode}\n{family.tail()}"
            for name, family in self._families.items()
            if not family.running
        }

    def newly_ended(self) -> dict[str, str]:
        """As `ended`, each client once."""
        new = {name: why for name, why in self.ended().items() if name not in self._told}
        self._told |= new.keys()
        return new

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

    They trust their server, which is of this machine's owner too: whoever starts both may name anything.

    `memory_root`/NAME is a client's memory, `log_dir`/client-NAME.log its output. `options` go to all.
    """
    families = {}
    for name in names:
        command = [sys.executable, "-m", module, "join", "--server", address, "--name", name, "--trust-server"]
        command += ["--memory", str((memory_root / name).resolve()), "--device", device, *options]
        families[name] = Family(command, environment(), log_dir / f"client-{name}.log", cwd)
    return Clients(families)
