"""The metrics of a run: what a data set is measured by, what measurements come to, which metric stands for the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from common.data.examples import Examples
from common.errors import Denied, SettingsError
from common.experiment import EvaluateSettings
from common.metrics.directions import higher_by_name
from common.metrics.metric import Metric, described
from common.metrics.ready import ready
from common.own import load
from common.tasks.base import Task


@dataclass(frozen=True)
class Measured:
    """What a data set was measured to be: means over its examples, and the sums of each `Metric` in float64."""

    examples: int
    means: Mapping[str, float]
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class Scoring:
    """The metrics of a task: the means of its `judge`, its `scores`, and those that `[evaluate]` names.

    Raises SettingsError for a name that means nothing or comes twice.
    """

    def __init__(self, task: Task, module: nn.Module, settings: EvaluateSettings) -> None:
        self._task = task
        self._asked = settings.headline
        own = type(task)
        self._judges = own.metrics is Task.metrics
        if self._judges and own.outputs is Task.outputs:
            raise SettingsError(f"{own.__name__} says nothing of metrics: write outputs() and judge(), or metrics()")
        named = [self._named(name, module) for name in settings.metrics]
        self.metrics: dict[str, Metric] = {}
        for metric in (*task.scores(), *named):
            if metric.name in self.metrics:
                raise SettingsError(f"evaluate.metrics: {metric.name!r} comes twice")
            self.metrics[metric.name] = metric

    def _named(self, name: str, module: nn.Module) -> Metric:
        if ":" not in name:
            return ready(name, self._task.metric_kind, lambda: self._task.output_size(module))
        found = load(name, "evaluate.metrics")
        if not isinstance(found, Metric):
            raise SettingsError(
                f"evaluate.metrics: {name!r} is a {type(found).__name__}; allowed: a common.metrics.metric.Metric"
            )
        return found

    def require(self, shared: bool) -> None:
        """Raise Denied for a metric whose sums say what the labels are like, unless that is `shared`."""
        for metric in self.metrics.values():
            if metric.reveals and not shared:
                raise Denied(
                    "metric-denied",
                    f"evaluate.metrics: {metric.name!r} tells {metric.reveals} of the site's evaluation examples; "
                    "the site has not allowed that (`share_labels` of its policy)",
                )

    def measure(self, module: nn.Module, data: Examples, batch_size: int) -> Measured:
        """Evaluate a model, in evaluation mode, on a data set of at least one example.

        Raises SettingsError for a metric that gives something else than numbers.
        """
        means: dict[str, float | Tensor] = {}
        sums: dict[str, Tensor] = {}
        training = module.training
        module.eval()
        with torch.inference_mode():
            for index in torch.split(torch.arange(len(data)), batch_size):
                judged, scored = self._of_batch(module, data.batch(index))
                for key, value in judged.items():
                    means[key] = means.get(key, 0.0) + _number(key, value)
                for key, total in scored.items():
                    sums[key] = sums[key] + total if key in sums else total
        module.train(training)
        found = {key: float(value) / len(data) for key, value in means.items()}
        if twice := found.keys() & sums.keys():
            raise SettingsError(f"evaluate.metrics: {sorted(twice)[0]!r} is a metric of the task already")
        return Measured(len(data), found, {key: total.cpu() for key, total in sums.items()})

    def _of_batch(self, module: nn.Module, batch: Any) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        if not self.metrics:
            return self._task.metrics(module, batch), {}
        outputs, targets = self._task.outputs(module, batch)
        # A task that looks at the model itself takes a pass of its own.
        judged = self._task.judge(outputs, targets) if self._judges else self._task.metrics(module, batch)
        return judged, {name: metric.measure(outputs, targets) for name, metric in self.metrics.items()}

    def values(self, measured: Measured) -> dict[str, float]:
        """Every metric of one data set, by name; NaN where there is no number."""
        found = dict(measured.means)
        for name, total in measured.sums.items():
            found |= self.metrics[name].values(total)
        return found

    def pooled(self, all_: Sequence[Measured]) -> dict[str, float]:
        """Every `Metric` of data sets taken together, from the sum of their sums in this order; of those alone whose
        sums are finite."""
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            held = [each.sums[name] for each in all_ if name in each.sums and bool(each.sums[name].isfinite().all())]
            if held:
                total = held[0].clone()
                for each in held[1:]:
                    total += each
                found |= metric.values(total)
        return found

    def higher(self, name: str) -> bool:
        """Whether more is better; of a part of a metric as of the whole."""
        metric = self.metrics.get(name) or self._whole(name)
        return metric.higher if metric else name not in self._task.lower and higher_by_name(name)

    def headline(self, names: Iterable[str]) -> str:
        """Which of the metrics that were measured stands for the run; "" before any was.

        Raises SettingsError if the one asked for is none of them.
        """
        wanted, found = self._asked or self._task.headline, sorted(names)
        if not found or wanted in found:
            return wanted
        if self._asked:
            raise SettingsError(
                f"evaluate.headline = {wanted!r} is no metric of this task; allowed: {', '.join(found)}"
            )
        means = [name for name in found if name != "loss" and self._whole(name) is None]
        first = [*(name for name in ("accuracy",) if name in found), *self.metrics, *means]
        return first[0] if first else "loss"

    def _whole(self, part: str) -> Metric | None:
        """The metric that a part is of, such as "iou.0"; None of what is no part."""
        return next((metric for known, metric in self.metrics.items() if part.startswith(f"{known}.")), None)


def _number(name: str, value: Any) -> float | Tensor:
    """A metric's sum over a batch. Raises SettingsError for what is none."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return value.double()
    if not isinstance(value, Tensor | str | bytes | type(None)):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise SettingsError(f"metric {name}: {described(value)}; needed: a number, the sum over the batch")
