"""A local step of each algorithm against a bare PyTorch SGD step on the same model and batch.

    python -m benchmarks.local_step [--model resnet18|mlp] [--steps 10] [--repeat 4] [--threads 1]

All are measured in turn within one process, in CPU time of all its threads, so that a busy machine disturbs little and
all alike; the table gives the least of the repetitions and its ratio to the bare step's. A step of an algorithm is its
whole `local` (with delta and upload) over its steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import models
from client.training.forward import Forward
from client.training.work import LocalWork
from common import flower
from common.data.examples import ClientData, Examples
from common.experiment import Experiment, LocalSettings
from common.model import FlatModel
from common.tasks.base import Task
from strategies.protocol.messages import TrainHead
from strategies.registry import settled

ALGORITHMS = ("fedavg", "fedprox", "fednova", "scaffold", "hafedho", "fedcm")


class Synthetic(Task):
    """One client with random images."""

    def __init__(self, build: Callable[[], nn.Module], batch: int) -> None:
        self._build = build
        order = torch.Generator().manual_seed(0)
        images = torch.randn(batch, 3, 32, 32, generator=order)
        self.examples = Examples(images, torch.randint(10, (batch,), generator=order))

    def model(self) -> nn.Module:
        return self._build()

    def names(self) -> list[str]:
        return ["0"]

    def client(self, name: str, file: str | None = None) -> ClientData:
        return ClientData(self.examples, self.examples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float]:
        return {}


def bare(task: Synthetic, steps: int, lr: float) -> Callable[[], None]:
    """The loop that everybody writes."""
    module = task.model().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            task.loss(module, (task.examples.inputs, task.examples.targets)).backward()
            optimizer.step()

    return run


def federated(task: Synthetic, steps: int, batch: int, algorithm: str, **local: Any) -> Callable[[], None]:
    """One client's `local` of an algorithm, with its memory from an earlier round; `local`: further settings."""
    settings = LocalSettings(lr=0.01, steps=steps, batch_size=batch, **local)
    experiment = Experiment(local=settings, strategy={"name": algorithm})  # type: ignore[arg-type]
    strategy, model = settled(experiment)[0], FlatModel(task.model())
    received = {name: value.clone() for name, value in strategy.broadcast(strategy.init(model.vector.clone())).items()}
    memory: dict[str, Tensor] = {}
    bench = SimpleNamespace(experiment=experiment, strategy=strategy, task=task, model=model, forward=Forward)
    about = {"experiment": "", "run": "", "client": "0", "generation": 1, "round": 2, "keep": [], "layout": ""}

    def run() -> None:
        nonlocal memory
        model.load(received["model"], model.buffers)
        head = TrainHead(**about, accepted=int(bool(memory)), share=0.01, lr=settings.lr)  # type: ignore[arg-type]
        work = LocalWork(bench, head, task.client("0"), received, memory)
        strategy.local(work)
        memory = work.kept

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("resnet18", "mlp"), default="resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    flower.prepare()  # the memory allocator's settings, as in every process of the project
    torch.set_num_threads(options.threads)
    task = Synthetic(getattr(models, options.model), options.batch)
    runs = {"bare SGD": bare(task, options.steps, 0.01)}
    runs |= {name: federated(task, options.steps, options.batch, name) for name in ALGORITHMS}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(options.repeat + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            if repeat:  # the first one warms up
                seconds[name].append((time.process_time() - started) / options.steps)
    size = sum(p.numel() for p in task.model().parameters())
    print(f"{options.model}, {size / 1e6:.1f} M parameters, batch {options.batch}, {options.threads} threads")
    print(f"{'':12} {'CPU ms a step':>14} {'ratio':>7}")
    base = seconds["bare SGD"]
    for name, values in seconds.items():
        ratio = min(values) / min(base)
        print(f"{name:12} {1000 * min(values):14.1f} {ratio:7.3f}")


if __name__ == "__main__":
    main()
