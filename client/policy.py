"""What a site lets a server ask of it: a TOML file of the site's own, such as

    experiments = ["digits-*"]            # patterns of experiment names
    tasks = ["digits", "hospital.tasks:xray"]
    files = ["/srv/federated/*.csv"]      # that an experiment may name; a folder stands for all in it
    downloads = ["cifar10"]               # that an experiment may start; true: of this project's own data sets
    strategies = ["fedavg", "scaffold"]
    max_steps = 2000                      # local steps a round
    max_seconds = 600.0                   # training time a round
    max_upload_norm = 100.0               # L2 norm of each vector sent
    max_message_mb = 500.0                # of what is received
    max_memory_mb = 16000.0               # of this process, without GPU memory
    share_labels = false                  # class counts in the roll call
    share_schema = true                   # a hash of what the data look like, there too
    statistics = true                     # sums over the data (`python -m server statistics`); default: none
    statistics_min_count = 10             # counts below it are kept back
    statistics_digits = 4                 # of each sum; default: all

Without a policy, and where a key is left out, a site runs the tasks of this project and no others, on the data that it
named itself; it opens no file and starts no download that an experiment names; steps, seconds and norms have no limit.
docs/policy.md has each key, what leaves a site, and what a hostile server can still learn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field

from common.data.grant import Grant, pattern_fault
from common.errors import Denied
from common.experiment import Experiment
from common.settings import Section, checked, shown, tables_of, text_of
from common.tasks import TASKS
from common.vector import State

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["Denied", "Policy"]


def _pattern(text: str) -> str:
    if fault := pattern_fault(text):
        raise ValueError(fault)
    return os.path.normpath(os.path.expanduser(text))


class Policy(Section):
    """The limits of one site."""

    experiments: list[str] | None = Field(None, description="patterns with *, ? and [...]; upper and lower case differ")
    tasks: list[str] | None = Field(
        None, description="exact names or references, as in task.name; default: the tasks of this project"
    )
    files: list[Annotated[str, AfterValidator(_pattern)]] | None = Field(
        None, description="absolute paths with *, ? and [...], a folder for all in it; default: none"
    )
    downloads: bool | list[str] | None = Field(
        None, description="names of data sets and pretrained models; true: the data sets of this project; default: none"
    )
    strategies: list[str] | None = None
    max_steps: int | None = Field(None, ge=1, description="local steps a round")
    max_seconds: float | None = Field(None, gt=0, description="seconds of training a round")
    max_upload_norm: float | None = Field(None, gt=0, description="L2 norm of each uploaded vector")
    max_message_mb: float = Field(2048.0, gt=0, description="MB of one received message")
    max_memory_mb: float | None = Field(None, gt=0, description="MB of main memory of this process")
    share_labels: bool | None = Field(None, description="default: what the node's own settings say")
    share_schema: bool = Field(True, description="a hash of columns' names, kinds and shapes in the roll call")
    statistics: bool | None = Field(None, description="sums over the data; default: only in a simulation")
    statistics_min_count: int | None = Field(None, ge=1, description="smaller counts are kept back; default: 10")
    statistics_digits: int | None = Field(None, ge=1, le=17, description="of each sum; default: all")

    @classmethod
    def load(cls, path: str) -> Policy:
        """The policy in a file, read once in this process; "" sets no limits beyond the defaults.

        Raises SettingsError naming the file, the key, the value and what is allowed.
        """
        return _load(path) if path else cls()

    def grant(self, allow_tasks: Sequence[str] = (), trusted: bool = False) -> Grant:
        """What experiments may name here. `allow_tasks` come on top of `tasks`; where server and site are one owner's
        (`trusted`) only what this policy says is bounded."""
        tasks = None if trusted and self.tasks is None else (*(self.tasks or ()), *allow_tasks)
        files = None if trusted and self.files is None else tuple(self.files or ())
        downloads = self.downloads if isinstance(self.downloads, bool) else tuple(self.downloads or ())
        return Grant(tasks, files, None if trusted and self.downloads is None else downloads)

    def bound_memory(self) -> None:
        """Hold this process to `max_memory_mb`: a larger request of a model or a task then fails as an error of that
        message, where else the system might end the process. Where there are no such limits nothing happens.
        """
        if self.max_memory_mb is not None and resource is not None:
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            wanted = int(self.max_memory_mb * 1e6)
            resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))

    def check(self, experiment: Experiment, grant: Grant) -> None:
        """Raise Denied for an experiment that this site takes no part in; nothing of it has been loaded yet."""
        for what, value, allowed in (
            ("experiment", experiment.name, self.experiments),
            ("strategy", experiment.strategy.name, self.strategies),
        ):
            fits = fnmatchcase if what == "experiment" else str.__eq__
            if allowed is not None and not any(fits(value, each) for each in allowed):
                raise Denied(f"{what}-denied", f"the site's policy does not allow {what} {shown(value)}")
        name = experiment.task.name
        if name not in TASKS:
            grant.task(name)
        elif self.tasks is not None and name not in (grant.tasks or ()):
            raise Denied("task-denied", f"the site's policy does not allow task {name!r}")

    def check_steps(self, steps: int) -> None:
        """Raise Denied for more local steps a round than allowed."""
        if self.max_steps is not None and steps > self.max_steps:
            raise Denied(
                "steps-denied", f"{steps} local steps a round; the site's policy allows max_steps = {self.max_steps}"
            )

    def watch(self) -> Callable[[int], None]:
        """A clock that starts now. Call it before each step with that step's number: raises Denied.

        It looks at the host's clock alone, so that a GPU need not be waited for.
        """
        start = time.monotonic()

        def look(steps: int) -> None:
            self.check_steps(steps)
            if self.max_seconds is not None and time.monotonic() - start > self.max_seconds:
                raise Denied(
                    "time-denied",
                    f"step {steps} of training comes too late; the site's policy allows "
                    f"max_seconds = {self.max_seconds:g}",
                )

        return look

    def check_upload(self, vectors: State) -> None:
        """Raise Denied for a vector that is longer than allowed, or not finite where a bound is set.

        How long it is comes of the site's data, and is for its log alone.
        """
        if self.max_upload_norm is None:
            return
        for name, value in vectors.items():
            size = float(torch.linalg.vector_norm(value.detach(), dtype=torch.float64)) if value.ndim else 0.0
            if not size <= self.max_upload_norm:
                raise Denied(
                    "norm-denied",
                    f"{name} is longer than the site's policy allows: max_upload_norm = {self.max_upload_norm:g}",
                    f"its norm is {size:.6g}",
                )


@lru_cache(maxsize=64)
def _load(path: str) -> Policy:
    text, source = text_of(Path(path).expanduser(), "policy file"), f"policy file {path!r}"
    return checked(Policy, tables_of(text, source), source)
