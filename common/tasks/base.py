"""What a task is: a model, each client's data, a loss and metrics. Write one's own by subclassing `Task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.data.examples import ClientData, Examples
from common.data.moments import Census
from common.errors import SettingsError
from common.experiment import EvaluateSettings
from common.metrics.metric import Metric
from common.metrics.ready import Kind

NO_CLIENTS = (
    "the task has no clients of its own (`names()` is empty), so none can be simulated: where sites bring their data, "
    "each joins under its name (python -m client join --name NAME --data PATH)"
)


class Task(ABC):
    """A model, data, a loss and metrics. One instance serves all clients of a process.

    Everything must be a function of the settings and the seed alone, the same in every process.
    """

    dtype: torch.dtype = torch.float32

    census: Census | None = None
    """What must be known of all clients' training data before round 1."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU; the caller has seeded torch's global generator."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all clients of a simulation, in the order of their partition numbers."""

    @abstractmethod
    def client(self, name: str, file: str | None = None) -> ClientData:
        """The data of client `name`; with `file`, all of that site's own file instead of a partition.

        Raises SettingsError if there is no such client or the file is unusable.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over one batch, a 0-d tensor that autograd can differentiate."""

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """What the model gives for a batch and what it should have given, as `metric_kind` says: for metrics.

        Called without gradients and with the model in evaluation mode. A task that has no such pair need not have
        this: then it overrides `metrics`.
        """
        raise SettingsError(
            f"{type(self).__name__} has no outputs(): metrics beside its own are made of them; write "
            "outputs(model, batch) -> (outputs, targets)"
        )

    def judge(self, outputs: Any, targets: Any) -> Mapping[str, float | Tensor]:
        """Sums over a batch's outputs that become means over a data set, e.g. {"loss": ..., "accuracy": ...}: numbers,
        or 0-d tensors, for then a GPU is not waited for to read those of each batch."""
        return {}

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float | Tensor]:
        """`judge` of `outputs`. Where there are none: such sums over one batch from the model itself."""
        return self.judge(*self.outputs(model, batch))

    def scores(self) -> Sequence[Metric]:
        """Metrics that are no means over examples, beside those of `judge`: F1, R2, by class. Computed from `outputs`,
        right over batches and clients alike."""
        return ()

    shifts: bool = False
    """Whether the clients' data are shifted as `[partition] shift` says."""

    metric_kind: Kind = ""
    """What `outputs` are: so that an experiment may name further metrics, see `common.metrics.ready`."""

    headline: str = ""
    """The metric that stands for a run. "": accuracy if there is one, else the first of `scores`, else the first of
    the others but the loss, else that."""

    lower: frozenset[str] = frozenset()
    """Which of the means of `judge` are better the lower they are, beside those of `common.metrics.directions`."""

    def output_size(self, model: nn.Module) -> int | None:
        """How many classes, labels or numbers the model gives; None if that cannot be told from it."""
        found = getattr(self.output_layer(model), "out_features", None)
        return found if isinstance(found, int) else None

    def augment(self, batch: Any) -> Any:
        """A training batch, changed at random: once a step, before every pass of that step sees it, on the batch's
        device and as a whole. Random numbers come from torch's global generator, which the caller has seeded."""
        return batch

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        """The layer of `model` whose input (b, r) is the representation of a batch and whose output are the logits:
        the "head" that clients may keep, and where MOON looks. None: this model has no such layer."""
        return None

    def central(self) -> Examples | None:
        """Test examples held by the server, or None."""
        return None

    def columns(self) -> tuple[str, ...]:
        """Which column of a site's table each number of an input is; () if there are none, or any will do."""
        return ()

    def explain(self) -> Mapping[str, str]:
        """What `check` shows of the data beside the settings: heading -> a line."""
        return {}

    def plan_hash(self) -> str:
        """Hash of the partition plan: equal in every process that holds the same split; "" without one."""
        return ""

    def describe(self, model: Tensor) -> Mapping[str, float]:
        """Extra numbers about the global model, a flat vector (d,), for the history."""
        return {}


def evaluate(task: Task, model: nn.Module, data: Examples, batch_size: int) -> dict[str, float]:
    """The task's own metrics over `data`, with the model in evaluation mode."""
    from common.tasks.scoring import Scoring  # which is made of tasks

    scoring = Scoring(task, model, EvaluateSettings())
    return scoring.values(scoring.measure(model, data, batch_size))
