"""`python -m client`: the command line of a site."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from common import flower, logs
from common.errors import RunError, SettingsError

cli = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="A site of a federation: one resident process that trains on its own data.",
    epilog="Example: python -m client join --server 127.0.0.1:9092 --name site-3",
)

memories = typer.Typer(no_args_is_help=True, help="What the clients of this machine remember between rounds.")
cli.add_typer(memories, name="memory")

DEFAULT_MEMORY = Path("~/.fedkeel/memory")
MemoryRoot = Annotated[
    Path, typer.Option("--memory", file_okay=False, help="A client's memory folder, or one that holds several.")
]

# As the name of an experiment: it becomes a folder's name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _checked_names(names: list[str]) -> list[str]:
    for name in names:
        if not _NAME.fullmatch(name):
            raise typer.BadParameter(f"{name!r}: letters, digits, '.', '_' and '-', at most 100, no leading sign")
    if len(set(names)) < len(names):
        raise typer.BadParameter("a name is given twice")
    return names


class LogFormat(StrEnum):
    """How lines are written."""

    text = "text"
    json = "json"


Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="The Flower server's Fleet address.")]
Names = Annotated[
    list[str],
    typer.Option(
        "--name",
        callback=_checked_names,
        help="This site's name, its own and always the same; given again, this process hosts several clients.",
    ),
]
Data = Annotated[
    str | None, typer.Option(metavar="PATH", help="This site's data, if the task reads any; {name} is the client's.")
]
Authority = Annotated[
    Path | None, typer.Option(help="The server operator's ca.pem. Without: the system's authorities.")
]
Key = Annotated[
    str | None, typer.Option(metavar="PATH", help="The private key of `keygen`; {name} is the client's name.")
]
PolicyFile = Annotated[
    Path | None, typer.Option(help="What a server may ask of this site, in TOML; see client/policy.py")
]
Memory = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        resolve_path=True,
        help="Folder of what this site remembers between rounds; of several clients, each in one of its name. "
        "Default: ~/.fedkeel/memory/NAME",
    ),
]
Device = Annotated[str, typer.Option(help="Where to train: cpu, auto, cuda, cuda:1, ...")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow a plain connection to another machine.")]
Format = Annotated[LogFormat, typer.Option(help="Lines for people, or one JSON object a line.")]


@cli.command(
    epilog="Example: python -m client join --server fl.example.org:9092 --name site-3 --ca ca.pem --key site.key"
)
def join(
    server: Server,
    name: Names,
    ca: Authority = None,
    key: Key = None,
    policy: PolicyFile = None,
    data: Data = None,
    memory: Memory = None,
    device: Device = "cpu",
    gpu_memory_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the GPU's memory for this process; 0: no limit.")
    ] = 0.0,
    insecure: Insecure = False,
    max_wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Give up after so long without a server.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve /metrics (Prometheus) and /health there.")
    ] = None,
    log_format: Format = LogFormat.text,
) -> None:
    """Join a Flower server and train for it until stopped.

    SIGTERM or Ctrl-C finishes the message in hand, then leaves; a second one ends at once.

    Exit code 0: stopped; 1: no server for --max-wait seconds; 2: what was typed cannot work or is refused.
    """
    with _errors(log_format):
        from client.fleet import Access
        from client.node import NodeOptions, run_nodes

        access = Access(server, str(ca or ""), "", insecure, max_wait)
        access.check()  # A typing error is told before the seconds that torch takes to load.
        clients = [
            NodeOptions(
                replace(access, key=_own(key, each)),
                each,
                device,
                _existing("--data", _own(data, each)),
                str(_memory(memory, each, len(name))),
                _existing("--policy", str(policy or "")),
                gpu_memory_fraction,
            )
            for each in name
        ]
        stop = stop_on_signal()
        from client.app import app
        from client.device import choose
        from client.policy import Policy

        limits = Policy.load(clients[0].policy)
        limits.bound_memory()
        choose(device, gpu_memory_fraction)
        most = int(limits.max_message_mb * 1e6)
        clients = [replace(each, access=replace(each.access, most_bytes=most)) for each in clients]
        with _watched(metrics, name) as watch:
            run_nodes(clients, app, stop, watch)


@cli.command(epilog="Example: python -m client keygen --out site-3.key")
def keygen(out: Annotated[Path, typer.Option(dir_okay=False, help="The private key.")] = Path("site.key")) -> None:
    """Make the key by which a server knows this site: OUT stays here, OUT.pub goes to the server's operator."""
    with _errors():
        from common import keys

        public = keys.generate(out)
        typer.echo(f"{out}: private, stays at this site")
        typer.echo(f"{public}: for the server's operator (python -m server nodes add NAME {public.name})")
        typer.echo(keys.fingerprint(keys.read_public(public.read_bytes(), str(public))))


@memories.command("list")
def memory_list(memory: MemoryRoot = DEFAULT_MEMORY) -> None:
    """What the clients of this machine remember, by run and generation; every file is checked."""
    with _errors():
        from client.memories import list_memories

        for folder in _memory_folders(memory):
            for each in list_memories(folder):
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
    with _errors():
        from client.memories import reset_memory

        folders = _memory_folders(memory)
        what = f"run {run}" if run else "all runs"
        if not yes and not typer.confirm(f"forget {what} in {', '.join(map(str, folders))}?"):
            raise typer.Exit(1)
        for folder in folders:
            gone = reset_memory(folder, run)
            typer.echo(f"{folder}: {gone.files} files, {gone.bytes / 1e6:.1f} MB forgotten")


def _own(pattern: str | None, name: str) -> str:
    """A path with {name} replaced."""
    return str(Path((pattern or "").replace("{name}", name)).expanduser()) if pattern else ""


def _existing(option: str, path: str) -> str:
    if path and not Path(path).exists():
        raise SettingsError(f"{option}: there is no file {path!r}")
    return str(Path(path).resolve()) if path else ""


def _memory(given: Path | None, name: str, clients: int) -> Path:
    if given is None:
        return DEFAULT_MEMORY.expanduser() / name
    return given / name if clients > 1 else given


def _memory_folders(root: Path) -> list[Path]:
    """The folder itself if a client uses it, else those in it that one does."""
    root = root.expanduser()
    found = [folder for folder in (root, *sorted(root.glob("*/"))) if (folder / ".lock").exists()]
    if not found:
        raise SettingsError(f"no client has left anything in {str(root)!r}")
    return found


@contextmanager
def _watched(address: str | None, names: list[str]) -> Iterator[Any]:
    """Metrics and health at [HOST:]PORT, or nothing without an address."""
    if address is None:
        yield None
        return
    from client.metrics import ClientMetrics
    from common.endpoint import Endpoint

    counted = ClientMetrics(names=names)
    with Endpoint(address, counted.registry, counted.health):
        yield counted


@contextmanager
def _errors(log_format: LogFormat = LogFormat.text) -> Iterator[None]:
    flower.prepare()
    logs.configure(log_format.value)
    try:
        flower.check_version()
        yield
    except SettingsError as error:
        raise _ended(error, 2) from None
    except RunError as error:
        raise _ended(error, 1) from None


def _ended(error: Exception, code: int) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(code)


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
