"""A site's audit log: which server it joined, each message that came in, each reply that went out."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from flwr.app import Message

from client.node.access import Access
from common.deploy.audit import NAME, AuditLog
from common.deploy.keys import fingerprint, load_private, public_of
from common.errors import SettingsError
from strategies.protocol import wire
from strategies.protocol.messages import head_of, outline

log = logging.getLogger("client.node.audited")


class AuditFailed(Exception):
    """A message cannot be written down, so that nothing may leave for it."""


class SiteLog:
    """What one client writes down, each line with its name and key.

    A reply is on the disk before its first byte leaves: `leaving` raises AuditFailed if it cannot be.
    """

    def __init__(self, path: Path, site: str, access: Access, policy: str = "") -> None:
        self._book = AuditLog(path)
        self._about: dict[str, Any] = {"site": site, "key": _key(access)}
        self._message: Message | None = None
        self.tell("started", server=access.server, authority=_hash_of(access.ca))
        self._tell_policy(policy)
        log.info("%s: audit log %s, head %s", site, self._book.path, self._book.head)

    def tell(self, what: str, outcome: str = "ok", **more: Any) -> None:
        """An event that nobody waits for."""
        self._book.try_record(what, outcome, **self._about, **more)

    def received(self, message: Message) -> None:
        """A message is here. Raises AuditFailed."""
        self._message = message
        about = {"kind": _kind(message), "bytes": _size(message), "message": message.metadata.message_id}
        # The reply's line brings the flush for both.
        self._record("message in", "ok", durable=False, **about)

    def leaving(self, reply: Message, sha256: str) -> None:
        """A reply is about to be sent, by this hash. Raises AuditFailed."""
        status = outline(reply)[0]
        self._record("upload out", status, kind=_kind(reply), bytes=_size(reply), message=sha256)

    def _record(self, what: str, outcome: str, **more: Any) -> None:
        try:
            self._book.record(what, outcome, run=_run(self._message), **self._about, **more)
        except OSError as error:
            raise AuditFailed(f"{self._book.path}: {error}") from error

    def _tell_policy(self, policy: str) -> None:
        now = _hash_of(policy)
        before = self._book.last("policy")
        if before is None or before.get("policy_sha256") != now:
            outcome = "first seen" if before is None else "changed"
            self.tell("policy", outcome, policy=policy, policy_sha256=now)


def default_path(memory: str) -> Path:
    """Where a client's audit log lies if nobody says."""
    return Path(memory) / NAME


NO_KEY = "none: joined without --key"
"""In place of a fingerprint: the key that Flower makes for such a process proves nothing and is a new one each time."""


def _key(access: Access) -> str:
    return fingerprint(public_of(load_private(Path(access.key)))) if access.key else NO_KEY


def _hash_of(path: str) -> str:
    """The SHA-256 of a file's content; "" without a file."""
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise SettingsError(f"{path!r} cannot be read: {error.strerror}") from None


def _kind(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _size(message: Message) -> int:
    return wire.size(message.content) if message.has_content() else 0


def _run(message: Message | None) -> str:
    """The run that a message says it is of; any server may say anything, so it is a word like others."""
    head = None if message is None else head_of(message)
    return "" if head is None else str(head.get("run", ""))
