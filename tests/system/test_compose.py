"""The container files without an engine: they parse, agree with each other and with the command lines that they use."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from common.experiment import Experiment
from common.flower import ROOT
from server.rounds.prepare import prepare
from tests.support.docker_helpers import bundle_files

BASE, TLS, GPU = "docker-compose.yml", "docker/compose.tls.yml", "docker/compose.gpu.yml"
NAMED, KEYED = "docker/compose.named.yml", "docker/compose.named-tls.yml"
TOGETHER = [
    [BASE],
    [BASE, TLS],
    [BASE, NAMED],
    [BASE, NAMED, GPU],
    [BASE, NAMED, TLS, KEYED],
    [BASE, NAMED, TLS, KEYED, GPU],
]
CLIENTS = ["client-0", "client-1", "client-2", "client-3"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text("utf-8")
LINES = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
PINS = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]


def read(file: str, **variables: str) -> dict[str, Any]:
    """A compose file with its variables filled in: those given, else their defaults."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1], match[2])

    text = re.sub(r"(?<!\$)\$\{(\w+):-([^}]*)\}", value, (ROOT / file).read_text("utf-8"))
    assert "${" not in text.replace("$${", ""), f"{file}: a variable without a default"
    content = yaml.safe_load(text)
    assert isinstance(content, dict)
    return content


def merged(files: list[str]) -> dict[str, dict[str, Any]]:
    """The services of files given together, as far as these overlays go: environments merge, the rest replaces."""
    services: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, more in read(file)["services"].items():
            more = dict(more)
            if base := more.pop("extends", None):
                assert base["file"] == BASE, "the path is relative to the project, not to the overlay"
                service = read(BASE)["services"][base["service"]]
                environment = service["environment"] | more.get("environment", {})
                # A volume at the same place takes the other's place.
                more = service | more | {"environment": environment}
            known = services.get(name, {})
            environment = known.get("environment", {}) | more.get("environment", {})
            services[name] = known | more | {"environment": environment}
    return {name: each for name, each in services.items() if each.get("deploy", {}).get("replicas") != 0}


def words(service: dict[str, Any]) -> list[str]:
    """What the shell of a service's command starts."""
    shell, option, script = service["command"]
    assert (shell, option) == ("sh", "-c")
    environment = service["environment"]
    script = re.sub(r"\$\$\{(\w+):\+([^}]*)\}", lambda match: match[2] if environment[match[1]] else "", script)
    filled = re.sub(r"\$\$(\w+)", lambda match: str(environment[match[1]]), script)
    start, *rest = shlex.split(filled)
    assert start == "exec", "the signals of `docker stop` would end at the shell"
    return rest


def options(arguments: list[str]) -> dict[str, Any]:
    """Parse `python -m MODULE COMMAND ...` as that command line does, except that files need not be there."""
    python, m, module, name, *rest = arguments
    assert (python, m) == ("python", "-m")
    group = typer.main.get_command(importlib.import_module(f"{module}.__main__").cli)
    assert isinstance(group, click.Group)
    command = group.commands[name]
    parsed, left, _ = command.make_parser(click.Context(command, info_name=name)).parse_args(rest)
    assert not left
    missing = [each.name for each in command.params if each.required and each.name not in parsed]
    assert not missing
    return parsed


@pytest.mark.parametrize("files", TOGETHER, ids=lambda files: " ".join(Path(file).stem for file in files))
def test_every_command_is_one_that_the_command_line_knows(files: list[str]) -> None:
    """With each overlay and with all: no unknown option, none missing, plain text only where it is typed."""
    services = merged(files)
    clients = CLIENTS if NAMED in files else ["client"]
    assert set(services) == {"superlink", "server", *clients}
    for name, service in services.items():
        parsed = options(words(service))
        secure = {"superlink": "certs", "server": "ca"}.get(name, "ca")
        assert bool(parsed.get("insecure")) == (TLS not in files)
        assert bool(parsed.get(secure)) == (TLS in files)
        if name in clients:
            assert parsed["device"] == ("cuda:0" if GPU in files else "cpu")
            assert bool(parsed.get("key")) == (TLS in files)


