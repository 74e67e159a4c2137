"""`python -m client`: the command line of a site."""

from __future__ import annotations

from common import portable
from common.deploy.options import finite

portable.start()  # before anything loads torch or numpy, which read what it sets

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from client.commands import admin, runs
from client.commands.options import (
    AUTO,
    DEFAULT_MEMORY,
    AllowTask,
    ApprovalsFile,
    Approve,
    Authority,
    Data,
    Device,
    Format,
    Insecure,
    Key,
    KitAuthority,
    KitFile,
    KitFolder,
    Memory,
    Names,
    PolicyFile,
    Portable,
    Server,
    TrustServer,
    approvals_file,
    errors,
)
from common.deploy import audit_commands
from common.deploy.logs import LogFormat
from common.errors import SettingsError

# Imported where used: torch and Flower take seconds, which --help and an error in what was typed need not wait for.

cli = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="A site of a federation: one resident process that trains on its own data.",
    epilog="Example: python -m client join --server 127.0.0.1:9092 --name site-3",
)


cli.command(epilog="Example: python -m client keygen --out site-3.key")(admin.keygen)
cli.command(epilog="Example: python -m client doctor --server fl.example.org:9092 --ca ca.pem")(admin.doctor)
cli.add_typer(admin.memories, name="memory")
cli.command(epilog="Example: python -m client approvals --show")(runs.approvals)
cli.command(epilog="Example: python -m client approve first")(runs.approve)
cli.command(epilog="Example: python -m client deny 3f9a0c41")(runs.deny)
cli.command(epilog="Example: python -m client revoke first")(runs.revoke)
cli.add_typer(audit_commands.commands(errors), name="audit")


@cli.command(
    epilog="Example: python -m client join --server fl.example.org:9092 --name site-3 --ca ca.pem --key site.key"
)
def join(
    kit: KitFile = None,
    server: Server = None,
    name: Names = None,
    ca: Authority = None,
    key: Key = None,
    policy: PolicyFile = None,
    allow_task: AllowTask = None,
    trust_server: TrustServer = False,
    approve: Approve = "policy",
    approvals: ApprovalsFile = None,
    folder: KitFolder = None,
    authority: KitAuthority = "",
    data: Data = None,
    memory: Memory = None,
    device: Device = "cpu",
    gpu_memory_fraction: Annotated[
        float,
        typer.Option(min=0, max=1, callback=finite, help="Part of the GPU's memory for this process; 0: no limit."),
    ] = 0.0,
    insecure: Insecure = False,
    max_wait: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, metavar="SECONDS", help="Give up after so long without a server."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve /metrics (Prometheus) and /health there.")
    ] = None,
    audit: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The audit log; {name} is the client's. Default: audit.jsonl in its memory."),
    ] = None,
    log_format: Format = LogFormat.text,
    portably: Portable = False,
) -> None:
    """Join a Flower server and train for it until stopped: with the kit that its operator made, or with --server and
    --name. Options take the place of what the kit says.

    SIGTERM or Ctrl-C finishes the message in hand, then leaves; a second one ends at once.

    Exit code 0: stopped; 1: no server for --max-wait seconds; 2: what was typed cannot work or is refused.
    """
    with errors(log_format):
        from client.node.access import Access
        from client.node.audited import default_path
        from client.node.resident import NodeOptions, run_nodes

        if kit:
            from client.commands.kit import ask, unpack

            given = unpack(kit, folder, authority, agreed=ask())
            server, name, ca = server or given.server, name or [given.name], ca or given.ca
            key, policy = key or str(given.key), policy or given.policy
        elif server is None or not name:
            raise SettingsError("join: give the kit of the server's operator, or --server and --name")
        access = Access(server, str(ca or ""), "", insecure, max_wait)
        file = str(approvals_file(approvals, memory, name))
        if kit:
            access = replace(access, patience_s=math.inf)  # its operator may be still to let it in
        access.check()  # A typing error is told before the seconds that torch takes to load.
        stop: threading.Event | None = None
        held = None
        if found := AUTO.fullmatch(name[0]):
            from client.memory.names import claim

            stop = stop_on_signal()
            claimed = claim((memory or DEFAULT_MEMORY).expanduser(), int(found[1]) if found[1] else None, stop)
            if claimed is None:
                return
            name, held = [claimed[0]], claimed[1]
            memory = held.folder
        clients = [
            NodeOptions(
                replace(access, key=_own(key, each)),
                each,
                device,
                _existing("--data", _own(data, each)),
                str(_memory(memory, each, len(name))),
                _existing("--policy", str(policy or "")),
                gpu_memory_fraction,
                tuple(allow_task or ()),
                trust_server,
                approve,
                file,
                held,
                str(_own(audit, each) or default_path(str(_memory(memory, each, len(name))))),
            )
            for each in name
        ]
        from client.approval.store import Approvals

        Approvals(file).entries()  # One that cannot be used is told before anything is joined.
        stop = stop or stop_on_signal()
        from client.app import app
        from client.policy import Policy
        from client.training.device import choose
        from common.arithmetic import require
        from common.data import grant
        from common.partition import split_cache

        grant.close()
        split_cache.share_in(held.folder.parent / ".plans" if held else Path(clients[0].memory) / ".plans")
        limits = Policy.load(clients[0].policy)
        limits.bound_memory()
        chosen = choose(device, gpu_memory_fraction)
        require("portable" if portably else "native", chosen)
        most = int(limits.max_message_mb * 1e6)
        clients = [replace(each, access=replace(each.access, most_bytes=most)) for each in clients]
        with _watched(metrics, name) as watch:
            run_nodes(clients, app, stop, watch)


def _own(pattern: str | None, name: str) -> str:
    """A path with {name} replaced."""
    return str(Path((pattern or "").replace("{name}", name)).expanduser()) if pattern else ""


def _existing(option: str, path: str) -> str:
    if path and not Path(path).exists():
        raise SettingsError(f"{option}: there is no file or folder {path!r}")
    return str(Path(path).resolve()) if path else ""


def _memory(given: Path | None, name: str, clients: int) -> Path:
    if given is None:
        return DEFAULT_MEMORY.expanduser() / name
    return given / name if clients > 1 else given


@contextmanager
def _watched(address: str | None, names: list[str]) -> Iterator[Any]:
    """Metrics and health at [HOST:]PORT, or nothing without an address."""
    if address is None:
        yield None
        return
    from client.node.metrics import ClientMetrics
    from common.deploy.endpoint import Endpoint

    counted = ClientMetrics(names=names)
    with Endpoint(address, counted.registry, counted.health):
        yield counted


def stop_on_signal() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one ends the process."""
    stop = threading.Event()
    asked: list[int] = []

    def ask() -> None:
        logging.getLogger("client").info("stopping after the message in hand; once more to stop at once")
        stop.set()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        # In a thread: the handler may have interrupted the main thread inside the event's or the log's lock.
        threading.Thread(target=ask, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop


if __name__ == "__main__":
    cli()
