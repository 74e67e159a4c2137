"""`doctor --experiment`: what a run would refuse at this site, found by doing what `join` does for it, up to one batch.

A process of its own, so that whatever a task does or takes ends with it.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from common.deploy.checks import Check
from common.errors import Sayable, SettingsError, SiteError

# Imported where used: the process that starts this one needs neither torch nor Flower for it.
if TYPE_CHECKING:
    from flwr.app import Context

    from client.session import Session
    from common.data.examples import ClientData
    from common.experiment import Experiment

LOOK_S = 120.0
"""For all of it, data included; the rest is then not awaited."""

MARK = "doctor: "

ADVICE = {
    "task-denied": "review that code, install it here, and allow it: --allow-task, or `tasks` of the policy",
    "file-denied": "give this site's file as --data, or allow what the experiment names: `files` of the policy",
    "download-denied": "put the data on this machine (FEDKEEL_DATA), or allow it: `downloads` of the policy",
    "data-missing": "give this site's file or folder as --data",
    "data-unused": "leave out --data, or ask whether this is the experiment that was meant",
    "data-shape": "bring the data into the experiment's shape, or ask for another one",
    "data-columns": "name the columns as the experiment does (task.inputs, task.target); their order is free",
    "data-cells": "mend those cells, or ask for task.missing, or for the value among task.categories",
    "data-labels": "number or name the labels as the experiment does (task.classes)",
    "client-unknown": "join under a name that the experiment knows, or give --data",
    "statistics-denied": "statistics = true in the policy, or ask for task.standardize with given numbers",
    "steps-denied": "raise max_steps of the policy, or ask for fewer local steps",
    "arithmetic": "start join with --portable, and doctor with FEDKEEL_PORTABLE=1 in its environment",
}


@dataclass(frozen=True)
class Look:
    """What to look with: the options of `join`, the files of one client."""

    experiment: str
    name: str
    data: str = ""
    policy: str = ""
    device: str = "cpu"
    allow_tasks: tuple[str, ...] = ()
    trusted: bool = False
    approve: str = "policy"
    approvals: str = ""
    sets: tuple[str, ...] = ()


_PROGRAM = (
    "from common import portable; portable.start()\n"  # before anything loads torch or numpy, which read what it sets
    "import sys; from client.commands.look import main; main(sys.argv[1])"
)


def looked(look: Look, limit_s: float = LOOK_S) -> Iterator[Check]:
    """The checks of another process, as they come; it ends with the last one or after `limit_s` seconds."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(asdict(look))]
    until, ended, last = time.monotonic() + limit_s, False, "it started"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines: queue.Queue[str | None] = queue.Queue()
        told: list[str] = []
        readers = [
            threading.Thread(target=_pass_on, args=(process.stdout, lines.put), daemon=True),
            threading.Thread(target=lambda: told.extend(process.stderr or ()), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            while not ended:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
                if line is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(5)
                    break
                word = json.loads(line)
                ended = word == "done"
                if not ended:
                    check = Check(*word)
                    last = check.name
                    yield check
        except queue.Empty:
            advice = "a run would wait here, too; look at the data's size, or leave out what is slow"
            yield Check("experiment", None, f"not done within {limit_s:g} s; the last that was seen: {last}", advice)
            ended = True
        finally:
            process.kill()
            for reader in readers:
                reader.join(5)
    if not ended:
        why = (told or [f"exit code {process.returncode}"])[-1].strip()[:300]
        advice = "memory that ran out, or code that ends its process; a run would end the same way"
        yield Check("experiment", False, f"the process that looked ended after {last}: {why}", advice)


def _pass_on(stream: IO[str] | None, put: Callable[[str | None], object]) -> None:
    for line in stream or ():
        if line.startswith(MARK):  # a task may print
            put(line.removeprefix(MARK))
    put(None)


# --- in the process of its own


def checks(look: Look) -> Iterator[Check]:
    """The checks, the first failed one last."""
    from flwr.app import Context, RecordDict

    from client.node.access import Access
    from client.node.resident import NodeOptions
    from client.session import grant_of
    from common.data import grant
    from common.experiment import Experiment
    from strategies.registry import settled

    options = NodeOptions(
        Access("127.0.0.1:1"), look.name, look.device, look.data, "", look.policy, 0.0, look.allow_tasks, look.trusted
    )
    options = replace(options, approve=look.approve, approvals=look.approvals)
    context = Context(run_id=0, node_id=1, node_config=options.config, state=RecordDict(), run_config={})
    stage = ["experiment"]
    try:
        experiment = settled(Experiment.load(look.experiment, look.sets))[1]
        rounds, strategy = experiment.rounds, experiment.strategy.name
        yield Check("experiment", True, f"{experiment.name}: {experiment.task.name}, {strategy}, {rounds} rounds")
        yield from _asked(context, experiment)
        with grant.granting(grant_of(context)):
            yield from _built(context, experiment, stage)
    except Sayable as error:
        code = str(error.code)
        yield Check(stage[0], False, str(error), ADVICE.get(code, "the line above says what is allowed"))
    except SettingsError as error:
        code = error.code if isinstance(error, SiteError) else ""
        yield Check(stage[0], False, str(error), ADVICE.get(code, "the line above says what is allowed"))
    except (Exception, SystemExit) as error:
        from client.training.device import out_of_memory

        memory = out_of_memory(error) or isinstance(error, MemoryError)
        advice = "less in a batch, another device, or more memory" if memory else "a run would fail the same way"
        yield Check(stage[0], False, f"{type(error).__name__}: {error}", advice)


def _asked(context: Context, experiment: Experiment) -> Iterator[Check]:
    """Whether the policy lets it pass, and what of a person's word."""
    from client.approval.store import Approvals, key_of
    from client.approval.words import described
    from client.session import grant_of, policy_of, shares_labels

    policy_of(context).check(experiment, grant_of(context))
    yield Check(
        "allowed", True, "the policy" if context.node_config["policy"] else "the defaults of a site let it pass"
    )
    lines = dict(described(experiment, shares_labels(context)))
    sent, privacy = lines["leaves a round"].partition(";")[0], lines["privacy"].partition(".")[0]
    yield Check("leaves", True, f"each round {sent}, and numbers; privacy: {privacy}; see `client approvals --show`")
    file, mode = str(context.node_config["approvals"]), context.node_config["approve"]
    key = key_of(experiment)
    entry = Approvals(file).entries().get(key) if file else None
    if entry is not None and entry.state in ("denied", "revoked"):
        advice = f"python -m client approve {key[:12]} --approvals {file}"
        yield Check("approval", False, f"{entry.name} ({key[:12]}) is {entry.state} by {entry.by}", advice)
    elif mode != "ask":
        yield Check("approval", True, f"--approve {mode}: nobody is asked")
    elif entry is not None and entry.state == "approved" and experiment.rounds <= entry.rounds:
        yield Check("approval", True, f"{key[:12]} was approved by {entry.by}, {entry.changed}, {entry.rounds} rounds")
    elif entry is not None:
        advice = f"python -m client approve {key[:12]} --approvals {file}"
        yield Check("approval", None, f"{key[:12]} waits for approval, {experiment.rounds} rounds", advice)
    else:
        advice = "somebody has to be there when the server asks: python -m client approve"
        yield Check("approval", None, f"{key[:12]} is not known here as yet; it will wait for approval", advice)


def _built(context: Context, experiment: Experiment, stage: list[str]) -> Iterator[Check]:
    """Task, model, data as the task reads them, and one batch."""
    from client.columns import stand_in, told
    from client.session import Session, policy_of, shares_labels, trusts
    from strategies.protocol.messages import RollHead

    stage[0] = "task"
    session = Session.of(experiment.json(), context)
    size, config = session.model.vector.numel(), context.node_config
    yield Check("task", True, f"{experiment.task.name}; {size:,} parameters in {len(session.model.layout)} tensors")
    yield from _memory(session)
    stage[0] = "data"
    name = str(config["name"])
    data = session.data(name, str(config["data"]))
    yield _seen(session, data)
    roll = session.roll([name], str(config["data"]), shares_labels(context), 0)
    told(session, RollHead(experiment.json(), ""), [name], str(config["data"]), policy_of(context), trusts(context))
    stand_in(session, [data])
    if not len(data.train):
        advice = "a run takes this site in and never asks it: bring examples, or a smaller partition.holdout"
        yield Check("examples", None, "no training example", advice)
        return
    stage[0] = "steps"
    policy_of(context).check_steps(roll.steps[0])
    stage[0] = "training"
    yield from _batch(session, data, roll.steps[0], policy_of(context).max_seconds)


def _memory(session: Session) -> Iterator[Check]:
    """Whether a round's vectors fit: model, gradient, the broadcast, what is sent and remembered, optimizer state."""
    import psutil
    import torch

    from strategies.registry import settled

    strategy = settled(session.experiment)[0]
    moments = {"sgd": 1}.get(session.experiment.local.optimizer, 3)
    vectors = 4 + moments + 2 * len({**strategy.payload, **strategy.survey}) + 3 * strategy.personal
    need = session.model.vector.nbytes * vectors
    if session.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(session.device)[0], str(session.device)
    else:
        free, where = psutil.virtual_memory().available, "this machine"
    fits = need < 0.8 * free
    detail = f"a round holds about {need / 1e6:,.1f} MB beside the data; {free / 1e6:,.0f} MB are free on {where}"
    yield Check("memory need", True if fits else None, detail, "give it more memory, or ask for a smaller model")


def _seen(session: Session, data: ClientData) -> Check:
    """What the task made of the data: how many, of what shape, of which classes."""
    import torch

    parts = [f"{len(data.train):,} training and {len(data.evaluate):,} evaluation examples"]
    if len(data.train):
        batch = data.train.batch(torch.arange(1))
        shown = [each for each in batch if isinstance(each, torch.Tensor)] if isinstance(batch, tuple | list) else []
        shown = [batch] if isinstance(batch, torch.Tensor) else shown
        kinds = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape[1:]) or ''}" for each in shown]
        parts.append(f"one is {' and '.join(kinds)}" if kinds else "")
        targets = getattr(data.train, "targets", None)
        if targets is not None and targets.ndim == 1 and not targets.is_floating_point():
            found = torch.unique(targets)
            classes = getattr(session.task, "classes", None)
            of = f" of {classes}" if isinstance(classes, int) else ""
            parts.append(f"labels of {len(found)}{of} classes, {int(found.min())} to {int(found.max())}")
    return Check("data", True, ", ".join(part for part in parts if part))


