"""From an experiment to all its parts, before round 1: every fault in what the user wrote shows here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from common import tasks
from common.errors import SettingsError, located
from common.experiment import Experiment
from common.model import FlatModel, build, matrix_slots
from common.settings import name_fault
from common.tasks.base import Task
from common.tasks.scoring import Scoring
from server.rounds.begin import begin_from
from server.rounds.ending import target_of
from strategies.base import FederatedStrategy
from strategies.protocol.participation import Participation
from strategies.protocol.selection import Selection
from strategies.registry import settled


@dataclass
class Prepared:
    """An experiment whose every part exists: nothing in it can fail any more for a reason that the user wrote."""

    experiment: Experiment
    strategy: FederatedStrategy
    task: Task
    model: FlatModel
    scoring: Scoring
    notes: list[str] = field(default_factory=list)
    """What to say before round 1 of a new run."""


def prepare(experiment: Experiment) -> Prepared:
    """Settle an experiment, and create all its parts. Raises SettingsError."""
    return assemble(*settled(experiment))


def assemble(strategy: FederatedStrategy, experiment: Experiment) -> Prepared:
    """Create task and initial model of a settled experiment, and check all parts against each other. Raises
    SettingsError."""
    _check_trackers(experiment)
    task = strategy.arrange(tasks.create(experiment.task, experiment.partition, experiment.seed), experiment)
    names, settings = task.names(), experiment.round
    _check_names(task, names)
    clients = len(names)
    if clients and settings.sample is not None and settings.sample > clients:
        raise SettingsError(f"round.sample = {settings.sample} is more than the {clients} clients of the partition")
    if clients and settings.wait_for is not None and settings.wait_for > clients:
        raise SettingsError(f"round.wait_for = {settings.wait_for} is more than the {clients} clients of the partition")
    most = settings.sample or clients
    if most and settings.quorum is not None and settings.quorum > most:
        raise SettingsError(f"round.quorum = {settings.quorum} is more than the {most} clients of a round")
    model = build(task, experiment.seed, personal=experiment.personal.parts, check=strategy.check_model)
    if experiment.personal.head_steps and not model.personal_layout:
        raise SettingsError(
            f"personal.head_steps = {experiment.personal.head_steps}: the personal part {experiment.personal.parts} "
            "has nothing to train"
        )
    muon = experiment.local.optimizer == "muon" and not experiment.local.nesterov
    if muon and model.vector.dtype == torch.bfloat16 and matrix_slots(task, model, "all"):
        # There torch.optim.Muon (2.14) normalizes the momentum itself in place.
        raise SettingsError(
            "local.optimizer = 'muon' with a model of bfloat16 needs local.nesterov = true, or a model of another dtype"
        )
    if experiment.speed.kind == "uniform" and experiment.local.steps is not None:
        raise SettingsError(
            f"speed.kind = 'uniform' draws epochs and local.steps = {experiment.local.steps} fixes steps; leave one out"
        )
    Participation(experiment).check(names)
    if experiment.task.options.get("test_file"):
        task.central()  # a test set that cannot be used shows here, and not where a run begins
    target_of(experiment.stop)
    Selection(experiment)
    start = experiment.task.options.get("start")
    notes = begin_from(model, start) if start is not None else []
    rehearse(task, model, names)
    return Prepared(experiment, strategy, task, model, Scoring(task, model.module, experiment.evaluate), notes)


def rehearse(task: Task, model: FlatModel, names: Sequence[str]) -> None:
    """One step on two examples, where this process has some, forward and backward: what cannot work is told once, with
    its file and line, before anybody has waited for it. The model stays as it is.

    Raises SettingsError. Memory that does not suffice is no fault of the task.
    """
    if task.census is not None:
        return  # what its inputs are made of is known after the roll call only
    data = task.central()
    data = data if data is not None and len(data) > 1 else task.client(names[0]).train if names else None
    if data is None or len(data) < 2:
        return
    try:
        with model.trial() as module, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will say them
            loss = task.loss(module, task.augment(data.batch(torch.arange(2))))
            if isinstance(loss, torch.Tensor) and loss.ndim == 0:  # of anything else the roll call tells
                loss.backward()  # type: ignore[no-untyped-call]
    except MemoryError:
        pass
    except Exception as error:
        raise SettingsError(f"the model cannot learn from this task's examples: {located(error)}") from error
    finally:
        model.whole_gradient.zero_()


def deployable(prepared: Prepared) -> Prepared:
    """The same where sites can run it. Raises SettingsError."""
    if prepared.strategy.simulated:
        raise SettingsError(
            f"strategy.name = {prepared.experiment.strategy.name!r} needs all clients' data in one place, and sites "
            "keep theirs; allowed: simulate, compare and local"
        )
    return prepared


def _check_trackers(experiment: Experiment) -> None:
    """Raise SettingsError for a tracker whose package is missing."""
    for name in experiment.tracking.use:
        if name != "tensorboard" and find_spec(name) is None:
            advice = f"in the project's folder: pip install '.[{name}]'"
            raise SettingsError(f"tracking.use = {name!r}: the package {name} is not installed; {advice}")


def _check_names(task: Task, names: Sequence[str]) -> None:
    """Raise SettingsError for clients that no server could tell apart, or whose folders could not be made."""
    seen: set[str] = set()
    for name in names:
        if fault := name_fault(name):
            raise SettingsError(f"{type(task).__name__}.names(): {fault}")
        if name in seen:
            raise SettingsError(f"{type(task).__name__}.names() holds {name!r} twice: each client has its own name")
        seen.add(name)
