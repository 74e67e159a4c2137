"""The one abstraction: an algorithm (`strategies/protocol/algorithm.py`: four pure methods) that is a Flower `Strategy`
too. Carrying the methods over messages is written once: `strategies/protocol/coordinator.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from common.compression.feedback import Kind
from common.errors import SettingsError
from common.experiment import Experiment
from strategies.protocol.algorithm import (
    Algorithm,
    MemoryKind,
    all_finite,
    cohort_mean,
    hyperparameters,
    tracker_change,
)
from strategies.protocol.flower_loop import FlowerLoop
from strategies.protocol.own import OWN, keep_own, load_own, own_model
from strategies.protocol.work import Part, Upload, Work


@hyperparameters
class FederatedStrategy(Algorithm, Strategy):
    """Base of the algorithms in this folder: what Flower's own loop calls,
    `strategy.start(grid, arrays, train_config=config_of(experiment))`. Our loop, `server/rounds/loop.py`, uses the same
    coordinator and adds quorum, deadline and checkpoints.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and address them."""
        if server_round == 1:
            self.__dict__.pop("_loop", None)
        return self._flower(config, arrays, grid).open_round(server_round, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and make the next model; without a valid reply the model stays."""
        return self._flower().close_round(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all clients that hold evaluation examples."""
        return self._flower().open_evaluation(server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Example-weighted means of the clients' metrics."""
        return self._flower().close_evaluation(replies)

    def summary(self) -> None:
        """Print the hyperparameters."""
        print(self)

    def _flower(
        self, config: ConfigRecord | None = None, arrays: ArrayRecord | None = None, grid: Grid | None = None
    ) -> FlowerLoop:
        """The coordinator that Flower's loop drives; a strategy instance itself holds no state of a run."""
        if "_loop" not in self.__dict__:
            if config is None or arrays is None or grid is None:
                raise RuntimeError("configure_train comes before the other steps of a round")
            self.__dict__["_loop"] = FlowerLoop.begin(self, config, arrays, grid)
        loop: FlowerLoop = self.__dict__["_loop"]
        return loop


def require_sgd(algorithm: str, experiment: Experiment, why: str) -> None:
    """Refuse adaptive local optimizers."""
    if experiment.local.adaptive:
        raise SettingsError(
            f"strategy.name = {algorithm!r} has no meaning with local.optimizer = "
            f"{experiment.local.optimizer!r}: {why}; allowed: 'sgd'"
        )


def refuse_kept_moments(algorithm: str, experiment: Experiment) -> None:
    """Refuse an optimizer's kept state where each of two models has an optimizer."""
    if experiment.local.moments == "keep":
        raise SettingsError(
            f"local.moments = 'keep' beside strategy.name = {algorithm!r}: two models are trained, each with an "
            "optimizer of its own; allowed: 'reset'"
        )


def refuse_sharpness(algorithm: str, experiment: Experiment) -> None:
    """Refuse SAM's second point where the formula says at which points gradients are taken."""
    if experiment.local.sam_rho:
        raise SettingsError(
            f"local.sam_rho = {experiment.local.sam_rho:g} has no meaning with strategy.name = {algorithm!r}, whose "
            "formula takes gradients at points of its own; leave it out"
        )


def damped_decay(algorithm: str, key: str, factor: float, experiment: Experiment) -> str | None:
    """A warning where local weight decay meets gradients that the algorithm scales by `factor`: at rest its momentum
    is zero, so the decay acts 1/factor times as strongly."""
    decay = experiment.local.weight_decay
    if not decay or factor == 1:
        return None
    return (
        f"{algorithm}: local.weight_decay = {decay:g} is not scaled by strategy.{key} = {factor:g} as gradients are: "
        f"it acts as a decay of {decay / factor:g}; {decay * factor:g} acts as {decay:g}"
    )


__all__ = [
    "OWN",
    "Algorithm",
    "FederatedStrategy",
    "Kind",
    "MemoryKind",
    "Part",
    "Upload",
    "Work",
    "all_finite",
    "cohort_mean",
    "damped_decay",
    "hyperparameters",
    "keep_own",
    "load_own",
    "own_model",
    "refuse_kept_moments",
    "refuse_sharpness",
    "require_sgd",
    "tracker_change",
]