def _batch(session: Session, data: ClientData, steps: int, most_s: float | None) -> Iterator[Check]:
    """One step's passes on a batch, as in training; how long a round may take."""
    import torch

    from common.seeds import torch_seeded

    local, size = session.experiment.local, min(session.experiment.local.batch_size, len(data.train))
    with torch_seeded(0, session.device):
        session.model.module.train()
        passes = session.forward(session.task, session.model, local)
        took = [0.0, 0.0]
        for number in range(2):  # the first one warms up
            started = time.perf_counter()
            loss = float(passes.backward(session.task.augment(data.train.batch(torch.arange(size)))))
            took[number] = time.perf_counter() - started
    seconds = steps * min(took)
    detail = f"a batch of {size} works on {session.device}; {steps:,} steps a round, about {seconds:.1f} s"
    if loss != loss or abs(loss) == float("inf"):
        advice = "look at the scale of the inputs; uploads that are not finite are refused"
        yield Check("training", False, f"the loss of a first batch of {size} is {loss}", advice)
        return
    yield Check("training", True, detail)
    if most_s is not None and seconds > most_s:
        advice = "raise it, or ask for fewer local steps"
        yield Check(
            "seconds", None, f"a round takes about {seconds:.0f} s; the policy has max_seconds = {most_s:g}", advice
        )
    deadline = session.experiment.round.deadline_s
    if seconds > 0.8 * deadline:
        advice = "ask for a later deadline or fewer local steps; late uploads are dropped"
        yield Check("deadline", None, f"a round takes about {seconds:.0f} s; round.deadline_s = {deadline:g}", advice)


def main(settings: str) -> None:
    """Write the checks as marked lines of JSON, then "done"."""
    values = json.loads(settings)
    look = Look(**{**values, "allow_tasks": tuple(values["allow_tasks"])})
    from client.policy import Policy
    from common.data import grant

    grant.close()
    if look.policy:
        Policy.load(look.policy).bound_memory()
    for check in checks(look):
        print(MARK + json.dumps([check.name, check.ok, check.detail, check.advice]), flush=True)
    print(f'{MARK}"done"', flush=True)


def paths(look: Look) -> Look:
    """The same with absolute paths."""
    absolute = {key: str(Path(getattr(look, key)).expanduser().absolute()) for key in ("experiment", "data", "policy")}
    return replace(look, **{key: path for key, path in absolute.items() if getattr(look, key)})  # type: ignore[arg-type]
