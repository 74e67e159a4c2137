"""The task for exact tests: F_i(w) = 1/2 sum_j a_ij (w_j - e_ij)^2, full-batch gradients, no randomness.

It shows what an algorithm converges to. The minimizers are sum_i p_i a_i e_i / sum_i p_i a_i by coordinate,
with p_i = 1/n for the uniform objective and p_i = n_i / sum n for the data-weighted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from common.data.arrays import opened
from common.data.examples import ClientData, Examples
from common.data.places import find
from common.errors import SettingsError, SiteError
from common.experiment import PartitionSettings
from common.settings import Opened, Section, checked
from common.tasks.base import Task
from common.tasks.classification import DTYPES

# key -> its dimensions: n clients, d coordinates
KEYS = {"centers": "nd", "curvatures": "nd", "steps": "n", "examples": "n", "start": "d"}


class QuadraticSettings(Section):
    """`[task] name = "quadratic"`."""

    file: Opened
    dtype: Literal["float32", "float64"] = "float32"


class Point(nn.Module):
    """The model: one parameter `w` (d,)."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self) -> Tensor:
        """The point itself."""
        return self.w


class Quadratic(Task):
    """n clients with a quadratic each, named by row "0" to "n-1"; client i takes its own number of steps.

    The file (.npz) holds `centers` e (n, d), `curvatures` a > 0 (n, d), the local `steps` tau_i >= 1 (n,),
    the numbers of `examples` n_i >= 1 (n,) and the `start` (d,). The examples are alike, so that any batch of
    a client has the gradient of its whole F_i; their number is what data weights are made of.
    """

    headline = "loss"

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        settings = checked(QuadraticSettings, options, "[task]")
        self.dtype = DTYPES[settings.dtype]
        path = find(settings.file, "task.file")
        with opened(path) as file:
            missing = [key for key in KEYS if key not in file.files]
            if missing:
                raise SettingsError(f"{path}: has no {', '.join(missing)}; needed: {', '.join(KEYS)}")
            self.arrays = _checked({key: file[key] for key in KEYS}, str(path))
        self.centers = torch.from_numpy(self.arrays["centers"]).to(self.dtype)
        self.curvatures = torch.from_numpy(self.arrays["curvatures"]).to(self.dtype)
        if (partition.kind, partition.shift) != ("iid", "none"):
            raise SettingsError(
                f"partition.kind = {partition.kind!r}, partition.shift = {partition.shift!r}: task 'quadratic' has a "
                "client in each row of its file; leave them out"
            )
        if partition.clients not in (None, len(self.centers)):
            raise SettingsError(
                f"partition.clients = {partition.clients}: {path} has {len(self.centers)} clients; "
                "allowed: that number, or none given"
            )

    def model(self) -> nn.Module:
        """`w` at the start."""
        return Point(torch.from_numpy(self.arrays["start"]).to(self.dtype))

    def names(self) -> list[str]:
        """The rows."""
        return [str(i) for i in range(len(self.centers))]

    def client(self, name: str, file: str | None = None) -> ClientData:
        """n_i training examples, as many for evaluation, and tau_i steps. A batch is the row i, b times."""
        if file is not None:
            raise SiteError("data-unused", f"client {name!r}: task 'quadratic' reads no file of a site ({file!r})")
        if name not in self.names():
            raise SiteError(
                "client-unknown", f"client {name!r}: no such client; allowed: '0' to '{len(self.centers) - 1}'"
            )
        row = torch.full((int(self.arrays["examples"][int(name)]),), int(name))
        examples = Examples(row, row)
        return ClientData(examples, examples, int(self.arrays["steps"][int(name)]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """F_i(w), whatever the batch's size; of examples of several clients the mean over them."""
        rows, w = batch[0], model()
        if bool((rows != rows[0]).any()):
            apart = self.curvatures.to(w.device)[rows] * (w - self.centers.to(w.device)[rows]) ** 2
            mean: Tensor = apart.sum() / (2 * len(rows))
            return mean
        row = int(rows[0])
        curvature, center = self.curvatures[row].to(w.device), self.centers[row].to(w.device)
        loss: Tensor = (curvature * (w - center) ** 2).sum() / 2
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float]:
        """F_i(w) times the batch's size, so that the mean over examples is F_i(w)."""
        return {"loss": self.loss(model, batch).item() * len(batch[0])}

    def plan_hash(self) -> str:
        """sha256 (hex) of the file's arrays."""
        digest = hashlib.sha256()
        for key in KEYS:
            digest.update(f"{key} {self.arrays[key].shape}".encode() + self.arrays[key].tobytes())
        return digest.hexdigest()

    def minimizer(self, weights: Literal["uniform", "data"]) -> NDArray[np.float64]:
        """The minimizer (d,) of the mean of F_i over clients, or of its mean weighted by n_i."""
        n_i = self.arrays["examples"]
        p = (np.ones(len(n_i)) if weights == "uniform" else n_i / n_i.sum())[:, None]
        a, e = self.arrays["curvatures"], self.arrays["centers"]
        minimizer: NDArray[np.float64] = (p * a * e).sum(0) / (p * a).sum(0)
        return minimizer

    def describe(self, model: Tensor) -> Mapping[str, float]:
        """L2 distances of the model (d,) to the two minimizers, in float64."""
        w = model.detach().cpu().double().numpy()
        return {
            "distance_uniform": float(np.linalg.norm(w - self.minimizer("uniform"))),
            "distance_data": float(np.linalg.norm(w - self.minimizer("data"))),
        }


def write(
    path: str | Path,
    *,
    centers: ArrayLike,
    curvatures: ArrayLike,
    steps: ArrayLike,
    examples: ArrayLike,
    start: ArrayLike,
) -> None:
    """Write a file for this task; shapes as in `Quadratic`. Raises SettingsError for what it would refuse."""
    given = {
        "centers": centers,
        "curvatures": curvatures,
        "steps": steps,
        "examples": examples,
        "start": start,
    }
    arrays = _checked({key: np.asarray(value) for key, value in given.items()}, str(path))
    with Path(path).open("wb") as file:  # np.savez would add a suffix to a name
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _checked(arrays: dict[str, NDArray[Any]], source: str) -> dict[str, NDArray[Any]]:
    """The arrays as float64 and int64, or SettingsError naming the key, its value and what is allowed."""
    centers = arrays["centers"]
    if centers.ndim != 2 or 0 in centers.shape:
        raise SettingsError(f"{source}: centers has shape {centers.shape}; allowed: (n, d), neither of them 0")
    sizes = dict(zip("nd", centers.shape, strict=True))
    result: dict[str, NDArray[Any]] = {}
    for key, dimensions in KEYS.items():
        array, shape = arrays[key], tuple(sizes[dimension] for dimension in dimensions)
        whole, positive = key in ("steps", "examples"), key in ("curvatures", "steps", "examples")
        if array.shape != shape:
            raise SettingsError(f"{source}: {key} has shape {array.shape}; with these centers it must be {shape}")
        if array.dtype.kind not in ("iu" if whole else "iuf"):
            raise SettingsError(f"{source}: {key} is {array.dtype}; allowed: {'integers' if whole else 'numbers'}")
        if not np.isfinite(array).all() or (positive and array.min() <= 0):
            allowed = "finite numbers above 0" if positive else "finite numbers"
            raise SettingsError(f"{source}: {key} has {array.min()} among its values; allowed: {allowed}")
        result[key] = array.astype(np.int64 if whole else np.float64)
    return result
