"""What the commands of `python -m server` share: options, and how they end."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from common import flower, portable
from common.deploy import logs
from common.deploy.logs import LogFormat
from common.deploy.options import finite
from common.errors import RunError, SettingsError
from common.settings import text_of
from server.rounds.stopping import Stopped

TOKEN = "FEDKEEL_TOKEN"

File = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")]
RunDir = Annotated[Path | None, typer.Option(help="Folder of this run. Default: a new one, runs/<name>.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Another seed than the file's.")]
LinkAuthority = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="With --superlink: the authority it is signed by.")
]
Clients = Annotated[
    int | None, typer.Option(min=1, help="Another number of simulated clients than the file's partition.clients.")
]
Device = Annotated[str, typer.Option(help="Where clients train: cpu, auto, cuda, cuda:1.")]
Gpus = Annotated[
    float,
    typer.Option(
        min=0.01, callback=finite, help="With --engine flower on a GPU: the part of it that each actor takes."
    ),
]
Grace = Annotated[float, typer.Option(min=0, callback=finite, help="Seconds that SIGTERM leaves to the round in hand.")]
Host = Annotated[str, typer.Option(help="Where clients join; 0.0.0.0 is every address of this machine.")]
FleetPort = Annotated[int, typer.Option(min=1, max=65535, help="Where clients join (gRPC).")]
ControlHost = Annotated[
    str, typer.Option(help="Where runs are submitted. Whoever reaches it runs code here: keep it to yourself.")
]
ControlPort = Annotated[int, typer.Option(min=1, max=65535, help="Where runs are submitted (HTTP).")]
Certs = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="TLS with the folder of `python -m server certs`.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plain text beyond this machine.")]
NodesFile = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Let in only the sites of this file; see `python -m server nodes`.")
]
State = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder of Flower's database. Without: it ends with the process.")
]
UsersFile = Annotated[
    Path | None,
    typer.Option("--users", dir_okay=False, help="The control port is for these; see `python -m server users`."),
]
AuditFile = Annotated[
    Path | None,
    typer.Option(
        "--audit", dir_okay=False, help="The audit log. Default: audit.jsonl in --state, of a run in its folder."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Who you are for a SuperLink with --users. Default: FEDKEEL_TOKEN."),
]
Metrics = Annotated[
    str | None, typer.Option(metavar="[HOST:]PORT", help="Serve /metrics (Prometheus) and /health there.")
]
Page = Annotated[
    str | None, typer.Option(metavar="[HOST:]PORT", help="Show rounds, curves and sites there, live, to a browser.")
]


Portable = Annotated[
    bool, typer.Option(portable.OPTION, help="As local.arithmetic = 'portable': one answer on any AVX2 processor.")
]
Format = Annotated[LogFormat, typer.Option(help="Lines for people, or one JSON object a line.")]


def _cohort(text: str) -> int:
    if text == "all":
        return 0
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise typer.BadParameter(f"{text!r}; allowed: all, or a number of clients from 1")
    return int(text)


Cohort = Annotated[
    int | None,
    typer.Option(
        parser=_cohort,
        metavar="all|N",
        help="Train a round's clients as one batched model, all or N at once. Outside the promise of equal bits.",
    ),
]


def token_of(file: Path | None = None) -> str:
    """The token of whoever types this command: of a file, else of the environment; never of the command line, which
    every user of the machine can read."""
    if file is None:
        return os.environ.get(TOKEN, "").strip()
    return text_of(file, "token file").strip()


Connect = Callable[[], Any]
"""Gives a `server.deploy.control.Control`."""
Link = Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="The SuperLink's control address.")]
Ca = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="The authority it is signed by.")]
_ASKS = {
    "superlink": (Link, "127.0.0.1:8000"),
    "ca": (Ca, None),
    "insecure": (Insecure, False),
    "token_file": (TokenFile, None),
}


def asks_superlink(command: Callable[..., None]) -> Callable[..., None]:
    """A command's parameter `connect`, of type `Connect`, on its command line: which SuperLink is asked, and as whom.

    `connect()` raises SettingsError for options that do not fit. Errors end the command as `errors` says.
    """

    @functools.wraps(command)
    def asking(*, superlink: str, ca: Path | None, insecure: bool, token_file: Path | None, **own: Any) -> None:
        def connect() -> Any:
            from server.deploy import federation  # as LinkOptions, half a second that `--help` does without
            from server.deploy.superlink import LinkOptions

            return federation.running_link(superlink, ca, LinkOptions(insecure=insecure), token_of(token_file))

        with errors():
            command(connect=connect, **own)

    hints = get_type_hints(command, include_extras=True)
    kept = [each for name, each in inspect.signature(command).parameters.items() if name != "connect"]
    given = {each.name: (hints[each.name], each.default) for each in kept} | _ASKS
    only = inspect.Parameter.KEYWORD_ONLY
    signature = [inspect.Parameter(name, only, default=each[1], annotation=each[0]) for name, each in given.items()]
    asking.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    asking.__annotations__ = {name: kind for name, (kind, _) in given.items()}
    del asking.__wrapped__
    return asking


@contextmanager
def errors(log_format: LogFormat = LogFormat.text) -> Iterator[None]:
    """One message and an exit code instead of a stack trace: 2 for what the user wrote, 1 for a failed run."""
    flower.prepare()
    logs.configure(log_format.value)
    # Clients of this process, in a simulation: what they have to say reaches the server and is told by it.
    logging.getLogger("client.app").setLevel(logging.ERROR)
    console = Console(stderr=True)
    try:
        flower.check_version()
        yield
    except SettingsError as error:
        console.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
    except RunError as error:
        console.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)
    except Stopped:
        console.print("stopped before it began")
    except KeyboardInterrupt:
        console.print("stopped; go on with --resume")
        sys.exit(130)


def note(file: Path, what: str, audit: Path | None = None, **more: Any) -> None:
    """A line in the audit log that was named, or in the one that lies beside a file that a command changes."""
    from common.deploy.audit import NAME, AuditLog  # hashing and locks, of commands that change something

    place = audit or file.with_name(NAME)
    if audit or place.exists():
        AuditLog(place).record(what, **more)
