"""Seconds of a round of real training on a GPU: resident clients that share it against stock SuperNodes.

    python -m benchmarks.gpu_round [--device cuda:0] [--model resnet18|mlp] [--precision float32|bfloat16|float16]

SCAFFOLD on random 32x32 images, one epoch a round, two clients. Resident clients keep CUDA context, model, data and
memory on the GPU; a stock SuperNode starts a process for each message. One engine after the other; the median over
rounds 3 and later. With `--deterministic` the weights of both must be equal. Minutes on a GPU; `--device cpu --model
mlp --examples 512` tries it without one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.round import median, resident, stock
from benchmarks.samples import Samples
from common.experiment import Experiment, PartitionSettings
from common.flower import ROOT
from common.tasks.base import Task

ENGINES = {"resident": resident, "stock": stock}


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`task.name = "benchmarks.gpu_round:task"`."""
    counts = [int(options["examples"])] * (partition.clients or 2)
    return Samples(getattr(models, options["model"]), (3, 32, 32), counts)


def experiment(options: argparse.Namespace, rounds: int) -> Experiment:
    """What is measured."""
    return Experiment.model_validate(
        {
            "name": "gpu-round",
            "rounds": rounds,
            "task": {"name": "benchmarks.gpu_round:task", "model": options.model, "examples": options.examples},
            "partition": {"clients": options.clients},
            "strategy": {"name": "scaffold"},
            "local": {
                "lr": 0.01,
                "batch_size": options.batch_size,
                "precision": options.precision,
                "channels_last": options.channels_last,
                "deterministic": options.deterministic,
            },
            "evaluate": {"clients": "none"},
            "checkpoint": {"every": 1000},
        }
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", choices=("resnet18", "mlp"), default="resnet18")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--examples", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    options = parser.parse_args()
    # The server app runs from the bundle, which has no benchmarks: it finds this task by the path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    names = [str(number) for number in range(options.clients)]
    print(f"{options.model}, {options.precision}, {options.clients} clients on {options.device}")
    print(f"{'engine':10} {'s a round':>10} {'ratio':>7} {'collect':>9} {'rounds':>7}   sha256 after round 3")
    base = None
    with tempfile.TemporaryDirectory() as temporary:
        for engine in options.engines:
            folder = Path(temporary) / engine
            folder.mkdir()
            settings = experiment(options, options.rounds if engine == "resident" else min(options.rounds, 5))
            records = ENGINES[engine](settings, folder, names, options.device)
            total = median(records, "total")
            base = base or total
            print(
                f"{engine:10} {total:10.3f} {total / base:7.1f} {median(records, 'collect'):9.3f} {len(records):7}   "
                f"{records[2]['sha256'][:16]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
