"""What separates the variants of HaFedHo, in numbers: `python -m benchmarks.hafedho` prints the tables of docs/hafedho.md.

Quadratics show the mathematics, exactly; the digits show what remains of it in accuracy. Runs go through the
strategies and the clients' local training; only the messages are left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import tasks
from common.experiment import Experiment
from common.tasks.base import Task, evaluate
from tests.helpers import Simulation, experiment, problem

STEPS, LR, MU, ROUNDS = 5, 0.03, 0.1, 40


def path(folder: Path, strategy: str, *, rounds: int = ROUNDS, arrays: dict[str, Any] | None = None, **given: Any) -> Tensor:
    """The server models (rounds, d) of six quadratics of equal steps, three of them sampled in each round."""
    given = {"local": {"lr": LR}, "round": {"sample": 3}} | given
    arrays = {"steps": np.full(6, STEPS)} | (arrays or {})
    return Simulation(experiment(folder, strategy, arrays=arrays, **given)).path(rounds)


def hafedho(folder: Path, **given: Any) -> Tensor:
    return path(folder, "hafedho", **{"mu": MU, **given})


def apart(a: Tensor, b: Tensor) -> float:
    """The largest distance of two runs' models in any round and coordinate."""
    return float((a - b).abs().max())


def table(title: str, head: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table in Markdown."""
    lines = [[cell if isinstance(cell, str) else f"{cell:.2g}" for cell in row] for row in rows]
    print(f"\n{title}\n")
    for line in [list(head), ["---"] * len(list(head)), *lines]:
        print("| " + " | ".join(line) + " |")
    print(flush=True)


def differences(folder: Path) -> None:
    """Which settings separate objective from gradient rectification, and the uploads from each other."""
    rows = []
    for name, local in {
        "plain SGD": {},
        "weight decay 0.1": {"weight_decay": 0.1},
        "local momentum 0.5": {"momentum": 0.5},
        "clipping at norm 3": {"clip_norm": 3.0},
    }.items():
        given = {"local": {"lr": LR, **local}}
        phi = hafedho(folder, **given)
        gradient = hafedho(folder, rectification="gradient", **given)
        displacement = hafedho(folder, upload="displacement", **given)
        both = hafedho(folder, upload="displacement", rectification="gradient", **given)
        raw = hafedho(folder, upload="raw", **given)
        fedavg = path(folder, "fedavg", weights="uniform", **given)
        pairs = ((phi, gradient), (displacement, both), (phi, displacement), (phi, raw), (raw, fedavg), (phi, fedavg))
        rows.append([name, *(apart(*pair) for pair in pairs)])
    head = "local training", "O - G, phi", "O - G, displ.", "phi - displ.", "phi - raw", "raw - FedAvg", "phi - FedAvg"
    table(f"1. Largest difference of the models in {ROUNDS} rounds (mu lambda = {MU * STEPS})", head, rows)


def equivalences(folder: Path) -> None:
    """FedCM, and the share that is or is not subtracted."""
    rows = []
    for beta in (0.1, 0.5, 0.9):
        mu, local = beta / STEPS, {"lr": 0.01}
        none = hafedho(folder, mu=mu, own_share="none", local=local)
        fedcm = path(folder, "fedcm", alpha=1 - beta, local={"lr": 0.01 / (1 - beta)})
        shares = [apart(hafedho(folder, mu=mu, own_share=share, local=local), none) for share in ("data", "cohort")]
        slow = path(folder, "fedavg", weights="uniform", local=local)
        fast = path(folder, "fedavg", weights="uniform", local={"lr": 0.01 / (1 - beta)})
        rows.append([f"{beta}", apart(none, fedcm), *shares, apart(none, slow), apart(none, fast)])
    head = "mu lambda", "FedCM", "own share p_i", "own share 1/m", "FedAvg(eta)", "FedAvg(eta/(1 - mu lambda))"
    table(f"2. HaFedHo without own share: largest difference from ... in {ROUNDS} rounds (eta = 0.01)", head, rows)


def factor(folder: Path, **given: Any) -> float:
    """The factor of the server's recursion g <- G + factor g: along straight lines of slope 1, G is constant."""
    line = {"curvatures": np.full((6, 5), 1e-9), "centers": np.full((6, 5), 1e9)}
    x = hafedho(folder, arrays=line, own_share="none", rounds=4, **given)
    moves = x[1:] - x[:-1]
    return float((moves[2] - moves[1]).norm() / (moves[1] - moves[0]).norm().clamp(min=1e-300))


def momentum(folder: Path) -> None:
    """Which uploads feed mu h back, and how strongly."""
    rows = []
    for name, local in {"plain SGD": {}, "local momentum 0.5": {"momentum": 0.5}, "0.9": {"momentum": 0.9}}.items():
        uploads = ("phi", "displacement", "raw")
        rows.append([name, *(factor(folder, upload=upload, local={"lr": LR, **local}) for upload in uploads)])
    table(f"3. Momentum factor of the server, measured (mu lambda = {MU * STEPS})", ("", "phi", "displ.", "raw"), rows)


def stability(folder: Path) -> None:
    """The distance travelled in 100 rounds where coordinate 0 is nearly flat."""
    curvatures = problem()["curvatures"]
    curvatures[:, 0] = 1e-4
    rows = []
    for beta in (0.9, 1.0, 1.1, 1.4):
        row: list[object] = [f"{beta}"]
        for local, rectification in (
            ({}, "objective"),
            ({"clip_norm": 3.0}, "objective"),
            ({"clip_norm": 3.0}, "gradient"),
        ):
            given = {"mu": beta / STEPS, "rectification": rectification, "upload": "displacement", "rounds": 100}
            x = hafedho(folder, arrays={"curvatures": curvatures}, local={"lr": LR, **local}, **given)
            row.append(float(x[-1].norm()))
        rows.append(row)
    head = "mu lambda", "no clipping", "O: clips grad f + mu h", "G: clips grad f, adds mu h"
    table("4. |w| after 100 rounds with one nearly flat direction", head, rows)


# --- digits


@cache
def digits(seed: int) -> Task:
    """The digits over 20 clients, Dirichlet(0.1)."""
    return tasks.create(settings(seed, "fedavg").task, settings(seed, "fedavg").partition, seed)


def settings(seed: int, strategy: str, lr: float = 0.05, clip: float | None = None, **given: Any) -> Experiment:
    local = {"lr": lr, "steps": 10, "batch_size": 32} | ({"clip_norm": clip} if clip else {})
    server = {"server": given.pop("server")} if "server" in given else {}
    partition = {"kind": "dirichlet", "alpha": 0.1, "clients": 20}
    values = {"seed": seed, "partition": partition, "round": {"sample": 5}, "local": local, **server}
    return Experiment.model_validate(values | {"strategy": {"name": strategy, **given}})


def accuracy(strategy: str, seeds: int = 3, rounds: int = 40, **given: Any) -> str:
    """Mean and spread over seeds of the test accuracy, each the mean of the last ten rounds."""
    results = []
    for seed in range(seeds):
        run, recent = Simulation(settings(seed, strategy, **given), task=digits(seed)), []
        test = run.task.central()
        assert test is not None
        for round in range(rounds):
            run.step()
            if round >= rounds - 10:
                run.model.load(run.x, run.course.buffers)
                recent.append(evaluate(run.task, run.model.module, test, 512)["accuracy"])
        results.append(100 * float(np.mean(recent)))
    return f"{np.mean(results):.1f} ({min(results):.1f} to {max(results):.1f})"


def accuracies() -> None:
    """The ablation, at mu lambda = 0.9."""
    mu, beta = 0.09, 0.9
    fedavg, same = {"weights": "uniform"}, {"mu": mu}
    rows = [
        ("FedAvg(eta)", accuracy("fedavg", **fedavg)),
        ("FedAvg(eta/(1 - mu lambda))", accuracy("fedavg", lr=0.5, **fedavg)),
        ("FedAvgM(mu lambda)", accuracy("fedavgm", server={"momentum": beta}, **fedavg)),
        ("FedCM(1 - mu lambda) at eta/(1 - mu lambda)", accuracy("fedcm", lr=0.5, alpha=1 - beta)),
        ("HaFedHo, objective", accuracy("hafedho", **same)),
        ("HaFedHo, gradient", accuracy("hafedho", rectification="gradient", **same)),
        ("HaFedHo, gradient, raw upload", accuracy("hafedho", rectification="gradient", upload="raw", **same)),
        ("HaFedHo, objective, clipped at 1", accuracy("hafedho", clip=1.0, **same)),
        ("HaFedHo, gradient, clipped at 1", accuracy("hafedho", rectification="gradient", clip=1.0, **same)),
        ("HaFedHo, objective, mu lambda = 0.09", accuracy("hafedho", mu=mu / 10)),
        ("HaFedHo, objective, mu lambda = 1.1", accuracy("hafedho", mu=0.11)),
    ]
    table("5. Digits, 20 clients of Dirichlet(0.1), 5 a round, lambda = 10, 40 rounds", ("", "test accuracy, %"), rows)


def main() -> None:
    """Print all tables."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for part in (differences, equivalences, momentum, stability):
            part(Path(name))
    accuracies()
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
