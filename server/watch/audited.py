"""The audit log of a run: where it lies, and its events as the round loop tells them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from common.deploy.audit import NAME, AuditLog
from common.experiment import Experiment
from server.rounds.folder import RunFolder
from server.rounds.records import Event


def audit_of(folder: RunFolder) -> Path:
    """Where the audit log of a run lies: in its folder."""
    return folder.path / NAME


def audited(log: AuditLog, run: str) -> Event:
    """Writes what it is told of a run; an error goes to the process's log and ends nothing."""

    def event(what: str, outcome: str = "ok", **more: Any) -> None:
        # A joining client costs the run no flush of its own: the end of the round, or of the run, brings one.
        log.try_record(what, outcome, run=run, durable=what not in ("joined", "left"), **more)

    return event


def began(event: Event, experiment: Experiment, resume: bool, **more: Any) -> None:
    """A run begins or goes on: with what experiment, by the hash of its resolved settings."""
    content = experiment.toml(full=True).encode()
    about = {"experiment": experiment.name, "experiment_sha256": hashlib.sha256(content).hexdigest()}
    event("resumed" if resume else "started", **about, **more)


def ended(event: Event, folder: RunFolder) -> None:
    """What run.json says of the end."""
    status = folder.status()
    known: dict[str, Any] = {key: status[key] for key in ("round", "error", "exit_code") if key in status}
    if "sha256" in status:
        known["weights"] = status["sha256"]
    event(str(status.get("status", "unknown")), "failed" if status.get("status") == "failed" else "ok", **known)
