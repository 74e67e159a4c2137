"""What portable arithmetic costs: local training steps in portable over native mode.

    python -m benchmarks.arithmetic [--models mlp cnn resnet18] [--steps 10] [--repeat 4] [--threads 1]

A process of each mode, for the mode is chosen before torch is loaded; they measure in turn, in CPU time, so that a busy
machine disturbs both alike. The table gives the least of the repetitions and the ratio. A step is FedAvg's whole local
work over its steps, on random 32x32 images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common import portable

MODES: dict[str, dict[str, str]] = {"native": {}, "portable": portable.ENVIRONMENT}
MODELS = ("mlp", "cnn", "resnet18")
OPTIMIZERS = ("sgd", "adam")
SERVE = "--serve"


def serve() -> None:
    """Answer measurements, a JSON line each way, until the input closes."""
    # Loaded in the children alone, whose environment decides how they compute.
    import torch

    from benchmarks import models
    from benchmarks.local_step import Synthetic, federated
    from common.models.images import cnn

    builders: dict[str, Callable[[], Any]] = {
        "mlp": models.mlp,
        "cnn": lambda: cnn((32, 32, 3), 16, 10),
        "resnet18": models.resnet18,
    }
    held: dict[str, Callable[[], None]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        torch.set_num_threads(asked["threads"])
        if line not in held:
            task = Synthetic(builders[asked["model"]], asked["batch"])
            held[line] = federated(task, asked["steps"], asked["batch"], "fedavg", optimizer=asked["optimizer"])
            held[line]()  # warms up
        started = time.process_time()
        held[line]()
        print(json.dumps((time.process_time() - started) / asked["steps"]), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(SERVE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    own = {key: value for key, value in os.environ.items() if key not in portable.ENVIRONMENT}
    command = [sys.executable, "-m", "benchmarks.arithmetic", SERVE]
    children = {
        mode: subprocess.Popen(
            command, env=own | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        for mode, variables in MODES.items()
    }
    try:
        print(f"batch {options.batch}, {options.threads} threads, CPU ms a step")
        print(f"{'':16} {'native':>9} {'portable':>9} {'ratio':>7}")
        for model in options.models:
            for optimizer in OPTIMIZERS:
                asked = {"model": model, "optimizer": optimizer, "batch": options.batch}
                asked |= {"steps": options.steps, "threads": options.threads}
                least = dict.fromkeys(children, float("inf"))
                for _ in range(options.repeat):
                    for mode, child in children.items():
                        assert child.stdin is not None
                        assert child.stdout is not None
                        child.stdin.write(json.dumps(asked) + "\n")
                        child.stdin.flush()
                        least[mode] = min(least[mode], json.loads(child.stdout.readline()))
                native, other = (1000 * least[mode] for mode in MODES)
                print(f"{model + ', ' + optimizer:16} {native:9.2f} {other:9.2f} {other / native:7.2f}")
    finally:
        for child in children.values():
            child.kill()
            child.communicate()


if __name__ == "__main__":
    main()
