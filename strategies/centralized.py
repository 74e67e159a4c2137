"""Training where one party holds all data: what a federation is measured against."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from common.data.examples import ClientData
from common.data.pooled import none_of, pooled
from common.errors import SettingsError, SiteError
from common.experiment import Experiment, LocalSettings, RoundSettings
from common.tasks.base import NO_CLIENTS, Task
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters


@hyperparameters
class Centralized(FederatedStrategy):
    """SGD on the examples of all clients together, with as many steps a round as the clients of a federated round.

    The first client holds the training examples of all, the others none; each evaluates the model on examples of its
    own, as in a federated run. A round takes the steps that the cohort would take all together: S/N times the sum of
    the clients' K_i, to the nearest whole number. Batches are drawn from the whole pool, anew in each round.

    cohort (default: all clients): S. It is what round.sample says; round.sample itself, over_select and quorum then
      mean nothing and are left out.

    The optimizer's moments stay from round to round, as nothing is averaged (local.moments = "reset" for the other
    way); rates follow their schedules by rounds. On quadratics with batches of all examples it is gradient descent on
    the mean of f_i weighted by examples. weights has no meaning. Each client's feature shift stays in its examples.

    Only in a simulation (`simulate`, `compare`, `local`), where every process can make all clients' data: sites keep
    theirs, so `run` refuses it, and a client that brings a file.
    """

    weights: Literal["uniform", "data"] = "data"
    cohort: int | None = Field(None, ge=1)

    simulated: ClassVar[bool] = True

    def local(self, work: Work) -> Upload:
        """The steps of a round."""
        for _ in work.steps():
            pass
        return work.upload(delta=work.delta())

    def settle(self, experiment: Experiment) -> Experiment:
        """The cohort's size is a number of steps here, and the optimizer goes on."""
        local, round, strategy = experiment.local, experiment.round, experiment.strategy
        update: dict[str, object] = {}
        if "moments" not in local.model_fields_set and (local.momentum or local.adaptive):
            given = local.model_dump(include=local.model_fields_set)
            update["local"] = LocalSettings.model_validate({**given, "moments": "keep"})
        if round.sample is not None:
            kept = round.model_fields_set - {"sample", "over_select", "quorum"}
            update["round"] = RoundSettings.model_validate(round.model_dump(include=kept))
            options = {"cohort": round.sample, **strategy.options}
            update["strategy"] = type(strategy)(name=strategy.name, **options)
        return experiment.model_copy(update=update)

    def arrange(self, task: Task, experiment: Experiment) -> Task:
        """The task with all training examples at its first client."""
        names = task.names()
        if not names:
            raise SettingsError(f"strategy.name = 'centralized': {NO_CLIENTS}")
        if self.cohort is not None and self.cohort > len(names):
            raise SettingsError(f"strategy.cohort = {self.cohort}: there are {len(names)} clients")
        whole = copy.copy(task)
        # On the instance: whatever else the task has stays its own.
        setattr(whole, "client", partial(self._client, task, experiment.local))  # noqa: B010
        return whole

    def check(self, experiment: Experiment) -> None:
        """One client trains, always and all of its steps."""
        for table, kind, plain in (
            ("speed", experiment.speed.kind, "fixed"),
            ("presence", experiment.presence.kind, "always"),
        ):
            if kind != plain:
                raise SettingsError(
                    f"{table}.kind = {kind!r} beside strategy.name = 'centralized', where one trains: leave it out"
                )

    def _client(self, task: Task, local: LocalSettings, name: str, file: str | None = None) -> ClientData:
        if file is not None:
            raise SiteError(
                "data-unused",
                f"client {name!r}: strategy 'centralized' pools data, and a site's own stay where they are",
            )
        own, names = task.client(name), task.names()
        if name != names[0]:
            return replace(own, train=none_of(own.train))
        held = [data for data in (own if each == name else task.client(each) for each in names) if len(data.train)]
        steps = [
            data.steps or local.steps or local.epochs * math.ceil(len(data.train) / local.batch_size) for data in held
        ]
        share = min(1.0, (self.cohort or len(held)) / max(1, len(held)))
        train = pooled([data.train for data in held] or [own.train])
        return replace(own, train=train, steps=max(1, round(share * sum(steps))))
