"""systemd units and Kubernetes manifests: valid by their own tools, closed, and with commands that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.flower import ROOT
from server.deploy import kits
from tests.support.commands import parsed

UNITS = sorted((ROOT / "docker" / "systemd").glob("*.service"))
TEMPLATE = kits.TEMPLATES / "fedkeel.service"
MANIFESTS = sorted(path for path in (ROOT / "docker" / "kubernetes").glob("*.yaml") if path.stem != "kustomization")
MOST_EXPOSED = 2.0
"""Of 10, by `systemd-analyze security`: 9.6 is a unit that says nothing."""

analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def unit(path: Path) -> str:
    return path.read_text("utf-8").replace("$name", "site-3").replace("$server", "fl.example.org:9092")


def setting(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text.replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize("path", [*UNITS, TEMPLATE], ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_exists_and_again_only_where_that_helps(path: Path) -> None:
    text = unit(path)
    (command,) = setting(text, "ExecStart")
    assert parsed(shlex.split(command.replace("/opt/fedkeel/.venv/bin/python", "python")))
    assert setting(text, "Restart") == ["on-failure"]
    assert setting(text, "RestartPreventExitStatus") == ["2"]
    assert setting(text, "StartLimitIntervalSec") == ["0"]  # it never gives up
    assert setting(text, "DynamicUser") == ["yes"]


@analyze
@pytest.mark.parametrize("path", [*UNITS, TEMPLATE], ids=lambda path: path.name)
def test_a_unit_is_valid_and_closed(path: Path, tmp_path: Path) -> None:
    """By `systemd-analyze verify` and `security`, on units as they are but for the interpreter, which is not here."""
    file = tmp_path / path.name.replace("@", "@first")
    text = unit(path).replace("/opt/fedkeel/.venv/bin/python", _command())
    file.write_text(text)
    link = unit(ROOT / "docker" / "systemd" / "fedkeel-superlink.service")
    (tmp_path / "fedkeel-superlink.service").write_text(link.replace("/opt/fedkeel/.venv/bin/python", _command()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    threshold = str(int(MOST_EXPOSED * 10))
    scored = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={threshold}", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert scored.returncode == 0, scored.stdout[-300:]


def _command() -> str:
    return shutil.which("env") or "/usr/bin/env"


@analyze
def test_a_unit_with_a_fault_is_found(tmp_path: Path) -> None:
    file = tmp_path / "fedkeel.service"
    file.write_text(unit(TEMPLATE).replace("Restart=on-failure", "Restart=sometimes"))
    words = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "restart specifier" in done.stderr


# --- Kubernetes


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text("utf-8"))]


def pods() -> list[tuple[str, dict[str, Any]]]:
    return [
        (each["metadata"]["name"], each["spec"]["template"])
        for each in documents()
        if "template" in each.get("spec", {})
    ]


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_manifests_fit_kubernetes_schemas(version: str) -> None:
    from kubernetes_validate import ValidationError, validate  # 0.3 s

    held = documents()
    assert {each["kind"] for each in held} == {"Namespace", "StatefulSet", "Service", "Job", "NetworkPolicy"}
    for each in held:
        validate(each, version, strict=True)
        assert each["metadata"].get("namespace", "fedkeel") == "fedkeel"
    wrong = next(each for each in held if each["kind"] == "Job")
    wrong["spec"]["template"]["spec"]["contaners"] = []
    with pytest.raises(ValidationError):
        validate(wrong, version, strict=True)


def test_kustomization_names_the_files_that_are_there() -> None:
    listed = yaml.safe_load((ROOT / "docker" / "kubernetes" / "kustomization.yaml").read_text("utf-8"))["resources"]
    assert sorted([*listed, "site.yaml"]) == sorted(path.name for path in MANIFESTS)


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_a_pod_is_restricted_and_its_command_exists(name: str, pod: dict[str, Any]) -> None:
    """By the "restricted" standard, with a root that is only read; what it mounts is there."""
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    options = parsed([*container["command"], *container["args"]])
    claimed = {"state": "state", "memory": "memory"}
    volumes = {each["name"] for each in spec["volumes"]} | claimed.keys()
    assert {each["name"] for each in container["volumeMounts"]} <= volumes
    assert options["metrics"] == "0.0.0.0:9100"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        for how in container.get(probe, {}).values():
            assert not isinstance(how, dict) or how["port"] in ports


def test_only_runs_reach_the_control_port() -> None:
    """Of all policies together, as Kubernetes reads them: what no policy allows is closed once one selects the pod."""
    policies = [each["spec"] for each in documents() if each["kind"] == "NetworkPolicy"]

    def selected(spec: dict[str, Any], labels: dict[str, str]) -> bool:
        return spec["podSelector"].get("matchLabels", {}).items() <= labels.items()

    link = {"app": "fedkeel", "role": "superlink"}
    assert any(selected(each, link) and "Ingress" in each["policyTypes"] for each in policies)
    allowed = [rule for each in policies if selected(each, link) for rule in each.get("ingress", [])]
    control = [
        rule for rule in allowed if any(port["port"] == "control" for port in rule.get("ports", [{"port": "control"}]))
    ]
    (rule,) = control
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "fedkeel", "role": "run"}}}]
    client = {"app": "fedkeel", "role": "client", "site": "site-3"}
    out = [rule for each in policies if selected(each, client) for rule in each.get("egress", [])]
    assert {port["port"] for rule in out for port in rule["ports"]} == {9092, 53}
    labels = {name: pod["metadata"]["labels"]["role"] for name, pod in pods()}
    assert labels == {"superlink": "superlink", "run-first": "run", "site-3": "client"}
