"""How this project sets up Flower: the pinned version, environment variables, and two slow defaults."""

from __future__ import annotations

import contextlib
import ctypes
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.errors import SettingsError

FLWR_SERIES = "1.39"

ROOT = Path(__file__).resolve().parents[1]
"""The project's folder: what Flower bundles, and what processes import from."""

# Between two looks for an object that is still under way, at first and at most.
PULL_BACKOFF_S = 0.005
PULL_BACKOFF_CAP_S = 0.1

# The largest single call between server and node. Flower cuts arrays into pieces of 5 MiB, one a call.
MOST_CALL_BYTES = 64 * 2**20

KEEPALIVE_S, KEEPALIVE_ANSWER_S = 20, 10
"""How often both ends of a quiet connection ask whether it is alive, and how long they wait for the answer. A firewall
that has forgotten a connection drops its packets without a word: only a missing answer tells."""


def keepalive() -> list[tuple[str, int]]:
    """gRPC's options for it, the same on both ends; the server lets nodes ask as often as they do."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]


_ENVIRONMENT = {
    # No telemetry and no update check: sites may not reach the internet, or may not want to.
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Seconds between looks for a submitted run. Each costs the SuperLink 5 to 10 ms, day and night.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0",
    # glibc hands a freed buffer of some MB back to the system and gets a new one, page by page, for each copy
    # of a message; keeping up to 512 MiB saves a third of the CPU time of a round with large models.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
}


def past_proxies() -> dict[str, str]:
    """The variables that keep loopback from all proxies, for every library that reads any; what is set there stays."""
    found = {}
    for name in ("no_proxy", "NO_PROXY"):
        given = os.environ.get(name) or os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        words = [word.strip() for word in given.split(",") if word.strip()]
        here = [each for each in ("localhost", "127.0.0.1", "::1") if each not in words]
        found[name] = "*" if "*" in words else ",".join([*words, *here])
    return found


def environment() -> dict[str, str]:
    """This process's environment with Flower's tuned settings; what the user set is kept."""
    return {**_ENVIRONMENT, **os.environ, **past_proxies()}


def prepare() -> None:
    """Put the tuned settings into this process. Call it before the first import of flwr, which reads them."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ |= past_proxies()
    # glibc has read its variables before Python started. Other C libraries lack the call, macOS and musl.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        keep = ctypes.CDLL(None).mallopt
        keep(-3, int(os.environ["MALLOC_MMAP_THRESHOLD_"]))
        keep(-1, int(os.environ["MALLOC_TRIM_THRESHOLD_"]))


def check_version() -> None:
    """Raise SettingsError unless the installed flwr is of the pinned series.

    Flower's server-to-client leg is gRPC up to this series; the node speaks it with flwr's own parts.
    """
    installed = installed_version()
    if installed.split(".")[:2] != FLWR_SERIES.split("."):
        raise SettingsError(
            f"flwr {installed} is installed, but Fedkeel needs flwr {FLWR_SERIES}.x: "
            f"pip install 'flwr[simulation]~={FLWR_SERIES}.0'"
        )


def installed_version(package: str = "flwr") -> str:
    """The version of an installed package, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def versions() -> str:
    """What decides whether two processes understand each other, and whether they compute the same bits."""
    return f"flwr {installed_version()}, torch {version('torch')}"


def tune_flower(longest_wait_s: float | None = None) -> None:
    """Shorten the wait for objects that are still under way, for all later pulls in this process.

    A message becomes visible before its objects are uploaded. Flower then waits 1 s, 2 s, 4 s and so on
    between looks, and its Grid offers no way to say otherwise; so the defaults themselves are changed.
    `longest_wait_s`: a reply whose objects have not come by then is an error reply (MESSAGE_UNAVAILABLE).
    Without it, a client that dies while it uploads holds up `pull_messages` for Flower's three minutes.
    """
    from flwr.supercore.inflatable.inflatable_utils import pull_objects  # 0.5 s; and `prepare` comes before flwr

    defaults = pull_objects.__kwdefaults__ or {}
    if not {"initial_backoff", "backoff_cap", "max_tries_per_object", "max_time"} <= set(defaults):
        return  # Another flwr: slow, but right.
    # The number of tries is no bound any more: the time is.
    defaults.update(initial_backoff=PULL_BACKOFF_S, backoff_cap=PULL_BACKOFF_CAP_S, max_tries_per_object=None)
    if longest_wait_s is not None:
        defaults.update(max_time=longest_wait_s)
