"""A run behind a SuperLink, seen from the command that started it: submit, show the rounds, stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from flwr.supercore.address import parse_address

from common.deploy.addresses import is_loopback
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from server.deploy.admission import Admission
from server.deploy.clients import start_clients
from server.deploy.control import Control, Watcher
from server.deploy.register import book_of, registered
from server.deploy.superlink import LinkOptions, SuperLink
from server.rounds.folder import RunFolder
from server.rounds.provenance import origin
from server.rounds.records import unheard
from server.rounds.stopping import Stop, heed
from server.watch.audited import audit_of
from server.watch.follow import follow
from server.watch.tail import Tail
from server.watch.viewers import Viewer

AGAIN_S, LOOK_S = 1.0, 0.1
"""Between two looks for a SuperLink that is not there, and for a request to stop meanwhile."""


def run(
    experiment: Experiment,
    folder: RunFolder,
    display: Viewer,
    *,
    resume: bool,
    names: Sequence[str] = (),
    device: str = "cpu",
    options: LinkOptions | None = None,
    stop: Stop = lambda: None,
    watchers: Sequence[Watcher] = (),
) -> None:
    """Run an experiment behind a SuperLink of its own, with resident clients `names` started here, and show its rounds.

    Stops every process that it started, also when it is stopped. Raises what ended the run, and Stopped if `stop` asked
    before it began. `watchers` are told how to ask the SuperLink.
    """
    options, given = options or LinkOptions(), options
    options.check()
    if given and not options.book:
        options = replace(options, audit=audit_of(folder))
    logs = folder.path / "logs"
    link = SuperLink(logs / "superlink.log", options=options, stop=stop)
    memory = folder.path / "memory"
    with ExitStack() as stack:
        claim = stack.enter_context(folder.claimed(resume))
        book = book_of(options)
        stack.enter_context(registered(book, options, display.say))
        # Clients start first: they load while the SuperLink does, and then wait for it. So they also stop last: a
        # round in hand must not be completed without those that stopped a moment earlier.
        clients = stack.enter_context(
            start_clients(link.fleet_address, names, memory_root=memory, log_dir=logs, device=device)
        )
        stack.enter_context(link)
        for told in watchers:
            told(link.control.look)
        if options.nodes:
            event = book.try_record if book else unheard
            stack.enter_context(Admission(options.nodes, link.control, display.say, link.knocks, event=event))
        if not names:
            display.say(f"clients join with: {join_command(link.options)}")

        said = Tail(logs / "superlink.log", skip=True)

        def trouble() -> str | None:
            for line in said.lines():
                if "refused a node" in line:
                    display.say(line[line.index("refused a node") :])
            for name, why in clients.newly_ended().items():
                display.say(f"client {name} ended: {why}")
            return None if link.running else f"the SuperLink ended; its log: {link.log}"

        # Clients of one's own are all there are; of others one may be wrong and the rest go on.
        audit = given.audit if given else None
        submitted(link.control, experiment, folder, display, resume, stop, trouble, bool(names), claim, audit)


def attach(
    experiment: Experiment,
    folder: RunFolder,
    display: Viewer,
    *,
    resume: bool,
    control: Control,
    stop: Stop = lambda: None,
    audit: Path | None = None,
) -> None:
    """Run an experiment behind a SuperLink that runs already, and show its rounds.

    The run folder is written by the server app, beside that SuperLink: it must be the same place for both. Ctrl-C
    stops the run too, without finishing its round; `stop` before it has begun raises Stopped. With `resume`, a run that
    is going on is watched: this command may have been killed and started again. A SuperLink that is not there is waited
    for, at the start and in the middle; then the run goes on. Raises RunError if someone else stopped it. `audit`: of
    the run, instead of in its folder; the server app writes it, too.
    """
    lost = False
    while True:
        _wait_for(control, display, stop)
        try:
            return _attached(experiment, folder, display, resume, control, stop, audit)
        except RunError as error:
            if stop() is not None or (not lost and not control.absent()):
                raise
            # Its SuperLink is gone, and what it ran with it: no fault of the run, nor is what ends late then.
            lost = not lost
            display.say(f"the SuperLink at {control.address} was gone ({error}); the run goes on with it")
            resume = folder.holds_run()


def _wait_for(control: Control, display: Viewer, stop: Stop) -> None:
    """Until a SuperLink answers; raises Stopped if `stop` asks for it first."""
    said = False
    while why := control.absent():
        if not said:
            display.say(f"no SuperLink at {control.address} yet, waiting: {why}")
            said = True
        end = time.monotonic() + AGAIN_S
        while time.monotonic() < end:
            heed(stop)
            time.sleep(LOOK_S)
    if said:
        display.say(f"the SuperLink at {control.address} is here")


def _attached(
    experiment: Experiment,
    folder: RunFolder,
    display: Viewer,
    resume: bool,
    control: Control,
    stop: Stop,
    audit: Path | None,
) -> None:
    with ExitStack() as stack:
        if resume and folder.in_use():
            display.say("this run is going on; its rounds follow")
            follow(folder, display, stop, _nothing, lambda: None if folder.in_use() else "the server app has died")
        else:
            claim = stack.enter_context(folder.claimed(resume))
            submitted(control, experiment, folder, display, resume, stop, _nothing, False, claim, audit)
        if stop() is None and folder.status().get("by"):
            display.say(f"stopped by {folder.status()['by']}")  # on purpose: no supervisor is to begin it again
        elif stop() is None and folder.status().get("status") == "stopped":
            # A supervisor that restarts this command after failures then goes on with the run.
            raise RunError("the run was stopped with its SuperLink; go on with --resume")


def _nothing() -> None:
    return None


def running_link(address: str, ca: Path | None, options: LinkOptions, token: str = "") -> Control:
    """The SuperLink at a control address. Raises SettingsError for options that are another one's affair, and for an
    address on another machine that would be spoken to in plain text."""
    parsed = parse_address(address)
    if parsed is None or not parsed[0] or parsed[1] < 1:
        raise SettingsError(f"--superlink: {address!r} is not HOST:PORT, such as 127.0.0.1:8000")
    if options.certificates or options.nodes or options.state or options.users:
        raise SettingsError(
            "--superlink: --certs, --nodes, --users and --state are for the command that started that SuperLink"
        )
    if ca and options.insecure:
        raise SettingsError("--ca and --insecure contradict each other")
    if not (ca or options.insecure or is_loopback(parsed[0])):
        raise SettingsError(
            f"--superlink: {address} is another machine and nothing would be encrypted: pass its ca.pem as --ca, or "
            "type --insecure if that is what you want"
        )
    return Control(address, ca, token)


def submitted(
    control: Control,
    experiment: Experiment,
    folder: RunFolder,
    display: Viewer,
    resume: bool,
    stop: Stop,
    trouble: Callable[[], str | None],
    strict: bool,
    claim: str,
    audit: Path | None = None,
) -> None:
    """Submit a run and follow it to its end; raises its error. `trouble()` says why it cannot go on, `claim` is the
    folder's for it, `audit` its log if that is not in its folder.

    However this ends before the run does (a signal at any moment, no answer to what was submitted): the run ends too,
    or never begins.
    """
    config: dict[str, str | int | float | bool] = {
        "experiment-toml": experiment.toml(),
        "run-dir": str(folder.path),
        "resume": resume,
        "strict": strict,
        "claim": claim,
        "submitted": json.dumps(origin()),
        "audit": str(audit.absolute()) if audit else "",
    }
    run_id = 0

    def dead() -> str | None:
        answer = control.status(run_id)
        if not answer.over:
            return None
        log = control.log(run_id).strip().splitlines()[-20:]
        return "\n".join([f"the server app ended: {answer.sub_status} {answer.details}", *log])

    try:
        heed(stop)
        run_id = control.submit(ROOT, config)
        follow(folder, display, stop, trouble, dead, claim)
    except BaseException as error:
        if run_id and stop() is None and not isinstance(error, KeyboardInterrupt):
            raise  # whoever resumes it watches it again
        folder.stop.ask(0)
        folder.withdraw(claim)
        _stop_for_good(control, run_id)
        raise
    if folder.status().get("claim") != claim:  # withdrawn before it began
        _stop_for_good(control, run_id)


def _stop_for_good(control: Control, run_id: int) -> None:
    """Spare the SuperLink the start of a server app that would end at once."""
    with suppress(RunError, SettingsError):
        if run_id and not control.status(run_id).over:
            control.stop(run_id)


def join_command(options: LinkOptions) -> str:
    """What a site types, with what only it knows in capitals."""
    host = "HOST" if options.host in ("0.0.0.0", "::") else options.host
    tls = f" --ca {Path(options.certificates.name) / 'ca.pem'}" if options.certificates else ""
    key = " --key NAME.key" if options.nodes else ""
    plain = " --insecure" if options.insecure else ""
    return f"python -m client join --server {host}:{options.fleet_port} --name NAME{tls}{key}{plain}"
