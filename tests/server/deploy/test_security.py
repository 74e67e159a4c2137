"""TLS and node keys between real processes: who belongs gets in, nobody else does, and both sides say why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER

from client.app import app
from common import flower
from common.deploy import keys
from common.experiment import Experiment
from common.flower import ROOT
from server.app import run
from server.deploy import certs, nodes
from server.deploy.processes import Family, held_ports, stop
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.patience import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TEXT = """
name = "secure"
rounds = {rounds}
partition.kind = "dirichlet"
partition.clients = 2
strategy.name = "scaffold"
local.epochs = {epochs}
round.deadline_s = 150
round.quorum = {quorum}
"""


class Federation:
    """`python -m server run` with TLS and a file of sites, and `python -m client join` from outside."""

    def __init__(self, folder: Path, text: str, *more: str) -> None:
        self.folder, self.families = folder, dict[str, Family]()
        self.fleet, self.control = held_ports(2)
        self.nodes, self.experiment = folder / "nodes.toml", folder / "experiment.toml"
        self.experiment.write_text(text)
        for name in ("0", "1"):
            self.allow(name)
        options = ["--host", "0.0.0.0", "--fleet-port", str(self.fleet), "--control-port", str(self.control)]
        options += ["--certs", str(folder / "certs"), "--nodes", str(self.nodes), "--run-dir", str(folder / "run")]
        self.start("server", "server", "run", str(self.experiment), *options, *more)

    def allow(self, name: str) -> None:
        if not (self.folder / f"{name}.key").exists():
            nodes.add(self.nodes, name, keys.generate(self.folder / f"{name}.key"))

    def start(self, label: str, *words: str) -> None:
        command = [sys.executable, "-m", *words]
        self.families[label] = Family(command, flower.environment(), self.folder / f"{label}.log", ROOT)

    def client(self, label: str, name: str, *options: str, server: str = "127.0.0.1") -> None:
        words = ["--server", f"{server}:{self.fleet}", "--name", name, "--memory", str(self.folder / "memory" / label)]
        self.start(label, "client", "join", *words, *options)

    def site(self, name: str) -> None:
        self.client(name, name, "--ca", self.ca, "--key", str(self.folder / f"{name}.key"))

    @property
    def ca(self) -> str:
        return str(self.folder / "certs" / "ca.pem")

    def log(self, label: str) -> str:
        log = self.families[label].log
        return log.read_text("utf-8", "replace") if log.exists() else ""

    def wait(self, true: Callable[[], object], seconds: float) -> None:
        until(true, lambda: {label: family.tail() for label, family in self.families.items()}, seconds)

    def code(self, label: str, seconds: float = 120) -> int:
        self.wait(lambda: not self.families[label].running, seconds)
        return int(self.families[label].process.returncode)


@contextmanager
def federation(folder: Path, rounds: int, epochs: int = 1, quorum: int = 2) -> Iterator[Federation]:
    certs.write(folder / "certs", ["fl.example.org"], [], 10)
    certs.write(folder / "other", ["localhost"], [], 10)
    made = Federation(folder, TEXT.format(rounds=rounds, epochs=epochs, quorum=quorum))
    try:
        yield made
    finally:
        stop(list(made.families.values()), 10)


def throw_garbage(here: Federation) -> None:
    """Bytes that are no TLS, and Fleet calls whose key, signature or body is nonsense; the server lives on."""
    for port in (here.fleet, here.control):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(os.urandom(4096))
    trust = grpc.ssl_channel_credentials(Path(here.ca).read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{here.fleet}", trust) as channel:
        for method in ("ActivateNode", "PullMessages", "PushMessages", "PushObject", "Nonsense"):
            call = channel.unary_unary(f"/flwr.proto.Fleet/{method}")
            for key, signature in ((b"", b""), (b"\xff" * 300, b"x"), (os.urandom(10_000), os.urandom(10_000))):
                said = ((PUBLIC_KEY_HEADER, key), (SIGNATURE_HEADER, signature), (TIMESTAMP_HEADER, "x\x7f"))
                with pytest.raises(grpc.RpcError):
                    call(os.urandom(1000), metadata=said if method != "Nonsense" else None, timeout=10)


def test_only_those_who_belong_get_in_and_the_weights_are_the_same(tmp_path: Path) -> None:
    with federation(tmp_path, rounds=4) as here:
        stranger = keys.generate(tmp_path / "stranger.key").with_suffix("")
        key = str(tmp_path / "0.key")
        here.site("0")
        here.wait(lambda: "joined" in here.log("0"), 90)
        here.client("no key", "x", "--ca", here.ca)
        here.client("unknown key", "x", "--ca", here.ca, "--key", str(stranger))
        here.client("key in use", "0", "--ca", here.ca, "--key", key)
        here.client("wrong authority", "x", "--ca", str(tmp_path / "other" / "ca.pem"), "--key", key)
        here.client("no authority", "x", "--key", key, server="localhost.localdomain")
        here.client("not encrypted", "x", "--key", key, "--max-wait", "3")
        # The second site, with its own key and the first one's name.
        here.client("another's name", "0", "--ca", here.ca, "--key", str(tmp_path / "1.key"))
        throw_garbage(here)
        assert here.code("no key") == 2
        assert "join with --key" in here.log("no key")
        for label, words in (("unknown key", "is not registered"), ("key in use", "in use by another process")):
            assert here.code(label) == 2
            assert words in here.log(label)
        assert here.code("wrong authority") == 2
        assert "is not to be trusted" in here.log("wrong authority")
        assert here.code("not encrypted") == 1
        server = here.log("server")
        assert "refused a node: key SHA256:" in server
        assert "is not registered" in server
        assert "in use by another process" in server
        here.wait(lambda: "a node with the key of '1' says that it is '0'" in here.log("server"), 60)
        stop([here.families.pop("another's name")], 10)
        here.site("1")
        assert here.code("server", 200) == 0
        for name in ("0", "1"):
            assert here.families[name].running
        history = RunFolder(tmp_path / "run").history()
    expected = run(InProcessGrid(app), Experiment.load(tmp_path / "experiment.toml"), RunFolder(tmp_path / "inprocess"))
    assert history[-1]["sha256"] == expected["sha256"]


@pytest.mark.rest
def test_a_site_that_is_removed_is_shut_out_and_the_others_go_on(tmp_path: Path) -> None:
    with federation(tmp_path, rounds=100000, epochs=3, quorum=1) as here:
        for name in ("0", "1"):
            here.site(name)
        folder = RunFolder(tmp_path / "run")
        here.wait(lambda: len(folder.history()) >= 3, 120)
        ended = subprocess.run(
            [sys.executable, "-m", "server", "nodes", "remove", "1", "--file", str(here.nodes)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        assert here.code("1") == 2
        assert "is not registered, or was removed" in here.log("1")
        here.wait(lambda: folder.history()[-1]["accepted"] == ["0"], 60)
        here.families["server"].process.terminate()
        assert here.code("server", 60) == 0
        assert "site 1 was removed" in here.log("server")
        history = folder.history()
    assert history[2]["accepted"] == ["0", "1"]
