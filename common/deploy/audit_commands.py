"""`audit verify` and `audit head`, the same for a server and a site."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from common.deploy.chain import Head, Verdict, verify

File = Annotated[Path, typer.Argument(metavar="FILE", help="The audit log, audit.jsonl.")]
SHOWN = 20


def commands(errors: Callable[[], AbstractContextManager[None]]) -> typer.Typer:
    """The commands, for a program that ends errors in its own way."""
    cli = typer.Typer(no_args_is_help=True, help="What happened and who did it: a log whose lines are chained by hash.")

    @cli.command("verify", epilog="Example: audit verify state/audit.jsonl --head 41:5f0c...")
    def check(
        file: File,
        head: Annotated[
            str | None, typer.Option(metavar="NUMBER:SHA256", help="A head noted earlier: is it still in the log?")
        ] = None,
    ) -> None:
        """Say where the chain breaks, if it does; exit code 1 then.

        A log whose end was cut off, or that somebody wrote anew as a whole, is known only by a head noted elsewhere.
        """
        with errors():
            verdict = verify(file, Head.parse(head) if head else None)
            for line in described(verdict, head is not None):
                typer.echo(line)
        if not verdict.ok:
            raise typer.Exit(1)

    @cli.command("head", epilog="Example: audit head state/audit.jsonl")
    def tell(file: File) -> None:
        """The number and hash of the last line: note it where nobody who can write the log can change it."""
        with errors():
            typer.echo(str(verify(file).head))

    return cli


def described(verdict: Verdict, anchored: bool) -> list[str]:
    """A verdict in words, a line each."""
    more = len(verdict.faults) - SHOWN
    lines = [f"BROKEN {fault}" for fault in verdict.faults[:SHOWN]] + ([f"... and {more} more"] if more > 0 else [])
    lines += [f"torn {each}" for each in verdict.torn]
    if not verdict.lines:
        return [*lines, "no lines"]
    begin = "from its beginning" if verdict.first == 1 else f"from line {verdict.first} on: older files are not here"
    chain = "the chain holds" if verdict.ok else f"{len(verdict.faults)} faults"
    lines.append(f"{verdict.lines} lines, {begin}; {chain}; head {verdict.head}")
    if verdict.ok and not anchored:
        lines.append("whether its end was cut off shows only against a head noted elsewhere: --head NUMBER:SHA256")
    return lines
