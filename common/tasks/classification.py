"""What all classification tasks on a pooled data set share: the split, cross entropy, accuracy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from common.data.examples import Examples, pick
from common.metrics.ready import Kind
from common.models.images import output_layer
from common.tasks.supervised import DTYPES, Supervised


class Classification(Supervised):
    """Classes of a pooled data set that a plan splits over clients: cross entropy and accuracy."""

    metric_kind: Kind = "classes"
    headline = "accuracy"

    @abstractmethod
    def pool(self) -> Examples:
        """All training examples: inputs (n, ...) and int64 targets (n,) on the CPU."""

    def labels(self) -> NDArray[Any] | None:
        """The classes."""
        found: NDArray[Any] = self.pool().targets.numpy()
        return found

    def features(self, inputs: Tensor) -> Tensor:
        """What the model receives for a batch of inputs (b, ...), on the batch's device."""
        return inputs

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        """The last linear layer; see `common.models.images.output_layer`."""
        return output_layer(model)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Logits (b, c)."""
        return model(self.features(inputs))

    def error(self, outputs: Any, targets: Any) -> Tensor:
        """Mean cross entropy, nats."""
        return functional.cross_entropy(outputs, targets)

    def judge(self, outputs: Any, targets: Any) -> Mapping[str, float | Tensor]:
        """Cross entropy (nats) and right answers."""
        if "error" in vars(self):  # of the experiment's own
            return {**super().judge(outputs, targets), "accuracy": (outputs.argmax(1) == targets).sum()}
        loss = functional.cross_entropy(outputs, targets, reduction="sum")
        return {"loss": loss.detach(), "accuracy": (outputs.argmax(1) == targets).sum()}


__all__ = ["DTYPES", "Classification", "pick"]
