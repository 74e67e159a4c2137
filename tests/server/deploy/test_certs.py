"""Certificates and node keys: what is made fits, and nothing is overwritten or left open."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from common.deploy import keys
from common.errors import SettingsError
from server.commands import doctor
from server.deploy import certs
from server.deploy.federation import running_link
from server.deploy.superlink import LinkOptions


def handshake(made: certs.Certificates, typed: str) -> None:
    """A TLS connection to a server with these certificates by a client that trusts their authority."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    client = ssl.create_default_context(cafile=str(made.ca))
    near, far = socket.socketpair()

    def accept() -> None:
        try:
            with server.wrap_socket(far, server_side=True) as connection:
                connection.recv(1)
        except (ssl.SSLError, OSError):
            pass  # the other side has hung up

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with client.wrap_socket(near, server_hostname=typed) as connection:
            connection.send(b"x")
    finally:
        near.close()
        thread.join(5)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_certificate_is_good_for_what_was_asked_and_for_this_machine(tmp_path: Path) -> None:
    made = certs.write(tmp_path / "certs", ["fl.example.org"], ["192.0.2.7", "2001:db8::1"], 90)
    for typed in ("fl.example.org", "192.0.2.7", "2001:db8::1", "localhost", "127.0.0.1", "::1"):
        handshake(made, typed)
    for typed in ("other.example.org", "192.0.2.8"):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"ostname mismatch|IP address mismatch"):
            handshake(made, typed)
    assert mode(made.key) == mode(tmp_path / "certs" / certs.CA_KEY) == 0o600
    left = x509.load_pem_x509_certificate(made.certificate.read_bytes()).not_valid_after_utc
    assert abs(left - datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=90)) < datetime.timedelta(minutes=1)
    assert "fl.example.org" in certs.describe(made.certificate)
    assert "89 days" in certs.describe(made.certificate)


def test_nothing_is_overwritten_and_a_renewed_certificate_has_the_same_authority(tmp_path: Path) -> None:
    made = certs.write(tmp_path, ["a"], [], 10)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SettingsError, match="not overwritten"):
        certs.write(tmp_path, ["b"], [], 10)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    made.certificate.unlink()
    made.key.unlink()
    renewed = certs.write(tmp_path, ["b"], [], 10)
    assert renewed.ca.read_bytes() == before[certs.CA]
    handshake(renewed, "b")


def test_half_an_authority_is_told(tmp_path: Path) -> None:
    made = certs.write(tmp_path, ["a"], [], 10)
    for path in (made.certificate, made.key, tmp_path / certs.CA_KEY):
        path.unlink()
    with pytest.raises(SettingsError, match=r"ca\.key"):
        certs.write(tmp_path, ["a"], [], 10)


@pytest.mark.parametrize(
    ("hosts", "addresses", "word"),
    [
        (["a b"], [], "--host"),
        (["https://a"], [], "--host"),
        (["a:9092"], [], "--host"),
        (["10.0.0.1"], [], "--host"),
        ([""], [], "--host"),
        ([], ["a"], "--ip"),
        ([], ["10.0.0.256"], "--ip"),
    ],
)
def test_a_name_or_an_address_that_is_none(hosts: list[str], addresses: list[str], word: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=word):
        certs.write(tmp_path / "certs", hosts, addresses, 10)
    assert not (tmp_path / "certs").exists()


def test_a_key_pair(tmp_path: Path) -> None:
    public = keys.generate(tmp_path / "site.key")
    assert mode(tmp_path / "site.key") == 0o600
    private = keys.load_private(tmp_path / "site.key")
    pem = keys.read_public(public.read_bytes(), "it")
    assert pem == keys.read_public(keys.openssh(pem), "it") == keys.read_public(pem, "it")
    assert serialization.load_pem_public_key(pem).public_numbers() == private.public_key().public_numbers()  # type: ignore[union-attr]
    assert keys.fingerprint(pem).startswith("SHA256:")
    assert len(keys.fingerprint(pem)) == 50
    for path in (tmp_path / "site.key", public):
        before = path.read_bytes()
        with pytest.raises(SettingsError, match="not overwritten"):
            keys.generate(tmp_path / "site.key")
        assert path.read_bytes() == before


