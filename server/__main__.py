"""`python -m server`: run, simulate and compare experiments."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from common.deploy.addresses import LOOPBACK
from common.deploy.logs import LogFormat
from common.errors import SettingsError
from common.experiment import Experiment
from common.partition import split_cache as plans
from server.commands import admin
from server.commands.options import (
    Certs,
    Cohort,
    ControlHost,
    ControlPort,
    Device,
    File,
    FleetPort,
    Format,
    Gpus,
    Grace,
    Host,
    Insecure,
    Metrics,
    NodesFile,
    Resume,
    RunDir,
    Seed,
    State,
    errors,
)
from server.rounds.stopping import GRACE_S, StopOnSignal

cli = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Federated experiments: simulated, on this machine over gRPC, or with clients that join from elsewhere.",
    epilog="Example: python -m server local experiments/digits.toml",
)


class Engine(StrEnum):
    """Where simulated clients run."""

    inprocess = "inprocess"
    flower = "flower"


@cli.command(epilog="Example: python -m server simulate experiments/digits.toml --engine inprocess --workers 2")
def simulate(
    experiment: File,
    engine: Annotated[
        Engine, typer.Option(help="This process, or Flower's simulation engine on Ray.")
    ] = Engine.inprocess,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that train. Default: 1 in process, all cores with flower."),
    ] = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    seed: Seed = None,
    device: Device = "cpu",
    gpus: Gpus = 1.0,
    cohort: Cohort = None,
    grace: Grace = GRACE_S,
) -> None:
    """Run all clients on this machine without a server.

    With --cohort the clients of a round train as one batched model: faster for many clients with a tiny model, equal to
    the ordinary way to rounding and not bit for bit. See docs/benchmarks.md.
    """
    with errors():
        if cohort is not None and engine is Engine.flower:
            raise SettingsError("--cohort with --engine flower: allowed: --engine inprocess")
        settings, folder = _open(experiment, run_dir, resume, seed)
        from server.engines.grid import CLIENT_APP, grid
        from server.watch.display import Display

        with StopOnSignal(grace) as stop, Display(settings.name, settings.rounds) as display:
            if engine is Engine.flower:
                from server.engines import vce

                vce.simulate(
                    settings,
                    folder,
                    resolve_name(CLIENT_APP),
                    resume=resume,
                    workers=workers or os.cpu_count() or 1,
                    say=display.say,
                    show=display.show,
                    stop=stop,
                    device=device,
                    gpus=gpus,
                )
            else:
                from server.app import run

                with grid(CLIENT_APP, workers or 1, device, folder.path / "memory", cohort) as node:
                    run(node, settings, folder, resume=resume, say=display.say, show=display.show, stop=stop)
        _conclude(folder, display)


@cli.command(epilog="Example: python -m server compare experiments/digits_compare.toml --workers 2")
def compare(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan file; docs/compare.md.")],
    run_dir: Annotated[Path | None, typer.Option(help="Folder of all runs. Default: runs/<name of the plan>.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that run cells. Default: all cores, or one an accelerator.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="On a Ray cluster instead; 'auto': this machine's, 'local': a new one."),
    ] = None,
    device: Device = "cpu",
    tidy: Annotated[
        bool, typer.Option("--tidy", help="Keep no checkpoints and no client memory of finished cells.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the plan, print its cells and end.")] = False,
) -> None:
    """Run a grid of experiments and seeds, fair by construction. Run it again to go on: finished cells stay."""
    with errors():
        from server.compare import start as bench
        from server.compare.plan import Plan
        from server.compare.progress import Progress
        from server.engines.grid import CLIENT_APP

        text, settings = Plan.read(plan)
        if dry_run:
            typer.echo(bench.outline(settings))
            return
        means = bench.Means(CLIENT_APP, device, workers, ray, tidy)
        progress = Progress(settings.name)
        try:
            with StopOnSignal() as stop:
                result = bench.run(settings, text, run_dir or Path("runs") / settings.name, means, progress, stop)
        except KeyboardInterrupt:
            progress.say("stopped; run it again to go on")
            raise typer.Exit(130) from None
        progress.say(bench.summary(result))
        if result.stopped:
            progress.say("stopped; run it again to go on")
            raise typer.Exit(143)
        if result.failed:
            raise typer.Exit(1)


@cli.command(epilog="Example: python -m server local experiments/digits.toml")
def local(
    experiment: File,
    run_dir: RunDir = None,
    resume: Resume = False,
    seed: Seed = None,
    device: Device = "cpu",
    grace: Grace = GRACE_S,
) -> None:
    """Run a whole federation on this machine: a SuperLink, the server app and one resident process a client."""
    with errors():
        settings, folder = _open(experiment, run_dir, resume, seed)
        from common.tasks.base import NO_CLIENTS
        from server.deploy import federation
        from server.rounds.prepare import prepare
        from server.watch.display import Display

        if not (names := prepare(settings).task.names()):
            raise SettingsError(NO_CLIENTS)
        with Display(settings.name, settings.rounds) as display:
            federation.run(settings, folder, display, resume=resume, names=names, device=device, grace_s=grace)
        _conclude(folder, display)


@cli.command(epilog="Example: python -m server run experiments/digits.toml --host 0.0.0.0 --certs certs")
def run(
    experiment: File,
    run_dir: RunDir = None,
    resume: Resume = False,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Go on from the latest checkpoint if there is one, else begin.")
    ] = False,
    seed: Seed = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Submit to this control address instead of starting a SuperLink."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="With --superlink: the authority it is signed by.")
    ] = None,
    host: Host = LOOPBACK,
    fleet_port: FleetPort = 9092,
    control_host: ControlHost = LOOPBACK,
    control_port: ControlPort = 8000,
    certs: Certs = None,
    insecure: Insecure = False,
    nodes: NodesFile = None,
    state: State = None,
    grace: Grace = GRACE_S,
    metrics: Metrics = None,
    log_format: Format = LogFormat.text,
) -> None:
    """Run an experiment with clients that join from elsewhere, and show its rounds.

    Starts a SuperLink for it, or submits it to one that runs already (--superlink): then the run folder must lie where
    both see it. SIGTERM finishes the round in hand or voids it, then exits with 0; a second one ends at once.
    """
    with errors(log_format):
        settings, folder = _open(experiment, run_dir, resume, seed, resume_or_start)
        from server.deploy import federation
        from server.deploy.superlink import LinkOptions
        from server.rounds.prepare import prepare
        from server.watch.viewers import watched

        resume = resume or (resume_or_start and folder.holds_run())
        options = LinkOptions(host, fleet_port, control_host, control_port, certs, insecure, nodes, state)
        control = federation.running_link(superlink, ca, options) if superlink else None
        prepare(settings)
        with watched(settings, metrics, log_format) as display:
            if control is not None:
                federation.attach(settings, folder, display, resume=resume, control=control, grace_s=grace)
            else:
                federation.run(settings, folder, display, resume=resume, options=options, grace_s=grace)
        _conclude(folder, display)


@cli.command(epilog="Example: python -m server superlink --host 0.0.0.0 --certs certs --nodes nodes.toml --state state")
def superlink(
    host: Host = LOOPBACK,
    fleet_port: FleetPort = 9092,
    control_host: ControlHost = LOOPBACK,
    control_port: ControlPort = 8000,
    certs: Certs = None,
    insecure: Insecure = False,
    nodes: NodesFile = None,
    state: State = None,
    grace: Grace = GRACE_S,
    metrics: Metrics = None,
    log_format: Format = LogFormat.text,
) -> None:
    """Keep a SuperLink running for any number of runs (`run --superlink`) until SIGTERM or Ctrl-C."""
    with errors(log_format):
        from server.deploy import service
        from server.deploy.superlink import LinkOptions
        from server.watch.viewers import endpoint, say

        options = LinkOptions(host, fleet_port, control_host, control_port, certs, insecure, nodes, state)
        with StopOnSignal(grace) as stop, endpoint(metrics, lambda: (service.healthy(options), {})):
            service.serve(options, stop=stop, say=say(log_format), grace_s=grace)


cli.command(epilog="Example: python -m server certs --host fl.example.org --ip 192.0.2.7")(admin.certs)
cli.command(epilog="Example: python -m server doctor first.toml --host 0.0.0.0 --certs certs")(admin.doctor)
cli.add_typer(admin.sites, name="nodes")


@cli.command(epilog="Example: python -m server check experiments/digits.toml")
def check(experiment: File) -> None:
    """Check an experiment file, its task and its data, and print the resolved settings."""
    with errors():
        settings = Experiment.load(experiment)
        from server.rounds.prepare import prepare
        from strategies.registry import written_out

        prepared = prepare(settings)
        typer.echo(written_out(prepared.strategy, prepared.experiment).toml(full=True))
        size = prepared.model.vector.numel()
        typer.echo(f"# {len(prepared.task.names())} clients, a model of {size:,} parameters, {prepared.strategy}")


@cli.command(epilog="Example: python -m server partition experiments/digits.toml --out plan.json --picture plan.png")
def partition(
    experiment: File,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the plan, for partition.kind = 'file'.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw clients x classes: .png, .svg or .pdf.")
    ] = None,
    seed: Seed = None,
) -> None:
    """Show how an experiment's examples are split over its clients; write the plan as a file, and as a picture."""
    with errors():
        from server.commands.partition import partition as make

        settings = Experiment.load(experiment)
        if seed is not None:
            settings = settings.model_copy(update={"seed": seed})
        typer.echo(make(settings, out, picture))


