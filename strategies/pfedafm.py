"""pFedAFM (Yi et al., arXiv 2404.17847): a small shared extractor, mixed with each client's own feature by feature."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from common.errors import SettingsError
from common.experiment import Experiment
from common.models.mixture import PRIVATE, Mixture
from common.tasks.base import Task
from strategies.base import FederatedStrategy, Upload, Work, hyperparameters, require_sgd


@hyperparameters
class PFedAFM(FederatedStrategy):
    """Client i predicts H_i(alpha_i * F_i(x) + (1 - alpha_i) * G(x)); extractor F_i, head H_i and alpha_i in [0, 1]^r,
    1 at first, never leave it. Only the extractor G is sent and averaged, by examples.

    A round at a client: (a) G frozen, E epochs on F_i, H_i and alpha_i; (b) F_i and H_i frozen, E epochs on G with
    alpha = 0, that is on H_i(G(x)). Each phase takes the epochs or steps of `[local]`.

    alpha_lr: the rate of alpha_i (default 0.1, as the official code), the same in each round whatever local.lr's
      schedule says; within a phase local.step_decay lowers it as it lowers local.lr, and starts anew with (b).
      alpha_i is clamped to [0, 1] after each step. Weight decay acts on it at local.lr.

    The paper's setting: local lr 0.01, momentum 0.9, weight_decay 1e-3, clip_norm 50, 10 epochs. In (a) the gradient
    of F_i, H_i and alpha_i is clipped as one; the official code leaves alpha_i out. Its averages alias one live
    network, so that its "mean" is the last client's G; one alpha and one momentum buffer serve all clients: not so
    here. Frozen BatchNorm layers of G still take a batch's own statistics in (a).

    Evaluation is each client's own, with the new G (the official code: with the G that it trained against). There is
    no global model: G's own head, which the official code has, is never trained. Needs a `common.models.mixture`:
    task digits and those on images make one with task.extractor. F_i may differ from process to process, as the
    model's layout counts only what is shared; clients of one process have one architecture.
    """

    weights: Literal["uniform", "data"] = "data"
    alpha_lr: float = Field(0.1, gt=0)

    passes: ClassVar[int] = 2

    def local(self, work: Work) -> Upload:
        """Phases (a) and (b); sends the change of G."""
        model = work.module
        assert isinstance(model, Mixture)
        slot, factor = work.personal_layout["alpha"], self.alpha_lr / work.lr
        for gradient in work.steps(clip="before", part="personal", after=model.clamp):
            slot.view(gradient).mul_(factor)
        with model.unmixed():
            for _ in work.steps(part="shared"):
                pass
        return work.upload(delta=work.delta())

    def check(self, experiment: Experiment) -> None:
        """What is private is the algorithm's, and alpha's rate is made by scaling its gradient."""
        require_sgd("pfedafm", experiment, "alpha_lr scales a gradient, which such a step is not proportional to")
        personal = experiment.personal
        if sorted(personal.parts) != sorted(PRIVATE) or personal.head_steps or personal.finetune_steps:
            raise SettingsError(
                f"strategy.name = 'pfedafm' has its own [personal]: parts = {PRIVATE}, without head_steps and "
                "finetune_steps; leave them out"
            )

    def check_model(self, task: Task, model: nn.Module) -> None:
        """Two extractors."""
        if not isinstance(model, Mixture):
            raise SettingsError(
                f"strategy.name = 'pfedafm' needs a model of two extractors, common.models.mixture.Mixture, not "
                f"{type(model).__name__}; 'digits' and the tasks on images make one with task.extractor"
            )
