"""`python -m client`: the command line of a site."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from common import flower
from common.errors import RunError, SettingsError

cli = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="A site of a federation: one resident process that trains on its own data.",
    epilog="Example: python -m client join --server 127.0.0.1:9092 --name site-3",
)

# As the name of an experiment: it becomes a folder's name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@cli.callback()
def _commands() -> None:
    # A callback keeps `join` a subcommand while it is the only one.
    pass


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(f"{name!r}: letters, digits, '.', '_' and '-', at most 100, no leading sign")
    return name


@cli.command(epilog="Example: python -m client join --server 127.0.0.1:9092 --name site-3 --data site-3.npz")
def join(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The Flower server's Fleet address.")],
    name: Annotated[str, typer.Option(callback=_checked_name, help="This site's name, its own and always the same.")],
    data: Annotated[
        Path | None,
        typer.Option(exists=True, resolve_path=True, help="This site's data, if the task reads any."),
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            resolve_path=True,
            help="Folder of what this site remembers between rounds. Default: ~/.fedkeel/memory/NAME",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")] = "cpu",
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow a plain connection to another machine.")] = False,
    max_wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Give up after so long without a server.")
    ] = None,
) -> None:
    """Join a Flower server and train for it until stopped.

    SIGTERM or Ctrl-C finishes the message in hand, then leaves; a second one ends at once.

    Exit code 0: stopped; 1: no server for --max-wait seconds; 2: what was typed cannot work or is refused.
    """
    flower.prepare()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("client").setLevel(logging.INFO)
    try:
        flower.check_version()
        from client.fleet import server_address
        from client.node import NodeOptions, run_node

        folder = memory or Path.home() / ".fedkeel" / "memory" / name
        options = NodeOptions(server, name, device, str(data or ""), str(folder), insecure, max_wait)
        server_address(server, insecure)  # A typing error is told before the seconds that torch takes to load.
        stop = stop_on_signal()
        from client.app import app

        run_node(options, app, stop)
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
