"""The doctors against real sockets, certificates and Flower's own Fleet service: what is wrong is named."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor as interceptor
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.cli.flower_superlink import _run_fleet_api_grpc_rere
from flwr.superlink.federation import NoOpFederationManager
from prometheus_client import CollectorRegistry

from client.commands import doctor as client_doctor
from client.memory.folder import open_memory
from common import flower
from common.deploy import checks as doctor
from common.deploy import keys, probe
from common.deploy.addresses import ip_address
from common.deploy.checks import Check, each, show, within
from common.deploy.endpoint import Endpoint
from common.errors import SettingsError
from common.files import write_atomically
from server.commands import doctor as server_doctor
from server.deploy import nodes
from server.deploy.certs import write
from server.deploy.processes import held_ports
from server.deploy.superlink import SuperLink

pytestmark = pytest.mark.timeout(120)

DAY = datetime.timedelta(days=1)


def one(checks: Sequence[Check] | Iterator[Check], name: str) -> Check:
    """The one check of this name that is not well, else the first one."""
    found = [check for check in checks if check.name == name]
    assert found, name
    return next((check for check in found if check.ok is not True), found[0])


def words(checks: Sequence[Check]) -> dict[str, str]:
    """Name -> ok, FAIL, warn or -; the worst one where there are several."""
    order = ["ok", "-", "warn", "FAIL"]
    result: dict[str, str] = {}
    for check in checks:
        result[check.name] = max(check.word, result.get(check.name, "ok"), key=order.index)
    return result


# What both sides share.


def test_only_failures_fail(capsys: pytest.CaptureFixture[str]) -> None:
    well, warned, skipped = Check("a", True, "x"), Check("b", None, "y", "do"), Check("c", None, "z")
    assert show([well, warned, skipped]) == 0
    assert show([well]) == 0
    assert show([]) == 0
    capsys.readouterr()
    assert show([well, Check("d", False, "broken", "mend it"), warned, skipped]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    a             x",
        "FAIL  d             broken",
        "                    -> mend it",
        "warn  b             y",
        "                    -> do",
        "-     c             z",
        "1 failed, 1 warnings",
    ]


def test_a_check_that_raises_or_hangs_is_a_check() -> None:
    def raising(error: Exception) -> Callable[[], Iterator[Check]]:
        def make() -> Iterator[Check]:
            yield Check("x", True, "before")
            raise error

        return make

    [unforeseen] = each("x", raising(KeyError("y")))
    assert (unforeseen.ok, unforeseen.detail) == (False, "KeyError: 'y'")
    [typed] = each("x", raising(SettingsError("no such thing")))
    assert (typed.ok, typed.detail) == (False, "no such thing")

    hanging = threading.Event()

    def hang() -> Iterator[Check]:
        yield Check("x", True, "before")
        hanging.wait(20)

    started = time.monotonic()
    assert [check.word for check in each("x", hang, 0.2)] == ["ok", "warn"]
    assert time.monotonic() - started < 2
    hanging.set()
    with pytest.raises(TimeoutError):
        within(0.1, lambda: time.sleep(1))
    assert within(5, lambda: 7) == 7


def test_versions_name_what_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    [check] = doctor.versions()
    assert check.ok, check
    assert f"torch {torch.__version__.partition('+')[0]}" in check.detail
    [check] = doctor.versions(["flwr", "no-such-package"])
    assert (check.ok, check.detail) == (False, "not installed: no-such-package")
    monkeypatch.setattr(flower, "installed_version", lambda: "1.43.0")
    [check] = doctor.versions()
    assert not check.ok
    assert "flwr 1.43.0 is installed" in check.detail
    monkeypatch.setattr(doctor, "PYTHONS", ((3, 99), (4, 0)))
    [check] = doctor.versions()
    assert not check.ok
    assert "3.99" in check.advice


def test_folders_are_really_written_to(tmp_path: Path) -> None:
    assert words(list(doctor.writable("state", tmp_path))) == {"state": "ok", "disk": "ok"}
    assert list(tmp_path.iterdir()) == []
    assert words(list(doctor.writable("state", tmp_path / "a" / "b"))) == {"state": "ok", "disk": "ok"}
    assert list(tmp_path.iterdir()) == []
    assert one(list(doctor.writable("state", tmp_path, 1e15)), "disk").word == "warn"
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "sub", Path("/proc/sys")):
        assert words(list(doctor.writable("state", folder))) == {"state": "FAIL"}


@pytest.mark.parametrize(("mode", "said"), [(0o600, []), (0o400, []), (0o640, ["warn"]), (0o644, ["warn"])])
def test_secrets_are_private(tmp_path: Path, mode: int, said: list[str]) -> None:
    path = tmp_path / "key"
    path.write_text("x")
    path.chmod(mode)
    assert [check.word for check in doctor.private("key", path)] == said


# Certificates and servers of all kinds.


class Authority:
    """A CA; always under the same name, as `certs` makes it."""

    def __init__(self, folder: Path, name: str = "Fedkeel federation CA") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / "ca.pem"
        self.save(self.ca, self.sign(self.name, self.key, 3650 * DAY, [], ca=True))

    def sign(
        self, subject: x509.Name, key: Any, lasts: datetime.timedelta, names: Sequence[str], *,
        start: datetime.timedelta = -DAY, ca: bool = False,
    ) -> x509.Certificate:  # fmt: skip
        now = datetime.datetime.now(datetime.UTC)
        alternatives = [
            x509.IPAddress(address) if (address := ip_address(name)) else x509.DNSName(name) for name in names
        ]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + start)
            .not_valid_after(now + lasts)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def server(self, names: Sequence[str], lasts: datetime.timedelta = 365 * DAY, **more: Any) -> Path:
        """A certificate and its key beside the authority's; returns the folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        self.save(self.folder / "server.pem", self.sign(subject, key, lasts, names, **more))
        (self.folder / "server.key").write_bytes(keys.private_pem(key))
        (self.folder / "server.key").chmod(0o600)
        return self.folder

    @staticmethod
    def save(path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP server of a thread a connection; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        end = threading.Event()

        def handle(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                answer(connection)

        def accept() -> None:
            while not end.is_set():
                with contextlib.suppress(TimeoutError):
                    threading.Thread(target=handle, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        end.set()
        thread.join()


@contextlib.contextmanager
def tls_server(folder: Path, alpn: Sequence[str] = ("h2",)) -> Iterator[int]:
    """Shakes hands with the certificate of a folder, and no more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.set_alpn_protocols(list(alpn))

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(1)

    with serving(answer) as port:
        yield port


class Fleet:
    """Flower's own Fleet service in this process."""

    def __init__(self, certs: Path | None = None, node_keys: bool = False) -> None:
        store = ObjectStoreFactory()
        self.factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), store)
        self.factory.state()
        self.port = held_ports(1)[0]
        certificates = None
        if certs:
            ca, certificate, key = (certs / name for name in ("ca.pem", "server.pem", "server.key"))
            certificates = (ca.read_bytes(), certificate.read_bytes(), key.read_bytes())
        self.server = _run_fleet_api_grpc_rere(
            f"127.0.0.1:{self.port}",
            self.factory,
            store,
            node_keys,
            certificates,
            [interceptor.NodeAuthServerInterceptor(self.factory)],
        )

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(None).wait()

    def let_in(self, public: Path) -> None:
        pem = keys.read_public(public.read_bytes(), str(public))
        self.factory.state().create_node("", "", pem, 0)

    def nodes(self) -> list[str]:
        """The states of all nodes, but of those that were taken out."""
        found = self.factory.state().get_node_info()
        return [node.status for node in found if node.status != "unregistered"]


def site(server: str, folder: Path, **more: Any) -> list[Check]:
    """The checks of a site whose memory is in `folder`."""
    return list(client_doctor.checks(server, names=["a"], memory=folder / "memory", **more))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certs")


def test_a_site_without_a_fault(authority: Authority, tmp_path: Path) -> None:
    folder = authority.server(["localhost", "127.0.0.1"])
    public = keys.generate(tmp_path / "a.key")
    (tmp_path / "policy.toml").write_text("max_steps = 10")
    np.savez(tmp_path / "a.npz", x=np.zeros((5, 3)), y=np.zeros(5, int))
    with Fleet(folder, node_keys=True) as fleet:
        fleet.let_in(public)
        before = fleet.nodes()
        checks = site(
            f"localhost:{fleet.port}",
            tmp_path,
            ca=authority.ca,
            key=str(tmp_path / "{name}.key"),
            data=str(tmp_path / "{name}.npz"),
            policy=tmp_path / "policy.toml",
        )
        assert set(words(checks).values()) == {"ok"}, checks
        assert fleet.nodes() == before
    assert [check.name for check in checks] == [
        "versions", "key", "dns", "port", "tls", "authority", "expiry", "names", "fleet", "clock", "node key",
        "device", "memory", "disk", "data", "policy",
    ]  # fmt: skip
    assert "max_steps = 10" in one(checks, "policy").detail
    assert "x float64[5, 3], y int64[5]" in one(checks, "data").detail


def test_a_name_that_the_certificate_lacks_is_told_with_those_that_it_has(authority: Authority, tmp_path: Path) -> None:
    folder = authority.server(["fl.example.org", "10.0.0.5"])
    with tls_server(folder) as port:
        checks = site(f"localhost:{port}", tmp_path, ca=authority.ca)
        assert one(checks, "names").detail == "the certificate is for fl.example.org, 10.0.0.5; you typed localhost"
        assert "certs --host localhost" in one(checks, "names").advice
        checks = site(f"127.0.0.1:{port}", tmp_path, ca=authority.ca)
        assert "certs --ip 127.0.0.1" in one(checks, "names").advice
    assert words(checks) == {
        "versions": "ok", "dns": "ok", "port": "ok", "tls": "ok", "authority": "ok", "expiry": "ok", "names": "FAIL",
        "fleet": "-", "device": "ok", "memory": "ok", "disk": "ok", "policy": "warn",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["Fedkeel federation CA", "Another CA"])
def test_another_authority_is_told_also_under_the_same_name(authority: Authority, tmp_path: Path, name: str) -> None:
    folder = authority.server(["localhost"])
    other = Authority(tmp_path / "other", name)
    with tls_server(folder) as port:
        checks = site(f"localhost:{port}", tmp_path, ca=other.ca)
    assert words(checks)["authority"] == "FAIL"
    assert "is not signed by the authority in" in one(checks, "authority").detail
    assert words(checks)["names"] == "ok"


@pytest.mark.parametrize(
    "content", [None, "", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_ca_file_that_is_none(authority: Authority, tmp_path: Path, content: str | None) -> None:
    folder = authority.server(["localhost"])
    ca = tmp_path / "ca.pem"
    if content is not None:
        ca.write_text(content)
    with tls_server(folder) as port:
        check = one(site(f"localhost:{port}", tmp_path, ca=ca), "authority")
    assert not check.ok
    assert "cannot be used" in check.detail


@pytest.mark.parametrize(
    ("start", "lasts", "word", "text"),
    [
        (-10, -1, "FAIL", "expired"),
        (1, 10, "FAIL", "valid only from"),
        (-10, 29, "warn", "28 days"),
        (-10, 31, "ok", "30 days"),
    ],
)
def test_expiry(authority: Authority, tmp_path: Path, start: int, lasts: int, word: str, text: str) -> None:
    folder = authority.server(["localhost"], lasts * DAY, start=start * DAY)
    with tls_server(folder) as port:
        checks = site(f"localhost:{port}", tmp_path, ca=authority.ca)
    assert (words(checks)["expiry"], "authority" in words(checks)) == (word, word != "FAIL")
    assert text in one(checks, "expiry").detail
    checks = list(server_doctor._certificates(folder, ["localhost"]))
    assert words(checks)["tls expiry"] == word
    assert text in one(checks, "tls expiry").detail


def test_tls_without_ca_and_ca_without_tls(authority: Authority, tmp_path: Path) -> None:
    folder = authority.server(["localhost"])
    with Fleet(folder) as secure, Fleet() as plain:
        checks = site(f"localhost:{secure.port}", tmp_path)
        assert one(checks, "tls").detail == "the server speaks TLS and this site would not"
        checks = site(f"localhost:{plain.port}", tmp_path, ca=authority.ca)
        assert one(checks, "tls").detail == "the server speaks gRPC without TLS and this site would speak TLS"
        checks = site(f"localhost:{plain.port}", tmp_path, approve="all")
        assert set(words(checks).values()) == {"ok"}
        assert one(checks, "node key").detail == "the server asks for none"
        assert plain.nodes() == []


def test_without_ca_another_machine_needs_an_authority_of_the_systems(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_doctor, "is_loopback", lambda host: False)
    with tls_server(authority.server(["localhost"])) as port:
        check = one(site(f"localhost:{port}", tmp_path), "authority")
        assert "is not signed by an authority that this system knows" in check.detail
        assert "--ca" in check.advice
        assert one(site(f"localhost:{port}", tmp_path, insecure=True), "tls").word == "FAIL"
    assert one(site(f"localhost:{port}", tmp_path, ca=authority.ca, insecure=True), "server").word == "FAIL"


def test_a_plain_connection_to_another_machine_is_refused_unless_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_doctor, "is_loopback", lambda host: False)
    with Fleet() as plain:
        check = one(site(f"127.0.0.1:{plain.port}", tmp_path), "tls")
        assert not check.ok
        assert "--insecure" in check.advice
        assert one(site(f"127.0.0.1:{plain.port}", tmp_path, insecure=True), "tls").ok


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_what_is_no_fleet_port_is_recognized(authority: Authority, tmp_path: Path) -> None:
    folder = authority.server(["localhost"])
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as web:
        threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
        assert one(site(f"127.0.0.1:{web.server_port}", tmp_path), "tls").detail.startswith("this is a web server")
        web.shutdown()
    with Endpoint("0", CollectorRegistry(), lambda: (True, {})) as metrics:
        assert one(site(f"127.0.0.1:{metrics.port}", tmp_path), "tls").detail.startswith("this is a web server")
    with tls_server(folder, ["http/1.1"]) as port:
        check = one(site(f"localhost:{port}", tmp_path, ca=authority.ca), "tls")
        assert "but not HTTP/2" in check.detail
        assert "8000" in check.advice
    with serving(lambda connection: None) as port:
        assert one(site(f"127.0.0.1:{port}", tmp_path), "tls").detail.startswith("closes the connection")
    with serving(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n") or time.sleep(0.2)) as port:
        assert one(site(f"127.0.0.1:{port}", tmp_path), "tls").detail == "speaks neither TLS nor gRPC"


def test_a_grpc_server_without_the_fleet_service(tmp_path: Path) -> None:
    import concurrent.futures

    import grpc

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        check = one(site(f"127.0.0.1:{port}", tmp_path), "fleet")
    finally:
        server.stop(None).wait()
    assert (check.ok, check.detail) == (False, "this is a gRPC server, but not Flower's Fleet service")


@pytest.mark.slow
def test_nothing_takes_long_when_nothing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that nobody answers, a name server that says nothing: seconds, and each is named."""
    with serving(lambda connection: time.sleep(15)) as port:
        started = time.monotonic()
        checks = site(f"127.0.0.1:{port}", tmp_path, ca=tmp_path / "ca.pem")
        assert time.monotonic() - started < 20
    assert one(checks, "tls").detail == "accepts connections and says nothing"
    assert words(checks)["memory"] == "ok"

    with socket.create_server(("127.0.0.1", 0), backlog=1) as full:
        # Its queue is full: further connections are not even refused.
        waiting = [socket.socket() for _ in range(4)]
        for each_ in waiting:
            each_.setblocking(False)
            each_.connect_ex(full.getsockname())
        started = time.monotonic()
        checks = site(f"127.0.0.1:{full.getsockname()[1]}", tmp_path)
        assert time.monotonic() - started < 20
        for each_ in waiting:
            each_.close()
    assert one(checks, "port").detail.endswith("does not answer")

    monkeypatch.setattr(probe, "DNS_S", 0.2)
    monkeypatch.setattr(probe.socket, "getaddrinfo", lambda *_, **__: time.sleep(5))
    assert "no answer within" in one(site("fl.example.org:9092", tmp_path), "dns").detail


def test_names_and_ports_that_are_wrong(tmp_path: Path) -> None:
    [port] = held_ports(1)
    assert one(site(f"127.0.0.1:{port}", tmp_path), "port").detail == f"127.0.0.1:{port} refuses connections"
    assert "is unknown here" in one(site("no-such-host.invalid:9092", tmp_path), "dns").detail
    for server in ("host", "host:0", "host:70000", "http://host:1", "::1:9092", "", "a b:1"):
        assert one(site(server, tmp_path), "server").word == "FAIL"


def test_node_keys_known_unknown_and_missing(authority: Authority, tmp_path: Path) -> None:
    folder = authority.server(["localhost"])
    for name in ("a", "b"):
        keys.generate(tmp_path / f"{name}.key")
    with Fleet(folder, node_keys=True) as fleet:
        fleet.let_in(tmp_path / "a.key.pub")
        fleet_before = fleet.nodes()

        def ask(key: str | None) -> Check:
            checks = site(f"localhost:{fleet.port}", tmp_path, ca=authority.ca, key=key and str(tmp_path / key))
            assert one(checks, "fleet").ok
            return one(checks, "node key")

        assert ask("a.key").ok
        assert "does not know the key" in ask("b.key").detail
        assert "nodes add NAME b.key.pub" in ask("b.key").advice
        assert "no --key was given" in ask(None).detail
        assert fleet.nodes() == fleet_before


@pytest.mark.parametrize(
    ("ahead_s", "text"),
    [
        (3, ""),
        (-290, ""),
        (20, "0 to 5 min ahead of"),
        (400, "5 to 10 min ahead of"),
        (-400, "5 to 10 min behind"),
        (3000, "45 to 50 min ahead of"),
        (86400, "more than 60 min off"),
    ],
)
def test_a_wrong_clock_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int, text: str) -> None:
    """By Flower's own judgement: the server's clock is moved the other way."""
    right = interceptor.now
    monkeypatch.setattr(interceptor, "now", lambda: right() - datetime.timedelta(seconds=ahead_s))
    with Fleet() as fleet:
        check = one(site(f"127.0.0.1:{fleet.port}", tmp_path), "clock")
    assert check.ok is (not text)
    assert text in check.detail


# What a site has.


def test_keys_of_all_wrong_kinds(tmp_path: Path) -> None:
    def ask() -> Check:
        return one(list(each("key", lambda: client_doctor._key(path))), "key")

    path = tmp_path / "a.key"
    assert "cannot be read" in ask().detail
    path.write_text("no key")
    assert not ask().ok
    path.write_bytes(keys.private_pem(ec.generate_private_key(ec.SECP256R1())))
    assert "P-384" in ask().detail
    key = ec.generate_private_key(ec.SECP384R1())
    encrypted = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted))
    assert not ask().ok
    path.unlink()
    keys.generate(path)
    assert ask().ok
    path.chmod(0o644)
    assert (ask().word, ask().advice) == ("warn", f"chmod 600 {path}")
    path.chmod(0o600)
    keys.generate(tmp_path / "b.key")
    (tmp_path / "a.key.pub").write_bytes((tmp_path / "b.key.pub").read_bytes())
    assert "is not the public key of" in ask().detail


def test_data_files_of_all_wrong_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"

    def ask() -> Check:
        return one(list(client_doctor._data(path)), "data")

    assert ask().detail == f"there is no {path}"
    path.write_bytes(b"no archive")
    assert "cannot be read as .npz" in ask().detail
    np.savez(path, x=np.array([{}], dtype=object), y=np.zeros(1, int))
    assert "Python objects" in ask().detail
    np.savez(path, rows=np.zeros((2, 3)), y=np.zeros(2, int))
    assert (ask().word, "task.inputs" in ask().advice) == ("warn", True)
    np.savez(path, x=np.arange(1000.0).reshape(10, 100), y=np.zeros(10, int))
    assert ask().ok
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    assert "damaged" in ask().detail
    path.write_bytes(content[: len(content) // 2])
    assert "cannot be read as .npz" in ask().detail
    path = tmp_path / "a.csv"
    path.write_text("1,2")
    assert ask().ok
    path = tmp_path / "images"
    path.mkdir()
    (path / "cat").mkdir()
    assert ask().detail == f"{path} is a folder of 1 entries; its content is the task's affair"


def test_a_device_that_is_not_there() -> None:
    [check] = each("device", lambda: client_doctor._device("cuda:99"))
    assert not check.ok
    assert "cuda:99" in check.detail


def test_a_memory_in_use_and_one_that_cannot_be(tmp_path: Path) -> None:
    def ask(folder: Path) -> dict[str, str]:
        return words(list(each("memory", lambda: client_doctor._memory(folder, [folder, folder / "a"]))))

    memory = tmp_path / "memory"
    assert ask(memory) == {"memory": "ok", "disk": "ok"}
    assert not memory.exists()
    with open_memory(memory / "a"):
        assert ask(memory)["memory"] == "FAIL"
    assert ask(memory)["memory lock"] == "ok"
    (tmp_path / "file").write_text("x")
    assert ask(tmp_path / "file") == {"memory": "FAIL"}


def test_a_policy_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("max_step = 10")
    [check] = each("policy", lambda: client_doctor._policy(tmp_path / "policy.toml"))
    assert not check.ok
    assert "max_step" in check.detail


# What a server has.


def server(**more: Any) -> list[Check]:
    fleet, control = held_ports(2)
    return list(server_doctor.checks(**({"fleet_port": fleet, "control_port": control} | more)))


EXPERIMENT = "name = 'small'\ntask.hidden = 4\npartition.clients = 3\n"


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
def test_a_server_without_a_fault(tmp_path: Path) -> None:
    Path("a.toml").write_text(EXPERIMENT)
    made = write(tmp_path / "certs", ["fl.example.org"], ["10.0.0.5"], 825)
    nodes.add(tmp_path / "nodes.toml", "site-a", keys.generate(tmp_path / "a.key"))
    checks = server(
        experiment=Path("a.toml"),
        host="0.0.0.0",
        certs=made.folder,
        nodes=tmp_path / "nodes.toml",
        state=tmp_path / "state",
        names=["fl.example.org"],
    )
    assert set(words(checks).values()) == {"ok"}, checks
    assert "3 clients" in one(checks, "experiment").detail
    assert "site-a" in one(checks, "nodes").detail
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("_here")
def test_an_experiment_that_cannot_run(tmp_path: Path) -> None:
    Path("a.toml").write_text(EXPERIMENT + "rnds = 3")
    assert "rnds" in one(server(experiment=Path("a.toml")), "experiment").detail
    assert "cannot be read" in one(server(experiment=Path("b.toml")), "experiment").detail
    Path("a.toml").write_text("task.name = 'npz'\ntask.file = 'nowhere.npz'")
    assert "nowhere.npz" in one(server(experiment=Path("a.toml")), "experiment").detail


@pytest.mark.usefixtures("_here")
def test_a_task_of_ones_own_must_be_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine_own.py").write_text("from common.tasks.digits import Digits\ndef task(*given): return Digits(*given)\n")
    Path("a.toml").write_text("task.name = 'mine_own:task'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    checks = server(experiment=Path("a.toml"))
    assert words(checks)["experiment"] == "ok"
    assert words(checks)["task module"] == "FAIL"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert words(server(experiment=Path("a.toml")))["task module"] == "ok"
    assert server_doctor._module("common.tasks.digits", None).ok


def test_ports_in_use_and_addresses_of_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = one(server(fleet_port=port), "ports")
        assert check.detail == f"fleet port {port} of 127.0.0.1 is in use"
        assert "--fleet-port" in check.advice
    assert one(server(host="192.0.2.1", insecure=True), "ports").word == "FAIL"
    assert one(server(host="0.0.0.0", insecure=True), "ports").ok


def test_an_open_port_without_tls_is_refused_unless_typed() -> None:
    assert "--host 0.0.0.0 is open" in one(server(host="0.0.0.0"), "tls").detail
    assert "--control-host 0.0.0.0" in one(server(control_host="0.0.0.0"), "tls").detail
    assert "tls" not in words(server(host="0.0.0.0", insecure=True))
    assert "tls" not in words(server(host="127.0.0.1"))


def certificates(folder: Path, *typed: str) -> dict[str, str]:
    return words(list(each("tls", lambda: server_doctor._certificates(folder, typed))))


WELL = {"tls": "ok", "tls key": "ok", "tls expiry": "ok", "tls ca": "ok", "tls names": "ok"}


def test_certificates_as_they_should_be(tmp_path: Path) -> None:
    made = write(tmp_path, ["fl.example.org", "*.lab.example.org"], ["10.0.0.5", "2001:db8::5"], 825)
    typed = ("fl.example.org", "FL.Example.org.", "a.lab.example.org", "10.0.0.5", "2001:db8:0::5", "localhost", "::1")
    assert certificates(made.folder, *typed) == WELL
    for name in ("example.org", "b.a.lab.example.org", "lab.example.org", "10.0.0.6", "2001:db8::6", "localhost2"):
        assert certificates(made.folder, name) == WELL | {"tls names": "FAIL"}


def test_certificates_for_this_machine_alone(tmp_path: Path) -> None:
    assert certificates(write(tmp_path, [], [], 825).folder) == WELL | {"tls names": "warn"}


def test_certificates_that_do_not_belong_together(authority: Authority, tmp_path: Path) -> None:
    folder = authority.server(["fl.example.org", "127.0.0.1"])
    assert certificates(folder) == WELL
    content = {name: (folder / name).read_bytes() for name in ("ca.pem", "server.pem", "server.key")}

    def changed(name: str, new: bytes) -> dict[str, str]:
        (folder / name).write_bytes(new)
        try:
            return certificates(folder)
        finally:
            (folder / name).write_bytes(content[name])

    other = Authority(tmp_path / "other")
    other.server(["fl.example.org"])
    others = {name: (other.folder / name).read_bytes() for name in content}
    assert changed("server.key", others["server.key"]) == WELL | {"tls": "FAIL", "tls key": "FAIL"}
    assert changed("ca.pem", others["ca.pem"]) == WELL | {"tls": "FAIL"}
    assert changed("server.pem", others["server.pem"]) == WELL | {"tls": "FAIL", "tls key": "FAIL"}
    assert changed("server.key", b"no key")["tls key"] == "FAIL"
    assert changed("server.pem", b"no certificate") == {"tls": "FAIL"}
    assert certificates(folder) == WELL
    (folder / "server.key").chmod(0o644)
    assert certificates(folder) == WELL | {"tls key": "warn"}
    (folder / "server.key").unlink()
    assert certificates(folder) == {"tls": "FAIL"}


def test_a_certificate_that_may_not_serve(authority: Authority) -> None:
    """What only a handshake shows: another purpose than a server's."""
    folder = authority.server(["fl.example.org", "127.0.0.1"])
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("fl.example.org"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    purpose = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = x509.CertificateBuilder(authority.name, authority.name, key.public_key(), 7, now - DAY, now + 99 * DAY)
    certificate = builder.add_extension(names, False).add_extension(purpose, True).sign(authority.key, hashes.SHA256())
    authority.save(folder / "server.pem", certificate)
    assert certificates(folder) == WELL | {"tls": "FAIL"}


def test_nodes_files(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"

    def ask(certs: Path | None = tmp_path) -> Check:
        return one(list(each("nodes", lambda: server_doctor._nodes(path, certs))), "nodes")

    assert not ask().ok
    write_atomically(path, b"[nodes]\n")
    assert ask().word == "warn"
    public = keys.generate(tmp_path / "a.key")
    nodes.add(path, "a", public)
    assert ask().ok
    assert "--certs" in ask(None).advice
    line = public.read_text().split(" ", 2)[:2]
    path.write_text(f'[nodes]\na = "{" ".join(line)}"\nb = "{" ".join(line)}"\n')
    assert not ask().ok
    for text in ("[nodes]\na = 'no key'\n", "nodes = 1", "[nodes", "[nodes]\na = 1\na = 2\n"):
        path.write_text(text)
        assert not ask().ok, text


@pytest.mark.processes
def test_a_running_superlink_is_asked(tmp_path: Path) -> None:
    with SuperLink(tmp_path / "link.log") as link:
        checks = server(superlink=link.control_address, run_dir=tmp_path / "run")
        assert set(words(checks).values()) == {"ok"}, checks
        assert "0 nodes are online" in one(checks, "superlink").detail
        assert words(checks)["clock"] == "ok"
        assert "control port" in one(server(superlink=link.fleet_address), "superlink").advice
        assert set(words(site(link.fleet_address, tmp_path, approve="all")).values()) == {"ok"}
        assert link.control.nodes() == []
        assert one(site(link.control_address, tmp_path), "tls").detail.startswith("this is a web server")
    check = one(server(superlink=link.control_address), "superlink")
    assert not check.ok
    assert "superlink" in check.advice


def test_the_commands_print_and_return_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet, control = held_ports(2)
    run_dir = tmp_path / "run"
    assert server_doctor.doctor_command(fleet_port=fleet, control_port=control, run_dir=run_dir) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all well"
    assert client_doctor.doctor_command(f"127.0.0.1:{fleet}", memory=tmp_path) == 1
    assert "refuses connections" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
