"""Who may use the control port: a file of users, with a role and the hash of a token each."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import tomli_w

from common.errors import SettingsError
from common.files import write_atomically
from common.settings import name_fault, tables_of, text_of

N, R, P = 2**14, 8, 1
"""scrypt (RFC 7914): 16 MB and some 50 ms a look."""
MOST_FAILURES, FAILURES_S = 10, 60.0
"""So many wrong tokens from one address in so many seconds, and no further one is looked at."""


class Role(StrEnum):
    """What a user may do; each may all that those before it may."""

    look = "look"
    submit = "submit"
    operate = "operate"

    def covers(self, needed: Role) -> bool:
        """Whether this role is enough."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class User:
    """A user: the role and the token's hash, "scrypt$n$r$p$salt$hash" in base64."""

    name: str
    role: Role
    token: str

    def knows(self, token: str) -> bool:
        """Whether this is the user's token; in a time that does not tell how much of it is right."""
        _, n, r, p, salt, wanted = self.token.split("$")
        found = hashlib.scrypt(token.encode(), salt=base64.b64decode(salt), n=int(n), r=int(r), p=int(p), dklen=32)
        return hmac.compare_digest(found, base64.b64decode(wanted))


class Wrong(Exception):
    """No token, a wrong one, or one that may not do this; `status` is that of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


NOBODY = User("nobody", Role.look, f"scrypt${N}${R}${P}${base64.b64encode(bytes(16)).decode()}${'A' * 43}=")
"""In place of a name that is not there, so that a try takes as long."""


def read(path: Path) -> dict[str, User]:
    """The users of a file. Raises SettingsError for a file that is wrong in any line."""
    if not path.exists():
        raise SettingsError(f"--users: there is no file {str(path)!r}; make it with: python -m server users add NAME")
    what = f"users file {str(path)!r}"
    tables = tables_of(text_of(path, "users file"), what)
    entries = tables.get("users", {})
    if set(tables) - {"users"} or not isinstance(entries, dict):
        raise SettingsError(f"{what} holds one table, [users], of tables name.role and name.token")
    users = {}
    for name, entry in entries.items():
        if fault := name_fault(name):
            raise SettingsError(f"{what}: {fault}")
        if not isinstance(entry, dict) or set(entry) != {"role", "token"} or entry["role"] not in list(Role):
            raise SettingsError(f"{what}: {name!r} needs a role, one of {', '.join(Role)}, a token's hash and no more")
        parts = str(entry["token"]).split("$")
        if len(parts) != 6 or parts[0] != "scrypt" or not all(part.isdecimal() for part in parts[1:4]):
            raise SettingsError(f"{what}: the token of {name!r} is no hash; make a new one: python -m server users add")
        users[name] = User(name, Role(entry["role"]), str(entry["token"]))
    return users


def write(path: Path, users: dict[str, User]) -> None:
    """Replace the users file; only its owner can read it."""
    table = {name: {"role": user.role.value, "token": user.token} for name, user in sorted(users.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, tomli_w.dumps({"users": table}).encode())
    path.chmod(0o600)


def add(path: Path, name: str, role: Role) -> str:
    """Let a user in; returns the token, which stands nowhere else. Raises SettingsError if the name is taken."""
    if fault := name_fault(name):
        raise SettingsError(fault)
    users = read(path) if path.exists() else {}
    if name in users:
        raise SettingsError(f"{name!r} has a token already; to replace it, remove {name!r} first")
    token, salt = f"{name}:{secrets.token_urlsafe(32)}", secrets.token_bytes(16)
    hashed = hashlib.scrypt(token.encode(), salt=salt, n=N, r=R, p=P, dklen=32)
    text = "$".join(base64.b64encode(part).decode() for part in (salt, hashed))
    users[name] = User(name, role, f"scrypt${N}${R}${P}${text}")
    write(path, users)
    return token


def remove(path: Path, name: str) -> None:
    """Shut a user out. Raises SettingsError if there is none of that name."""
    users = read(path)
    if name not in users:
        raise SettingsError(f"users file {str(path)!r} has no {name!r}; it has: {', '.join(sorted(users)) or 'nobody'}")
    del users[name]
    write(path, users)


class Users:
    """The users file as it is now, asked at each call; may be used from any thread.

    A file that is wrong lets nobody in but those it let in before. `own`: the token of the server itself.
    """

    def __init__(self, path: Path, own: str = "") -> None:
        self._path, self._own = path, own
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._users: dict[str, User] = {}
        self._known: dict[str, User] = {}
        """Hash of a token that was right -> whose it is, so that scrypt is asked once."""
        self._failures: dict[str, list[float]] = {}

    def user(self, authorization: str, address: str) -> User:
        """Whose token an Authorization header holds. Raises Wrong."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Wrong(401, "this control port asks who you are: FEDKEEL_TOKEN or --token-file with your token")
        if self._own and hmac.compare_digest(token.encode(), self._own.encode()):
            return User("superlink", Role.operate, "")
        digest = hashlib.sha256(token.encode()).hexdigest()
        with self._lock:
            self._look()
            if found := self._known.get(digest):
                return found
            if len(self._recent(address)) >= MOST_FAILURES:
                raise Wrong(429, f"too many wrong tokens from {address}: try again in a minute")
            # One look at a time: it takes memory and a processor, and whoever guesses waits for those before.
            user = self._users.get(token.partition(":")[0], NOBODY)
            if not user.knows(token) or user is NOBODY:
                if len(self._failures) > 1000:  # addresses come from the network
                    self._failures.clear()
                self._failures.setdefault(address, []).append(time.monotonic())
                raise Wrong(401, "this token is not known here, or was removed")
            self._known[digest] = user
            return user

    def _recent(self, address: str) -> list[float]:
        now = time.monotonic()
        kept = [at for at in self._failures.get(address, []) if now - at < FAILURES_S]
        if kept:
            self._failures[address] = kept
        else:
            self._failures.pop(address, None)
        return kept

    def _look(self) -> None:
        try:
            status = self._path.stat()
            stamp = status.st_mtime_ns, status.st_ino
            if stamp != self._stamp:
                self._users, self._known, self._stamp = read(self._path), {}, stamp
        except FileNotFoundError:
            self._users, self._known, self._stamp = {}, {}, None
        except (OSError, SettingsError):
            pass  # as it was: `users` writes it as a whole, so somebody is editing it
