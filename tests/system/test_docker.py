"""Federations in containers: the same weights as in one process, also after a kill; TLS, keys, any uid, nothing to
write on but volumes and /tmp."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.docker_helpers import IMAGE, TORCH, Federation, bundle_files, engine, shell, until

pytestmark = [pytest.mark.rest, pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

NAMED, KEYED = "docker/compose.named.yml", "docker/compose.named-tls.yml"

# All three in every round: a round that lacks one is void and tried again with the same three.
KILLED = """
name = "killed"
rounds = 7
[task]
name = "digits"
[partition]
kind = "dirichlet"
alpha = 0.5
clients = 3
[strategy]
name = "scaffold"
[local]
lr = 0.05
batch_size = 16
steps = 1500
[round]
quorum = 3
deadline_s = 240.0
max_void = 20
"""
TOML_KEYED = """
name = "keyed"
rounds = 2
[task]
name = "digits"
[partition]
clients = 2
[strategy]
name = "scaffold"
[round]
deadline_s = 240.0
"""


SCALED = """
name = "scaled"
rounds = 12
[task]
name = "digits"
[strategy]
name = "scaffold"
[local]
steps = 100
[round]
wait_for = 3
quorum = 1
deadline_s = 240.0
"""


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The image, built as `docker compose build` does; layers that are there already are kept."""
    with engine():
        env = {"IMAGE": IMAGE, "TORCH": TORCH}
        shell("docker", "compose", "-f", "docker-compose.yml", "build", "-q", "superlink", timeout=600, env=env)
        yield IMAGE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of experiments that a federation reads."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "killed.toml").write_text(KILLED, "utf-8")
    (folder / "scaled.toml").write_text(SCALED, "utf-8")
    (folder / "keyed.toml").write_text(TOML_KEYED, "utf-8")
    return folder


