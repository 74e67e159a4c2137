"""A run behind a SuperLink, seen from the command that started it: submit, show the rounds, stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flwr.supercore.address import parse_address

from common.deploy.addresses import is_loopback
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from server.deploy.admission import Admission
from server.deploy.clients import start_clients
from server.deploy.control import Control
from server.deploy.processes import hurry
from server.deploy.superlink import LinkOptions, SuperLink
from server.rounds.folder import RunFolder
from server.rounds.stopping import GRACE_S, Stop, StopOnSignal
from server.watch.follow import follow
from server.watch.tail import Tail
from server.watch.viewers import Viewer


def run(
    experiment: Experiment,
    folder: RunFolder,
    display: Viewer,
    *,
    resume: bool,
    names: Sequence[str] = (),
    device: str = "cpu",
    options: LinkOptions | None = None,
    grace_s: float = GRACE_S,
) -> None:
    """Run an experiment behind a SuperLink of its own, with resident clients `names` started here, and show its rounds.

    Stops every process that it started, also after Ctrl-C or SIGTERM. Raises what ended the run.
    """
    options = options or LinkOptions()
    options.check()
    logs = folder.path / "logs"
    link = SuperLink(logs / "superlink.log", options=options)
    memory = folder.path / "memory"
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(grace_s))
        begin(folder, resume)
        # Clients start first: they load while the SuperLink does, and then wait for it. So they also stop last: a
        # round in hand must not be completed without those that stopped a moment earlier.
        clients = stack.enter_context(
            start_clients(link.fleet_address, names, memory_root=memory, log_dir=logs, device=device)
        )
        stack.enter_context(link)
        if options.nodes:
            stack.enter_context(Admission(options.nodes, link.control, display.say, link.knocks))
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
        submitted(link.control, experiment, folder, display, resume, stop, trouble, strict=bool(names))


def attach(
    experiment: Experiment,
    folder: RunFolder,
    display: Viewer,
    *,
    resume: bool,
    control: Control,
    grace_s: float = GRACE_S,
) -> None:
    """Run an experiment behind a SuperLink that runs already, and show its rounds.

    The run folder is written by the server app, beside that SuperLink: it must be the same place for both. Ctrl-C
    stops the run too, without finishing its round. With `resume`, a run that is going on is watched: this command may
    have been killed and started again. Raises RunError if someone else stopped it.
    """
    with stop_on_signals(grace_s) as stop:
        if resume and folder.in_use():
            display.say("this run is going on; its rounds follow")
            follow(folder, display, stop, _nothing, lambda: None if folder.in_use() else "the server app has died")
        else:
            begin(folder, resume)
            submitted(control, experiment, folder, display, resume, stop, _nothing, strict=False)
        if stop() is None and folder.status().get("status") == "stopped":
            # A supervisor that restarts this command after failures then goes on with the run.
            raise RunError("the run was stopped with its SuperLink; go on with --resume")


def _nothing() -> None:
    return None


def running_link(address: str, ca: Path | None, options: LinkOptions) -> Control:
    """The SuperLink at a control address. Raises SettingsError for options that are another one's affair, and for an
    address on another machine that would be spoken to in plain text."""
    parsed = parse_address(address)
    if parsed is None or not parsed[0] or parsed[1] < 1:
        raise SettingsError(f"--superlink: {address!r} is not HOST:PORT, such as 127.0.0.1:8000")
    if options.certificates or options.nodes or options.state:
        raise SettingsError("--superlink: --certs, --nodes and --state are for the command that started that SuperLink")
    if ca and options.insecure:
        raise SettingsError("--ca and --insecure contradict each other")
    if not (ca or options.insecure or is_loopback(parsed[0])):
        raise SettingsError(
            f"--superlink: {address} is another machine and nothing would be encrypted: pass its ca.pem as --ca, or "
            "type --insecure if that is what you want"
        )
    return Control(address, ca)


def begin(folder: RunFolder, resume: bool) -> None:
    """Look whether the folder is free, before anything starts."""
    with folder.open(resume):
        # The server app locks the folder itself; what an earlier run left there must not be taken for its word.
        folder.set_status("starting")


def submitted(
    control: Control,
    experiment: Experiment,
    folder: RunFolder,
    display: Viewer,
    resume: bool,
    stop: Stop,
    trouble: Callable[[], str | None],
    strict: bool,
) -> None:
    """Submit a run and follow it to its end; raises its error. `trouble()` says why it cannot go on."""
    config: dict[str, str | int | float | bool] = {
        "experiment-toml": experiment.toml(),
        "run-dir": str(folder.path),
        "resume": resume,
        "strict": strict,
    }
    run_id = control.submit(ROOT, config)

    def dead() -> str | None:
        answer = control.status(run_id)
        if not answer.over:
            return None
        log = control.log(run_id).strip().splitlines()[-20:]
        return "\n".join([f"the server app ended: {answer.sub_status} {answer.details}", *log])

    follow(folder, display, stop, trouble, dead)


def join_command(options: LinkOptions) -> str:
    """What a site types, with what only it knows in capitals."""
    host = "HOST" if options.host in ("0.0.0.0", "::") else options.host
    tls = f" --ca {Path(options.certificates.name) / 'ca.pem'}" if options.certificates else ""
    key = " --key NAME.key" if options.nodes else ""
    plain = " --insecure" if options.insecure else ""
    return f"python -m client join --server {host}:{options.fleet_port} --name NAME{tls}{key}{plain}"


@contextmanager
def stop_on_signals(grace_s: float) -> Iterator[Stop]:
    """SIGTERM asks to stop; the second one, or Ctrl-C, unwinds at once, so that what was started is stopped too.

    While it is, further signals wait.
    """

    def unwind(number: int = 0, frame: Any = None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        hurry()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, unwind)
    try:
        with StopOnSignal(grace_s, at_once=unwind) as stop:
            yield stop
    finally:
        signal.signal(signal.SIGINT, before)