def test_keys_that_are_none_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "key"
    wrong = [b"", b"x", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
    wrong += [keys.private_pem(ec.generate_private_key(ec.SECP256R1()))]
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    wrong += [rsa.generate_private_key(65537, 2048).private_bytes(*plain, serialization.NoEncryption())]
    locked = serialization.BestAvailableEncryption(b"secret")
    wrong += [ec.generate_private_key(ec.SECP384R1()).private_bytes(*plain, locked)]
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(SettingsError, match="--key"):
            keys.load_private(path)
        with pytest.raises(SettingsError, match="the file"):
            keys.read_public(content, "the file")
    with pytest.raises(SettingsError, match="--key"):
        keys.load_private(tmp_path / "none")


@given(st.binary(max_size=300))
def test_no_bytes_are_more_than_no_key(content: bytes) -> None:
    with pytest.raises(SettingsError):
        keys.read_public(content, "it")


# --- what a server may listen on


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "fl.example.org"])
@pytest.mark.parametrize("which", ["host", "control_host"])
def test_beyond_this_machine_a_server_needs_certificates(host: str, which: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--insecure"):
        LinkOptions(**{which: host}).check()  # type: ignore[arg-type]
    LinkOptions(**{which: host}, insecure=True).check()  # type: ignore[arg-type]
    certs.write(tmp_path, ["a"], [], 10)
    LinkOptions(**{which: host}, certificates=tmp_path).check()  # type: ignore[arg-type]


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    LinkOptions().check()
    made = certs.write(tmp_path / "certs", ["a"], [], 10)
    file = tmp_path / "nodes.toml"
    for options, word in (
        (LinkOptions(certificates=made.folder, insecure=True), "contradict"),
        (LinkOptions(nodes=file), "needs --certs"),
        (LinkOptions(nodes=file, certificates=made.folder), "no file"),
        (LinkOptions(certificates=tmp_path), "ca.pem"),
    ):
        with pytest.raises(SettingsError, match=word):
            options.check()
    if os.geteuid():
        made.key.chmod(0)
        with pytest.raises(SettingsError, match="cannot be read"):
            LinkOptions(certificates=made.folder).check()


@pytest.mark.parametrize(
    ("address", "ca", "options", "word"),
    [
        ("fl.example.org:8000", None, LinkOptions(), "--insecure"),
        ("192.0.2.7:8000", None, LinkOptions(), "--insecure"),
        ("127.0.0.1:8000", None, LinkOptions(state=Path("s")), "--state"),
        ("127.0.0.1:8000", None, LinkOptions(certificates=Path("c")), "--certs"),
        ("127.0.0.1:8000", Path("ca.pem"), LinkOptions(insecure=True), "contradict"),
        ("nowhere", None, LinkOptions(), "HOST:PORT"),
        ("", None, LinkOptions(), "HOST:PORT"),
        (":8000", None, LinkOptions(), "HOST:PORT"),
    ],
)
def test_a_superlink_that_runs_elsewhere(address: str, ca: Path | None, options: LinkOptions, word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        running_link(address, ca, options)


def test_a_superlink_that_may_be_spoken_to() -> None:
    assert running_link("127.0.0.1:8000", None, LinkOptions()).ca is None
    assert running_link("superlink:8000", None, LinkOptions(insecure=True)).ca is None
    assert running_link("superlink:8000", Path("ca.pem"), LinkOptions()).ca == Path("ca.pem")


# --- a company's own authority


def company(folder: Path, names: list[str], *, chain: bool = True, days: int = 90) -> certs.Certificates:
    """ca.pem, server.pem with an authority in between, server.key (RSA), as others make them."""
    now = datetime.datetime.now(datetime.UTC)

    def signed(subject: str, issuer: str, key: rsa.RSAPrivateKey, by: rsa.RSAPrivateKey, ca: bool) -> x509.Certificate:
        named = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (subject, issuer)]
        builder = (
            x509.CertificateBuilder()
            .subject_name(named[0])
            .issuer_name(named[1])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=100))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
        )
        if not ca:
            builder = builder.add_extension(certs.x509.SubjectAlternativeName(certs._names(names, [])), critical=False)
        return builder.sign(by, hashes.SHA256())

    root, middle, leaf = (rsa.generate_private_key(65537, 2048) for _ in range(3))
    folder.mkdir()
    pem = serialization.Encoding.PEM
    above = signed("Middle", "Root", middle, root, True)
    own = signed("fl", "Middle", leaf, middle, False)
    (folder / "ca.pem").write_bytes(signed("Root", "Root", root, root, True).public_bytes(pem))
    (folder / "server.pem").write_bytes(own.public_bytes(pem) + (above.public_bytes(pem) if chain else b""))
    plain = (pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (folder / "server.key").write_bytes(leaf.private_bytes(*plain))
    return certs.Certificates(folder)


def test_a_companys_own_certificate_with_its_chain(tmp_path: Path) -> None:
    made = company(tmp_path / "own", ["fl.example.org"])
    LinkOptions(certificates=made.folder).check()
    handshake(made, "fl.example.org")
    found = list(doctor._certificates(made.folder, ["fl.example.org"]))
    assert not [check for check in found if check.ok is False], found
    assert any("CN=Root" in check.detail for check in found)
    # Without the authority in between no site can follow the chain, and doctor says so.
    short = company(tmp_path / "short", ["fl.example.org"], chain=False)
    assert any(check.name == "tls" and check.ok is False for check in doctor._certificates(short.folder, []))


def test_what_is_wrong_with_a_certificate_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (company(tmp_path / name, ["fl.example.org"]) for name in ("one", "two"))
    key = two.key.read_bytes()
    for content, word in ((one.key.read_bytes(), "is not the key of"), (b"x", "no certificate and key in PEM")):
        two.key.write_bytes(content)
        with pytest.raises(SettingsError, match=word):
            LinkOptions(certificates=two.folder).check()
    two.key.write_bytes(key)
    with pytest.raises(SettingsError, match="expired"):
        LinkOptions(certificates=company(tmp_path / "old", ["a"], days=-1).folder).check()
    monkeypatch.setattr(certs, "ALWAYS_ADDRESSES", ())
    lacking = company(tmp_path / "lacking", ["fl.example.org"])
    monkeypatch.undo()
    with pytest.raises(SettingsError, match=r"issued for localhost and 127\.0\.0\.1"):
        LinkOptions(certificates=lacking.folder).check()
    assert any("127.0.0.1 too" in check.detail for check in doctor._certificates(lacking.folder, []))


def test_a_new_authority_beside_the_old_one(tmp_path: Path) -> None:
    old = certs.write(tmp_path / "old", ["a"], [], 10)
    new = certs.write(tmp_path / "new", ["a"], [], 10, beside=old.folder)
    assert new.trust.read_bytes() == new.ca.read_bytes() + old.ca.read_bytes()
    assert old.trust == old.ca
    for beside, word in ((tmp_path / "none", "no certificate"), (old.key, "no certificate")):
        with pytest.raises(SettingsError, match=word):
            certs.write(tmp_path / "third", ["a"], [], 10, beside=beside)
    new.certificate.unlink()
    new.key.unlink()
    with pytest.raises(SettingsError, match="has an authority already"):
        certs.write(new.folder, ["a"], [], 10, beside=old.folder)
