"""`python -m server statistics`: what the sites hold, before a round is spent on finding that it is not the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.deploy.options import Set, finite
from server.commands.options import File, Insecure, LinkAuthority, errors, token_of
from server.rounds.stopping import Stop, StopOnSignal, heed

# Imported where used: torch and Flower take seconds, and `--help` needs none of them.

if TYPE_CHECKING:
    from common.experiment import Experiment

LOOK_S = 0.5


def statistics(
    experiment: File,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Ask the sites at this control address. Without: simulated clients."),
    ] = None,
    ca: LinkAuthority = None,
    insecure: Insecure = False,
    sites: Annotated[int, typer.Option(min=1, help="With --superlink: wait for so many.")] = 1,
    far: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="From which distance on a site is shown as far; docs/deploy.md."),
    ] = 0.5,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Everything, as JSON.")] = None,
    set_: Set = None,
) -> None:
    """Sums over the sites' data: counts, means, deviations, missing values, histograms, labels; who is far from whom.

    Sites answer only what their policy allows (statistics = true), as coarse as it says.
    """
    with errors(), StopOnSignal(0) as stop:
        from common.experiment import Experiment
        from common.files import write_atomically
        from server.statistics.gather import loaded
        from server.statistics.show import table

        settings = Experiment.load(experiment, set_ or ())
        text = _asked(settings, superlink, ca, insecure, sites, far, stop) if superlink else _simulated(settings, far)
        typer.echo(table(loaded(text)))
        if out:
            write_atomically(out, text.encode() + b"\n")
            typer.echo(f"all of it: {out}")


def _simulated(experiment: Experiment, far: float) -> str:
    from pkgutil import resolve_name

    from server.engines.grid import CLIENT_APP
    from server.engines.inprocess import InProcessGrid
    from server.statistics.gather import gather

    return gather(InProcessGrid(resolve_name(CLIENT_APP)), experiment, 1, far=far).json()


def _asked(
    experiment: Experiment, superlink: str, ca: Path | None, insecure: bool, sites: int, far: float, stop: Stop
) -> str:
    from common.errors import RunError
    from server.app import STATISTICS
    from server.deploy.federation import running_link
    from server.deploy.superlink import LinkOptions

    control = running_link(superlink, ca, LinkOptions(insecure=insecure), token_of())
    run_id = control.submit(
        run_config={"experiment-toml": experiment.toml(), "statistics": sites, "statistics-far": far}
    )
    said = 0
    try:
        while not (status := control.status(run_id)).over:
            heed(stop)
            for line in (lines := control.log(run_id).splitlines())[said:]:
                if line.startswith("waiting for sites"):
                    typer.echo(line)
            said = len(lines)
            time.sleep(LOOK_S)
    except BaseException:
        control.stop(run_id)
        raise
    lines = control.log(run_id).splitlines()
    found = next((line.removeprefix(STATISTICS) for line in lines if line.startswith(STATISTICS)), None)
    if found is None:
        told = next((line for line in reversed(lines) if "RunError" in line or "SettingsError" in line), "")
        raise RunError(told.partition("Error: ")[2] or f"the server app ended: {status.sub_status} {status.details}")
    return found
