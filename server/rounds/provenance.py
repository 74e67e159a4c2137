"""When, where and by what a run was started: wall-clock times, host, command, versions."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from common.flower import ROOT, installed_version

PACKAGES = ("flwr", "torch", "numpy")
MOST_COMMAND, STARTS_KEPT = 2000, 100

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z ")
_SECRET = re.compile(r"--[\w-]*(token|password|secret)[\w-]*")


def now() -> str:
    """The wall clock: UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stamped(text: str) -> str:
    """A line of notes with its time."""
    return f"{now()} {text}"


def unstamped(line: str) -> str:
    """A line of notes without its time; those of earlier releases have none."""
    return _STAMP.sub("", line, count=1)


def command(words: Sequence[str] | None = None) -> str:
    """What was typed to start this process, values of options for secrets left out."""
    given, shown, hide = sys.orig_argv if words is None else words, [], False
    for word in given:
        name = word.partition("=")[0]
        secret = bool(_SECRET.fullmatch(name))
        shown.append("..." if hide else f"{name}=..." if secret and "=" in word else word)
        hide = secret and "=" not in word
    return shlex.join(shown)[:MOST_COMMAND]


def origin() -> dict[str, Any]:
    """This process: {"time", "host", "user", "process", "command", "versions"}."""
    return {
        "time": now(),
        "host": socket.gethostname(),
        "user": _user(),
        "process": os.getpid(),
        "command": command(),
        "versions": {
            "fedkeel": own_version(),
            "python": platform.python_version(),
            **{each: installed_version(each) for each in PACKAGES},
        },
    }


def own_version() -> str:
    """The release of this checkout, "" if its file is not there."""
    try:
        text = (ROOT / "pyproject.toml").read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
