"""What each algorithm reaches with rates tuned for it: one plan over the registry, and its table.

    python -m benchmarks.accuracy [--only fagc scaffold] [--workers 2] [--folder runs/accuracy]

The digits over 20 clients of Dirichlet(0.1), ten a round, one epoch of batches of 32, 60 rounds. Every algorithm tries
every local rate of its optimizer's grid and, where its name fixes a server optimizer, three rates of that; the best on
the tuning's seed is run with other seeds. All else has its default. It is a plan as `python -m server compare` runs it:
`plan.toml` in the folder, all cores unless `--workers` says otherwise, the same command again goes on.

Accuracy, %: mean over seeds of the mean of a run's last five evaluations (rounds 48, 51, ... 60), with the sample
standard deviation; of the model that the server holds on the test set, or with * of the clients' own models on their
own examples, which is another and easier question. † : a rate lies at the edge of its grid.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.experiment import Experiment
from server.api import compare, results
from server.compare.standings import TUNED
from strategies.registry import REGISTRY, resolve

SEEDS, TUNING_SEEDS = [0, 1, 2], [100]
ROUNDS, EVERY, WINDOW = 60, 3, 5
SGD = [0.01, 0.03, 0.1, 0.3, 1.0]
ADAM = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
OUTER = [0.3, 0.7, 1.0]
ADAPTIVE = [0.01, 0.03, 0.1]
TASKS = {"fedbn": {"model": "cnn", "width": 8}, "pfedafm": {"extractor": 32}}
"""Models for what the default one lacks: BatchNorm, a second extractor."""


def tables(algorithms: Sequence[str]) -> dict[str, Any]:
    """The plan: an algorithm is a variant."""
    return {
        "name": "accuracy",
        "seeds": SEEDS,
        "base": {
            "rounds": ROUNDS,
            "task": {"name": "digits"},
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 20},
            "round": {"sample": 10},
            "local": {"batch_size": 32},
            "evaluate": {"every": EVERY},
            "checkpoint": {"every": ROUNDS},
            "tracking": {"use": []},
        },
        "tuning": {"seeds": TUNING_SEEDS, "window": WINDOW},
        "variants": [variant(name) for name in algorithms],
    }


def variant(algorithm: str) -> dict[str, Any]:
    """An algorithm with what is tried for it."""
    settled = resolve(Experiment.model_validate({"strategy": {"name": algorithm}}))
    rates = {"local.lr": ADAM if settled.local.adaptive else SGD}
    if settled.server.optimizer != "sgd":
        rates["server.lr"] = OUTER if settled.server.optimizer in ("momentum", "nesterov") else ADAPTIVE
    given = {"task": TASKS[algorithm]} if algorithm in TASKS else {}
    return {"name": algorithm, "strategy.name": algorithm, **given, "tune": rates}


def rows(frame: Any, tuned: dict[str, Any]) -> list[str]:
    """A Markdown row an algorithm, from `server.api.results` and the scores of tuned.json."""
    lines = []
    for algorithm, runs in frame.groupby("variant", sort=False):
        last = runs.dropna(subset="accuracy").groupby("seed")["accuracy"].apply(lambda values: values[-WINDOW:].mean())
        own = "*" if REGISTRY[algorithm].personal else ""
        rates = " ".join(f"{key.removesuffix('.lr')} {value:g}" for key, value in tuned[algorithm]["winner"].items())
        edge = " †" if tuned[algorithm]["hints"] else ""
        lines.append(f"| `{algorithm}` | {rates}{edge} | {100 * last.mean():.1f} ± {100 * last.std():.1f}{own} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the plan, or what is missing of it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=REGISTRY, default=list(REGISTRY))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--folder", type=Path, default=Path("runs/accuracy"))
    options = parser.parse_args(arguments)
    try:
        compare(tables(options.only), run_dir=options.folder, workers=options.workers, progress=True)
    except RunError as error:  # a rate at which an algorithm diverges ends its run, and loses
        print(error)
    tuned = json.loads((options.folder / TUNED).read_text("utf-8"))
    print("| name | rates | accuracy, % |\n| --- | --- | --- |", *rows(results(options.folder), tuned), sep="\n")


if __name__ == "__main__":
    main()
