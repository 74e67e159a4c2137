"""Which HTTP proxy stands between this machine and a server: the same answer for gRPC, for HTTP and for `doctor`.

gRPC reads other variables than other programs do, in lower case alone. Here all of them count, in the usual order.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from common.deploy.addresses import bracketed, ip_address, is_loopback

ORDER = ("grpc", "https", "http", "all")
"""`grpc_proxy`, `https_proxy`, `http_proxy`, `all_proxy`, in lower case or upper case; the first that is set counts."""


@dataclass(frozen=True)
class HttpProxy:
    """A proxy that is asked for a tunnel with CONNECT. `variable`: where it is named."""

    host: str
    port: int
    user: str | None
    password: str
    variable: str

    @property
    def address(self) -> str:
        """HOST:PORT, for people: without name and password."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        """With name and password, as gRPC wants it."""
        who = "" if self.user is None else f"{self.user}:{self.password}@"
        return f"http://{who}{self.address}"

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """A connection to HOST:PORT through this proxy. Raises OSError, with the proxy's words if it refuses."""
        asked = HTTPConnection(self.host, self.port, timeout=timeout_s)
        headers = {}
        if self.user is not None:
            import base64  # of a look through a proxy with a password alone

            word = base64.b64encode(f"{unquote(self.user)}:{unquote(self.password)}".encode()).decode()
            headers["Proxy-Authorization"] = f"Basic {word}"
        asked.set_tunnel(host, port, headers)
        try:
            asked.connect()
        except HTTPException as error:
            asked.close()
            raise OSError(f"{self.address} is no HTTP proxy: {error!r}") from None
        except OSError:
            asked.close()
            raise
        assert isinstance(asked.sock, socket.socket)
        return asked.sock


def proxy_for(host: str) -> HttpProxy | None:
    """The proxy between this machine and a server; None: there is none. Loopback is never behind one.

    A proxy of another kind than http:// (SOCKS, https://) is passed over: gRPC cannot speak to it. See `unusable`.
    """
    if is_loopback(host) or _bypassed(host):
        return None
    for variable, text in _named():
        parts = urlsplit(text if "://" in text else f"http://{text}")
        with suppress(ValueError):
            if parts.scheme == "http" and parts.hostname:
                return HttpProxy(parts.hostname, parts.port or 80, parts.username, parts.password or "", variable)
    return None


def unusable(host: str) -> str:
    """The variable that names a proxy which gRPC cannot use, where there is no other; "" if none does."""
    named = _named()
    return "" if is_loopback(host) or _bypassed(host) or proxy_for(host) or not named else named[0][0]


def _named() -> list[tuple[str, str]]:
    given = getproxies_environment()
    return [(f"{kind}_proxy", given[kind]) for kind in ORDER if given.get(kind)]


def _bypassed(host: str) -> bool:
    """Whether `no_proxy` names a host: by name, by the end of a name, by address or by network."""
    given = getproxies_environment()
    if not given:
        return False
    if proxy_bypass(host.strip("[]")):
        return True
    address = ip_address(host.strip("[]"))
    for word in given.get("no", "").split(",") if address else ():
        with suppress(ValueError):
            if address in ipaddress.ip_network(word.strip(), strict=False):
                return True
    return False
