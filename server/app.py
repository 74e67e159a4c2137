"""The ServerApp: reads the experiment, runs the rounds. The same one behind a SuperLink and under VCE."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from common import arithmetic, flower
from common.deploy.audit import AuditLog
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from server.rounds.ending import Finish
from server.rounds.folder import RunFolder, choose_folder
from server.rounds.loop import Rounds
from server.rounds.prepare import assemble
from server.rounds.records import Event, Record, unheard
from server.rounds.reply_limits import bound_replies, guard_replies
from server.rounds.stopping import Stop, StopOnSignal, Stopped, earliest, end_with_parent, heed
from server.statistics.gather import gather
from server.statistics.merge import FAR
from server.watch.audited import audit_of, audited, began, ended
from server.watch.display import columns, lines
from server.watch.tracking import Trackers
from strategies.registry import settled

app = ServerApp()

STATISTICS = "statistics: "
"""Before the line of the log that is a result of theirs."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config names.

    Keys: `experiment` (a path in the bundle, or of this machine), `experiment-toml` (its content instead),
    `run-dir` (default: runs/<name> in the SuperLink's folder), `resume`, `strict` (a refused client ends the run
    before round 1 instead of being left out), `claim` (of the command that looks after the run). `statistics`: no run,
    but what so many sites hold, as a line of the log; `statistics-far`: from which distance on a site is far.
    `submitted`: by which process, as JSON.
    """
    if "--parent-pid" in sys.argv:
        # Flower then raises SIGINT in a thread, which a main thread that waits for a lost server never sees.
        end_with_parent()
    config = context.run_config
    experiment = read_experiment(str(config.get("experiment", "")), str(config.get("experiment-toml", "")))
    flower.tune_flower(longest_wait_s=experiment.round.deadline_s)
    guard_replies()
    if sites := int(config.get("statistics", 0)):
        with StopOnSignal() as stop:
            found = gather(grid, experiment, sites, far=float(config.get("statistics-far", FAR)), say=say, stop=stop)
        say(STATISTICS + found.json())
        return
    resume = bool(config.get("resume", False))
    given = str(config.get("run-dir", ""))
    folder = RunFolder(given or choose_folder("runs", experiment.name, resume))
    strict, heads = bool(config.get("strict", False)), [""]

    def show(record: Record) -> None:
        for text in lines(record, heads):
            say(text)
        heads[:] = columns(record)

    # Flower's own handler would leave the round in hand unfinished.
    submitted = json.loads(str(config.get("submitted", "")) or "{}")
    book = AuditLog(str(config.get("audit", "")) or audit_of(folder), "server app")
    event = audited(book, folder.path.name)
    began(event, experiment, resume, submitted=submitted)
    try:
        with StopOnSignal() as stop:
            run(
                grid,
                experiment,
                folder,
                resume=resume,
                show=show,
                stop=stop,
                strict=strict,
                claim=str(config.get("claim", "")),
                event=event,
                submitted=submitted,
            )
    finally:
        ended(event, folder)


def say(text: str) -> None:
    """A line in Flower's log of the run."""
    print(text, flush=True)


def read_experiment(path: str, text: str) -> Experiment:
    """The experiment given as text, or by a path that is looked for in the bundle first."""
    if text:
        return Experiment.parse(text, "experiment")
    inside = ROOT / path
    return Experiment.load(inside if inside.is_file() else path)


def run(
    grid: Grid,
    experiment: Experiment,
    folder: RunFolder,
    *,
    resume: bool = False,
    say: Callable[[str], None] = say,
    show: Callable[[Record], None] = lambda record: None,
    stop: Stop = lambda: None,
    strict: bool = True,
    claim: str = "",
    event: Event = unheard,
    submitted: Mapping[str, Any] | None = None,
    finish: Finish = lambda record: None,
) -> Record:
    """Run an experiment over any grid; returns the last line of its history.

    What became of it, also of a failure, stands in the folder's run.json: there other processes look. A run that
    `stop` or the folder's stop file ended returns like a finished one; the status tells them apart. `claim`: of the
    command that submitted it, as in `RunFolder.claimed`. `event` is told what an audit log holds; `submitted`: by which
    other process, for run.json. `finish` is asked after each round whether to end there.
    """
    strategy, experiment = settled(experiment)

    def told(text: str) -> None:
        folder.note(text)
        say(text)

    with folder.open(resume, claim):
        try:
            folder.set_status("starting", rounds=experiment.rounds, claim=claim)
            folder.note_start(resumed=resume, **({"submitted": submitted} if submitted else {}))
            if caution := getattr(grid, "caution", ""):
                told(caution)
            either = earliest(stop, folder.stop)
            heed(either)
            torch.set_num_threads(experiment.local.threads)
            arithmetic.require(experiment.local.arithmetic)
            prepared = assemble(strategy, experiment)
            bound_replies(prepared)
            with Trackers(prepared.experiment, folder.path, told) as tracking:

                def shown(record: Record) -> None:
                    tracking.write(record)
                    show(record)

                rounds = Rounds(
                    grid,
                    prepared,
                    folder,
                    say=told,
                    show=shown,
                    stop=either,
                    strict=strict,
                    event=event,
                    finish=finish,
                )
                record = rounds.run(resume)
        except Stopped:
            record = (folder.history() or [{}])[-1]
            told(f"stopped after round {record.get('round', 0)}; go on with --resume")
            by = {"by": by} if (by := folder.stop.by()) else {}
            folder.set_status("stopped", rounds=experiment.rounds, round=record.get("round", 0), exit_code=0, **by)
            return record
        except (SettingsError, RunError) as error:
            folder.set_status("failed", error=str(error), exit_code=2 if isinstance(error, SettingsError) else 1)
            raise
        except KeyboardInterrupt:
            folder.set_status("stopped", exit_code=130)
            raise
        except BaseException as error:
            folder.set_status("failed", error=repr(error), exit_code=1, traceback=traceback.format_exc())
            raise
        early = {"ended": rounds.ended} if rounds.ended else {}
        folder.set_status("finished", rounds=experiment.rounds, sha256=record.get("sha256"), **early)
    return record
