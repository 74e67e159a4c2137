"""Looking at a server from outside: its name, its port, what it speaks there, its certificate."""

from __future__ import annotations

import contextlib
import datetime
import errno
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from cryptography import x509

from common.deploy.addresses import ip_address
from common.deploy.checks import Check, within
from common.deploy.proxies import HttpProxy, proxy_for, unusable

DNS_S, CONNECT_S, ANSWER_S = 4.0, 3.0, 3.0
SOON = datetime.timedelta(days=30)

Spoken = Literal["http2", "http", "silent", "closed", "other"]

# The client's side of an HTTP/2 connection without TLS: preface and an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def connect(host: str, port: int, timeout_s: float = CONNECT_S) -> socket.socket:
    """A connection to a server the way a site's own goes: directly, or through the proxy that stands between. Raises
    OSError."""
    proxy = proxy_for(host)
    return proxy.connect(host, port, timeout_s) if proxy else socket.create_connection((host, port), timeout_s)


def name_resolves(host: str) -> Check:
    """Whether a host name has an address. Where a proxy stands between, that is the proxy's affair."""
    if proxy := proxy_for(host):
        return Check("proxy", True, f"{host} is reached through the proxy {proxy.address} ({proxy.variable})")
    if variable := unusable(host):
        advice = "name an HTTP proxy that allows CONNECT in https_proxy, or the server in no_proxy"
        return Check("proxy", None, f"{variable} names a proxy that gRPC cannot use: connecting directly", advice)
    if ip_address(host):
        return Check("dns", True, f"{host} is an address")
    try:
        found = within(DNS_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        return Check("dns", False, f"{host}: no answer within {DNS_S:g} s", "is this machine's name server reachable?")
    except (OSError, UnicodeError) as error:
        advice = "look for a typing error; ask who runs the server; or give its address"
        return Check("dns", False, f"{host} is unknown here ({error})", advice)
    return Check("dns", True, f"{host} is {', '.join(dict.fromkeys(str(info[4][0]) for info in found))}")


def port_opens(host: str, port: int) -> Check:
    """Whether something accepts connections there, or how that fails."""
    started, proxy = time.monotonic(), proxy_for(host)
    way = f" through the proxy {proxy.address}" if proxy else ""
    try:
        with connect(host, port):
            took = time.monotonic() - started
            return Check("port", True, f"{host}:{port} accepts connections{way} ({took:.3f} s)")
    except OSError as error:
        if proxy:
            return _not_through(proxy, host, port, error)
        known = {
            errno.ECONNREFUSED: ("refuses connections", "is the server up? does it listen on --host 0.0.0.0?"),
            errno.EHOSTUNREACH: ("cannot be reached", "is there a route, a VPN?"),
            errno.ENETUNREACH: ("cannot be reached", "is there a route, a VPN?"),
        }
        late = ("does not answer", "a firewall drops the packets, or this is the wrong address; open this TCP port")
        words, advice = known.get(
            error.errno or 0, late if isinstance(error, TimeoutError) else (str(error), "see above")
        )
        return Check("port", False, f"{host}:{port} {words}", advice)


def _not_through(proxy: HttpProxy, host: str, port: int, error: OSError) -> Check:
    """What to make of a proxy through which a server is not reached."""
    said = str(error)
    advice = f"is {proxy.variable} right? no_proxy={host} goes past the proxy"
    if "403" in said or "405" in said:
        advice = f"ask for CONNECT to {host}:{port} to be allowed; many proxies allow port 443 alone"
    elif "407" in said:
        advice = f"the proxy asks who you are: {proxy.variable}=http://USER:PASSWORD@{proxy.address}"
    elif "502" in said or "503" in said or "504" in said:
        advice = "the proxy does not reach the server: is it up, and is this its name and port?"
    return Check("port", False, f"{host}:{port} is not reached through the proxy {proxy.address}: {said}", advice)


def spoken(host: str, port: int) -> Spoken:
    """What a server without TLS says to HTTP/2's first words."""
    try:
        with connect(host, port) as connection:
            connection.settimeout(ANSWER_S)
            connection.sendall(_PREFACE)
            answer = connection.recv(16)
    except TimeoutError:
        return "silent"
    except OSError:
        return "closed"
    if answer[3:4] == b"\4" and len(answer) >= 9:
        return "http2"
    if answer.lower().startswith((b"http/", b"<!doctype", b"<html")):  # Python's own answers without a head.
        return "http"
    return "other" if answer else "closed"


def presented(host: str, port: int) -> tuple[bytes, bool]:
    """The certificate (DER) that a server presents, unverified, and whether it then speaks HTTP/2.

    Raises OSError (ssl.SSLError is one) if there is no TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with _secured(context, host, port) as connection:
        return connection.getpeercert(binary_form=True) or b"", connection.selected_alpn_protocol() == "h2"


def trusted(host: str, port: int, ca: Path | None) -> str:
    """Why the authority in `ca`, or one of the system's, does not vouch for a server; "" if it does.

    Names are not compared.
    """
    try:
        with _secured(_client_context(ca), host, port):
            return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message


@contextlib.contextmanager
def _secured(context: ssl.SSLContext, host: str, port: int) -> Iterator[ssl.SSLSocket]:
    context.set_alpn_protocols(["h2"])
    with (
        connect(host, port) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        yield secured


def _client_context(ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    if ca:
        context.load_verify_locations(ca)
    else:
        context.load_default_certs()
    return context


def shakes_hands(certificate: Path, key: Path, ca: Path) -> str:
    """Why no TLS connection comes about between a server and a client with these files, in memory; "" if one does."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server_context.load_cert_chain(certificate, key)
        client_context = _client_context(ca)
    except (ssl.SSLError, OSError) as error:
        return str(error)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(back, there, server_hostname="localhost")
    server = server_context.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return str(error)
    return ""


def names_of(certificate: x509.Certificate) -> list[str]:
    """DNS names and IP addresses that a certificate is good for."""
    try:
        return [
            str(name.value)
            for name in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        ]
    except x509.ExtensionNotFound:
        return []


def covers(certificate: x509.Certificate, host: str) -> bool:
    """Whether a certificate is good for a host; a name's first label may be a wildcard."""
    if address := ip_address(host):
        return str(address) in names_of(certificate)
    wanted = host.lower().rstrip(".")
    parent = wanted.partition(".")[2]
    return any(name.lower() in (wanted, f"*.{parent}" if parent else "") for name in names_of(certificate))


def lasts(name: str, certificate: x509.Certificate, renew: str) -> Check:
    """Whether a certificate is valid now and for the next month."""
    now = datetime.datetime.now(datetime.UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        return Check(
            name, False, f"valid only from {start:%Y-%m-%d %H:%M} UTC; here it is {now:%Y-%m-%d %H:%M}", "set the clock"
        )
    if now > end:
        return Check(name, False, f"expired {end:%Y-%m-%d %H:%M} UTC; here it is {now:%Y-%m-%d %H:%M}", renew)
    left = f"valid until {end:%Y-%m-%d} ({(end - now).days} days)"
    return Check(name, None if end - now < SOON else True, left, renew)
