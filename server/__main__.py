"""`python -m server`: run, simulate and compare experiments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common import flower, plans, references
from common.errors import RunError, SettingsError
from common.experiment import Experiment

cli = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Federated experiments: simulated, on this machine over gRPC, or with clients that join from elsewhere.",
    epilog="Example: python -m server local experiments/digits.toml",
)

CLIENT_APP = "client.app:app"
"""By name: the server's code knows no client code, Flower's project file names the two apps."""

File = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")]
RunDir = Annotated[Path | None, typer.Option(help="Folder of this run. Default: a new one, runs/<name>.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Another seed than the file's.")]
Device = Annotated[str, typer.Option(help="Where clients train: cpu, auto, cuda, cuda:1.")]


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
) -> None:
    """Run all clients on this machine without a server."""
    with _errors():
        settings, folder = _open(experiment, run_dir, resume, seed)
        from server.display import Display

        with Display(settings.name, settings.rounds) as display:
            if engine is Engine.flower:
                from server import vce

                count = workers or os.cpu_count() or 1
                vce.simulate(
                    settings,
                    folder,
                    references.load(CLIENT_APP),
                    resume=resume,
                    workers=count,
                    say=display.say,
                    show=display.show,
                )
            else:
                from server import inprocess
                from server.app import run

                with inprocess.grid(CLIENT_APP, workers or 1, device, folder.path / "memory") as grid:
                    run(grid, settings, folder, resume=resume, say=display.say, show=display.show)
        _conclude(folder, display)


@cli.command(epilog="Example: python -m server local experiments/digits.toml")
def local(
    experiment: File,
    run_dir: RunDir = None,
    resume: Resume = False,
    seed: Seed = None,
    device: Device = "cpu",
) -> None:
    """Run a whole federation on this machine: a SuperLink, the server app and one resident process a client."""
    with _errors():
        settings, folder = _open(experiment, run_dir, resume, seed)
        from server import federation
        from server.display import Display
        from server.prepare import prepare

        names = prepare(settings).task.names()
        with Display(settings.name, settings.rounds) as display:
            federation.run(settings, folder, display, resume=resume, names=names, device=device)
        _conclude(folder, display)


@cli.command(epilog="Example: python -m server run experiments/digits.toml --fleet-port 9092")
def run(
    experiment: File,
    run_dir: RunDir = None,
    resume: Resume = False,
    seed: Seed = None,
    fleet_port: Annotated[int, typer.Option(min=1, max=65535, help="Where clients join.")] = 9092,
    control_port: Annotated[int, typer.Option(min=1, max=65535, help="Flower's control port.")] = 8000,
) -> None:
    """Start a SuperLink on this machine, submit the experiment, wait for clients to join and show the rounds."""
    with _errors():
        settings, folder = _open(experiment, run_dir, resume, seed)
        from server import federation
        from server.display import Display
        from server.prepare import prepare

        prepare(settings)
        with Display(settings.name, settings.rounds) as display:
            federation.run(settings, folder, display, resume=resume, fleet_port=fleet_port, control_port=control_port)
        _conclude(folder, display)


@cli.command(epilog="Example: python -m server check experiments/digits.toml")
def check(experiment: File) -> None:
    """Check an experiment file, its task and its data, and print the resolved settings."""
    with _errors():
        settings = Experiment.load(experiment)
        from server.prepare import prepare

        prepared = prepare(settings)
        typer.echo(prepared.experiment.toml(full=True))
        size = prepared.model.vector.numel()
        typer.echo(f"# {len(prepared.task.names())} clients, a model of {size:,} parameters, {prepared.strategy}")


@cli.command(epilog="Example: python -m server report runs/a runs/b --target 0.9 --out report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    target: Annotated[float, typer.Option(help="Target accuracy.")] = 0.9,
    out: Annotated[Path, typer.Option(help="The HTML page.")] = Path("report.html"),
) -> None:
    """Compare runs: rounds and bytes to a target accuracy and the curves, on one self-contained page."""
    with _errors():
        from server.report import write

        table = write(runs, target, out)
        typer.echo(table)
        typer.echo(f"page {out.resolve()}")


def _open(path: Path, run_dir: Path | None, resume: bool, seed: int | None) -> tuple[Experiment, Any]:
    from server.folder import RunFolder, choose

    plans.share()
    settings = Experiment.load(path)
    if seed is not None:
        settings = settings.model_copy(update={"seed": seed})
    folder = RunFolder(run_dir or choose("runs", settings.name, resume))
    folder.require(resume)
    return settings, folder


def _conclude(folder: Any, display: Any) -> None:
    from server.display import summary
    from server.plots import curves

    history = folder.history()
    if history:
        plot = curves({folder.path.name: history}, folder.path / "curves.png")
        display.say(summary(history, folder.path, plot))


@contextmanager
def _errors() -> Iterator[None]:
    """One message and an exit code instead of a stack trace: 2 for what the user wrote, 1 for a failed run."""
    flower.prepare()
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
    except KeyboardInterrupt:
        console.print("stopped; go on with --resume")
        sys.exit(130)


if __name__ == "__main__":
    cli()
