"""What the commands of `python -m client` share: options, and how they end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from common import flower, portable
from common.deploy import logs
from common.deploy.logs import LogFormat
from common.errors import RunError, SettingsError
from common.settings import name_fault

DEFAULT_MEMORY = Path("~/.fedkeel/memory")


AUTO = re.compile(r"auto(?::([1-9][0-9]{0,5}))?")
"""A name that stands for whichever is free, of the first so many."""


def _checked_names(names: list[str] | None) -> list[str] | None:
    if names and len(names) == 1 and AUTO.fullmatch(names[0]):
        return names
    for name in names or []:
        if fault := name_fault(name):
            raise typer.BadParameter(fault)
        if names and names.count(name) > 1:
            raise typer.BadParameter(f"{name!r} is given twice")
    return names


Server = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The Flower server's Fleet address.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        callback=_checked_names,
        help="This site's name, its own and always the same; given again, this process hosts several clients. "
        "auto: the lowest whole number that no other client holds below --memory; auto:N, of the first N.",
    ),
]
KitFile = Annotated[
    Path | None, typer.Argument(metavar="KIT.zip", help="The archive that `python -m server kit` made for this site.")
]
KitFolder = Annotated[
    Path | None,
    typer.Option("--folder", file_okay=False, help="Where the kit is unpacked. Default: the site's name, beside it."),
]
KitAuthority = Annotated[
    str,
    typer.Option(
        "--authority", metavar="FINGERPRINT", help="Of the kit's authority, as the operator read it out; else it asks."
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
PolicyFile = Annotated[Path | None, typer.Option(help="What a server may ask of this site, in TOML; docs/policy.md")]
AllowTask = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="A task of one's own that experiments may run here, beside those of this project; may be given again.",
    ),
]
TrustServer = Annotated[
    bool,
    typer.Option(
        "--trust-server",
        help="The server is run by this machine's owner: its experiments may name code, files and downloads, and it is "
        "told whole errors. Bounded by --policy alone.",
    ),
]
Approve = Annotated[
    Literal["ask", "policy", "all"],
    typer.Option(
        help="Which runs are taken. ask: those that a person here approved; policy: those that --policy, or "
        "without one its defaults, let pass; all: the same, on purpose. See docs/approval.md."
    ),
]
ApprovalsFile = Annotated[
    Path | None,
    typer.Option(
        "--approvals",
        dir_okay=False,
        metavar="FILE",
        help="Which runs were approved, denied, revoked. Default: approvals.json in the memory folder, of several "
        "clients in the one that holds theirs.",
    ),
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
Portable = Annotated[
    bool, typer.Option(portable.OPTION, help="Compute the same bits as any AVX2 processor; docs/arithmetic.md.")
]
Format = Annotated[LogFormat, typer.Option(help="Lines for people, or one JSON object a line.")]


def approvals_file(given: Path | None, memory: Path | None, names: Sequence[str]) -> Path:
    """Where `join` with these options keeps who was approved: one file for all clients of a process."""
    if given is not None:
        return given.expanduser().absolute()
    if memory is None:
        root = DEFAULT_MEMORY.expanduser()
        memory = root / names[0] if len(names) == 1 else root
    return memory.expanduser().absolute() / "approvals.json"


@contextmanager
def errors(log_format: LogFormat = LogFormat.text) -> Iterator[None]:
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
