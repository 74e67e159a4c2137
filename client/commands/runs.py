"""Commands for whoever decides which runs a site takes part in: approve, deny, revoke, and who waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from client.commands.options import DEFAULT_MEMORY, ApprovalsFile, errors
from common.errors import SettingsError

# Imported where used: torch and Flower take seconds, which --help and an error in what was typed need not wait for.
if TYPE_CHECKING:
    from client.approval.store import Approvals, Entry

    Found = tuple[Approvals, str, Entry]

MemoryRoot = Annotated[
    Path,
    typer.Option("--memory", file_okay=False, help="As for `join`: the memory folder, or one that holds several."),
]
Run = Annotated[str, typer.Argument(help="Name of the run or its experiment, or the beginning of its hash.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def approvals(
    run: Annotated[str | None, typer.Argument(help="Only this one: a name or the beginning of a hash.")] = None,
    memory: MemoryRoot = DEFAULT_MEMORY,
    file: ApprovalsFile = None,
    show: Annotated[bool, typer.Option("--show", help="Also what each of them is, in words.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
) -> None:
    """Which runs wait for approval here, and which were approved, denied or revoked, when and by whom."""
    with errors():
        found = _found(run, memory, file)
        for approvals, key, entry in found:
            if as_json:
                about = entry.model_dump(mode="json") | {"name": entry.name, "sha256": key, "waits": entry.waits}
                typer.echo(json.dumps({**about, "file": str(approvals.path)}, sort_keys=True))
                continue
            typer.echo(_line(key, entry))
            if show:
                _show(entry)
        if not found and not as_json:
            typer.echo("no server has asked for a run here" if run is None else f"no such run: {run!r}")
    if run is not None and not found:
        raise typer.Exit(1)


def approve(run: Run, memory: MemoryRoot = DEFAULT_MEMORY, file: ApprovalsFile = None, yes: Yes = False) -> None:
    """Let a run that waits take part, after a look at what it does and what leaves this site.

    It begins, or goes on, within seconds; nothing has to be started again.
    """
    _decide(run, memory, file, yes, "approved")


def deny(run: Run, memory: MemoryRoot = DEFAULT_MEMORY, file: ApprovalsFile = None, yes: Yes = False) -> None:
    """Refuse a run. It is not asked about again; `approve` takes this back."""
    _decide(run, memory, file, yes, "denied")


def revoke(run: Run, memory: MemoryRoot = DEFAULT_MEMORY, file: ApprovalsFile = None, yes: Yes = False) -> None:
    """Take an approval back: the run stops here before its next message. What was sent so far cannot be called back."""
    _decide(run, memory, file, yes, "revoked")


def _decide(
    run: str, memory: Path, file: Path | None, yes: bool, state: Literal["approved", "denied", "revoked"]
) -> None:
    with errors():
        from client.approval.store import Approvals

        found = [each for each in _found(run, memory, file) if _changes(each[2], state)]
        keys = {key for _, key, _ in found}
        if not found:
            raise SettingsError(_nothing(run, memory, file, state))
        if len(keys) > 1:
            listed = "\n".join(f"  {_line(key, entry)}" for _, key, entry in found)
            raise SettingsError(f"{run!r} may be any of these; name one by its hash:\n{listed}")
        _, key, entry = found[0]
        typer.echo(_line(key, entry))
        if state == "approved":
            _show(entry)
        if not yes and not typer.confirm({"approved": "approve", "denied": "deny", "revoked": "revoke"}[state] + "?"):
            raise typer.Exit(1)
        for path, shown in {approvals.path: entry for approvals, _, entry in found}.items():
            rounds = shown.asked if state == "approved" else 0
            done = Approvals(path).decide(key, state, rounds)
            _audit(path, key, done)
            typer.echo(f"{state}: {done.name} ({key[:12]}) in {path}")


def _changes(entry: Entry, state: str) -> bool:
    """Whether a word would change anything of an entry."""
    if state == "approved":
        return entry.waits or entry.state != "approved"
    if state == "revoked":
        return entry.state in ("approved", "admitted")
    return entry.state != "denied"


def _nothing(run: str, memory: Path, file: Path | None, state: str) -> str:
    same = _found(run, memory, file)
    if same:
        _, key, entry = same[0]
        return f"{run!r} ({key[:12]}) is {entry.state}: there is nothing to be {state}"
    known = sorted({entry.name for _, _, entry in _found(None, memory, file)})
    return f"no server has asked for a run {run!r} here; known: {', '.join(known) or 'none'}"


def _found(run: str | None, memory: Path, file: Path | None) -> list[Found]:
    """The entries meant by `run`, None for all, oldest first, each with the file that it stands in."""
    from client.approval.store import matching

    found = [
        (approvals, key, entry)
        for approvals in _files(memory, file)
        for key, entry in (approvals.entries() if run is None else matching(approvals.entries(), run)).items()
    ]
    return sorted(found, key=lambda each: (each[2].changed, each[1]))


def _files(memory: Path, file: Path | None) -> Iterator[Approvals]:
    """The file that was named, else that of the memory folder and of those in it."""
    from client.approval.store import NAME, Approvals

    if file is not None:
        yield Approvals(file)
        return
    root = memory.expanduser()
    for folder in (root, *sorted(root.glob("*/"))):
        if (folder / NAME).exists():
            yield Approvals(folder / NAME)


def _line(key: str, entry: Entry) -> str:
    state = {
        "waiting": "waits for approval",
        "approved": f"approved by {entry.by}, {entry.rounds} rounds",
        "admitted": f"taken by {entry.by}, no person asked",
        "denied": f"denied by {entry.by}",
        "revoked": f"revoked by {entry.by}",
    }[entry.state]
    more = f"; waits for approval of {entry.asked} rounds" if entry.state == "approved" and entry.waits else ""
    return f"{key[:12]}  {entry.name}  {state}{more}  ({entry.changed}; asked since {entry.first})"


def _show(entry: Entry) -> None:
    from client.approval.words import described, plain
    from common.experiment import Experiment
    from common.settings import checked

    settings = checked(Experiment, entry.experiment, "the run's experiment")
    for heading, text in described(settings):
        typer.echo(f"  {heading:<15} {text}")
    typer.echo(f"  {'asked as':<15} {plain(', '.join(entry.runs))}")


def _audit(path: Path, key: str, entry: Entry) -> None:
    """A line in the site's audit log, which lies beside the approvals."""
    from common.deploy import audit

    run = entry.runs[-1] if entry.runs else entry.name
    try:
        log = audit.AuditLog(path.with_name(audit.NAME))
        log.record(entry.state, run=run, experiment_sha256=key, rounds=entry.rounds)
    except (OSError, SettingsError) as error:  # the word itself counts all the same
        typer.echo(f"warning: the audit log could not be written: {error}", err=True)
