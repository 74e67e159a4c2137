"""What separates the variants of HaFedHo: prints the tables of docs/hafedho.md.

    python -m benchmarks.hafedho

Quadratics show the mathematics, exactly; the digits show what remains of it in accuracy. Runs go through the
strategies and the clients' local training; only the messages are left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import tasks
from common.experiment import Experiment
from common.tasks.base import Task, evaluate
from tests.support.helpers import Simulation, experiment, problem

STEPS, LR, MU, ROUNDS = 5, 0.03, 0.1, 40


def path(folder: Path, strategy: str, rounds: int = ROUNDS, **given: Any) -> Tensor:
    """The server models (rounds, d) of six quadratics of equal steps, three of them sampled in each round."""
    arrays: dict[str, Any] = {"steps": np.full(6, STEPS)} | given.pop("arrays", {})
    tables: dict[str, Any] = {"local": {"lr": LR}, "round": {"sample": 3}} | given
    return Simulation(experiment(folder, strategy, arrays=arrays, **tables)).path(rounds)


def hafedho(folder: Path, **given: Any) -> Tensor:
    return path(folder, "hafedho", **{"mu": MU, **given})


def apart(a: Tensor, b: Tensor) -> float:
    """The largest distance of two runs' models in any round and coordinate."""
    return float((a - b).abs().max())


