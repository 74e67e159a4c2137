"""What a SuperLink's audit log holds: its certificate, who may join, who was refused, when it began and ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from common.deploy.audit import NAME, AuditLog
from common.errors import SettingsError
from server.deploy.superlink import LinkOptions


def book_of(options: LinkOptions) -> AuditLog | None:
    """The audit log of a SuperLink: where `--audit` says, else in `--state`; None without both."""
    return AuditLog(options.book) if options.book else None


def beside(path: Path) -> AuditLog:
    """The audit log beside a file that a command changes: of the nodes file, of certificates."""
    return AuditLog(path.absolute().parent / NAME)


@contextmanager
def registered(book: AuditLog | None, options: LinkOptions, say: Callable[[str], None]) -> Iterator[None]:
    """The start and the end of a SuperLink, written down. Whom it refuses its own process writes into the same log."""
    if book is None:
        yield
        return
    about: dict[str, Any] = {
        "host": options.host,
        "fleet_port": options.fleet_port,
        "control_port": options.control_port,
    }
    book.try_record("superlink started", **about, **_identity(options))
    say(f"audit log {book.path}, head {book.head}")
    try:
        yield
    except BaseException as error:
        book.try_record("superlink ended", type(error).__name__, why=str(error))
        raise
    else:
        book.try_record("superlink ended")
    say(f"audit log {book.path}, head {book.head}")


def _identity(options: LinkOptions) -> dict[str, str]:
    """By which certificate sites know this server, and the file of sites, by their hashes."""
    known: dict[str, str] = {}
    if options.certificates:
        try:
            known |= certificate_of(options.certificates / "server.pem")
        except (OSError, ValueError) as error:
            raise SettingsError(f"--certs: the server's certificate cannot be read: {error}") from None
    if options.nodes:
        known["nodes_sha256"] = hashlib.sha256(options.nodes.read_bytes()).hexdigest()
    return known


def certificate_of(path: Path) -> dict[str, str]:
    """A certificate's fingerprint (SHA-256 of its DER form), names' subject and expiry."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return {
        "certificate_sha256": certificate.fingerprint(hashes.SHA256()).hex(),
        "serial": f"{certificate.serial_number:x}",
        "until": certificate.not_valid_after_utc.isoformat(),
    }
