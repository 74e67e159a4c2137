"""A certificate authority of one's own and the server's certificate: TLS without any other party."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.deploy.addresses import ip_address
from common.deploy.keys import private_pem, unreadable, write_private
from common.errors import SettingsError

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca.key", "server.pem", "server.key"
TRUST = "trust.pem"
"""The new authority and the one before it: what sites trust while the server changes from one to the other."""

# Flower's own helper processes reach the server by these.
ALWAYS_HOSTS, ALWAYS_ADDRESSES = ("localhost",), ("127.0.0.1", "::1")

_CA_DAYS = 3650
_BACKDATED = datetime.timedelta(hours=1)  # for sites whose clocks are behind


@dataclass(frozen=True)
class Certificates:
    """The files of a folder that `write` made. Sites need `ca` alone; `ca_key` belongs in a safe."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority's certificate: what clients trust."""
        return self.folder / CA

    @property
    def trust(self) -> Path:
        """What sites are to trust: two authorities while one takes over from another, else `ca`."""
        both = self.folder / TRUST
        return both if both.exists() else self.ca

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.folder / CERTIFICATE

    @property
    def key(self) -> Path:
        """The server's private key."""
        return self.folder / KEY

    def require(self) -> Certificates:
        """Raise SettingsError if a file that the server needs is missing."""
        for path in (self.ca, self.certificate, self.key):
            if path.is_file() and not os.access(path, os.R_OK):
                raise SettingsError(f"--certs: {unreadable(path)}")
            if not path.is_file():
                raise SettingsError(
                    f"--certs: {str(path)!r} is missing; make certificates with: "
                    f"python -m server certs --host NAME --out {self.folder}"
                )
        return self


def fits(made: Certificates) -> None:
    """Raise SettingsError for certificates, such as a company's own, with which a server would start and serve nobody:
    a key without its certificate or with a password, or names that lack the one by which its own processes reach it."""
    try:
        certificate = x509.load_pem_x509_certificates(made.certificate.read_bytes())[0]
        key = serialization.load_pem_private_key(made.key.read_bytes(), password=None)
    except (ValueError, TypeError, OSError) as error:
        raise SettingsError(
            f"--certs: {made.certificate} and {made.key} are no certificate and key in PEM, without a password: {error}"
        ) from None
    public = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if certificate.public_key().public_bytes(*public) != key.public_key().public_bytes(*public):
        raise SettingsError(f"--certs: {made.key} is not the key of {made.certificate}")
    if ALWAYS_ADDRESSES[0] not in alternative_names(certificate):
        names = ", ".join(alternative_names(certificate)) or "nothing"
        raise SettingsError(
            f"--certs: {made.certificate} is for {names}; the server's own processes reach it at 127.0.0.1: have it "
            "issued for localhost and 127.0.0.1 too"
        )
    if certificate.not_valid_after_utc < _now():
        raise SettingsError(f"--certs: {made.certificate} expired on {certificate.not_valid_after_utc:%Y-%m-%d}")


def write(
    folder: Path, hosts: Sequence[str], addresses: Sequence[str], days: int, beside: Path | None = None
) -> Certificates:
    """Make a server certificate for DNS names and IP addresses, signed by the folder's authority.

    The authority is made if the folder has none, and used again if it has: then clients need no new file. `beside`: a
    folder, or file, of the authority before this one: `trust` then holds both, for sites while the server changes over.
    Raises SettingsError if a name or an address is none or a server certificate is there already.
    """
    made = Certificates(folder)
    for path in (made.certificate, made.key):
        if path.exists():
            raise SettingsError(
                f"{str(path)!r} exists already and is not overwritten; to renew it, move {CERTIFICATE} and {KEY} away "
                f"and leave {CA} and {CA_KEY}: clients then need no new file"
            )
    names = _names(hosts, addresses)
    before = _before(beside, folder) if beside else b""
    authority, authority_key = _authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    lifetime = min(datetime.timedelta(days=days), authority.not_valid_after_utc - _now())
    builder = (
        _builder((hosts or addresses or ALWAYS_HOSTS)[0], authority.subject, key.public_key(), lifetime)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    certificate = builder.sign(authority_key, hashes.SHA256())
    write_private(made.key, private_pem(key))
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    if beside:
        (folder / TRUST).write_bytes(made.ca.read_bytes() + before)
    return made


def _before(beside: Path, folder: Path) -> bytes:
    """The authority that sites trust so far."""
    if (folder / CA).exists():
        raise SettingsError(f"--beside: {str(folder)!r} has an authority already; a new one needs another --out")
    file = Certificates(beside).ca if beside.is_dir() else beside
    try:
        content = file.read_bytes()
        x509.load_pem_x509_certificates(content)
    except (OSError, ValueError):
        raise SettingsError(f"--beside: {str(file)!r} is no certificate in PEM that can be read") from None
    return content


def describe(path: Path) -> str:
    """Names, addresses and expiry of a certificate, in one line."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    left = (certificate.not_valid_after_utc - _now()).days
    until = f"valid until {certificate.not_valid_after_utc:%Y-%m-%d} ({left} days)"
    return f"for {', '.join(alternative_names(certificate))}; {until}"


def alternative_names(certificate: x509.Certificate) -> list[str]:
    """DNS names and IP addresses that a certificate is good for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def certified(path: Path) -> list[str]:
    """Those of a certificate's file."""
    return alternative_names(x509.load_pem_x509_certificate(path.read_bytes()))


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_path, key_path = folder / CA, folder / CA_KEY
    if certificate_path.exists() != key_path.exists():
        here, missing = (certificate_path, key_path) if certificate_path.exists() else (key_path, certificate_path)
        raise SettingsError(f"{str(here)!r} is there without {str(missing)!r}: bring it back or choose another --out")
    if certificate_path.exists():
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SettingsError(f"{str(key_path)!r} is not a key that this command made")
        return x509.load_pem_x509_certificate(certificate_path.read_bytes()), key
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fedkeel federation CA")])
    certificate = (
        _builder("Fedkeel federation CA", subject, key.public_key(), datetime.timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_private(key_path, private_pem(key))
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _builder(
    common_name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = _now()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
    )


def _usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )


def _names(hosts: Sequence[str], addresses: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, *ALWAYS_HOSTS]):
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?", host) or ip_address(host):
            raise SettingsError(f"--host: {host!r} is no DNS name (addresses go to --ip, no port, no scheme)")
        names.append(x509.DNSName(host))
    for address in dict.fromkeys([*addresses, *ALWAYS_ADDRESSES]):
        if (parsed := ip_address(address)) is None:
            raise SettingsError(f"--ip: {address!r} is no IP address (names go to --host)")
        names.append(x509.IPAddress(parsed))
    return names


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
