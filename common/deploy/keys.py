"""Node keys: EC P-384 pairs by which a site proves who it is. The private one stays at the site."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from common.errors import SettingsError

_OPENSSH = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
_PEM = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def generate(path: Path) -> Path:
    """Write a new private key (PEM, readable by its owner only) and `path`.pub; returns the latter.

    Raises SettingsError if one of the files is there: a key is never overwritten.
    """
    public = path.with_name(path.name + ".pub")
    for each in (path, public):
        if each.exists():
            raise SettingsError(f"{str(each)!r} exists already; a key is not overwritten: choose another name")
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, private_pem(key))
    public.write_bytes(key.public_key().public_bytes(*_OPENSSH) + f" {path.stem}\n".encode())
    return public


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read. Raises SettingsError if it is there or cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SettingsError(f"{str(path)!r} cannot be written: {error}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def unreadable(path: Path) -> str:
    """That a file is there and this user may not read it: whose it is, its mode, and who asks."""
    try:
        about = path.stat()
    except OSError as error:
        return f"{str(path)!r} cannot be read: {error.strerror}"
    return (
        f"{str(path)!r} is there and cannot be read: it belongs to user {about.st_uid}, mode "
        f"{stat.S_IMODE(about.st_mode):04o}, and this process runs as user {os.geteuid()}; give it to that user (chown)"
    )


def load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key. Raises SettingsError if the file is none."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except PermissionError:
        raise SettingsError(f"--key: {unreadable(path)}") from None
    except OSError as error:
        raise SettingsError(f"--key: {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(
            f"--key: {str(path)!r} is no private key without a password ({error}); make one with: "
            "python -m client keygen"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise SettingsError(
            f"--key: {str(path)!r} is no EC P-384 key, which Flower asks for; make one with: python -m client keygen"
        )
    return key


def public_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public half of a private key, as the PEM that Flower knows nodes by."""
    return key.public_key().public_bytes(*_PEM)


def read_public(text: str | bytes, source: str) -> bytes:
    """A public key, given as an OpenSSH line or as PEM, as the PEM that Flower knows nodes by.

    Raises SettingsError that names `source`.
    """
    content = text.encode() if isinstance(text, str) else text
    if b"PRIVATE KEY" in content:
        raise SettingsError(f"{source} is a private key, which never leaves its site; ask for the file with .pub")
    load = serialization.load_pem_public_key if b"-----BEGIN" in content else serialization.load_ssh_public_key
    try:
        key = load(content.strip())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"{source} is no public key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise SettingsError(f"{source} is no EC P-384 key, which Flower asks for")
    return key.public_bytes(*_PEM)


def openssh(pem: bytes) -> str:
    """A public key in PEM as an OpenSSH line without a comment."""
    return serialization.load_pem_public_key(pem).public_bytes(*_OPENSSH).decode()


def fingerprint(pem: bytes) -> str:
    """The short form of a public key that `ssh-keygen -lf` shows too."""
    return _short(hashlib.sha256(base64.b64decode(openssh(pem).split()[1])).digest())


def fingerprint_or(pem: bytes, otherwise: str) -> str:
    """The same, or `otherwise` for what is no key: it may come from the network."""
    try:
        return fingerprint(pem)
    except (ValueError, IndexError):
        return otherwise


def _short(digest: bytes) -> str:
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def spoken(fingerprint: str) -> str:
    """A fingerprint to be read out over the phone: 64 hexadecimal digits in groups of four."""
    digits = base64.b64decode(fingerprint.removeprefix("SHA256:") + "=").hex()
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def read_fingerprint(text: str, source: str) -> str:
    """A fingerprint as "SHA256:...", given so or as `spoken`. Raises SettingsError that names `source`."""
    plain = re.sub(r"[\s:-]", "", text)
    if re.fullmatch("[0-9A-Fa-f]{64}", plain):
        return _short(bytes.fromhex(plain))
    text = text.strip()
    whole = re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", text)
    if whole and _short(base64.b64decode(text.removeprefix("SHA256:") + "=")) == text:
        return text
    raise SettingsError(
        f"{source}: {text[:80]!r} is no fingerprint; allowed: SHA256: and 43 letters, or 64 hexadecimal digits"
    )
