"""Who may join: a file of site names and their keys, one or for a while two a name, some with a last day.

[nodes]
site-1 = "ecdsa-sha2-nistp384 AAAA..."
site-2 = ["ecdsa-sha2-nistp384 AAAA...", { key = "ecdsa-sha2-nistp384 AAAA...", expires = 2027-01-01 }]
site-3 = "SHA256:..."      # the fingerprint alone: the key that has it is taken when its site first knocks
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from common.deploy import keys
from common.errors import SettingsError
from common.files import write_atomically
from common.settings import name_fault, shown, tables_of, text_of

MOST_KEYS = 2
"""Of one name: the one in use and the one that takes over."""

SOON = datetime.timedelta(days=30)


@dataclass(frozen=True)
class SiteKey:
    """A key of a site. `pem`: the key, None while only its fingerprint is known; `expires`: its last day, in UTC."""

    fingerprint: str
    pem: bytes | None = None
    expires: datetime.date | None = None

    def expired(self, today: datetime.date) -> bool:
        """Whether its last day is over."""
        return self.expires is not None and today > self.expires

    def ends_soon(self, today: datetime.date) -> str:
        """What to say of a key whose last day is near or over; "" of any other."""
        if self.expires is None or self.expires - today > SOON:
            return ""
        days = (self.expires - today).days
        return f"expired on {self.expires}" if days < 0 else f"expires in {days} days, on {self.expires}"


Nodes = dict[str, tuple[SiteKey, ...]]
"""Site name -> its keys, the oldest first."""


def today() -> datetime.date:
    """The day in UTC, by which keys expire."""
    return datetime.datetime.now(datetime.UTC).date()


def read(path: Path) -> Nodes:
    """The sites of a nodes file. Raises SettingsError for a file that is wrong in any line."""
    if not path.exists():
        raise SettingsError(
            f"--nodes: there is no file {str(path)!r}; make it with: python -m server nodes add NAME KEY.pub"
        )
    tables = tables_of(text_of(path, "nodes file"), f"nodes file {str(path)!r}")
    entries = tables.get("nodes", {})
    if set(tables) - {"nodes"} or not isinstance(entries, dict):
        raise SettingsError(f'nodes file {str(path)!r} holds one table, [nodes], of name = "public key"')
    nodes: Nodes = {}
    for name, value in entries.items():
        source = f"nodes file {str(path)!r}"
        if fault := name_fault(name):
            raise SettingsError(f"{source}: {fault}")
        held = value if isinstance(value, list) else [value]
        if not 1 <= len(held) <= MOST_KEYS:
            raise SettingsError(f"{source}: {name!r} has {len(held)} keys; allowed: 1, or for a while {MOST_KEYS}")
        nodes[name] = tuple(_entry(each, f"{source}: the key of {name!r}") for each in held)
    _unique(nodes, str(path))
    return nodes


def _entry(value: Any, source: str) -> SiteKey:
    expires = None
    if isinstance(value, dict):
        if set(value) - {"key", "expires"} or "key" not in value:
            raise SettingsError(f"{source}: {shown(value)}; allowed: key, and expires = a date such as 2027-01-01")
        expires, value = value.get("expires"), value["key"]
        if expires is not None and type(expires) is not datetime.date:
            raise SettingsError(f"{source}: expires = {shown(expires)}; allowed: a date such as 2027-01-01")
    if not isinstance(value, str):
        raise SettingsError(f"{source}: {shown(value)}; needs a public key as text")
    if value.startswith("SHA256:"):
        return SiteKey(keys.read_fingerprint(value, source), None, expires)
    pem = keys.read_public(value, source)
    return SiteKey(keys.fingerprint(pem), pem, expires)


def write(path: Path, nodes: Nodes) -> None:
    """Replace the nodes file."""
    table: dict[str, Any] = {}
    for name, held in sorted(nodes.items()):
        entries = [_written(key) for key in held]
        table[name] = entries[0] if len(entries) == 1 else entries
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, tomli_w.dumps({"nodes": table}).encode())


def _written(key: SiteKey) -> Any:
    text = keys.openssh(key.pem) if key.pem else key.fingerprint
    return text if key.expires is None else {"key": text, "expires": key.expires}


def add(
    path: Path,
    name: str,
    key: Path | None = None,
    *,
    fingerprint: str = "",
    also: bool = False,
    expires: datetime.date | None = None,
    day: datetime.date | None = None,
) -> str:
    """Allow a site by its public key or by that key's fingerprint; returns the fingerprint.

    `also`: beside the key that it has. A key that is there already gets the new last day. Raises SettingsError if the
    name has a key, or the key a name.
    """
    if fault := name_fault(name):
        raise SettingsError(fault)
    if (key is None) == (not fingerprint):
        raise SettingsError("nodes add: give the file of the public key or its --fingerprint, one of them")
    if expires is not None and expires < (day or today()):
        raise SettingsError(f"--expires {expires} is over: a key that was refused once is never taken back")
    new = replace(_given(key, fingerprint), expires=expires)
    nodes = read(path) if path.exists() else {}
    held = nodes.get(name, ())
    same = next((each for each in held if each.fingerprint == new.fingerprint), None)
    if same:
        changed = replace(same, pem=same.pem or new.pem, expires=expires or same.expires)
        if changed == same:
            raise SettingsError(f"{name!r} has this key already")
        nodes[name] = tuple(changed if each is same else each for each in held)
    elif held and not also:
        raise SettingsError(
            f"{name!r} has a key already; --also lets it have a second one for a while; or remove {name!r} first"
        )
    elif len(held) >= MOST_KEYS:
        raise SettingsError(f"{name!r} has {len(held)} keys already: python -m server nodes retire {name}")
    else:
        nodes[name] = (*held, new)
    _unique(nodes, str(path))
    write(path, nodes)
    return new.fingerprint


def _given(key: Path | None, fingerprint: str) -> SiteKey:
    if key is None:
        return SiteKey(keys.read_fingerprint(fingerprint, "--fingerprint"))
    try:
        pem = keys.read_public(key.read_bytes(), repr(str(key)))
    except OSError as error:
        raise SettingsError(f"{str(key)!r} cannot be read: {error.strerror}") from None
    return SiteKey(keys.fingerprint(pem), pem)


def retire(path: Path, name: str, fingerprint: str = "") -> str:
    """Take one of a site's two keys away, the older one unless another is named; returns its fingerprint.

    Raises SettingsError if it has one alone: that would be `remove`.
    """
    nodes = read(path)
    held = _held(nodes, name, path)
    if len(held) < 2:
        raise SettingsError(
            f"{name!r} has one key; without it the site is shut out: python -m server nodes remove {name}"
        )
    wanted = keys.read_fingerprint(fingerprint, "--fingerprint") if fingerprint else held[0].fingerprint
    if wanted not in [each.fingerprint for each in held]:
        raise SettingsError(f"{name!r} has no key {wanted}; it has: {', '.join(each.fingerprint for each in held)}")
    nodes[name] = tuple(each for each in held if each.fingerprint != wanted)
    write(path, nodes)
    return wanted


def remove(path: Path, name: str) -> tuple[SiteKey, ...]:
    """Shut a site out; returns the keys that it had. Raises SettingsError if it is not there."""
    nodes = read(path)
    held = _held(nodes, name, path)
    del nodes[name]
    write(path, nodes)
    return held


def _held(nodes: Nodes, name: str, path: Path) -> tuple[SiteKey, ...]:
    if name not in nodes:
        raise SettingsError(f"{name!r} is not in {str(path)!r}; there are: {', '.join(sorted(nodes)) or 'none'}")
    return nodes[name]


def _unique(nodes: Nodes, path: str) -> None:
    owner: dict[str, str] = {}
    for name, held in nodes.items():
        for key in held:
            if key.fingerprint in owner:
                other = owner[key.fingerprint]
                raise SettingsError(
                    f"nodes file {path!r}: {other!r} and {name!r} have the same key; each needs its own"
                )
            owner[key.fingerprint] = name


def admitted(nodes: Nodes, waiting: Mapping[str, bytes], day: datetime.date) -> dict[bytes, str]:
    """The keys (PEM) that may join on a day, each with its site's name; `waiting`: fingerprint -> key, of those that
    have knocked."""
    found: dict[bytes, str] = {}
    for name, held in nodes.items():
        for key in held:
            pem = key.pem or waiting.get(key.fingerprint)
            if pem is not None and not key.expired(day):
                found[pem] = name
    return found
