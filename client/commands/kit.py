"""Joining with a kit: its archive is checked, compared by its fingerprint, unpacked; the site's own key is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from common.deploy import keys
from common.deploy import kit as kits
from common.errors import SettingsError
from common.files import write_atomically

KEPT = (kits.POLICY,)
"""What the site changes and a newer kit does not."""


@dataclass(frozen=True)
class Unpacked:
    """What `join` needs of a kit. `fingerprint`: of the site's key."""

    server: str
    name: str
    ca: Path
    key: Path
    policy: Path
    fingerprint: str


def unpack(
    archive: Path,
    folder: Path | None = None,
    authority: str = "",
    say: Callable[[str], None] = typer.echo,
    agreed: Callable[[], bool] | None = None,
) -> Unpacked:
    """Check a kit and put it into a folder (default: the site's name, beside the archive), with a new key if there is
    none there.

    `authority`: the fingerprint that the kit must have, as the operator read it out. Without it `agreed()` is asked
    once, before anything is written, where the folder does not hold this authority yet; None: nobody is there to ask.
    Raises SettingsError for a kit that is wrong, another authority, and a no.
    """
    kit = kits.read(archive)
    name = kit.manifest.name
    place = (folder or archive.resolve().parent / name).expanduser()
    prints = kit.manifest.authorities
    if authority and not any(kits.same_fingerprint(authority, each) for each in prints):
        raise SettingsError(
            f"--authority: the kit's is {', '.join(prints)}: if the server's operator reads out another one, "
            "this kit is not theirs"
        )
    ca = place / kits.CA
    if not authority and not (ca.is_file() and ca.read_bytes() == kit.files[kits.CA]):
        say(f"kit for {name}, server {kit.manifest.server}; the server's authority has the fingerprint")
        for each in prints:
            say(f"    {each}")
        if agreed is None:
            say("compare it over the phone with the server's operator, or give what they read out as --authority")
        elif not agreed():
            raise SettingsError("not joined: the fingerprint of the kit's authority is not the operator's")
    _write(place, kit)
    key = place / f"{name}.key"
    if not key.exists():
        keys.generate(key)
        say(f"{key}: this site's key, new; it stays here")
    pem = keys.public_of(keys.load_private(key))
    fingerprint = keys.fingerprint(pem)
    say(f"this site's key, to be read out to the operator: {fingerprint}\n    {keys.spoken(fingerprint)}")
    return Unpacked(kit.manifest.server, name, ca, key, place / kits.POLICY, fingerprint)


def _write(place: Path, kit: kits.Kit) -> None:
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, content in kit.files.items():
            path = place / file
            if path.is_symlink():
                raise SettingsError(f"{str(path)!r} is a link; a kit is unpacked into a folder of its own: --folder")
            if not path.exists() or (file not in KEPT and path.read_bytes() != content):
                write_atomically(path, content)
    except OSError as error:
        raise SettingsError(f"--folder: {str(place)!r} cannot be written: {error.strerror}") from None


def ask() -> Callable[[], bool] | None:
    """How to ask whoever sits at the terminal; None if nobody does."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    return lambda: typer.confirm("has the operator read out the same over the phone?")