@cli.command(epilog="Example: python -m server report runs/a runs/b --target 0.9 --out report.html")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Run folders, or folders that hold such.")],
    target: Annotated[
        list[float] | None,
        typer.Option(help="Target accuracy; may be repeated. Default: those of the plans, else 0.9."),
    ] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The HTML page.")] = Path("report.html"),
    tables: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also report.md and everything as CSV and Parquet, in here.")
    ] = None,
    smoothing: Annotated[int, typer.Option(min=1, help="Evaluations in a row whose mean has to reach the target.")] = 1,
    window: Annotated[int, typer.Option(min=1, help="Last evaluations whose mean is the final score.")] = 5,
) -> None:
    """Compare runs and plans on one self-contained page: curves with bands over seeds, rounds and bytes to targets."""
    with errors():
        from server.report import write

        told = write(folders, target or (), out, smoothing=smoothing, window=window, tables=tables, command=sys.argv)
        typer.echo(told)
        typer.echo(f"page {out.resolve()}")
        if tables is not None:
            typer.echo(f"tables {tables.resolve()}")


def _open(
    path: Path, run_dir: Path | None, resume: bool, seed: int | None, either: bool = False
) -> tuple[Experiment, Any]:
    from server.rounds.folder import RunFolder, choose

    plans.share()
    settings = Experiment.load(path)
    if seed is not None:
        settings = settings.model_copy(update={"seed": seed})
    if either and run_dir is None:
        run_dir = Path("runs") / settings.name
    folder = RunFolder(run_dir or choose("runs", settings.name, resume))
    if not either:
        folder.require(resume)
    return settings, folder


def _conclude(folder: Any, display: Any) -> None:
    from server.report.plots import curves
    from server.watch.display import summary

    history = folder.history()
    if history:
        plot = curves({folder.path.name: history}, folder.path / "curves.png")
        display.say(summary(history, folder.path, plot))


if __name__ == "__main__":
    cli()
