"""`python -m tests.support.portable_runs`: small runs in portable arithmetic, one JSON line of name -> sha256.

In a process of its own, natively and under emulated processors: the variables count only before torch is loaded.
"""

from __future__ import annotations

from common import portable

portable.enter()

import json  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

from common.flower import ROOT  # noqa: E402
from server.api import simulate  # noqa: E402

CNN = {"name": "digits", "model": "cnn", "width": 4}
RUNS: dict[str, dict[str, Any]] = {
    "mlp, scaffold, sgd": {"strategy.name": "scaffold", "local.lr": 0.1},
    "mlp, fedavg, adam": {"local.optimizer": "adam"},
    "mlp, fedavg, amsgrad": {"local.optimizer": "amsgrad", "local.weight_decay": 0.01},
    "mlp, fedavg, adamw without bias correction": {"local.optimizer": "adamw", "local.bias_correction": False},
    "mlp, fedavg, normalized": {"local.optimizer": "normalized"},
    "mlp, fedavg, muon": {"local.optimizer": "muon"},
    "mlp, fedavg, soap": {"local.optimizer": "soap", "local.precondition_every": 2},
    "mlp, fedadam, sgd": {"strategy.name": "fedadam", "local.lr": 0.1},
    "mlp, fedams, sgd": {"strategy.name": "fedams", "local.lr": 0.1},
    "mlp, mime with adam": {"strategy": {"name": "mime", "base": "adam", "denominator": "stepped"}, "local.lr": 0.1},
    "mlp, float64, adam": {"task.dtype": "float64", "local.optimizer": "adam"},
    "mlp, float64, fedyogi": {"task.dtype": "float64", "strategy.name": "fedyogi", "local.lr": 0.1},
    "mlp, two threads": {"local.lr": 0.1, "local.threads": 2},
    "cnn, scaffold, sgd": {"task": CNN, "strategy.name": "scaffold", "local.lr": 0.1},
    "cnn, fedavg, adam": {"task": CNN, "local.optimizer": "adam"},
}
WHOLE = "experiments/digits.toml"
"""The README's experiment, all of it."""


def run(name: str) -> str:
    """sha256 of the weights after two rounds of three steps."""
    if name == WHOLE:
        return str(simulate(ROOT / WHOLE, **{"local.arithmetic": "portable"}).records[-1]["sha256"])
    tables = {
        "name": "portable",
        "rounds": 2,
        "task": {"name": "digits"},
        "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 2},
        "local": {"lr": 0.01, "steps": 3, "clip_norm": 1.0, "arithmetic": "portable"},
    }
    return str(simulate(tables, **RUNS[name]).records[-1]["sha256"])


def main(names: list[str]) -> None:
    """Those named, or all; what fails says why."""
    found = {}
    for name in names or [*RUNS, WHOLE]:
        found[name] = run(name)
        print(name, found[name][:16], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