def test_clients_are_as_many_as_asked_for_and_the_data_are_split_among_so_many() -> None:
    """CLIENTS says both; without it four are started, take what is free, and the experiment decides."""
    for given, names, split in (({}, ["auto"], None), ({"CLIENTS": "50"}, ["auto:50"], "50")):
        services = read(BASE, **given)["services"]
        assert services["client"]["deploy"]["replicas"] == given.get("CLIENTS", "4")
        assert options(words(services["client"]))["name"] == names
        assert options(words(services["server"])).get("clients") == split


def test_the_image_is_built_once() -> None:
    """Six builds of one image would give it six identities, and the next `up` would replace all containers."""
    assert [name for name, service in merged([BASE, NAMED]).items() if "build" in service] == ["superlink"]
    assert {service["image"] for service in merged([BASE, NAMED]).values()} == {"fedkeel:latest"}


def test_clients_never_reach_the_control_port() -> None:
    """It is bound to a network on which no client is."""
    for files in TOGETHER:
        for name, service in merged(files).items():
            on = set(service["networks"])
            assert ("control" in on) == (name in ("superlink", "server"))
            assert ("fleet" in on) == (name != "server")
    parsed = options(words(merged([BASE])["superlink"]))
    assert parsed["control_host"] == "control"
    assert "control" in merged([BASE])["superlink"]["networks"]["control"]["aliases"]


def test_names_and_volumes_are_stable_and_unshared() -> None:
    """A client's name and memory are its own; the server sees the SuperLink's run folders at the same path."""
    services = merged([BASE, NAMED])
    names = [options(words(services[client]))["name"] for client in CLIENTS]
    memories = [services[client]["volumes"] for client in CLIENTS]
    assert names == [["0"], ["1"], ["2"], ["3"]]
    assert memories == [[f"memory-{number}:/memory"] for number in range(4)]
    assert set(read(BASE)["volumes"]) == {"state", "memories"}
    assert set(read(NAMED)["volumes"]) == {f"memory-{number}" for number in range(4)}
    assert merged([BASE])["client"]["volumes"] == ["memories:/memory"]
    assert services["superlink"]["volumes"] == ["state:/state"]
    assert services["server"]["volumes"][0] == "state:/state"
    default = prepare(Experiment.load(ROOT / services["server"]["environment"]["EXPERIMENT"]))
    assert default.task.names() == ["0", "1", "2", "3"]


