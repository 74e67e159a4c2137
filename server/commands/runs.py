"""`python -m server runs`, `sites` and `users`: who runs what behind a SuperLink, and who may."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from common.deploy.options import Set
from common.errors import SettingsError
from common.settings import printable
from server.commands.options import Connect, Grace, asks_superlink, errors, note
from server.deploy.users import Role
from server.rounds.stopping import GRACE_S

# Imported where used: Flower takes half a second, and `--help` needs none of it.

runs = typer.Typer(no_args_is_help=True, help="The runs behind a SuperLink, and those that wait for their turn.")
users = typer.Typer(no_args_is_help=True, help="Who may use a SuperLink's control port (`--users`), and for what.")

Json = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]
Run = Annotated[str, typer.Argument(help="Its id, its place in the queue (q3) or its name.")]
UsersPath = Annotated[Path, typer.Option("--file", dir_okay=False, help="The users file.")]


@runs.command("list", epilog="Example: python -m server runs list --superlink 127.0.0.1:8000")
@asks_superlink
def runs_list(
    connect: Connect,
    as_json: Json = False,
) -> None:
    """What waits, what goes on and what has ended."""
    found = connect().ask("GET", "/fedkeel/v1/runs")
    if as_json:
        _print(found, "experiment")
        return
    columns = ("run", "queue", "name", "status", "round", "since", "owner", "folder")
    _table(columns, [[r["id"], r["queue"], r["name"], _status(r), _round(r), *_who(r)] for r in found])


@runs.command("show", epilog="Example: python -m server runs show first")
@asks_superlink
def runs_show(
    connect: Connect,
    run: Run,
    as_json: Json = False,
) -> None:
    """One run: its settings, its last rounds, why clients were dropped."""
    found = connect().ask("GET", f"/fedkeel/v1/runs/{_quoted(run)}")
    if as_json:
        _print(found)
        return
    console = Console(highlight=False)
    for key in ("id", "queue", "name", "status", "since", "owner", "folder", "error"):
        if found[key]:
            console.print(f"{key:8} {found[key]}", markup=False)
    rows = [
        [
            str(line["round"]),
            f"{len(line['accepted'])} of {len(line['sampled'])}",
            "; ".join(f"{name}: {why}" for name, why in line["dropped"].items()),
            "; ".join(f"{c['key']} {c['from']} -> {c['to']}" for c in line.get("changed", [])),
        ]
        for line in found["rounds_done"]
    ]
    _table(("round", "accepted", "dropped", "changed"), rows)
    for name, causes in sorted(found["causes"].items()):
        told = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
        console.print(f"{name}: {told}", markup=False)
    for line in found["notes"]:
        console.print(line, markup=False)
    console.print(f"\n{found['settings']}", markup=False)


@runs.command("stop", epilog="Example: python -m server runs stop first")
@asks_superlink
def runs_stop(
    connect: Connect,
    run: Run,
    grace: Grace = GRACE_S,
) -> None:
    """Stop a run as SIGTERM does: its round is finished or void, and it can be resumed. Or take it out of the queue."""
    control = connect()
    found = control.ask("POST", f"/fedkeel/v1/runs/{_quoted(run)}/stop", {"grace_s": grace})
    typer.echo(f"{found['name']}: {found['status']}")


@runs.command("resume", epilog="Example: python -m server runs resume first --experiment first.toml")
@asks_superlink
def runs_resume(
    connect: Connect,
    run: Run,
    experiment: Annotated[Path | None, typer.Option(help="Other settings, as far as they may change.")] = None,
    set_: Set = None,
) -> None:
    """Put a run that was stopped or failed into the queue: it goes on from its newest checkpoint."""
    if set_ and not experiment:
        raise SettingsError(f"--set {set_[0]} changes a file's settings: give --experiment, too")
    text = str(_experiment(experiment, set_).toml()) if experiment else ""
    found = connect().ask("POST", f"/fedkeel/v1/runs/{_quoted(run)}/resume", {"experiment": text})
    typer.echo(f"{found['name']} waits as {found['queue']}")


@runs.command("queue", epilog="Example: python -m server runs queue first.toml second.toml")
@asks_superlink
def runs_queue(
    connect: Connect,
    experiments: Annotated[list[Path], typer.Argument(metavar="EXPERIMENT.toml...", help="In this order.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run, for one experiment; default: runs/<name> at the SuperLink.")
    ] = None,
    set_: Set = None,
) -> None:
    """Let experiments run one after another, or side by side as far as the SuperLink's --at-once allows.

    They are the SuperLink's from then on: this command ends at once, and a restart of the SuperLink forgets none.
    """
    from server.rounds.prepare import deployable, prepare

    if run_dir and len(experiments) > 1:
        raise SettingsError(f"--run-dir {str(run_dir)!r} is of one run, and {len(experiments)} were given")
    texts = []
    for path in experiments:  # all or none
        settings = _experiment(path, set_)
        deployable(prepare(settings))
        texts.append(settings.toml())
    control = connect()
    for text in texts:
        body = {"experiment": text, "folder": str(run_dir.resolve()) if run_dir else ""}
        found = control.ask("POST", "/fedkeel/v1/queue", body)
        typer.echo(f"{found['name']} waits as {found['queue']}")


@asks_superlink
def sites(
    connect: Connect,
    as_json: Json = False,
) -> None:
    """The sites of a SuperLink: who is here, when the others were last, how they compute, why one is refused."""
    found = connect().ask("GET", "/fedkeel/v1/sites")
    if as_json:
        _print(found)
        return
    columns = ("name", "status", "seen", "examples", "versions", "arithmetic", "schema", "refused")
    _table(columns, [["" if s[key] is None else str(s[key]) for key in columns] for s in map(_marked, found)])


@users.command("add", epilog="Example: python -m server users add alice --role submit")
def users_add(
    name: str,
    role: Annotated[Role, typer.Option(help="look: list; submit: also start runs and stop one's own; operate: all.")],
    file: UsersPath = Path("users.toml"),
) -> None:
    """Let somebody in, and print the token: it stands nowhere else. A SuperLink with this file knows it at once."""
    with errors():
        from server.deploy import users as book

        token = book.add(file, name, role)
        note(file, "user added", user=name, role=role.value)
        typer.echo(token)
        typer.echo(f"{name} may {role.value}; keep this token in a file of your own, or in FEDKEEL_TOKEN", err=True)


@users.command("list")
def users_list(file: UsersPath = Path("users.toml")) -> None:
    """Who may, and what."""
    with errors():
        from server.deploy import users as book

        for name, user in sorted(book.read(file).items()):
            typer.echo(f"{name:20} {user.role.value}")


@users.command("remove")
def users_remove(name: str, file: UsersPath = Path("users.toml")) -> None:
    """Shut somebody out, at once."""
    with errors():
        from server.deploy import users as book

        book.remove(file, name)
        note(file, "user removed", user=name)
        typer.echo(f"{name} is shut out")


def _marked(site: Mapping[str, Any]) -> Mapping[str, Any]:
    """A site whose data do not look like most others'."""
    return {**site, "schema": f"{site['schema']} differs"} if site.get("schema_differs") else site


def _experiment(path: Path, sets: list[str] | None) -> Any:
    from common.experiment import Experiment

    return Experiment.load(path, sets or ())


def _quoted(ref: str) -> str:
    from urllib.parse import quote

    return quote(ref, safe="")


def _status(run: Mapping[str, Any]) -> str:
    return f"{run['status']}: {run['error'][:60]}" if run["error"] else str(run["status"])


def _round(run: Mapping[str, Any]) -> str:
    return f"{run['round']}/{run['rounds']}" if run["rounds"] else str(run["round"] or "")


def _who(run: Mapping[str, Any]) -> list[str]:
    return [str(run["since"])[:19], run["owner"], run["folder"]]


def _print(found: Any, *without: str) -> None:
    kept = [{k: v for k, v in each.items() if k not in without} for each in found] if without else found
    print(json.dumps(kept, indent=1))


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    table = Table(box=None, header_style="", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ignore")
    for row in rows:
        # What others wrote is shown as it is, and never taken for markup.
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False, width=2000).print(table)
