"""A run behind a SuperLink, seen from the command that started it: submit, show the rounds, stop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flwr.supercore.address import parse_address

from common.addresses import is_loopback
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from server.clients import Clients, start_clients
from server.control import ROOT, Control, RunStatus
from server.folder import HISTORY, NOTES, RunFolder
from server.launch import LinkOptions, SuperLink
from server.nodes import Follower
from server.processes import hurry
from server.stopping import GRACE_S, Stop, StopOnSignal
from server.watch import Viewer

LOOK_S = 0.1
ASK_S = 2.0
AT_ONCE_S = 2.0
MARGIN_S = 15.0
"""How long after the grace of a stop the server app may take to write its state and end."""


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
            stack.enter_context(Follower(options.nodes, link.control, display.say))
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
        submitted(link.control, experiment, folder, display, resume, stop, grace_s, trouble, strict=bool(names))


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
    stops the run too, without finishing its round. Raises RunError if someone else stopped it.
    """
    with stop_on_signals(grace_s) as stop:
        begin(folder, resume)
        submitted(control, experiment, folder, display, resume, stop, grace_s, lambda: None, strict=False)
        if stop() is None and folder.status().get("status") == "stopped":
            # A supervisor that restarts this command after failures then goes on with the run.
            raise RunError("the run was stopped with its SuperLink; go on with --resume")


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
    grace_s: float,
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
    try:
        _follow(folder, display, control, run_id, stop, grace_s, trouble)
    except KeyboardInterrupt:
        folder.stop.ask(0)
        end = time.monotonic() + AT_ONCE_S
        while folder.status().get("status") == "running" and time.monotonic() < end:
            time.sleep(LOOK_S)
        raise


def _follow(
    folder: RunFolder,
    display: Viewer,
    control: Control,
    run_id: int,
    stop: Stop,
    grace_s: float,
    trouble: Callable[[], str | None],
) -> None:
    """Show the history as it grows until the run is over; raise its error."""
    history, notes = Tail(folder.path / HISTORY), Tail(folder.path / NOTES, skip=True)
    asked, stopping = time.monotonic(), False
    after: int | None = None
    while True:
        status = folder.status()
        display.tick(str(status.get("status", "unknown")))
        after = status.get("after", after)
        if after is not None:
            for line in history.lines():
                if (record := json.loads(line))["round"] > after:
                    display.show(record)
        for line in notes.lines():
            display.say(line)
        if status.get("status") in ("finished", "stopped"):
            return
        if status.get("status") == "failed":
            raise failure(folder)
        if (why := trouble()) is not None:
            raise RunError(why)
        if (until := stop()) is not None:
            if not stopping:
                stopping = True
                folder.stop.ask(max(0.0, until - time.monotonic()))
                display.say(f"stopping after the round in hand, within {grace_s:g} s; once more to stop at once")
            if time.monotonic() > until + MARGIN_S:
                raise RunError("the run did not stop in time; go on with --resume")
        if time.monotonic() - asked > ASK_S:
            asked = time.monotonic()
            answer = control.status(run_id)
            if answer.over and folder.status().get("status") not in ("finished", "failed", "stopped"):
                raise RunError(_died(control, run_id, answer))
        time.sleep(LOOK_S)


class Tail:
    """The new whole lines of a file that grows, or that is replaced by another one as a whole."""

    def __init__(self, path: Path, skip: bool = False) -> None:
        self._path, self._offset, self._file = path, 0, 0
        if skip and path.exists():
            self._offset, self._file = path.stat().st_size, path.stat().st_ino

    def lines(self) -> Iterator[str]:
        """What was added since the last call."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._file or about.st_size < self._offset:
                    self._file, self._offset = about.st_ino, 0
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        yield from whole.decode("utf-8", "replace").splitlines()


def join_command(options: LinkOptions) -> str:
    """What a site types, with what only it knows in capitals."""
    host = "HOST" if options.host in ("0.0.0.0", "::") else options.host
    tls = f" --ca {Path(options.certificates.name) / 'ca.pem'}" if options.certificates else ""
    key = " --key NAME.key" if options.nodes else ""
    plain = " --insecure" if options.insecure else ""
    return f"python -m client join --server {host}:{options.fleet_port} --name NAME{tls}{key}{plain}"


def failure(folder: RunFolder) -> Exception:
    """The error that a run left in its folder."""
    status = folder.status()
    text = str(status.get("error", "the run failed"))
    return SettingsError(text) if status.get("exit_code") == 2 else RunError(text)


def _died(control: Control, run_id: int, answer: RunStatus) -> str:
    log = control.log(run_id).strip().splitlines()[-20:]
    return "\n".join([f"the server app ended: {answer.sub_status} {answer.details}", *log])


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


__all__ = ["Clients", "Tail", "attach", "begin", "failure", "join_command", "run", "stop_on_signals", "submitted"]
