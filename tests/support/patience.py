"""How long to wait on this machine: limits are those of a quiet one, times how slow this one is at the moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache

from common.flower import ROOT, environment

QUIET_START_S = 3.0
"""What the start of a client takes on two quiet cores, imports and all."""


@lru_cache
def start_s() -> float:
    """What it takes here, measured once a session."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import client.app"], cwd=ROOT, env=environment(), check=True)
    return time.monotonic() - started


def slowness() -> float:
    """1 on a quiet machine; else by how much a start takes longer, or how many processes want each core."""
    return max(1.0, start_s() / QUIET_START_S, os.getloadavg()[0] / (os.cpu_count() or 1))


def limit(quiet_s: float) -> float:
    """Seconds that are allowed here for what is allowed `quiet_s` on a quiet machine."""
    return quiet_s * slowness()


def until(true: Callable[[], object], what: str | Callable[[], object], limit_s: float = 90.0) -> None:
    """Wait for it; AssertionError once it has taken longer than `limit(limit_s)`, as of then."""
    started = time.monotonic()
    while not true():
        if time.monotonic() - started > limit_s:
            allowed = limit(limit_s)
            told = what if isinstance(what, str) else what()
            assert time.monotonic() - started < allowed, f"waited {allowed:.0f} s in vain: {told}"
        time.sleep(0.02)
