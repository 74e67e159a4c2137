"""Commands for whoever runs a site: its key, its memory and a look at what would go wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from client.commands.options import (
    DEFAULT_MEMORY,
    AllowTask,
    ApprovalsFile,
    Approve,
    Authority,
    Data,
    Device,
    Insecure,
    Key,
    Memory,
    PolicyFile,
    Server,
    TrustServer,
    errors,
)
from common.deploy.options import Set
from common.errors import SettingsError

# Imported where used: torch and Flower take seconds, which --help and an error in what was typed need not wait for.

memories = typer.Typer(no_args_is_help=True, help="What the clients of this machine remember between rounds.")

MemoryRoot = Annotated[
    Path, typer.Option("--memory", file_okay=False, help="A client's memory folder, or one that holds several.")
]


def keygen(out: Annotated[Path, typer.Option(dir_okay=False, help="The private key.")] = Path("site.key")) -> None:
    """Make the key by which a server knows this site: OUT stays here, OUT.pub goes to the server's operator."""
    with errors():
        from common.deploy import keys
        from common.deploy.audit import NAME, AuditLog

        public = keys.generate(out)
        known = keys.fingerprint(keys.read_public(public.read_bytes(), str(public)))
        AuditLog(out.absolute().parent / NAME).try_record("key", "made", key=known, file=str(out))
        typer.echo(f"{out}: private, stays at this site")
        typer.echo(f"{public}: for the server's operator (python -m server nodes add NAME {public.name})")
        typer.echo(known)


@memories.command("list")
def memory_list(memory: MemoryRoot = DEFAULT_MEMORY) -> None:
    """What the clients of this machine remember, by run and generation; every file is checked."""
    with errors():
        from client.memory.folder import list_memories

        for folder in _memory_folders(memory):
            held = list_memories(folder)
            if not held:
                typer.echo(f"{folder}: nothing")
            for each in held:
                versions = ", ".join(map(str, each.versions))
                damaged = "".join(f"; version {v} is damaged: {why}" for v, why in each.damaged.items())
                typer.echo(
                    f"{folder}: {each.client} in {each.run}, generation {each.generation}, versions {versions}, "
                    f"{each.bytes / 1e6:.1f} MB, {each.age_s / 60:.0f} min old{damaged}"
                )


@memories.command("reset")
def memory_reset(
    memory: MemoryRoot = DEFAULT_MEMORY,
    run: Annotated[str | None, typer.Option(help="Only what belongs to this run.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget: trackers of a run that still goes on then start anew on all sites. Refused while a client runs."""
    with errors():
        from client.memory.folder import reset_memory
        from common.deploy.audit import NAME, AuditLog

        folders = _memory_folders(memory)
        what = f"run {run}" if run else "all runs"
        if not yes and not typer.confirm(f"forget {what} in {', '.join(map(str, folders))}?"):
            raise typer.Exit(1)
        for folder in folders:
            gone = reset_memory(folder, run)
            AuditLog(folder / NAME).try_record("memory", "forgotten", run=run or "", runs=gone.runs, files=gone.files)
            typer.echo(f"{folder}: {gone.files} files, {gone.bytes / 1e6:.1f} MB forgotten")


def doctor(
    server: Server = None,
    name: Annotated[list[str] | None, typer.Option(help="As for `join`; may be given again.")] = None,
    ca: Authority = None,
    key: Key = None,
    policy: PolicyFile = None,
    data: Data = None,
    memory: Memory = None,
    device: Device = "cpu",
    insecure: Insecure = False,
    experiment: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="FILE", help="Also look with this experiment, as its run would."),
    ] = None,
    approve: Approve = "policy",
    approvals: ApprovalsFile = None,
    allow_task: AllowTask = None,
    trust_server: TrustServer = False,
    set_: Set = None,
) -> None:
    """Look at all that `join` needs, with the same options. Exit code 1 if something would fail.

    With --experiment what its run would refuse here: what may be named, data as the task reads them, the model, one
    batch. Without --server nothing of the network is looked at then.
    """
    with errors():
        if not server and experiment is None:
            raise SettingsError("doctor: give --server, --experiment or both")
        if set_ and experiment is None:
            raise SettingsError(f"--set {set_[0]} changes a file's settings: give --experiment, too")
        from client.commands.doctor import doctor_command

        code = doctor_command(
            server or "",
            names=name or [],
            ca=ca,
            key=key,
            data=data,
            memory=memory,
            device=device,
            policy=policy,
            insecure=insecure,
            experiment=experiment,
            approve=approve,
            approvals=approvals,
            allow_tasks=allow_task or [],
            trusted=trust_server,
            sets=set_ or [],
        )
    sys.exit(code)


def _memory_folders(root: Path) -> list[Path]:
    """The folder itself if a client uses it, else those in it that one does."""
    root = root.expanduser()
    found = [folder for folder in (root, *sorted(root.glob("*/"))) if (folder / ".lock").exists()]
    if not found:
        raise SettingsError(f"no client has left anything in {str(root)!r}")
    return found
