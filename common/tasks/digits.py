"""scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from common.data.examples import Examples, pick
from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.models.images import check_heads, cnn, mlp
from common.models.mixture import of_sequences
from common.seeds import derive
from common.settings import Section, checked
from common.tasks.classification import Classification


class DigitsSettings(Section):
    """`[task] name = "digits"`."""

    dtype: Literal["float32", "float64"] = "float32"
    model: Literal["mlp", "cnn"] = Field("mlp", description="cnn: two convolutions with BatchNorm")
    hidden: int = Field(64, ge=1, description="units of the mlp's hidden layer")
    width: int = Field(16, ge=1, description="channels of the cnn's first convolution")
    projection: int | None = Field(None, ge=1, description="moon: width of a projection head before the output layer")
    extractor: int | None = Field(None, ge=1, description="pfedafm: hidden units of a shared extractor beside it")


class Digits(Classification):
    """8x8 images as 64 numbers in [0, 1]; a multilayer perceptron 64-hidden-10, or a small convolutional network.

    The seed draws the 359 central test images; the other 1,438 are partitioned.
    """

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        settings = checked(DigitsSettings, options, "[task]")
        super().__init__(partition, seed, settings.dtype)
        check_heads(settings.projection, settings.extractor)
        self.settings = settings
        if settings.extractor and settings.model != "mlp":
            raise SettingsError(f"task.extractor = {settings.extractor} beside task.model = 'cnn'; allowed: 'mlp'")
        self._pool, self._test = _digits(self.dtype, seed)
        _ = self.assignment  # settings errors belong to the start

    def pool(self) -> Examples:
        """1,438 training images: inputs (1438, 64)."""
        return self._pool

    def central(self) -> Examples:
        """359 test images that no client holds: inputs (359, 64)."""
        return self._test

    def model(self) -> nn.Module:
        """Logits (b, 10) from what `features` gives."""
        given = self.settings
        if given.model == "cnn":
            return cnn((8, 8), given.width, 10, given.projection).to(self.dtype)
        model = mlp(64, given.hidden, 10, given.projection).to(self.dtype)
        return of_sequences(model, mlp(64, given.extractor, given.hidden).to(self.dtype)) if given.extractor else model

    def features(self, inputs: Tensor) -> Tensor:
        """Inputs (b, 64) for the mlp, (b, 1, 8, 8) for the cnn."""
        return inputs if self.settings.model == "mlp" else inputs.view(-1, 1, 8, 8)


def _digits(dtype: torch.dtype, seed: int) -> tuple[Examples, Examples]:
    table = _table()
    images, labels = table[:, :-1], table[:, -1].astype(int)
    everything = Examples(torch.from_numpy(images / 16).to(dtype), torch.from_numpy(labels).long())
    order = np.random.default_rng(derive(seed, "digits", "test")).permutation(len(labels))
    test = len(labels) // 5
    return pick(everything, np.sort(order[test:])), pick(everything, np.sort(order[:test]))


def _table() -> NDArray[np.float64]:
    """(1797, 65): 64 pixels of 0 to 16 and the label. scikit-learn's own file without scikit-learn, whose import takes
    most of a small run's time (3 CPU seconds of every process)."""
    spec = importlib.util.find_spec("sklearn")
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else Path()
    return np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
