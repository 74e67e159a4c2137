"""`python -m server simulate`, `local`, `run` and `superlink`: one experiment, wherever its clients are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

import typer

from common import portable
from common.deploy.addresses import LOOPBACK
from common.deploy.logs import LogFormat
from common.deploy.options import Set
from common.errors import SettingsError
from common.experiment import Experiment
from server.commands.options import (
    AuditFile,
    Certs,
    Clients,
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
    LinkAuthority,
    Metrics,
    NodesFile,
    Page,
    Portable,
    Resume,
    RunDir,
    Seed,
    State,
    TokenFile,
    UsersFile,
    errors,
    token_of,
)
from server.page import page_at
from server.rounds.stopping import GRACE_S, StopOnSignal, stop_on_signals

if TYPE_CHECKING:
    from server.deploy.control import Watcher
    from server.rounds.folder import RunFolder
    from server.watch.link_metrics import LinkMetrics
    from server.watch.viewers import Viewer

# Imported where used: torch, Flower and matplotlib take seconds, numpy a tenth of one, and `--help` needs none of them.


class Engine(StrEnum):
    """Where simulated clients run."""

    inprocess = "inprocess"
    flower = "flower"


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
    set_: Set = None,
    device: Device = "cpu",
    gpus: Gpus = 1.0,
    cohort: Cohort = None,
    grace: Grace = GRACE_S,
    page: Page = None,
    portably: Portable = False,
) -> None:
    """Run all clients on this machine without a server.

    With --cohort the clients of a round train as one batched model: faster for many clients with a tiny model, equal to
    the ordinary way to rounding and not bit for bit. See docs/benchmarks.md.
    """
    with errors(), StopOnSignal(grace) as stop:
        if cohort is not None and engine is Engine.flower:
            raise SettingsError("--cohort with --engine flower: allowed: --engine inprocess")
        from server.engines.grid import CLIENT_APP, grid
        from server.watch.display import Display

        settings, folder = _open(experiment, run_dir, resume, seed, portably, sets=set_ or ())
        with page_at(page, settings.name) as shown, Display(settings.name, settings.rounds) as display:
            if shown:
                shown.show_run(folder, settings, display.say)
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


def local(
    experiment: File,
    run_dir: RunDir = None,
    resume: Resume = False,
    seed: Seed = None,
    set_: Set = None,
    device: Device = "cpu",
    grace: Grace = GRACE_S,
    page: Page = None,
    portably: Portable = False,
) -> None:
    """Run a whole federation on this machine: a SuperLink, the server app and one resident process a client."""
    with errors(), stop_on_signals(grace) as stop:
        from common.tasks.base import NO_CLIENTS
        from server.deploy import federation
        from server.rounds.prepare import prepare
        from server.watch.display import Display

        settings, folder = _open(experiment, run_dir, resume, seed, portably, sets=set_ or ())
        with page_at(page, settings.name) as shown:
            if not (names := prepare(settings).task.names()):
                raise SettingsError(NO_CLIENTS)
            with Display(settings.name, settings.rounds) as display:
                watchers = [shown.show_run(folder, settings, display.say)] if shown else []
                federation.run(
                    settings, folder, display, resume=resume, names=names, device=device, stop=stop, watchers=watchers
                )
        _conclude(folder, display)


def run(
    experiment: File,
    run_dir: RunDir = None,
    resume: Resume = False,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Go on from the latest checkpoint if there is one, else begin.")
    ] = False,
    seed: Seed = None,
    set_: Set = None,
    clients: Clients = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Submit to this control address instead of starting a SuperLink."),
    ] = None,
    ca: LinkAuthority = None,
    token_file: TokenFile = None,
    host: Host = LOOPBACK,
    fleet_port: FleetPort = 9092,
    control_host: ControlHost = LOOPBACK,
    control_port: ControlPort = 8000,
    certs: Certs = None,
    insecure: Insecure = False,
    nodes: NodesFile = None,
    state: State = None,
    users: UsersFile = None,
    audit: AuditFile = None,
    grace: Grace = GRACE_S,
    metrics: Metrics = None,
    page: Page = None,
    log_format: Format = LogFormat.text,
    portably: Portable = False,
) -> None:
    """Run an experiment with clients that join from elsewhere, and show its rounds.

    Starts a SuperLink for it, or submits it to one that runs already (--superlink): then the run folder must lie where
    both see it. SIGTERM finishes the round in hand or voids it, then exits with 0; a second one ends at once.
    """
    with errors(log_format), stop_on_signals(grace) as stop:
        from server.deploy import federation
        from server.deploy.superlink import LinkOptions
        from server.rounds.prepare import deployable, prepare
        from server.watch.viewers import watched

        settings, folder = _open(experiment, run_dir, resume, seed, portably, resume_or_start, clients, set_ or ())
        resume = resume or (resume_or_start and folder.holds_run())
        options = LinkOptions(host, fleet_port, control_host, control_port, certs, insecure, nodes, state, users, audit)
        control = federation.running_link(superlink, ca, options, token_of(token_file)) if superlink else None
        sites = _link_metrics(metrics, nodes) if control is None else None
        watchers: list[Watcher] = [sites.follow] if sites else []
        who = {"users": users, "certificates": certs, "insecure": insecure}
        with page_at(page, settings.name, **who) as shown:
            deployable(prepare(settings))
            with watched(settings, metrics, log_format, sites) as display:
                watchers += [shown.show_run(folder, settings, display.say)] if shown else []
                if control is None:
                    federation.run(
                        settings, folder, display, resume=resume, options=options, stop=stop, watchers=watchers
                    )
                else:
                    for watcher in watchers:
                        watcher(control.look)
                    federation.attach(settings, folder, display, resume=resume, control=control, stop=stop, audit=audit)
        _conclude(folder, display)


def superlink(
    host: Host = LOOPBACK,
    fleet_port: FleetPort = 9092,
    control_host: ControlHost = LOOPBACK,
    control_port: ControlPort = 8000,
    certs: Certs = None,
    insecure: Insecure = False,
    nodes: NodesFile = None,
    state: State = None,
    users: UsersFile = None,
    audit: AuditFile = None,
    grace: Grace = GRACE_S,
    metrics: Metrics = None,
    page: Page = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs of the queue that go on side by side.")] = 1,
    log_format: Format = LogFormat.text,
    portably: Portable = False,
) -> None:
    """Keep a SuperLink running for any number of runs (`run --superlink`) until SIGTERM or Ctrl-C."""
    with errors(log_format), StopOnSignal(grace) as stop:
        from server.deploy import service
        from server.deploy.superlink import LinkOptions
        from server.watch.viewers import endpoint, say

        options = LinkOptions(host, fleet_port, control_host, control_port, certs, insecure, nodes, state, users, audit)
        seen, told = _link_metrics(metrics, nodes), say(log_format)
        watchers: list[Watcher] = [seen.follow] if seen else []
        with (
            page_at(page, users=users, certificates=certs, insecure=insecure) as shown,
            endpoint(metrics, lambda: (service.healthy(options), {}), more=seen),
        ):
            if shown:
                watchers.append(shown.show_link(options, told))
            service.serve(options, stop=stop, say=told, grace_s=grace, at_once=at_once, watchers=watchers)


def _link_metrics(metrics: str | None, nodes: Path | None) -> LinkMetrics | None:
    if metrics is None:
        return None
    from server.deploy.nodes import read
    from server.watch.link_metrics import LinkMetrics

    return LinkMetrics((lambda: read(nodes)) if nodes else None)


def _open(
    path: Path,
    run_dir: Path | None,
    resume: bool,
    seed: int | None,
    portably: bool,
    either: bool = False,
    clients: int | None = None,
    sets: Sequence[str] = (),
) -> tuple[Experiment, RunFolder]:
    from common.partition import split_cache
    from server.rounds.folder import RunFolder, choose_folder

    settings = Experiment.load(path, sets)
    if portably or portable.complete():
        settings = settings.portable()
    if settings.local.arithmetic == "portable":
        portable.ensure()
    split_cache.share()
    if seed is not None:
        settings = settings.model_copy(update={"seed": seed})
    if clients is not None:
        partition = settings.partition.model_copy(update={"clients": clients})
        settings = settings.model_copy(update={"partition": partition})
    if either and run_dir is None:
        run_dir = Path("runs") / settings.name
    folder = RunFolder(run_dir or choose_folder("runs", settings.name, resume))
    if not either:
        folder.require(resume)
    return settings, folder


def _conclude(folder: RunFolder, display: Viewer) -> None:
    from server.report.plots import curves
    from server.watch.display import summary

    history = folder.history()
    if history:
        plot = curves({folder.path.name: history}, folder.path / "curves.png")
        display.say(summary(history, folder.path, plot))
        best = folder.status().get("best") or {}
        if best.get("file") and best["round"] != history[-1]["round"]:
            display.say(f"best {best['metric']} {best['value']:.4f} after round {best['round']}: {best['file']}")
