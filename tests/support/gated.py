"""A task whose processes can be held in a phase of their work, by files; see `Gates`.

The environment variable FEDKEEL_GATES names their folder. Without it nothing waits: the same task serves the runs in
process that tests compare with.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.data.examples import ClientData, Examples
from common.experiment import PartitionSettings
from common.files import write_atomically
from common.tasks.base import Task
from tests.support.patience import until

VARIABLE = "FEDKEEL_GATES"

Phase = Literal["train", "save", "saved"]
"""In its local steps; a file of tensors is written and neither flushed nor in place; it is, its folder not flushed."""


class Gates:
    """The test's side: `arm` a phase of a client (or of the "server"), `wait` until it is there, `open` it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        folder.mkdir()

    def arm(self, name: str, phase: Phase, skip: int = 0) -> None:
        """Hold the process when it comes to that phase, after it has passed `skip` times."""
        self._count += 1
        write_atomically(self.folder / f"{name}.{phase}", f"{skip} {self._count}".encode(), durable=False)

    def wait(self, name: str, phase: Phase, limit_s: float = 60.0) -> None:
        """Until the process is held."""
        until((self.folder / f"{name}.{phase}.here").exists, f"{name} comes to {phase}", limit_s)

    def open(self, name: str, phase: Phase) -> None:
        """Let it go on, or forget it if it was killed there."""
        for path in (f"{name}.{phase}", f"{name}.{phase}.here"):
            (self.folder / path).unlink(missing_ok=True)

    def open_all(self) -> None:
        """Hold nobody."""
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)


def gate(name: str, phase: Phase) -> None:
    """The process's side: wait here for as long as the test wants it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    armed = Path(folder) / f"{name}.{phase}"
    skip, number = _read(armed)
    if skip > 0:
        write_atomically(armed, f"{skip - 1} {number}".encode(), durable=False)
    elif number:
        here = armed.with_name(f"{armed.name}.here")
        here.touch()
        while _read(armed)[1] == number:  # Not: for as long as there is any; it may have been armed for the next time.
            time.sleep(0.005)
        here.unlink(missing_ok=True)


def _read(armed: Path) -> tuple[int, int]:
    """How often to pass, and the number of this arming; zeros: not armed."""
    try:
        skip, number = armed.read_text().split()
    except FileNotFoundError:
        return 0, 0
    return int(skip), int(number)


class Vector(nn.Module):
    """One parameter of `size` numbers; counts the local steps of a round."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size))
        self.steps = 0

    def train(self, mode: bool = True) -> Vector:
        """Called once before the steps of a round."""
        self.steps = 0
        return super().train(mode)


class Gated(Task):
    """Client i holds 8 (i + 1) numbers x; the loss of a batch is |w - mean(x) slope|^2 / 2.

    Batches differ by client and round, so a round too many or a wrong version of memory shows in the weights.
    """

    def __init__(self, size: int, clients: int) -> None:
        self.name = ""
        """Whose data this process has loaded: a resident node's own."""
        self._size = size
        self._clients = clients
        self._slope = torch.randn(size, generator=torch.Generator().manual_seed(1))

    def model(self) -> nn.Module:
        return Vector(self._size)

    def names(self) -> list[str]:
        return [str(number) for number in range(self._clients)]

    def client(self, name: str, file: str | None = None) -> ClientData:
        self.name = name
        count = 8 * (int(name) + 1)
        x = torch.randn(count, 1, generator=torch.Generator().manual_seed(int(name))) + int(name)
        none = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
        return ClientData(Examples(x, torch.zeros(count, dtype=torch.int64)), none)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, Vector)
        model.steps += 1
        if model.steps == 2:
            gate(self.name, "train")
        return (model.w - batch[0].mean() * self._slope).square().sum() / 2

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float]:
        return {}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`task.name = "tests.support.gated:task"` with `task.size` parameters and `partition.clients` clients."""
    made = Gated(int(options.get("size", 1000)), partition.clients or 3)
    if os.environ.get(VARIABLE):
        name = "server" if "server.rounds.loop" in sys.modules else ""
        os.fsync = lambda descriptor: _gated_fsync(name or made.name, descriptor)
    return made


_fsync = os.fsync
_written: set[int] = set()  # threads that have flushed a file of tensors and not yet its folder


def _gated_fsync(name: str, descriptor: int) -> None:
    thread = threading.get_ident()
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        if thread in _written:
            _written.remove(thread)
            gate(name, "saved")
    elif ".safetensors" in os.readlink(f"/proc/self/fd/{descriptor}"):
        _written.add(thread)
        gate(name, "save")
    _fsync(descriptor)
