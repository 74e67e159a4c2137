"""Metrics: on the server's own test set and on the clients' evaluation examples, under different names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from common.errors import RunError, SettingsError, located
from common.experiment import StopSettings
from common.metrics.directions import higher_by_name
from common.tasks.base import Task
from common.tasks.scoring import Measured
from common.vector import State
from server.rounds.ending import Ending
from server.rounds.exchange import Exchange
from server.rounds.prepare import Prepared
from server.rounds.records import Record, Value
from server.rounds.roster import Roster
from strategies.base import Algorithm, Upload
from strategies.protocol.acceptance import measured
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.messages import Refused, read_reply

Summary = dict[str, dict[str, Value]]

NOTED = ("norm.", "seconds.")
"""How metrics of an upload begin that are no metrics of the model."""

AWAY = frozenset({"offline", "timed out", "late", "lost", "refused"})
"""Causes that say nothing against the metrics: the client was not there, or its site takes no part."""


@dataclass
class Answers:
    """What came of asking clients for their metrics, by name: what they measured, and why others did not."""

    asked: list[str] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)


class Evaluation:
    """Evaluates the coordinator's model as `[evaluate]` says."""

    def __init__(self, prepared: Prepared) -> None:
        experiment, strategy = prepared.experiment, prepared.strategy
        self._model, self.scoring = prepared.model, prepared.scoring
        self._settings = experiment.evaluate
        self._last = experiment.rounds
        self._deadline = experiment.round.deadline_s
        # Without its personal part there is no global model to evaluate.
        self._central = None if experiment.personal.parts or strategy.personal else prepared.task.central()
        auto = "all" if self._central is None or strategy.own_models(experiment) else "none"
        self._clients = auto if self._settings.clients == "auto" else self._settings.clients

    def ending(self, settings: StopSettings, records: Iterable[Record]) -> Ending:
        """What decides when the run ends. Raises SettingsError where it waits for what is never evaluated."""
        for key in ("patience", "target"):
            if (value := getattr(settings, key)) is not None and self._central is None and self._clients == "none":
                raise SettingsError(
                    f"stop.{key} = {value!r}: nothing is evaluated in this run; allowed with evaluate.clients = 'all' "
                    "or 'sampled', or a task with a test set at the server"
                )
        return Ending(settings, self.scoring.higher, records)

    def due(self, round: int) -> bool:
        """Every so many rounds, and always after the last."""
        return round % self._settings.every == 0 or round == self._last

    def central(self, coordinator: Coordinator) -> dict[str, float]:
        """All metrics on the server's test set; {} without one. Raises RunError if they cannot be computed."""
        if self._central is None:
            return {}
        self._model.load(coordinator.state["model"], coordinator.buffers)
        try:
            found = self.scoring.measure(self._model.module, self._central, self._settings.batch_size)
        except Exception as error:
            raise RunError(f"the model of round {coordinator.round} cannot be evaluated: {located(error)}") from error
        return self.scoring.values(found)

    def clients(self, coordinator: Coordinator, roster: Roster, exchange: Exchange, sampled: Iterable[str]) -> Answers:
        """What clients measured on their own examples; nobody is asked if `[evaluate]` says so.

        Raises RunError if none of them can compute the metrics.
        """
        if self._clients == "none":
            return Answers()
        chosen = set(sampled) if self._clients == "sampled" else set(roster.members)
        names = [name for name in roster.evaluators if name in chosen]
        messages = coordinator.evaluation_messages(
            coordinator.round, [roster.members[n] for n in names], self._deadline
        )
        replies = exchange.run(messages, self._deadline)
        answers = Answers(names)
        for name in names:
            try:
                if name not in replies:
                    raise Refused("timed out")
                reply = read_reply(replies[name])
                answers.measured[name] = measured(coordinator, roster.members[name], reply, self.scoring.metrics)
            except Refused as error:
                answers.dropped[name], answers.causes[name] = str(error), error.kind
        answers.measured = agreed(answers.measured)
        if names and not answers.measured and not AWAY & set(answers.causes.values()):
            raise RunError(
                f"none of {len(names)} clients can evaluate the model of round {coordinator.round}; the first: "
                f"{answers.dropped[names[0]]}"
            )
        return answers

    def each(self, answers: Answers) -> dict[str, dict[str, float]]:
        """metric -> client -> value; NaN where a client has no number."""
        values = {name: self.scoring.values(found) for name, found in sorted(answers.measured.items())}
        return by_metric(values)

    def summary(self, answers: Answers, each: Mapping[str, Mapping[str, float]]) -> Summary:
        """`summarize` of what clients measured, `each` of it; "weighted" of a metric of sums is of all examples."""
        examples = {name: found.examples for name, found in answers.measured.items()}
        pooled = self.scoring.pooled([answers.measured[name] for name in sorted(answers.measured)])
        return summarize(examples, each, self.scoring.higher, pooled)


def agreed(all_: Mapping[str, Measured]) -> dict[str, Measured]:
    """Without the means that most clients do not tell: one site's word must not name what a run is judged by."""
    told = Counter(name for each in all_.values() for name in each.means)
    kept = {name for name, count in told.items() if 2 * count > len(all_)}
    return {
        client: replace(each, means={name: value for name, value in each.means.items() if name in kept})
        for client, each in all_.items()
    }


def by_metric(values: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """metric -> client -> value, from client -> metric -> value."""
    keys = sorted({key for metrics in values.values() for key in metrics})
    return {key: {name: metrics[key] for name, metrics in sorted(values.items()) if key in metrics} for key in keys}


def summarize(
    examples: Mapping[str, int],
    each: Mapping[str, Mapping[str, float]],
    higher: Callable[[str], bool],
    pooled: Mapping[str, float],
) -> Summary:
    """metric -> {"weighted": mean by examples, "mean": plain mean, "worst": value, "client": who, "n": clients}.

    `pooled`: what stands for "weighted" where a metric is no mean. Clients whose value is not finite count as worst and
    are left out of the means. NaN stands for a number that there is not; `RunFolder.append` makes None of it.
    """
    summary: Summary = {}
    for key, values in each.items():
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        sign = 1.0 if higher(key) else -1.0
        worst = min(values, key=lambda name: sign * values[name] if name in known else -math.inf)
        total = sum(examples[name] for name in known)
        weighted = sum(examples[name] * value for name, value in known.items()) / total if known else math.nan
        summary[key] = {
            "weighted": pooled.get(key, weighted),
            "mean": sum(known.values()) / len(known) if known else math.nan,
            "worst": values[worst],
            "client": worst,
            "n": len(known),
        }
    return summary


def of_training(uploads: Sequence[Upload]) -> Summary:
    """`summarize` of what clients told of their training; norms and times have lines of their own."""
    values = {
        upload.name: {key: value for key, value in upload.metrics.items() if not key.startswith(NOTED)}
        for upload in uploads
    }
    examples = {upload.name: upload.examples for upload in uploads}
    return summarize(examples, by_metric(values), higher_by_name, {})


def described(strategy: Algorithm, state: State) -> dict[str, Value]:
    """Scalars of the algorithm about its state. Raises RunError with the cause where its code fails."""
    try:
        return {str(key): float(value) for key, value in strategy.describe(state).items()}
    except Exception as error:
        raise RunError(f"{type(strategy).__name__}.describe failed: {located(error)}") from error


def describe(task: Task, model: torch.Tensor) -> dict[str, Value]:
    """Extra numbers of the task about the global model (for `quadratic` the distance to the minimizer)."""
    return {key: float(value) for key, value in task.describe(model).items()}
