"""Host names, addresses and ports."""

from __future__ import annotations

import ipaddress
import re
import socket

LOOPBACK = "127.0.0.1"
HOST_PORT = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})"


def host_port(text: str) -> tuple[str, int] | None:
    """Host, without brackets, and port of HOST:PORT; None for what is none."""
    match = re.fullmatch(HOST_PORT, text)
    return (match[1].strip("[]"), int(match[2])) if match and 0 < int(match[2]) < 65536 else None


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text is, without brackets; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and nobody else can reach it."""
    address = ip_address(host.strip("[]"))
    return host == "localhost" if address is None else address.is_loopback


def reachable(host: str) -> str:
    """Where this machine reaches a server that listens on `host`: loopback for one that listens everywhere."""
    return {"0.0.0.0": LOOPBACK, "::": "[::1]", "": LOOPBACK}.get(host.strip("[]"), bracketed(host))


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def answers(port: int, host: str = LOOPBACK) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=1):
            return True
    except OSError:
        return False
