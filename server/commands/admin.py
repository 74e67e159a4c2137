"""Commands for whoever runs a server: certificates, sites and a look at what would go wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from common.deploy.addresses import LOOPBACK
from common.deploy.options import Set
from common.errors import SettingsError
from server.commands.options import (
    ControlHost,
    ControlPort,
    FleetPort,
    Host,
    Insecure,
    NodesFile,
    State,
    errors,
)

# Imported where used: cryptography and httpx take tenths of a second, and `--help` needs none of them.


def certs(
    host: Annotated[list[str] | None, typer.Option(help="DNS name that clients type; may be given again.")] = None,
    ip: Annotated[list[str] | None, typer.Option(help="IP address that clients type; may be given again.")] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder.")] = Path("certs"),
    days: Annotated[int, typer.Option(min=1, max=3650, help="Until the server's certificate expires.")] = 825,
    beside: Annotated[
        Path | None, typer.Option(help="The folder of the authority before this new one: OUT/trust.pem holds both.")
    ] = None,
) -> None:
    """Make a certificate authority and the server's certificate, or with an authority that is there a new certificate.

    Sites get OUT/ca.pem. OUT/ca.key signs further certificates: keep it off the server.
    """
    with errors():
        from common.deploy.kit import authorities
        from server.deploy import certs as authority
        from server.deploy import register

        made = authority.write(out, host or [], ip or [], days, beside)
        register.beside(made.certificate).try_record("certificate", "made", **register.certificate_of(made.certificate))
        typer.echo(f"{made.certificate}: {authority.describe(made.certificate)}")
        for each in authorities(made.trust.read_bytes(), str(made.trust)):
            typer.echo(f"authority {each.fingerprint} ({each.subject}, until {each.until})")
        typer.echo(f"sites need {made.trust}; keep {out / authority.CA_KEY} in a safe place")


def doctor(
    experiment: Annotated[Path | None, typer.Argument(metavar="EXPERIMENT.toml", help="Look at this too.")] = None,
    host: Host = LOOPBACK,
    fleet_port: FleetPort = 9092,
    control_host: ControlHost = LOOPBACK,
    control_port: ControlPort = 8000,
    certs: Annotated[Path | None, typer.Option(file_okay=False, help="Folder of `python -m server certs`.")] = None,
    insecure: Insecure = False,
    nodes: NodesFile = None,
    state: State = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Control address of a SuperLink that runs already.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="With --superlink: the authority it is signed by.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="What sites type as the server's host.")] = None,
    set_: Set = None,
) -> None:
    """Look at all that `run` and `superlink` need, with the same options. Exit code 1 if something would fail."""
    with errors():
        if set_ and experiment is None:
            raise SettingsError(f"--set {set_[0]} changes a file's settings: name the file, too")
        from server.commands.doctor import doctor_command

        code = doctor_command(
            experiment=experiment,
            host=host,
            fleet_port=fleet_port,
            control_host=control_host,
            control_port=control_port,
            certs=certs,
            insecure=insecure,
            nodes=nodes,
            state=state,
            run_dir=run_dir,
            superlink=superlink,
            ca=ca,
            names=name or [],
            sets=set_ or (),
        )
    sys.exit(code)
