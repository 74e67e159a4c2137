"""MOON (Li, He and Song, arXiv 2103.16257): model-contrastive federated learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from common.errors import SettingsError
from common.tasks.base import Task
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters

PREVIOUS = "previous"


@hyperparameters
class Moon(FederatedStrategy):
    """FedAvg whose clients are drawn to the representations of the server's model and away from their own last ones.

    Loss of a batch: the task's plus mu times the mean over examples of

        -log( e^{cos(z, z_glob)/T} / (e^{cos(z, z_glob)/T} + e^{cos(z, z_prev)/T}) ).

    z is what the model's output layer reads; z_glob comes from the model that the round started from, z_prev from this
    client's model at the end of its last accepted round; both are frozen and in evaluation mode. A client without such
    a round trains without the term, as in the official code's first round; that code later takes an untrained network
    for it. Three forward passes a step.

    mu (mu >= 0, default 5, the paper's for CIFAR-10; the code's is 1; tried are 0.001 to 10). mu = 0 is FedAvg.
    temperature: T (T > 0, default 0.5).

    The paper's models have a projection head of two layers before the output layer, and z is its output: here
    `[task] projection = 256`. A comparison with FedAvg must use the same model. The paper's recipe: SGD with lr 0.01,
    momentum 0.9 (new in each round), weight decay 1e-5, batch 64, 10 epochs.
    """

    weights: Literal["uniform", "data"] = "data"
    mu: float = Field(5.0, ge=0)
    temperature: float = Field(0.5, gt=0)

    memory: ClassVar[Literal["none", "bound", "own"]] = "own"

    def local(self, work: Work) -> Upload:
        """K steps on the contrastive loss; keeps the model and its buffers."""
        for _ in work.steps(extra=self._contrast(work)):
            pass
        if self.mu:
            kept = {PREVIOUS: work.vector, **work.buffers}
            work.keep(**kept)
        return work.upload(delta=work.delta())

    def _contrast(self, work: Work) -> Callable[[Tensor, Any], Tensor] | None:
        """The term for a batch, or None for one who has no last model."""
        if not self.mu or PREVIOUS not in work.memory:
            return None
        # The buffers received lie in the live model, which training changes.
        received = {name: value.clone() for name, value in work.buffers.items()}
        last = {name: work.memory[name] for name in work.buffers}
        current = work.representation(work.received["model"], received)
        previous = work.representation(work.memory[PREVIOUS], last)
        dtype = work.vector.dtype

        def contrast(z: Tensor, batch: Any) -> Tensor:
            z = z.to(dtype)  # under autocast it is of half precision
            near, far = (functional.cosine_similarity(z, f(batch).to(dtype), dim=-1) for f in (current, previous))
            return -self.mu * functional.logsigmoid((near - far) / self.temperature).mean()

        return contrast

    def check_model(self, task: Task, model: nn.Module) -> None:
        """There must be a representation."""
        if task.output_layer(model) is None:
            raise SettingsError(
                f"strategy.name = 'moon' needs what the model's output layer reads, and the model of "
                f"{type(task).__name__} has none; allowed: a task whose `output_layer` names one"
            )
