"""Metrics: on the server's own test set and on the clients' evaluation examples, under different names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from common.experiment import Experiment
from common.model import FlatModel
from common.tasks.base import Task
from common.tasks.base import evaluate as evaluate_model
from server.rounds.exchange import Exchange
from server.rounds.roster import Roster
from strategies.protocol.acceptance import check_evaluation
from strategies.protocol.algorithm import Algorithm
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.messages import Refused, read_reply

Summary = dict[str, dict[str, float | int | str]]
Results = Mapping[str, tuple[int, Mapping[str, float]]]


class Evaluation:
    """Evaluates the coordinator's model as `[evaluate]` says."""

    def __init__(self, task: Task, model: FlatModel, experiment: Experiment, strategy: Algorithm) -> None:
        self._task = task
        self._model = model
        self._settings = experiment.evaluate
        self._last = experiment.rounds
        self._deadline = experiment.round.deadline_s
        # Without its personal part there is no global model to evaluate.
        self._central = None if experiment.personal.parts or strategy.personal else task.central()
        auto = "all" if self._central is None or strategy.own_models(experiment) else "none"
        self._clients = auto if self._settings.clients == "auto" else self._settings.clients

    def due(self, round: int) -> bool:
        """Every so many rounds, and always after the last."""
        return round % self._settings.every == 0 or round == self._last

    def central(self, coordinator: Coordinator) -> dict[str, float]:
        """Means over the server's test set; {} without one."""
        if self._central is None:
            return {}
        self._model.load(coordinator.state["model"], coordinator.buffers)
        return evaluate_model(self._task, self._model.module, self._central, self._settings.batch_size)

    def clients(self, coordinator: Coordinator, roster: Roster, exchange: Exchange, sampled: Iterable[str]) -> Results:
        """Client -> number of examples and metrics on its own examples; {} if not asked for."""
        if self._clients == "none":
            return {}
        chosen = set(sampled) if self._clients == "sampled" else set(roster.members)
        names = [name for name in roster.evaluators if name in chosen]
        messages = coordinator.evaluation_messages(
            coordinator.round, [roster.members[n] for n in names], self._deadline
        )
        replies = exchange.run(messages, self._deadline)
        results: dict[str, tuple[int, Mapping[str, float]]] = {}
        for name in names:
            try:
                if name not in replies:
                    raise Refused("timed out")
                reply = read_reply(replies[name])
                check_evaluation(coordinator, roster.members[name], reply)
                results[name] = (reply.head.examples, reply.metrics)
            except Refused:
                continue
        return results


def each(results: Results) -> dict[str, dict[str, float]]:
    """metric -> client -> value."""
    keys = sorted({key for _, metrics in results.values() for key in metrics})
    return {key: {name: m[key] for name, (_, m) in sorted(results.items()) if key in m} for key in keys}


def summarize(results: Results) -> Summary:
    """metric -> {"weighted": mean by examples, "mean": plain mean, "worst": value, "client": who, "n": clients}.

    Worst is the largest loss and the smallest of anything else. Clients whose value is not finite count as worst and
    are left out of the means.
    """
    summary: Summary = {}
    keys = sorted({key for _, metrics in results.values() for key in metrics if "." not in key})
    for key in keys:
        values = {name: (n, m[key]) for name, (n, m) in sorted(results.items()) if key in m}
        finite = [(n, v) for n, v in values.values() if math.isfinite(v)]
        if not finite:
            continue
        sign = -1.0 if "loss" in key or key == "objective" else 1.0
        worst = min(values, key=lambda name: sign * values[name][1] if math.isfinite(values[name][1]) else -math.inf)
        summary[key] = {
            "weighted": sum(n * v for n, v in finite) / sum(n for n, _ in finite),
            "mean": sum(v for _, v in finite) / len(finite),
            "worst": values[worst][1],
            "client": worst,
            "n": len(finite),
        }
    return summary


def describe(task: Task, model: torch.Tensor) -> dict[str, float]:
    """Extra numbers of the task about the global model (for `quadratic` the distance to the minimizer)."""
    return {key: float(value) for key, value in task.describe(model).items()}
