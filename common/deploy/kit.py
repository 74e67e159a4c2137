"""A site's kit: one archive with all that a site needs to join but its own key and data. Nothing in it is secret.

A kit comes by mail or over a web page, so what is in it is not believed: entries that are not known, too large, twice
or other than the manifest says are refused, and nothing is written outside the site's folder. What an attacker in
between can change, the authority, is compared over the phone by its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from pydantic import Field

from common.deploy.addresses import HOST_PORT
from common.errors import SettingsError
from common.files import replacing
from common.settings import Name, Section, checked

MANIFEST, CA, POLICY, UNIT, COMPOSE, README = (
    "manifest.json",
    "ca.pem",
    "policy.toml",
    "fedkeel.service",
    "compose.yml",
    "README.txt",
)
FILES = (CA, POLICY, UNIT, COMPOSE, README)
"""Beside the manifest; all of them, and no other."""

FORMAT = 1
MOST_BYTES, MOST_ARCHIVE = 256 * 1024, 1024 * 1024
"""Of one file in a kit, and of the archive."""


class Manifest(Section):
    """What a kit says of itself."""

    kit: int
    name: Name
    server: str = Field(pattern=f"^{HOST_PORT}$")
    made: date = Field(strict=False)
    version: str = Field(max_length=40)
    authorities: list[str]
    """Fingerprints of the certificates in ca.pem, as `Authority.fingerprint`."""
    files: dict[str, str]
    """File -> sha256."""


@dataclass(frozen=True)
class Authority:
    """A certificate that a site trusts to vouch for the server. `fingerprint`: SHA-256, in 16 groups of 4 digits."""

    subject: str
    fingerprint: str
    until: date


@dataclass(frozen=True)
class Kit:
    """A kit that was read and checked: file -> content, without the manifest."""

    manifest: Manifest
    files: Mapping[str, bytes]


def authorities(pem: bytes, source: str) -> list[Authority]:
    """The certificates of a bundle in PEM, at least one. Raises SettingsError that names `source`."""
    if b"PRIVATE KEY" in pem:
        raise SettingsError(f"{source} holds a private key, which never leaves the machine it was made on")
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise SettingsError(f"{source} is no certificate in PEM") from None
    return [
        Authority(each.subject.rfc4514_string(), _grouped(each.fingerprint(SHA256())), each.not_valid_after_utc.date())
        for each in found
    ]


def _grouped(digest: bytes) -> str:
    digits = digest.hex()
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def same_fingerprint(one: str, other: str) -> bool:
    """Whether two fingerprints of certificates are the same, however they are grouped."""
    return _plain(one) == _plain(other) != ""


def _plain(text: str) -> str:
    return re.sub(r"[\s:-]", "", text.strip().removeprefix("SHA256:")).lower()


def write(path: Path, name: str, server: str, version: str, made: date, files: Mapping[str, bytes]) -> Kit:
    """Write a kit of `FILES`. Raises SettingsError if the archive is there already or something in it is wrong."""
    assert set(files) == set(FILES)
    found = authorities(files[CA], "the authority")
    values = {
        "kit": FORMAT,
        "name": name,
        "server": server,
        "made": made.isoformat(),
        "version": version,
        "authorities": [each.fingerprint for each in found],
        "files": {file: hashlib.sha256(content).hexdigest() for file, content in sorted(files.items())},
    }
    manifest = checked(Manifest, values, "kit")
    if path.exists():
        raise SettingsError(f"{str(path)!r} exists already and is not overwritten; choose another --out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MANIFEST, json.dumps(values, indent=1) + "\n")
            for file in FILES:
                archive.writestr(file, files[file])
    except OSError as error:
        raise SettingsError(f"--out: {str(path)!r} cannot be written: {error.strerror}") from None
    return Kit(manifest, dict(files))


def read(path: Path) -> Kit:
    """Read a kit and check all of it; nothing is written. Raises SettingsError that says what is wrong."""
    source = f"kit {str(path)!r}"
    try:
        if path.stat().st_size > MOST_ARCHIVE:
            raise SettingsError(f"{source} is larger than a kit can be ({MOST_ARCHIVE // 1024} kB)")
        with zipfile.ZipFile(path) as archive:
            held = _entries(archive, source)
    except OSError as error:
        raise SettingsError(f"{source} cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{source} is damaged or no kit: {error}; ask for it again") from None
    try:
        values = json.loads(held.pop(MANIFEST))
    except (ValueError, RecursionError):
        raise SettingsError(f"{source}: {MANIFEST} is no JSON; ask for the kit again") from None
    if not isinstance(values, dict) or values.get("kit") != FORMAT:
        raise SettingsError(f"{source} is of another release than this one: upgrade, or ask for a new kit")
    manifest = checked(Manifest, values, source)
    for file, content in held.items():
        if manifest.files.get(file) != hashlib.sha256(content).hexdigest():
            raise SettingsError(f"{source}: {file} is not as its manifest says; ask for the kit again")
    if set(manifest.files) != set(FILES):
        raise SettingsError(f"{source}: its manifest names other files than a kit has")
    found = [each.fingerprint for each in authorities(held[CA], f"{source}: {CA}")]
    if found != manifest.authorities:
        raise SettingsError(f"{source}: its manifest names other authorities than {CA} holds")
    return Kit(manifest, held)


def _entries(archive: zipfile.ZipFile, source: str) -> dict[str, bytes]:
    """All entries, each at most `MOST_BYTES` whatever the archive says of it."""
    names = [entry.filename for entry in archive.infolist()]
    known = {MANIFEST, *FILES}
    if odd := [name for name in names if name not in known or names.count(name) > 1]:
        raise SettingsError(f"{source} holds {odd[0][:80]!r}, which a kit does not have or has once")
    if missing := sorted(known - set(names)):
        raise SettingsError(f"{source} lacks {', '.join(missing)}; ask for it again")
    held = {}
    for name in names:
        with archive.open(name) as file:
            held[name] = file.read(MOST_BYTES + 1)
        if len(held[name]) > MOST_BYTES:
            raise SettingsError(f"{source}: {name} is larger than it can be")
    return held
