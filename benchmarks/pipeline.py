"""The data pipeline's part of a local step: gathering a batch, augmenting it, normalizing it.

    python -m benchmarks.pipeline [--steps 100]

The small CNN (width 32) on CIFAR-10-shaped bytes, one CPU thread, crops and mirror images: milliseconds of each part
and of forward and backward pass on what it gives, medians, in turn so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from common import tasks
from common.experiment import PartitionSettings, TaskSettings
from common.models import build
from common.tasks.base import Examples

TASK = {"name": "cifar10", "model": "cnn", "augment": "crop-flip"}


def main() -> None:
    """Print one line for each batch size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    task = tasks.create(TaskSettings.model_validate(TASK), PartitionSettings(), 0)
    model = build(task, 0)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (10_000, 32, 32, 3), dtype=torch.uint8, generator=random)
    data = Examples(images, torch.randint(0, 10, (10_000,), generator=random))
    model.module.train()
    print("batch  gather  augment  normalize  passes  pipeline/step")
    for size in (20, 32):
        times: dict[str, list[float]] = {"gather": [], "augment": [], "normalize": [], "passes": []}
        for _ in range(steps):
            index = torch.randint(0, len(data), (size,), generator=random)
            batch = timed(times["gather"], lambda index=index: data.batch(index))  # type: ignore[misc]
            batch = timed(times["augment"], lambda batch=batch: task.augment(batch))  # type: ignore[misc]
            timed(times["normalize"], lambda batch=batch: task.features(batch[0]))  # type: ignore[attr-defined,misc]
            loss = timed(times["passes"], lambda batch=batch: step(task, model.module, batch))  # type: ignore[misc]
            assert loss > 0
        parts = {name: statistics.median(values) for name, values in times.items()}
        # The passes normalize once more: that is part of the loss.
        pipeline = parts["gather"] + parts["augment"] + parts["normalize"]
        share = pipeline / (parts["gather"] + parts["augment"] + parts["passes"])
        print(f"{size:5}  " + "  ".join(f"{parts[name]:.3f} ms" for name in times) + f"  {share:.2%}")


def timed(into: list[float], do: Callable[[], Any]) -> Any:
    """The result; its milliseconds are noted."""
    start = time.perf_counter()
    result = do()
    into.append((time.perf_counter() - start) * 1e3)
    return result


def step(task: Any, model: torch.nn.Module, batch: Any) -> float:
    """Forward and backward pass."""
    model.zero_grad(set_to_none=False)
    loss = task.loss(model, batch)
    loss.backward()
    return float(loss.detach())


if __name__ == "__main__":
    main()
