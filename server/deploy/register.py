"""What a SuperLink's audit log holds: its certificate, who may join, who was refused, when it began and ended."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from common.deploy.audit import NAME, AuditLog
from common.errors import SettingsError
from server.deploy.superlink import LinkOptions

_REFUSED = re.compile(r"refused a node: (.*)")
_KEY = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_SITE = re.compile(r"site (\S+) (may join|was removed|cannot be registered)")


def book_of(options: LinkOptions) -> AuditLog | None:
    """The audit log of a SuperLink: in `--state`; None without."""
    return AuditLog(options.state / NAME) if options.state else None


def beside(path: Path) -> AuditLog:
    """The audit log beside a file that a command changes: of the nodes file, of certificates."""
    return AuditLog(path.absolute().parent / NAME)


@contextmanager
def registered(
    book: AuditLog | None, options: LinkOptions, say: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """`say` that also writes down who was let in and refused; around it, the start and the end of a SuperLink."""
    if book is None:
        yield say
        return
    about: dict[str, Any] = {
        "host": options.host,
        "fleet_port": options.fleet_port,
        "control_port": options.control_port,
    }
    book.try_record("superlink started", **about, **_identity(options))
    say(f"audit log {book.path}, head {book.head}")

    def both(text: str) -> None:
        hear(book, text)
        say(text)

    try:
        yield both
    except BaseException as error:
        book.try_record("superlink ended", type(error).__name__, why=str(error))
        raise
    else:
        book.try_record("superlink ended")
    say(f"audit log {book.path}, head {book.head}")


def hear(book: AuditLog, text: str) -> None:
    """Write down a line that a SuperLink said, if it is of sites."""
    key = found[0] if (found := _KEY.search(text)) else ""
    if match := _REFUSED.search(text):
        site = named[1] if (named := re.search(r" of (\S+) is in use", match[1])) else ""
        book.try_record("refused", site=site, key=key, why=match[1])
    elif match := _SITE.match(text):
        outcome = "failed" if match[2] == "cannot be registered" else "ok"
        what = "site removed" if match[2] == "was removed" else "site registered"
        book.try_record(what, outcome, site=match[1], key=key, why="" if outcome == "ok" else text)


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
