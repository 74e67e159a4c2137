"""Commands for who may join: `python -m server nodes` and `python -m server kit`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from server.commands.options import State, errors, note

# Imported where used: cryptography and httpx take tenths of a second, and `--help` needs none of them.

nodes_app = typer.Typer(no_args_is_help=True, help="Which sites may join, by their public keys.")
SiteFile = Annotated[Path, typer.Option("--file", dir_okay=False, help="The nodes file.")]
Fingerprint = Annotated[str, typer.Option(metavar="SHA256:...", help="Of the key, as its site reads it out.")]
NODES = Path("nodes.toml")
Audit = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="Note it in this audit log; default: audit.jsonl beside the nodes file, if any."),
]


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}; allowed: a date such as 2027-01-01") from None


def kit(
    name: Annotated[str, typer.Argument(metavar="SITE", help="The site's name: it joins under this one.")],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where it finds the server.")],
    certs: Annotated[Path, typer.Option(file_okay=False, help="Folder of `python -m server certs`.")] = Path("certs"),
    ca: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The authority, or several, instead of the folder's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="The archive. Default: SITE.zip.")] = None,
    file: SiteFile = NODES,
    audit: Audit = None,
) -> None:
    """Make one archive with all that a site needs but its key and data. Nothing in it is secret. The nodes file is made
    too, empty, if there is none: a server can start with it."""
    with errors():
        from server.deploy import kits, nodes

        made = kits.make(kits.Order(name, server, certs, ca), out or Path(f"{name}.zip"), datetime.date.today())
        if not file.exists():
            nodes.write(file, {})
            typer.echo(f"{file}: the sites that may join, none yet")
        note(file, "kit made", audit, site=name, key=made.manifest.authorities[0], server=server)
        typer.echo(f"{out or Path(f'{name}.zip')}: for {name}; there: python -m client join {name}.zip --data PATH")
        typer.echo("over the phone, read out the authority's fingerprint; both sides must have the same:")
        for fingerprint in made.manifest.authorities:
            typer.echo(f"    {fingerprint}")
        typer.echo(
            "and let them read out their key's: python -m server nodes add "
            + f"{name} --fingerprint 'THEIR FINGERPRINT'"
        )


@nodes_app.command("add", epilog="Example: python -m server nodes add site-3 site-3.key.pub --expires 2027-12-31")
def nodes_add(
    name: Annotated[str, typer.Argument(help="The site's name: it can join under no other.")],
    key: Annotated[Path | None, typer.Argument(help="Its public key, from `python -m client keygen`.")] = None,
    fingerprint: Fingerprint = "",
    also: Annotated[bool, typer.Option("--also", help="Beside the key that it has, until `nodes retire`.")] = False,
    expires: Annotated[
        datetime.date | None, typer.Option(parser=_date, metavar="DATE", help="The key's last day (UTC).")
    ] = None,
    file: SiteFile = NODES,
    audit: Audit = None,
) -> None:
    """Allow a site, by its key or by the fingerprint of a key that has knocked or will. A server that runs with this
    file lets it in within seconds. A key that is there gets the new --expires."""
    with errors():
        from server.deploy import nodes

        print_ = nodes.add(file, name, key, fingerprint=fingerprint, also=also, expires=expires)
        note(file, "nodes add", audit, site=name, key=print_, also=also, expires=str(expires or ""))
        until = f" until {expires}" if expires else ""
        typer.echo(f"{name} may join with key {print_}{until}")


@nodes_app.command("list")
def nodes_list(file: SiteFile = NODES, state: State = None) -> None:
    """The sites that may join, and the keys that wait to be let in (--state: as of a server that cannot write beside
    the nodes file)."""
    with errors():
        from common.deploy.keys import spoken
        from server.deploy import nodes, waiting

        found, day = nodes.read(file), nodes.today()
        for name, held in sorted(found.items()):
            for key in held:
                said = key.ends_soon(day) or (f"until {key.expires}" if key.expires else "")
                more = [said, "" if key.pem else "its key is taken when it knocks"]
                typer.echo(f"{name:20} {key.fingerprint} {'; '.join(filter(None, more))}".rstrip())
        known = {key.fingerprint for held in found.values() for key in held}
        for print_, each in waiting.read(waiting.place(file, state)).items():
            if print_ not in known:
                typer.echo(f"{'waiting':20} {print_} from {each.address}, last {each.last}\n{'':20} {spoken(print_)}")


@nodes_app.command("retire", epilog="Example: python -m server nodes retire site-3")
def nodes_retire(name: str, fingerprint: Fingerprint = "", file: SiteFile = NODES, audit: Audit = None) -> None:
    """Take away the older of a site's two keys, or the one that is named. It is never taken back."""
    with errors():
        from server.deploy import nodes

        print_ = nodes.retire(file, name, fingerprint)
        note(file, "nodes retire", audit, site=name, key=print_)
        typer.echo(f"{name}: key {print_} is refused from now on")


@nodes_app.command("remove")
def nodes_remove(name: str, file: SiteFile = NODES, audit: Audit = None) -> None:
    """Shut a site out. Its keys are never taken back: to return, it needs a new one."""
    with errors():
        from server.deploy import nodes

        for key in nodes.remove(file, name):
            note(file, "nodes remove", audit, site=name, key=key.fingerprint)
        typer.echo(f"{name} is shut out")
