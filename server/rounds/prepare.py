"""From an experiment to all its parts, before round 1: every fault in what the user wrote shows here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common import tasks
from common.errors import SettingsError
from common.experiment import Experiment
from common.model import build, matrix_slots
from common.names import name_fault
from common.tasks.base import Task
from server.rounds.loop import Prepared
from server.watch import tracking
from strategies.protocol.participation import Pace
from strategies.registry import create, resolve


def prepare(experiment: Experiment) -> Prepared:
    """Create strategy, task and initial model, and check them against each other. Raises SettingsError."""
    experiment = resolve(experiment)
    strategy = create(experiment)
    tracking.check(experiment)
    task = tasks.create(experiment.task, experiment.partition, experiment.seed)
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
    Pace(experiment).check(names)
    return Prepared(experiment, strategy, task, model)


def _check_names(task: Task, names: Sequence[str]) -> None:
    """Raise SettingsError for clients that no server could tell apart, or whose folders could not be made."""
    seen: set[str] = set()
    for name in names:
        if fault := name_fault(name):
            raise SettingsError(f"{type(task).__name__}.names(): {fault}")
        if name in seen:
            raise SettingsError(f"{type(task).__name__}.names() holds {name!r} twice: each client has its own name")
        seen.add(name)
