"""What a task is: a model, each client's data, a loss and metrics. Write one's own by subclassing `Task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.data.examples import ClientData, Examples
from common.data.moments import Census

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

    @abstractmethod
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float | Tensor]:
        """Sums over one batch that become means over a data set, e.g. {"loss": ..., "accuracy": ...}.

        Numbers, or 0-d tensors: a GPU is not waited for to read those of each batch.
        Called without gradients and with the model in evaluation mode.
        """

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
    """Means of the task's metrics over `data`, with the model in evaluation mode."""
    sums: dict[str, float | Tensor] = {}
    training = model.training
    model.eval()
    with torch.inference_mode():
        for index in torch.split(torch.arange(len(data)), batch_size):
            for key, value in task.metrics(model, data.batch(index)).items():
                sums[key] = sums.get(key, 0.0) + (value.double() if isinstance(value, Tensor) else value)
    model.train(training)
    return {key: float(value) / len(data) for key, value in sums.items()}