def test_every_service_is_hardened_and_only_tls_publishes_a_port() -> None:
    for name, service in merged([BASE, NAMED]).items():
        assert service["read_only"]
        assert service["init"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "ports" not in service
        assert options(words(service))["metrics"] == "0.0.0.0:9100"  # where the image's HEALTHCHECK asks
        assert service["restart"] == ("on-failure" if name == "server" else "unless-stopped")
        grace = float(options(words(service)).get("grace") or 30)
        assert int(service["stop_grace_period"].removesuffix("s")) > grace
    assert read(BASE)["networks"] == {"fleet": {"internal": True}, "control": {"internal": True}}
    assert re.search(r"^HEALTHCHECK .*docker/health.py", DOCKERFILE, re.MULTILINE)
    published = {name: service["ports"] for name, service in merged(TOGETHER[-1]).items() if "ports" in service}
    assert published == {"superlink": ["9092:9092"]}


@pytest.mark.skipif(
    not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="no docker compose here",
)
@pytest.mark.parametrize("files", [[BASE], [BASE, NAMED]], ids=["base", "named"])
def test_no_outage_uses_up_the_restarts_of_a_service(files: list[str]) -> None:
    """As compose itself reads the files, with anchors, overlays and `deploy` merged."""
    words = [word for file in files for word in ("-f", file)]
    done = subprocess.run(
        ["docker", "compose", *words, "--project-directory", str(ROOT), "config", "--format", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    services = json.loads(done.stdout)["services"]
    assert {"superlink", "server"} <= set(services)
    for service in services.values():
        assert service["restart"] in ("unless-stopped", "on-failure")
        assert "restart_policy" not in service.get("deploy", {})


def test_the_tls_overlay_gives_each_container_only_its_own_secrets() -> None:
    """The authority's key to none, a node's key to its client, the server's key to the SuperLink."""
    overlay, named = read(TLS, DEPLOY="/d"), read(KEYED, DEPLOY="/d")
    assert {name: secret["file"] for name, secret in overlay["secrets"].items()} == {
        name: f"/d/{name}" for name in ("ca.pem", "server.pem", "server.key")
    }
    assert {name: secret["file"] for name, secret in named["secrets"].items()} == {
        f"{number}.key": f"/d/keys/{number}.key" for number in range(4)
    }
    for name, service in (overlay["services"] | named["services"]).items():
        key = {"source": f"{name.removeprefix('client-')}.key", "target": "node.key"}
        expected = {"superlink": ["ca.pem", "server.pem", "server.key"], "server": ["ca.pem"], "client": ["ca.pem"]}
        assert service["secrets"] == expected.get(name, ["ca.pem", key])
    # Scaled clients share a folder of node keys, and only that; each reads the one of its name.
    assert overlay["services"]["client"]["volumes"] == ["/d/keys:/keys:ro"]


def test_gpus_are_one_each_or_shared() -> None:
    def devices(**variables: str) -> list[str]:
        services = read(GPU, **variables)["services"]
        reserved = [service["deploy"]["resources"]["reservations"]["devices"] for service in services.values()]
        assert all(len(each) == 1 and each[0]["capabilities"] == ["gpu"] for each in reserved)
        return [each[0]["device_ids"][0] for each in reserved]

    assert devices() == ["0", "1", "2", "3"]
    assert devices(GPU_1="0", GPU_2="0", GPU_3="0") == ["0"] * 4


def test_the_build_context_has_what_the_bundle_and_the_dockerfile_need() -> None:
    """Nothing is sent unless it is named; all that the app bundle includes and the Dockerfile copies is."""
    assert next(line for line in LINES if not line.startswith("#")) == "*"
    sent = {line.removeprefix("!") for line in LINES if line.startswith("!")}
    assert {file.split("/")[0] for file in bundle_files()} <= sent
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert {path for line in copied for path in line.split()} - {"."} <= sent
    assert all((ROOT / path).exists() for path in sent)


def test_the_default_torch_is_the_pinned_one_everywhere() -> None:
    (pinned,) = [pin for pin in PINS if pin.startswith("torch==")]
    assert set(re.findall(r"^ARG TORCH=(.*)$", DOCKERFILE, re.MULTILINE)) == {pinned}
    assert read(BASE)["services"]["superlink"]["build"]["args"]["TORCH"] == pinned
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${BASE}", "torch"}  # one base
    assert re.findall(r"^ARG BASE=(\S+)", DOCKERFILE, re.MULTILINE) == ["python:3.11-slim-bookworm"]


@pytest.mark.parametrize(
    ("torch", "extras"), [("pinned", ""), ("torch==2.9.0", ""), ("torch==2.9.0", "vision")], ids=str
)
def test_the_image_installs_the_projects_dependencies(tmp_path: Path, torch: str, extras: str) -> None:
    """All of pyproject's and the asked extras' as pinned, no developer's tools; another torch brings its parts."""
    (pinned,) = [pin for pin in PINS if pin.startswith("torch==")]
    chosen = pinned if torch == "pinned" else torch
    command = [sys.executable, "docker/requirements.py", chosen, extras, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=30)
    wanted = (tmp_path / "requirements.txt").read_text("utf-8").splitlines()
    pins = (tmp_path / "constraints.txt").read_text("utf-8").splitlines()
    vision = PROJECT["project"]["optional-dependencies"]["vision"]
    assert wanted == PROJECT["project"]["dependencies"] + (vision if extras else [])
    of_torch = [pin for pin in PINS if re.match(r"(torch|torchvision|triton|nvidia-\S+|cuda-\S+)==", pin)]
    assert pins == [pin for pin in PINS if chosen == pinned or pin not in of_torch]


def test_a_sites_image_does_without_what_a_site_does_without(tmp_path: Path) -> None:
    """No Ray and none of what splits, draws or reports; every other dependency, as pinned."""
    (pinned,) = [pin for pin in PINS if pin.startswith("torch==")]
    command = [sys.executable, "docker/requirements.py", pinned, "", str(tmp_path), "client"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=30)
    wanted = (tmp_path / "requirements.txt").read_text("utf-8").splitlines()
    without = {"flwr-datasets", "matplotlib", "tensorboard", "scikit-learn", "pandas", "jinja2", "greenlet"}
    names = [re.split(r"[\[<>=~! ]", each, maxsplit=1)[0] for each in PROJECT["project"]["dependencies"]]
    assert [re.split(r"[\[<>=~! ]", each, maxsplit=1)[0] for each in wanted] == [
        each for each in names if each not in without
    ]
    assert not [each for each in wanted if "simulation" in each]
