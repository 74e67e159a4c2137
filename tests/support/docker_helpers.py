"""A Docker engine for tests, and federations in containers that leave nothing behind."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.flower import ROOT
from server.deploy.control import bundle

IMAGE = "fedkeel:test"
# Scripts that bring up an engine and a base image where there is no registry; empty: there are none.
SCRIPTS = Path(os.environ.get("FEDKEEL_DOCKER_SCRIPTS", ROOT.parent / "shared" / "docker") or os.devnull)
TORCH = os.environ.get("FEDKEEL_DOCKER_TORCH", "torch==2.13.0")


def shell(
    *command: str, timeout: float = 60, check: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root; with `check` its failure is an error that shows the output."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def answers() -> bool:
    """Whether an engine with Compose is there."""
    if not shutil.which("docker"):
        return False
    return not any(
        shell("docker", *words, timeout=30, check=False).returncode for words in (("info",), ("compose", "version"))
    )


def bundle_files() -> set[str]:
    """The files of the app bundle that the server makes, without Flower's own additions."""
    with zipfile.ZipFile(io.BytesIO(bundle(ROOT))) as archive:
        return {name for name in archive.namelist() if not name.startswith(".info")}


@contextmanager
def engine() -> Iterator[None]:
    """An engine that answers. Skips where there is neither one nor the scripts; a script that fails is a failure.

    A daemon that this has started is stopped at the end.
    """
    there = answers()
    if not SCRIPTS.is_dir():
        if not there:
            pytest.skip(f"no Docker engine answers, and no scripts that start one in {SCRIPTS}")
        yield
        return
    shell(str(SCRIPTS / "start-engine.sh"), timeout=300)
    try:
        shell(str(SCRIPTS / "make-base-image.sh"), timeout=400)
        yield
    finally:
        if not there:
            _stop_daemon(Path("/var/run/docker.pid"))


def _stop_daemon(pid_file: Path) -> None:
    # Its last act is to remove the file; the process itself may stay as a zombie.
    os.kill(int(pid_file.read_text("utf-8")), signal.SIGTERM)
    until(lambda: not pid_file.exists(), 60, "dockerd to end")


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `condition`, asked four times a second."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.25)
    return value


class Federation:
    """A compose project of its own name, gone with its volumes at the end; failures show the containers' logs.

    Runs under a uid that nobody has, where the machine lets files be given away to it. `folder`: experiments.
    """

    def __init__(self, folder: Path, experiment: str, overlays: Sequence[str] = (), env: dict[str, str] | None = None):
        # Beyond the uids that systems give out.
        self.uid = random.randint(70_000, 80_000) if os.getuid() == 0 else os.getuid()
        self.user = f"{self.uid}:{self.uid if os.getuid() == 0 else os.getgid()}"
        self.folder = folder
        self.name = f"fedkeel-{uuid.uuid4().hex[:8]}"
        self._files = [word for file in ("docker-compose.yml", *overlays) for word in ("-f", file)]
        self._env = {
            "COMPOSE_PROJECT_NAME": self.name,
            "COMPOSE_FILE": "",
            "IMAGE": IMAGE,
            "FEDKEEL_USER": self.user,
            "EXPERIMENTS": str(folder),
            "EXPERIMENT": f"experiments/{experiment}",
            **(env or {}),
        }
        folder.chmod(0o755)

    def compose(self, *words: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`docker compose ...` of this project."""
        return shell("docker", "compose", *self._files, *words, timeout=timeout, check=check, env=self._env)

    def up(self, *services: str, wait: bool = True) -> None:
        """Start services; with `wait` until they are healthy."""
        words = ["--wait", "--wait-timeout", "150"] if wait else []
        self.compose("up", "-d", "--no-build", "--quiet-pull", *words, *services, timeout=180)

    def scale(self, clients: int) -> None:
        """So many clients that are given names."""
        words = ("up", "-d", "--no-build", "--no-recreate", "--scale", f"client={clients}", "superlink", "client")
        self.compose(*words, timeout=180)

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine says of a service's container."""
        (container,) = self.compose("ps", "-a", "-q", service).stdout.split()
        (found,) = json.loads(shell("docker", "inspect", container).stdout)
        assert isinstance(found, dict)
        return found

    def ended(self, service: str) -> int | None:
        """The exit code of a service's container; None while it runs."""
        state = self.inspect(service)["State"]
        return None if state["Running"] or state["Restarting"] else int(state["ExitCode"])

    def wait(self, service: str, seconds: float) -> int:
        """The exit code of a service's container once it has ended."""
        until(lambda: self.ended(service) is not None, seconds, f"{service} to end")
        code = self.ended(service)
        assert code is not None
        return code

    def history(self, run: str) -> list[dict[str, Any]]:
        """The history of a run so far."""
        text = self.compose("exec", "-T", "superlink", "cat", f"/state/runs/{run}/history.jsonl", check=False).stdout
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def in_process(self, experiment: str) -> list[dict[str, Any]]:
        """The history of the same experiment in one process, in the same image: no network, nothing to write on."""
        code = "python -m server simulate $0 --run-dir /tmp/run >&2 && cat /tmp/run/history.jsonl"
        done = shell(*self.bare(), "-v", f"{self.folder}:/app/experiments:ro", IMAGE, "sh", "-c", code,
                     f"experiments/{experiment}", timeout=120)  # fmt: skip
        return [json.loads(line) for line in done.stdout.splitlines()]

    def bare(self) -> list[str]:
        """`docker run` without network, capabilities and a place to write but /tmp."""
        words = "docker run --rm --network none --read-only --tmpfs /tmp --cap-drop ALL -e OMP_NUM_THREADS=1"
        return [*words.split(), "--security-opt", "no-new-privileges", "--user", self.user]

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:
            logs = self.compose("logs", "--no-color", "--timestamps", timeout=60, check=False)
            print(self.compose("ps", "-a", check=False).stdout, logs.stdout[-30_000:], sep="\n")
        self.compose("down", "-v", "--remove-orphans", "--timeout", "5", timeout=120)