def table(title: str, head: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table in Markdown."""
    lines = [list(head), ["---" for _ in head]]
    lines += [[cell if isinstance(cell, str) else f"{cell:.2g}" for cell in row] for row in rows]
    print(f"\n{title}\n")
    print(*("| " + " | ".join(line) + " |" for line in lines), sep="\n", flush=True)


def differences(folder: Path) -> None:
    """Which settings separate objective from gradient rectification, and the uploads from each other."""
    rows = []
    settings: dict[str, dict[str, float]] = {
        "plain SGD": {},
        "weight decay 0.1": {"weight_decay": 0.1},
        "local momentum 0.5": {"momentum": 0.5},
        "clipping at norm 3": {"clip_norm": 3.0},
    }
    for name, local in settings.items():
        given: dict[str, Any] = {"local": {"lr": LR, **local}}
        phi, moved, raw = (hafedho(folder, upload=u, **given) for u in ("phi", "displacement", "raw"))
        rectified = {"rectification": "gradient", **given}
        phi_g, moved_g = (hafedho(folder, upload=u, **rectified) for u in ("phi", "displacement"))
        fedavg = path(folder, "fedavg", weights="uniform", **given)
        pairs = (phi, phi_g), (moved, moved_g), (phi, moved), (raw, fedavg), (phi, fedavg)
        rows.append([name, *(apart(*pair) for pair in pairs)])
    head = "local training", "O - G, phi", "O - G, displ.", "phi - displ.", "raw - FedAvg", "phi - FedAvg"
    table(f"1. Largest difference of two runs in {ROUNDS} rounds, mu lambda = {MU * STEPS}", head, rows)


def equivalences(folder: Path) -> None:
    """FedCM, the share that is or is not subtracted, and FedAvg."""
    rows = []
    for beta in (0.1, 0.5, 0.9):
        given: dict[str, Any] = {"mu": beta / STEPS, "local": {"lr": 0.01}}
        faster = {"lr": 0.01 / (1 - beta)}
        others = (
            path(folder, "fedcm", alpha=1 - beta, local=faster),
            hafedho(folder, own_share="data", **given),
            path(folder, "fedavg", weights="uniform", local=given["local"]),
            path(folder, "fedavg", weights="uniform", local=faster),
        )
        run = hafedho(folder, own_share="none", **given)
        rows.append([f"{beta}", *(apart(run, other) for other in others)])
    head = "mu lambda", "FedCM", "with own share p_i", "FedAvg(eta)", "FedAvg(eta/(1 - mu lambda))"
    title = f"2. HaFedHo without own share: largest difference from other runs in {ROUNDS} rounds, eta = 0.01"
    table(title, head, rows)


def factor(folder: Path, **given: Any) -> float:
    """The factor of the server's recursion g <- G + factor g, from its first two moves along straight lines of
    slope 1, where G is constant."""
    line = {"curvatures": np.full((6, 5), 1e-9), "centers": np.full((6, 5), 1e9)}
    first, second = hafedho(folder, arrays=line, own_share="none", rounds=2, **given)
    return float((second - 2 * first).norm() / first.norm())


def momentum(folder: Path) -> None:
    """Which uploads feed mu h back, and how strongly."""
    rows = []
    for rho in (0.0, 0.5, 0.9):
        local = {"lr": LR, "momentum": rho}
        uploads = "phi", "displacement", "raw"
        rows.append([f"{rho}", *(factor(folder, upload=upload, local=local) for upload in uploads)])
    title = f"3. Momentum factor of the server, measured, mu lambda = {MU * STEPS}"
    table(title, ("local momentum", "phi", "displacement", "raw"), rows)


def stability(folder: Path) -> None:
    """The distance travelled where coordinate 0 is nearly flat."""
    curvatures = problem()["curvatures"]
    curvatures[:, 0] = 0.01
    given: dict[str, Any] = {"arrays": {"curvatures": curvatures}, "rounds": 60}
    rows = []
    for beta in (0.5, 0.9, 1.1, 1.4):
        row: list[object] = [f"{beta}"]
        for clip, rectification in ((None, "objective"), (3.0, "objective"), (3.0, "gradient")):
            local = {"lr": LR, "clip_norm": clip}
            x = hafedho(folder, mu=beta / STEPS, rectification=rectification, local=local, **given)
            row.append(float(x[-1].norm()))
        rows.append(row)
    head = "mu lambda", "no clipping", "O, grad f + mu h clipped", "G, grad f clipped, mu h added"
    table("4. |w| after 60 rounds with one nearly flat direction, clipping at norm 3", head, rows)


# --- digits: eta = 0.1, lambda = 5

LAMBDA, BETA = 5, 0.8


@cache
def digits(seed: int) -> Task:
    """The digits over 20 clients, Dirichlet(0.1)."""
    plain = settings(seed, {"name": "fedavg"})
    return tasks.create(plain.task, plain.partition, seed)


def settings(seed: int, strategy: dict[str, Any], **local: Any) -> Experiment:
    """Five of the 20 clients a round, 5 local steps on batches of 32."""
    values = {
        "seed": seed,
        "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 20},
        "strategy": strategy,
        "round": {"sample": 5},
        "local": {"lr": 0.1, "steps": LAMBDA, "batch_size": 32} | local,
        "server": {"momentum": BETA},
    }
    return Experiment.model_validate(values)


def accuracy(strategy: dict[str, Any], local: dict[str, Any]) -> str:
    """Mean and range over three seeds of the test accuracy, each the mean of rounds 21 to 25."""
    results = []
    for seed in range(3):
        run, recent = Simulation(settings(seed, strategy, **local), task=digits(seed)), []
        test = run.task.central()
        assert test is not None
        run.run(20)
        for _ in range(5):
            run.model.load(run.run(1), run.coordinator.buffers)
            recent.append(100 * evaluate(run.task, run.model.module, test, 512)["accuracy"])
        results.append(np.mean(recent))
    return f"{np.mean(results):.1f} ({min(results):.1f} to {max(results):.1f})"


def accuracies() -> None:
    """The ablation of the paper, with the runs that separate the causes."""
    fedavg, fast = {"name": "fedavg", "weights": "uniform"}, {"lr": 0.1 / (1 - BETA)}
    hafedho: dict[str, Any] = {"name": "hafedho", "mu": BETA / LAMBDA}
    gradient = hafedho | {"rectification": "gradient"}
    runs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "FedAvg(eta)": (fedavg, {}),
        "FedAvg(eta/(1 - mu lambda))": (fedavg, fast),
        "FedAvgM(mu lambda)": (fedavg | {"name": "fedavgm"}, {}),
        "FedCM(1 - mu lambda) at eta/(1 - mu lambda)": ({"name": "fedcm", "alpha": 1 - BETA}, fast),
        "HaFedHo, objective": (hafedho, {}),
        "HaFedHo, gradient": (gradient, {}),
        "HaFedHo, no own share": (hafedho | {"own_share": "none"}, {}),
        "HaFedHo, gradient, raw upload": (gradient | {"upload": "raw"}, {}),
        "HaFedHo, objective, clipped at 1": (hafedho, {"clip_norm": 1.0}),
        "HaFedHo, gradient, clipped at 1": (gradient, {"clip_norm": 1.0}),
    }
    rows = [(name, accuracy(strategy, local)) for name, (strategy, local) in runs.items()]
    title = f"5. Digits, 20 clients of Dirichlet(0.1), 5 a round, mu lambda = {BETA}, after 25 rounds"
    table(title, ("", "test accuracy, %"), rows)


def main() -> None:
    """Print all tables."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for part in (differences, equivalences, momentum, stability):
            part(Path(folder))
    accuracies()
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
