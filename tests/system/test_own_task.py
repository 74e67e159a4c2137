"""A task of a site's own over gRPC: who has allowed it takes part, who has not says so and imports nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common import flower
from common.flower import ROOT
from server.deploy.processes import Family, stop
from server.deploy.superlink import SuperLink
from server.rounds.folder import RunFolder
from tests.support.children import environment
from tests.support.faults import toy
from tests.support.patience import until
from tests.support.site import OWN_TASK

pytestmark = [pytest.mark.rest, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_task_needs_the_word_of_each_site(tmp_path: Path) -> None:
    """Two sites of one server; the refusal is in the run's notes and in the site's log under one event."""
    settings = toy(round={"wait_for": 1}, rounds=2)
    folder, families = RunFolder(tmp_path / "run"), dict[str, Family]()
    with environment(PYTHONPATH=str(ROOT)), SuperLink(tmp_path / "superlink.log") as link:
        for name, more in (("2", []), ("3", ["--allow-task", OWN_TASK])):
            words = ["join", "--server", link.fleet_address, "--name", name, "--memory", str(tmp_path / name), *more]
            command = [sys.executable, "-m", "client", *words]
            families[name] = Family(command, flower.environment(), tmp_path / f"{name}.log", ROOT)
        try:
            until(lambda: len(link.control.online()) == 2, "both sites are here")
            link.control.submit(
                ROOT, {"experiment-toml": settings.toml(), "run-dir": str(folder.path), "resume": False}
            )
            ends = ("finished", "failed")
            until(lambda: folder.status().get("status") in ends, lambda: str(folder.status()), 90)
        finally:
            stop(list(families.values()), 10)
    notes, log = "\n".join(map(str, folder.notes())), (tmp_path / "2.log").read_text("utf-8")
    assert folder.status()["status"] == "finished", notes
    assert [line["accepted"] for line in folder.history()] == [["3"], ["3"]]
    said = f"task-denied: task.name = {OWN_TASK!r} is none of this project's"
    assert said in log
    assert said in notes
    assert notes.split("(event ")[1][:6] in log
