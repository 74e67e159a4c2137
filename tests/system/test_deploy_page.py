"""docs/deploy.md, followed: its commands, in their order, as one person would type them at both ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.flower import ROOT, environment
from server.deploy.processes import Family, held_ports, stop
from server.rounds.folder import RunFolder
from tests.support.patience import until

PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
COMMANDS = ("python ", "mkdir ", "cp ", "curl ", "make ", "git ", "sudo ", "kubectl ", "docker ")
FINGERPRINT = re.compile(r"this site's key, to be read out to the operator: (SHA256:\S+)")


def commands() -> list[str]:
    """Every line of the page that is to be typed, in its order, but those marked `# rest`."""
    lines = [line[4:].rstrip() for line in PAGE.splitlines() if re.match(r"    \S", line)]
    typed = [line for line in lines if line.startswith(COMMANDS)]
    return [re.sub(r"\s+#.*", "", line) for line in typed if not re.search(r"#\s*rest", line)]


def block(first: str) -> str:
    """The block of the page that begins with a line."""
    found = re.search(rf"(?:^    {re.escape(first)}.*\n)(?:^    .*\n)*", PAGE, re.MULTILINE)
    assert found, first
    return "".join(line[4:] + "\n" for line in found[0].splitlines())


def test_what_is_not_executed_is_marked_and_no_more_than_a_machine_cannot_give() -> None:
    lines = [line.strip() for line in PAGE.splitlines() if re.search(r"#\s*rest", line)]
    assert len(lines) < 14
    assert sum(line.startswith("python") for line in lines) <= 2
    assert len(commands()) > 15


class Typed:
    """The page's two machines in one folder, with free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.families = folder, list[Family]()
        self.fleet, self.control, *self.metrics = held_ports(4)
        self.environment = {**environment(), "HOME": str(folder), "PYTHONPATH": str(ROOT)}

    def here(self, line: str) -> str:
        """A line with this machine's names."""
        for there, own in (
            ("fl.example.org:9092", f"localhost:{self.fleet}"),
            ("127.0.0.1:8000", f"127.0.0.1:{self.control}"),
            ("--host 0.0.0.0", f"--host 127.0.0.1 --fleet-port {self.fleet} --control-port {self.control}"),
            ("9464", str(self.metrics[0])),
            ("9465", str(self.metrics[1])),
            ("/srv/backup/", str(self.folder / "backup")),
        ):
            line = line.replace(there, own)
        return re.sub(r"^python ", f"{sys.executable} ", line)

    def log(self) -> str:
        return "\n".join(family.log.read_text("utf-8", "replace") for family in self.families if family.log.exists())

    def fingerprint(self) -> str:
        until(lambda: FINGERPRINT.search(self.log()), self.log, 90)
        found = FINGERPRINT.search(self.log())
        assert found
        return found[1]

    def type(self, line: str) -> None:
        if "$FINGERPRINT" in line:
            self.environment["FINGERPRINT"] = self.fingerprint()
        if "nodes list" in line:  # the site has knocked
            until(lambda: (self.folder / "nodes.waiting.json").exists(), self.log, 90)
        if line.endswith("&"):
            words = self.here(line[:-1].strip()).split()
            log = self.folder / f"background-{len(self.families)}.log"
            self.families.append(Family(words, self.environment, log, self.folder))
            if "superlink" in line:
                until(lambda: "SuperLink: clients at" in self.log(), self.log, 90)
            return
        done = subprocess.run(
            ["bash", "-c", self.here(line)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )
        told = done.stdout + done.stderr
        if "client doctor" in line:  # beside a site that runs, whose memory is its own
            assert not [each for each in told.splitlines() if each.startswith("FAIL") and "memory" not in each], told
        else:
            assert done.returncode == 0, f"{line}\n{told}\n{self.log()}"


@pytest.mark.processes
@pytest.mark.rest
@pytest.mark.timeout(900)
def test_the_page_leads_from_nothing_to_a_finished_run_and_on(tmp_path: Path) -> None:
    if not shutil.which("bash") or not shutil.which("curl"):
        pytest.skip("bash and curl are needed to type what the page says")
    typed = Typed(tmp_path)
    (tmp_path / "backup").mkdir()
    (tmp_path / "site-1").mkdir()
    experiment = block('name = "first"')
    (tmp_path / "first.toml").write_text(experiment.replace("rounds = 20", "rounds = 2"))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "site-1.npz", x=rng.random((60, 8, 8)), y=np.arange(60) % 10)
    (tmp_path / "site-1" / "policy.toml").write_text(block("statistics = true"))
    try:
        for line in commands():
            typed.type(line)
    finally:
        stop(typed.families, 10)
    folder = RunFolder(tmp_path / "runs" / "first")
    assert folder.status()["status"] == "finished"
    assert folder.history()[-1]["accepted"] == ["site-1"]
    assert (tmp_path / "backup" / "nodes.toml").exists()
    told = json.loads((tmp_path / "statistics.json").read_text())
    assert told["sites"] == {"site-1": 60}
    assert told["columns"]["x channel 0"]["count"] == 60 * 64
    assert (tmp_path / "new" / "trust.pem").read_text().count("BEGIN") == 2
    assert os.stat(tmp_path / "site-1" / "site-1.key").st_mode & 0o077 == 0
