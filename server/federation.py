"""A whole federation on this machine: a SuperLink, the server app and, for `local`, its clients."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from server.display import Display
from server.folder import RunFolder
from server.launch import (
    ROOT,
    Clients,
    RunStatus,
    SuperLink,
    check_ports,
    run_log,
    run_status,
    start_clients,
    submit_run,
)

LOOK_S = 0.1
ASK_S = 2.0


def run(
    experiment: Experiment,
    folder: RunFolder,
    display: Display,
    *,
    resume: bool,
    names: Sequence[str] = (),
    device: str = "cpu",
    fleet_port: int | None = None,
    control_port: int | None = None,
) -> None:
    """Run an experiment behind a real SuperLink, with resident clients `names` started here, and show its rounds.

    Stops every process that it started, also after Ctrl-C or SIGTERM. Raises what ended the run.
    """
    check_ports({"--fleet-port": fleet_port, "--control-port": control_port})
    logs = folder.path / "logs"
    with folder.open(resume):
        # The server app locks the folder itself; what an earlier run left there must not be taken for its word.
        folder.set_status("starting")
    link = SuperLink(logs / "superlink.log", fleet_port=fleet_port, control_port=control_port)
    memory = folder.path / "memory"
    # Clients start first: they load while the SuperLink does, and then wait for it. So they also stop last: a round
    # in hand must not be completed without those that stopped a moment earlier.
    with (
        _terminated_as_interrupt(),
        start_clients(link.fleet_address, names, memory_root=memory, log_dir=logs, device=device) as clients,
        link,
    ):
        if not names:
            display.say(f"clients join with: python -m client join --server {link.fleet_address} --name NAME")
        config: dict[str, str | int | float | bool] = {
            "experiment-toml": experiment.toml(),
            "run-dir": str(folder.path),
            "resume": resume,
            # Clients of one's own are all there are; of others one may be wrong and the rest go on.
            "strict": bool(names),
        }
        run_id = submit_run(link.control_address, ROOT, config)
        _follow(folder, display, link, clients, run_id)


def _follow(folder: RunFolder, display: Display, link: SuperLink, clients: Clients, run_id: int) -> None:
    """Show the history as it grows until the run is over; raise its error."""
    shown, told = len(folder.history()), len(folder.notes())
    complained: set[str] = set()
    asked = time.monotonic()
    while True:
        status = folder.status().get("status")
        history = folder.history()
        for record in history[min(shown, len(history)) :]:
            display.show(record)
        shown = len(history)
        for text in (notes := folder.notes())[told:]:
            display.say(text)
        told = len(notes)
        for name, why in clients.ended().items():
            if name not in complained:
                complained.add(name)
                display.say(f"client {name} ended: {why}")
        if status == "finished":
            return
        if status == "failed":
            raise failure(folder)
        if not link.running:
            raise RunError(f"the SuperLink ended; its log: {link.log}")
        if time.monotonic() - asked > ASK_S:
            asked = time.monotonic()
            answer = run_status(link.control_address, run_id)
            if answer.over and folder.status().get("status") not in ("finished", "failed"):
                raise RunError(_died(link, run_id, answer))
        time.sleep(LOOK_S)


def failure(folder: RunFolder) -> Exception:
    """The error that a run left in its folder."""
    status = folder.status()
    text = str(status.get("error", "the run failed"))
    return SettingsError(text) if status.get("exit_code") == 2 else RunError(text)


def _died(link: SuperLink, run_id: int, answer: RunStatus) -> str:
    log = run_log(link.control_address, run_id).strip().splitlines()[-20:]
    return "\n".join([f"the server app ended: {answer.sub_status} {answer.details}", *log])


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that what was started is stopped; while it is, further signals wait."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before: dict[signal.Signals, Callable[..., object] | int | None] = {}
    for each in (signal.SIGTERM, signal.SIGINT):
        before[each] = signal.signal(each, on_signal)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
