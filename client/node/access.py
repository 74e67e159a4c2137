"""How a site reaches a server, and as whom."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import grpc  # type: ignore[import-untyped]
from cryptography import x509
from flwr.supercore.address import parse_address

from common.deploy.addresses import bracketed, is_loopback
from common.deploy.keys import load_private
from common.deploy.proxies import HttpProxy, proxy_for
from common.errors import SettingsError
from common.flower import MOST_CALL_BYTES, keepalive

# A lost server is looked for about once a second; gRPC's own back-off goes up to two minutes.
_CHANNEL = [
    ("grpc.max_send_message_length", MOST_CALL_BYTES),
    ("grpc.max_receive_message_length", MOST_CALL_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A name that leads elsewhere by now is asked for again at the next try, not half a minute later.
    ("grpc.dns_min_time_between_resolutions_ms", 2000),
]


def server_address(server: str) -> str:
    """The gRPC target of a HOST:PORT. Raises SettingsError if it is none."""
    host, port = _parsed(server)
    return f"{bracketed(host)}:{port}"


def _parsed(server: str) -> tuple[str, int]:
    host, port, is_v6 = parse_address(server) or ("", 0, None)
    if port < 1 or not (is_v6 or re.fullmatch(r"[A-Za-z0-9_.-]+", host)):
        raise SettingsError(f"--server: {server!r} is not HOST:PORT, such as fl.example.org:9092")
    return host, port


@dataclass(frozen=True)
class Access:
    """How a server is reached and who is asking. The same for all clients of a process but for the key.

    `ca`: file of the authority that signed the server's certificate; "": the system's authorities. `key`: file of the
    private key by which the server knows this site; "": a new one each time, for servers that let anybody in.
    Plain text is for this machine alone, unless `insecure`. `most_bytes`: of one received message.
    `patience_s`: how long a site with a key of its own tries to get in: a little longer than a server holds a killed
    one for alive; infinite where its operator is still to let it in.
    """

    server: str
    ca: str = ""
    key: str = ""
    insecure: bool = False
    max_wait_s: float | None = None
    most_bytes: int = 2**31
    patience_s: float = 25.0

    @property
    def host(self) -> str:
        """The server's name or address, without its port."""
        return _parsed(self.server)[0]

    @property
    def encrypted(self) -> bool:
        """Whether the connection is TLS: always beyond this machine, unless someone typed otherwise."""
        return bool(self.ca) or not (self.insecure or is_loopback(self.host))

    @property
    def proxy(self) -> HttpProxy | None:
        """The proxy between this site and the server."""
        return proxy_for(self.host)

    def check(self) -> None:
        """Raise SettingsError for what cannot work."""
        server_address(self.server)
        if self.ca and self.insecure:
            raise SettingsError("--ca and --insecure contradict each other")
        self.authority()
        if self.key:
            load_private(Path(self.key))

    def authority(self) -> bytes | None:
        """The authority's certificate in PEM; None for the system's."""
        if not self.ca:
            return None
        try:
            content = Path(self.ca).read_bytes()
            x509.load_pem_x509_certificates(content)
        except OSError as error:
            raise SettingsError(f"--ca: {self.ca!r} cannot be read: {error.strerror}") from None
        except ValueError:
            raise SettingsError(f"--ca: {self.ca!r} is no certificate in PEM; ask for the server's ca.pem") from None
        return content

    def channel(self) -> grpc.Channel:
        """A new channel; those of one process share a connection."""
        address, proxy = server_address(self.server), self.proxy
        # Said here, not left to gRPC: it reads fewer variables, and would send even loopback through a proxy.
        through = ("grpc.http_proxy", proxy.url) if proxy else ("grpc.enable_http_proxy", 0)
        options = [*_CHANNEL, *keepalive(), through]
        if not self.encrypted:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.authority()), options=options)
