"""No process that a test has started outlives it, whatever happens to the test and to the process that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

OWNER, SESSION = "FEDKEEL_TEST_OWNER", "FEDKEEL_TEST_SESSION"
"""Variables that all descendants inherit: the test, or the fixture of many tests, that they belong to; and the run."""

_WATCH = f"""
import os, signal, sys
if os.fork():
    os._exit(0)
os.setsid()
sys.stdin.read()  # ends when the process that runs the tests does, in whatever way
mark = ("{SESSION}=" + sys.argv[1]).encode()
for _ in range(2):  # anew: one may have started another meanwhile
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid() and mark in open("/proc/" + pid + "/environ", "rb").read().split(bytes(1)):
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
"""


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Of the processes that are started meanwhile."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


@contextmanager
def owned() -> Iterator[None]:
    """What is started within and still lives at the end is killed. Whoever outlives a test by intention, as the clients
    of a module's federation do, is started under another OWNER."""
    owner = uuid.uuid4().hex
    try:
        with environment(**{OWNER: owner}):
            yield
    finally:
        for _ in range(2):  # anew: one may have started another meanwhile
            left = carrying(OWNER, owner)
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=5)


@contextmanager
def watched() -> Iterator[None]:
    """All that is started within is killed at the end, or when this process ends, be it by SIGKILL. Linux only."""
    if sys.platform != "linux":
        yield
        return
    run = uuid.uuid4().hex
    with subprocess.Popen([sys.executable, "-ISc", _WATCH, run], stdin=subprocess.PIPE), environment(**{SESSION: run}):
        yield


def carrying(key: str, value: str) -> list[psutil.Process]:
    """Living processes with this in their environment, but for helpers of Python's that serve this whole process."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(key) != value or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.append(process)
    return found
