"""Whether a site takes part in a run: asked before anything that an experiment names is imported, opened or built."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from client.approval.store import Approvals, Entry, resolved
from client.session import policy_of
from common.data.grant import granted
from common.deploy import audit
from common.errors import Denied, SettingsError
from common.experiment import Experiment
from strategies.protocol.messages import DENIED, WAITING, Undecided

log = logging.getLogger("client.approval")

ASK, POLICY, ALL = "ask", "policy", "all"
MODES = (ASK, POLICY, ALL)

_told: set[tuple[str, str, str]] = set()


class NotApproved(Denied):
    """A run that nobody here has approved: `state` is `WAITING`, or `DENIED` where somebody decided against it."""

    def __init__(self, state: str, client: str) -> None:
        super().__init__("approval-denied" if state == DENIED else "approval-waits", Undecided.WORDS[state])
        self.state, self.client = state, client


def check_approval(context: Context, text: str, run: str, round: int = 0) -> None:
    """Return if this node takes part in a run with this experiment (JSON), as its settings "approve" (`MODES`) and
    "approvals" (the file) say; without them, as in simulations, every run is taken.

    "ask": only what a person approved, up to the number of rounds that was shown. "policy" and "all": whatever the
    policy lets pass, but for what a person denied or revoked. Raises NotApproved, and Denied where the policy forbids
    the run, so that nobody is asked about it, or where the file cannot be used.
    """
    mode = str(context.node_config.get("approve", ""))
    if not mode:
        return
    client, file = str(context.node_config.get("name", "?")), str(context.node_config.get("approvals", ""))
    if mode not in MODES or not file:
        raise Denied("approval-denied", "the site's settings of approvals cannot work", f"{mode!r} with {file!r}")
    key, experiment = resolved(text)
    policy_of(context).check(experiment, granted())
    try:
        approvals = _opened(file)
        entry = approvals.entries().get(key)
        if entry is not None and entry.state in ("denied", "revoked"):
            _tell(client, key, entry.state, f"{client}: {entry.name} ({key[:12]}) is {entry.state}: it is not taken")
            raise NotApproved(DENIED, client)
        if mode != ASK:
            _note(context, approvals, key, experiment, run, mode)
        elif not _approved(entry, experiment.rounds, round):
            if approvals.ask(key, experiment, run):
                _audit(context, "waiting", key, run)
            about = f"{experiment.name} ({key[:12]}), {experiment.rounds} rounds"
            what = f"python -m client approve {key[:12]} --approvals {file}"
            _tell(client, key, f"waits {experiment.rounds}", f"{client}: {about} waits for approval: {what}")
            raise NotApproved(WAITING, client)
    except SettingsError as error:
        _tell(client, key, "unusable", f"{client}: {error}")
        raise Denied("approvals-unusable", "the site cannot read who was approved; its log has more") from None


def _approved(entry: Entry | None, rounds: int, round: int) -> bool:
    """Whether a person approved so many rounds, and this one is among them."""
    return entry is not None and entry.state == "approved" and max(rounds, round) <= entry.rounds


@lru_cache(maxsize=64)
def _opened(file: str) -> Approvals:
    return Approvals(file)


def _note(context: Context, approvals: Approvals, key: str, experiment: Experiment, run: str, mode: str) -> None:
    """Remember what was taken unasked. A folder that cannot be written costs the note, not the run."""
    try:
        if approvals.ask(key, experiment, run, mode):
            _audit(context, "admitted", key, run)
    except SettingsError as error:
        _tell(
            str(context.node_config.get("name", "?")), key, "unwritten", f"{error}: this run can only be denied later"
        )


def _audit(context: Context, what: str, key: str, run: str) -> None:
    """A line of the audit log beside the approvals; that it cannot be written stops no run."""
    config = context.node_config
    path = Path(str(config["approvals"])).with_name(audit.NAME)
    try:
        audit.AuditLog(path).record(what, run=run, site=str(config.get("name", "")), experiment_sha256=key)
    except (OSError, SettingsError) as error:
        log.error("audit log %s: %s could not be written: %s", path, what, error)


def _tell(client: str, key: str, what: str, text: str) -> None:
    """Once a process: a server asks again and again."""
    if (client, key, what) not in _told:
        if len(_told) > 1000:  # a server can cause any number of them
            _told.clear()
        _told.add((client, key, what))
        log.warning("%s", text)