def same_weights(history: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert [r["round"] for r in history] == [r["round"] for r in reference]
    assert [r["accepted"] for r in history] == [r["accepted"] for r in reference]
    assert [r["sha256"] for r in history] == [r["sha256"] for r in reference]


def test_the_image_holds_the_bundle_and_no_more(image: str) -> None:
    """Every file that Flower's bundle takes, and of the rest of the repository only what the build itself reads."""
    listing = "find /app -name '*.pyc' -prune -o -type f -printf '%P\\n'"
    found = set(shell("docker", "run", "--rm", image, "sh", "-c", listing).stdout.split())
    found = {path for path in found if "/templates/" not in path}  # of pages and kits, which no server app makes
    own = {f"docker/{name}" for name in ("requirements.py", "slim.sh", "used.py", "health.py")}
    assert found == bundle_files() | {"constraints.txt"} | own
    packages = shell("docker", "run", "--rm", image, "python", "-m", "pip", "list", "--format", "json").stdout
    installed = {each["name"] for each in json.loads(packages)}
    assert not installed & {"pytest", "hypothesis", "mypy", "ruff", "torchvision"}
    assert {"torch", "flwr"} <= installed


# The container's first process is an init that ends with this one.
KILL_MAIN = "import psutil; psutil.Process(1).children()[0].kill()"


def test_killed_containers_cost_no_bit(image: str, folder: Path) -> None:
    """SCAFFOLD with three clients under a random uid: a client is killed while it trains and started again, then the
    SuperLink with the server app in it, which the engine starts again, and so the run is resumed."""
    with Federation(folder, "killed.toml", [NAMED]) as federation:
        clients = ["client-0", "client-1", "client-2"]
        federation.up("superlink", *clients)
        federation.up("server", wait=False)
        until(lambda: len(federation.history("killed")) >= 2, 300, "two rounds")
        federation.compose("kill", "-s", "KILL", "client-1")
        assert federation.ended("client-1") == 137
        federation.compose("start", "client-1")
        until(lambda: len(federation.history("killed")) >= 4, 300, "two more rounds")
        federation.compose("exec", "-T", "superlink", "python", "-c", KILL_MAIN, check=False)
        assert federation.wait("server", 300) == 0
        history = federation.history("killed")
        assert any("1" in tried["dropped"] for record in history for tried in record["void"])
        assert {record["generation"] for record in history} == {history[0]["generation"]}
        assert federation.inspect("superlink")["RestartCount"] == 1
        assert "resuming after round" in federation.compose("logs", "--no-color", "server").stdout
        same_weights(history, federation.in_process("killed.toml"))
        for service in ("superlink", "server", *clients):
            about = federation.inspect(service)
            assert about["HostConfig"]["ReadonlyRootfs"]
            assert about["Config"]["User"] == federation.user
            assert not any(about["NetworkSettings"]["Ports"].values())
        federation.compose("stop", timeout=100)
        assert {service: federation.ended(service) for service in ("superlink", *clients)} == dict.fromkeys(
            ("superlink", *clients), 0
        )


MAKE_KEYS = """set -e
python -m server certs --host superlink --host control --out /deploy
for name in 0 1 2 3; do python -m client keygen --out /deploy/keys/$name.key; done
for name in 0 1; do python -m server nodes add $name /deploy/keys/$name.key.pub --file /deploy/nodes/nodes.toml; done
"""


def test_tls_with_node_keys_admits_only_known_keys(image: str, folder: Path, tmp_path: Path) -> None:
    """The files are made as the overlay's head says; a client whose key is not in nodes.toml is refused until it is."""
    deploy = tmp_path / "deploy"
    (deploy / "nodes").mkdir(parents=True)
    (deploy / "keys").mkdir()
    env = {"DEPLOY": str(deploy), "FLEET_PORT": "0"}
    with Federation(folder, "keyed.toml", [NAMED, "docker/compose.tls.yml", KEYED], env) as federation:
        if os.getuid() == 0:
            for path in (deploy, deploy / "nodes", deploy / "keys"):
                os.chown(path, federation.uid, federation.uid)
        in_image = [*federation.bare(), "-v", f"{deploy}:/deploy", image]
        shell(*in_image, "sh", "-c", MAKE_KEYS)
        federation.up("superlink", "client-0", "client-1")
        assert federation.inspect("superlink")["NetworkSettings"]["Ports"]["9092/tcp"]
        federation.up("server", "client-2", wait=False)
        assert federation.wait("server", 300) == 0
        same_weights(federation.history("keyed"), federation.in_process("keyed.toml"))
        log = federation.compose("logs", "--no-color", "client-2").stdout
        assert "refuses this node" in log
        assert "is not registered" in log
        assert "joined" not in log
        assert "refused a node: key" in federation.compose("logs", "--no-color", "superlink").stdout
        add = "python -m server nodes add 2 /deploy/keys/2.key.pub --file /deploy/nodes/nodes.toml"
        shell(*in_image, *add.split())
        until(lambda: federation.inspect("client-2")["State"]["Health"]["Status"] == "healthy", 120, "client-2 to join")


def test_clients_are_scaled_up_and_down_while_a_run_goes_on(image: str, folder: Path) -> None:
    """Three of six names are there, then all six, then two; each name has one bearer at a time and a memory that stays
    with it; no generation is lost. The control port answers no client."""
    with Federation(folder, "scaled.toml", env={"CLIENTS": "6"}) as federation:
        federation.scale(3)
        federation.up("server", wait=False)
        until(lambda: len(federation.history("scaled")) >= 2, 300, "two rounds")
        federation.scale(6)
        until(lambda: len(federation.history("scaled")[-1]["sampled"]) == 6, 200, "six clients in a round")
        federation.scale(2)
        assert federation.wait("server", 400) == 0
        history = federation.history("scaled")
        assert len(history) == 12
        assert set(history[0]["sampled"]) == {"0", "1", "2"}
        assert {record["generation"] for record in history} == {1}
        code = "import socket; socket.create_connection(('superlink', 8000), 5)"
        asked = federation.compose("exec", "-T", "client", "python", "-c", code, check=False)
        assert asked.returncode == 1
        assert "refused" in asked.stderr


def test_a_sites_image_is_small_and_joins(image: str, tmp_path: Path) -> None:
    """Below 1.3 GB on python:3.11-slim-bookworm, which is 0.13 GB; a stand-in for that base may be larger. Its command
    line works without what it was built without."""
    shell(
        *("docker", "build", "-q", "-f", "docker/Dockerfile", "--target", "client", "-t", "fedkeel-client:test"),
        *("--build-arg", f"TORCH={TORCH}", "."),
        timeout=600,
    )
    size, base = (
        int(shell("docker", "image", "inspect", "-f", "{{.Size}}", name).stdout)
        for name in ("fedkeel-client:test", "python:3.11-slim-bookworm")
    )
    bare = ["docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "fedkeel-client:test"]
    assert "--approve" in shell(*bare, "python", "-m", "client", "join", "--help").stdout
    code = "import client.app, client.node.resident, sys; print('ray' in sys.modules, 'pandas' in sys.modules)"
    assert shell(*bare, "python", "-c", code).stdout.split() == ["False", "False"]
    assert size - base + 0.13e9 < 1.3e9, f"{size / 1e9:.2f} GB on a base of {base / 1e9:.2f} GB"
