"""What the HTTP servers inside a process share: where they listen, and calls that may hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import ipaddress
import re
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from common.deploy.addresses import LOOPBACK, ip_address
from common.errors import SettingsError

T = TypeVar("T")


def parse(address: str, option: str) -> tuple[str, int]:
    """Host (by default 127.0.0.1, without brackets) and port of [HOST:]PORT. Raises SettingsError, naming `option`, if
    it is none."""
    match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):)?([0-9]{1,5})", address)
    host = (match[1] or LOOPBACK).strip("[]") if match else ""
    if (
        match is None
        or int(match[2]) > 65535
        or ((match[1] or "").startswith("[") and not isinstance(ip_address(host), ipaddress.IPv6Address))
    ):
        raise SettingsError(f"{option}: {address!r} is not [HOST:]PORT, such as 9464, 0.0.0.0:9464 or [::]:9464")
    return host, int(match[2])


def listening(address: str, option: str) -> socket.socket:
    """A socket that listens at [HOST:]PORT. Raises SettingsError, naming `option`, if it cannot."""
    host, port = parse(address, option)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        # It listens at once: nobody is turned away though the thread that serves may take a moment to begin.
        return socket.create_server(place, family=family, dualstack_ipv6=both)
    except socket.gaierror:
        reason = "this host name is unknown"
    except OSError as error:
        known = {
            errno.EADDRINUSE: "this port is in use",
            errno.EADDRNOTAVAIL: "this machine has no such address",
            errno.EACCES: "this user may not open this port",
        }
        reason = known.get(error.errno or 0, str(error))
    raise SettingsError(f"{option}: {address}: {reason}") from None


def in_thread(question: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The answer from a thread that may hang: a daemon, for which neither the loop nor the process's end waits."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name=name, daemon=True).start()
    return asyncio.wrap_future(answer)
