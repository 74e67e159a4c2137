"""What each algorithm reaches with rates tuned for it: one plan over the registry, and its table.

    python -m benchmarks.accuracy [--only fagc scaffold] [--workers 2] [--folder runs/accuracy] [--picture curves.svg]

The digits over 20 clients of Dirichlet(0.1), ten a round, one epoch of batches of 32, 60 rounds. Every algorithm tries
every local rate of its optimizer's grid and, where it is FedAvg with a server optimizer, three rates of that; the best
on the tuning's seed is run with other seeds. All else has its default. It is a plan as `python -m server compare` runs
it: `plan.toml` in the folder, all cores unless `--workers` says otherwise, the same command again goes on.

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

import matplotlib
from matplotlib import pyplot as plt

from common.errors import RunError
from common.experiment import Experiment
from server.api import compare, results
from server.compare.standings import TUNED
from strategies.registry import REGISTRY, settled
from tests.support.helpers import MIXED, NORMED

SEEDS, TUNING_SEEDS = [0, 1, 2], [100]
ROUNDS, EVERY, WINDOW = 60, 3, 5
SGD = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
ADAM = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
MOMENTUM = [0.3, 0.7, 1.0]
ADAPTIVE = [0.01, 0.03, 0.1]
SHOWN = ["fedavg", "fedavgm", "scaffold", "feddyn", "hafedho"]


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
    whole = settled(Experiment.model_validate({"strategy": {"name": algorithm}}))[1]
    rates = {"local.lr": ADAM if whole.local.adaptive else SGD}
    if whole.server.optimizer not in ("sgd", "nesterov"):  # the outer step of DiLoCo and MuLoCo is part of the name
        rates["server.lr"] = MOMENTUM if whole.server.optimizer == "momentum" else ADAPTIVE
    return {"name": algorithm, "strategy.name": algorithm, "task": task_of(algorithm), "tune": rates}


def task_of(algorithm: str) -> dict[str, Any]:
    """What its model needs beside the default: BatchNorm, a second extractor."""
    if algorithm in NORMED:
        return {"model": "cnn", "width": 8}
    return {"extractor": 32} if algorithm in MIXED else {}


def rows(frame: Any, tuned: dict[str, Any]) -> list[str]:
    """A Markdown row an algorithm, from `server.api.results` and the scores of tuned.json."""
    lines = []
    for algorithm, runs in frame.groupby("variant", sort=False):
        last = runs.dropna(subset="accuracy").groupby("seed")["accuracy"].apply(lambda values: values[-WINDOW:].mean())
        own = "*" if REGISTRY[algorithm].personal or REGISTRY[algorithm].cls.personal else ""
        rates = " ".join(f"{key.removesuffix('.lr')} {value:g}" for key, value in tuned[algorithm]["winner"].items())
        edge = " †" if tuned[algorithm]["hints"] else ""
        lines.append(f"| `{algorithm}` | {rates}{edge} | {100 * last.mean():.1f} ± {100 * last.std():.1f}{own} |")
    return lines


def picture(frame: Any, path: Path) -> None:
    """Accuracy by round of the algorithms in `SHOWN`: mean over seeds, and a band of one standard deviation."""
    matplotlib.rcParams["svg.hashsalt"] = "fedkeel"  # the same runs, the same file
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for algorithm in SHOWN:
        runs = frame[frame["variant"] == algorithm].dropna(subset="accuracy")
        values = 100 * runs.pivot_table(index="round", columns="seed", values="accuracy")
        mean, spread = values.mean(axis=1), values.std(axis=1)
        (line,) = axes.plot(values.index, mean, label=algorithm)
        axes.fill_between(values.index, mean - spread, mean + spread, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="accuracy, %", xlim=(EVERY, ROUNDS), ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False, ncols=len(SHOWN))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the plan, or what is missing of it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=REGISTRY, default=list(REGISTRY))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--folder", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--picture", type=Path, help="curves of some of them, .svg or .png")
    options = parser.parse_args(arguments)
    try:
        compare(tables(options.only), run_dir=options.folder, workers=options.workers, progress=True)
    except RunError as error:  # a rate at which an algorithm diverges ends its run, and loses
        print(error)
    tuned = json.loads((options.folder / TUNED).read_text("utf-8"))
    frame = results(options.folder)
    print("| name | rates | accuracy, % |\n| --- | --- | --- |", *rows(frame, tuned), sep="\n")
    if options.picture:
        picture(frame, options.picture)


if __name__ == "__main__":
    main()
