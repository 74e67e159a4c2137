"""`python -m server compare`, `report`, `check` and `partition`: many runs, and what one looks at before and after."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from common import portable
from common.deploy.options import Set
from common.errors import SettingsError
from common.experiment import Experiment
from common.metrics.target import Target
from server.commands.options import (
    Device,
    File,
    Portable,
    Seed,
    errors,
)
from server.rounds.stopping import StopOnSignal

# Imported where used: torch, Flower and matplotlib take seconds, numpy a tenth of one, and `--help` needs none of them.


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
    portably: Portable = False,
) -> None:
    """Run a grid of experiments and seeds, fair by construction. Run it again to go on: finished cells stay."""
    with errors():
        from server.compare import start as bench
        from server.compare.plan import Plan
        from server.compare.progress import Progress
        from server.engines.grid import CLIENT_APP

        text, settings = Plan.read(plan)
        if portably or portable.complete():
            settings = settings.portable()
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


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Run folders, or folders that hold such.")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METRIC=]NUMBER",
            help="A value of the headline, or of METRIC; may be repeated. Default: those of the plans, else 0.9 of an "
            "accuracy.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The HTML page.")] = Path("report.html"),
    tables: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also report.md and everything as CSV and Parquet, in here.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Also charts as PDF and SVG and tables as LaTeX, for a paper, in here."),
    ] = None,
    percent: Annotated[bool, typer.Option("--percent", help="Shares as percent in the figures.")] = False,
    smoothing: Annotated[int, typer.Option(min=1, help="Evaluations in a row whose mean has to reach the target.")] = 1,
    window: Annotated[int, typer.Option(min=1, help="Last evaluations whose mean is the final score.")] = 5,
) -> None:
    """Compare runs and plans on one self-contained page: curves with bands over seeds, rounds and bytes to targets."""
    with errors():
        from server.report import write

        targets = [_target(given) for given in target or ()]
        if percent and figures is None:
            raise SettingsError("--percent is of the figures: give --figures DIR")
        told = write(
            folders, targets, out, smoothing=smoothing, window=window, tables=tables, figures=figures, percent=percent,
            command=sys.argv,
        )  # fmt: skip
        typer.echo(told)
        typer.echo(f"page {out.resolve()}")
        if tables is not None:
            typer.echo(f"tables {tables.resolve()}")
        if figures is not None:
            typer.echo(f"figures {figures.resolve()}")


def _target(given: str) -> Target:
    try:
        return Target.parse(given)
    except ValueError as error:
        raise SettingsError(f"--target: {error}") from None


def check(experiment: File, set_: Set = None) -> None:
    """Check an experiment file, its task and its data, and print the resolved settings."""
    with errors():
        from server.rounds.prepare import prepare
        from strategies.registry import written_out

        prepared = prepare(Experiment.load(experiment, set_ or ()))
        typer.echo(written_out(prepared.strategy, prepared.experiment).toml(full=True))
        size = prepared.model.vector.numel()
        typer.echo(f"# {len(prepared.task.names())} clients, a model of {size:,} parameters, {prepared.strategy}")
        for heading, line in prepared.task.explain().items():
            typer.echo(f"# {heading}: {line}")


def partition(
    experiment: File,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the plan, for partition.kind = 'file'.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw clients x classes: .png, .svg or .pdf.")
    ] = None,
    seed: Seed = None,
    set_: Set = None,
) -> None:
    """Show how an experiment's examples are split over its clients; write the plan as a file, and as a picture."""
    with errors():
        from server.commands.partition import partition as make

        settings = Experiment.load(experiment, set_ or ())
        if seed is not None:
            settings = settings.model_copy(update={"seed": seed})
        typer.echo(make(settings, out, picture))
