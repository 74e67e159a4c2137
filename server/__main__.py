"""`python -m server`: run, simulate and compare experiments."""

from __future__ import annotations

import os
import signal
import sys

if sys.argv[1:2] in (["run"], ["local"], ["superlink"]):
    # Until the command listens itself, and once it has ended: told to stop, and nothing runs.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

from common import portable

portable.start()  # before anything loads torch or numpy, which read what it sets

from collections.abc import Callable

import typer

from common.deploy import audit_commands
from server.commands import admin, run, runs, sites, statistics, study
from server.commands.options import errors

cli = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Federated experiments: simulated, on this machine over gRPC, or with clients that join from elsewhere.",
    epilog="Example: python -m server local experiments/digits.toml",
)


COMMANDS: dict[Callable[..., None], str] = {
    run.simulate: "simulate experiments/digits.toml --engine inprocess --workers 2",
    study.compare: "compare experiments/digits_compare.toml --workers 2",
    run.local: "local experiments/digits.toml",
    run.run: "run experiments/digits.toml --host 0.0.0.0 --certs certs",
    run.superlink: "superlink --host 0.0.0.0 --certs certs --nodes nodes.toml --state state",
    admin.certs: "certs --host fl.example.org --ip 192.0.2.7",
    sites.kit: "kit site-3 --server fl.example.org:9092",
    admin.doctor: "doctor first.toml --host 0.0.0.0 --certs certs",
    study.check: "check experiments/digits.toml",
    statistics.statistics: "statistics experiments/digits.toml --out statistics.json",
    study.partition: "partition experiments/digits.toml --out plan.json --picture plan.png",
    runs.sites: "sites --superlink 127.0.0.1:8000",
    study.report: "report runs/a runs/b --target 0.9 --out report.html",
}
"""Each with an example of its use."""

for command, example in COMMANDS.items():
    cli.command(epilog=f"Example: python -m server {example}")(command)
cli.add_typer(sites.nodes_app, name="nodes")
cli.add_typer(runs.runs, name="runs")
cli.add_typer(runs.users, name="users")
cli.add_typer(audit_commands.commands(errors), name="audit")

if __name__ == "__main__":
    cli()
