"""Cohort mode against one client after the other: seconds of a round in one process, on the same work.

    python -m benchmarks.cohort [--threads 1 2] [--rounds 8] [--cases mlp-10 mlp-50 ...] [--strategy fedavg]

Random examples, as many at each client, so that all batches of a step are alike; with "uneven" a client has 70 to 130,
so that last batches differ. The two take turns, a block of rounds each; medians over all rounds but the first of each
block. It prints seconds, their ratio, the ratio of CPU seconds (which other processes of the machine change least), the
share of gradients that were computed together, and the largest difference of the final weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from benchmarks.samples import Samples
from client.app import app
from client.cohort import answer_all, pool
from common.experiment import Experiment, PartitionSettings
from common.models.images import cnn, mlp
from common.tasks.base import Task
from server.app import run
from server.engines.inprocess import CohortGrid, InProcessGrid
from server.rounds.folder import RunFolder

BLOCKS = 3


@dataclass(frozen=True)
class Case:
    """What is trained: how many clients a round, in which batches."""

    model: str
    sampled: int
    batch: int
    uneven: bool = False


CASES = {
    "tiny": Case("tiny", 3, 20),
    "mlp-10": Case("mlp", 10, 20),
    "mlp-50": Case("mlp", 50, 20),
    "mlp-100": Case("mlp", 100, 20),
    "mlp-100-uneven": Case("mlp", 100, 20, uneven=True),
    "wide-10": Case("wide", 10, 32),
    "cnn8-10": Case("cnn8", 10, 20),
    "cnn8-50": Case("cnn8", 50, 20),
    "cnn32-10-20": Case("cnn32", 10, 20),
    "cnn32-10-32": Case("cnn32", 10, 32),
}

MODELS: Mapping[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "mlp": ((64,), lambda: mlp(64, 64, 10)),
    "wide": ((784,), lambda: mlp(784, 200, 10)),
    "cnn8": ((1, 8, 8), lambda: cnn((8, 8), 16, 10)),
    "cnn32": ((3, 32, 32), lambda: cnn((32, 32, 3), 32, 10)),
    "tiny": ((4,), lambda: mlp(4, 4, 10)),
}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`task.name = "benchmarks.cohort:task"`: 100 examples a client, or 70 to 130."""
    shape, build = MODELS[options["model"]]
    counts = [70 + number * 37 % 61 if options["uneven"] else 100 for number in range(partition.clients or 10)]
    return Samples(build, shape, counts)


def experiment(case: Case, strategy: str, threads: int, rounds: int) -> Experiment:
    """What is measured: ten steps a round, or two epochs of clients of unequal size."""
    work: dict[str, Any] = {"epochs": 2} if case.uneven else {"steps": 10}
    return Experiment.model_validate(
        {
            "name": "cohort",
            "rounds": rounds,
            "task": {"name": "benchmarks.cohort:task", "model": case.model, "uneven": case.uneven},
            "partition": {"clients": case.sampled},
            "strategy": {"name": strategy},
            "local": {"lr": 0.01, "batch_size": case.batch, "threads": threads, **work},
            "evaluate": {"clients": "none"},
            "checkpoint": {"every": 1000},
        }
    )


def measure(given: Experiment) -> dict[str, float]:
    """Seconds of a round both ways, share of gradients computed together, difference of the weights."""
    seconds: dict[str, list[float]] = {"sequential": [], "cohort": []}
    busy: dict[str, list[float]] = {"sequential": [], "cohort": []}
    grids = {"sequential": InProcessGrid(app), "cohort": CohortGrid(app, answer_all)}
    weights = {}
    before = pool("cpu").together, pool("cpu").apart
    with tempfile.TemporaryDirectory() as temporary:
        for block in range(BLOCKS):
            for name, grid in grids.items():
                folder = RunFolder(Path(temporary) / f"{name}-{block}")
                marks: list[float] = []
                run(
                    grid,
                    given,
                    folder,
                    say=lambda text: None,
                    show=lambda record, marks=marks: marks.append(time.process_time()),
                )
                busy[name] += [after - before for before, after in pairwise(marks)]
                seconds[name] += [record["seconds"]["total"] for record in folder.history()[1:]]
                weights[name] = load_file(folder.path / "model.safetensors")
    together, apart = pool("cpu").together - before[0], pool("cpu").apart - before[1]
    pairs = zip(weights["sequential"].values(), weights["cohort"].values(), strict=True)
    return {
        **{name: statistics.median(values) for name, values in seconds.items()},
        "busy": statistics.median(busy["cohort"]) / statistics.median(busy["sequential"]),
        "together": together / max(1, together + apart),
        "difference": max(float((a - b).abs().max()) for a, b in pairs),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--strategy", default="fedavg")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES)[1:])
    options = parser.parse_args(arguments)
    columns = "threads", "one by one, s", "cohort, s", "ratio", "CPU", "together", "max diff"
    print("| " + " | ".join([options.strategy, *columns]) + " |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.cases:
        for threads in options.threads:
            got = measure(experiment(CASES[name], options.strategy, threads, options.rounds))
            ratio = got["cohort"] / got["sequential"]
            times = f"{got['sequential']:.3f} | {got['cohort']:.3f} | {ratio:.2f} | {got['busy']:.2f}"
            print(f"| {name} | {threads} | {times} | {got['together']:.0%} | {got['difference']:.0e} |", flush=True)


if __name__ == "__main__":
    main()
