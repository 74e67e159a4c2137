"""Where each algorithm comes to rest on clients that differ, as the table of docs/fixed-points.md.

    python -m benchmarks.fixed_points [--rounds 2000] [--only scaffold fagc]

Six quadratics F_i(w) = 1/2 sum_j a_ij (w_j - e_ij)^2 of five coordinates: centers of deviation 3, curvatures from 0.5
to 2, 1 to 8 local steps, full gradients, float64. The distance is that to the minimizer of the objective that the
algorithm averages (by client or by examples), the mean over the last 50 rounds; the start is the origin.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.helpers import Simulation, experiment

LR = 0.04
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": LR}
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": LR, "betas": (0.9, 0.99), "bias_correction": False}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedAvgM": ("fedavgm", {"server": {"momentum": 0.5}}),
    "FedExP": ("fedexp", {}),
    "FedProx, mu = 1": ("fedprox", {"mu": 1.0}),
    "FedSAM, rho = 0.5": ("fedsam", {"local": {"sam_rho": 0.5}}),
    "FedLWS": ("fedlws", {}),
    "FedCM": ("fedcm", {}),
    "HaFedHo, mu = 0.05": ("hafedho", {"mu": 0.05}),
    "MimeLite": ("mimelite", {}),
    "Mime": ("mime", {}),
    "FedNova": ("fednova", {}),
    "FedNova, vr literal": ("fednova", {"vr": "literal"}),
    "FedNova, vr compensated": ("fednova", {"vr": "compensated"}),
    "FedNova, vr compensated, momentum 0.9": (
        "fednova",
        {"vr": "compensated", "local": {"momentum": 0.9, "lr": LR / 10}},
    ),
    "SCAFFOLD": ("scaffold", {}),
    "SCAFFOLD, data weights": ("scaffold", {"weights": "data"}),
    "SCAFFOLD, proximal mu = 1": ("scaffold", {"local": {"proximal_mu": 1.0}}),
    "SCAFFOLD, top-k 20 %, ef14": ("scaffold", {"compression": {"up": "top-k", "ratio": 0.2}}),
    "SCAFFOLD, int8, ef21": ("scaffold", {"compression": {"up": "int8", "feedback": "ef21"}}),
    "SCAFFOLD-M": ("scaffoldm", {}),
    "PAdaMFed": ("padamfed", {}),
    "FedDyn, alpha = 2": ("feddyn", {"alpha": 2.0}),
    "FedSpeed, lam = 0.5, rho = 0": ("fedspeed", {"lam": 0.5, "rho": 0.0}),
    "FedSpeed, lam = 0.5, rho = 0.1": ("fedspeed", {"lam": 0.5}),
    "FedSplit": ("fedsplit", {}),
    "FA-GC, SGD": ("fagc", {"local": SGD}),
    "FA-GC, Adam": ("fagc", {"local": ADAM}),
    "FA-GC, normalized": ("fagc", {"local": {"optimizer": "normalized", "lr": LR}}),
    "FA-NT, Adam": ("fant", {"local": ADAM}),
    "LocalAdam": ("localadam", {"local": ADAM}),
}


def distance(folder: Path, name: str, given: dict[str, Any], rate: float, sample: int | None, rounds: int) -> float:
    """The distance at rest, or nan for a run that leaves."""
    local = {"lr": LR} | given.get("local", {})
    tables = {**given, "local": local | {"lr": local["lr"] * rate}, "round": {"sample": sample} if sample else {}}
    run = Simulation(experiment(folder, name, **tables))
    target = torch.as_tensor(run.task.minimizer(run.strategy.weights))  # type: ignore[attr-defined]
    try:
        still = 0
        while run.coordinator.round < rounds - 50 and still < 20:
            before = run.x
            still = still + 1 if float((run.run(1) - before).abs().max()) < 1e-13 else 0
        path = run.path(50)
    except ArithmeticError:
        return float("nan")
    return float((path - target).norm(dim=1).mean())


def verdict(whole: float, half: float) -> str:
    """What the two full runs say."""
    if whole < 1e-8:
        return "reaches it"
    order = whole / half
    return "vanishes with the rate" if order > 1.6 else "stays"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--only", nargs="+", help="registry names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = "", f"all clients, rate {LR}", f"all clients, rate {LR / 2}", f"3 of 6, rate {LR}", "its distance"
    print(f"Distance to the minimizer after {options.rounds} rounds, or at rest\n")
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for title, (name, given) in ROWS.items():
            if options.only and name not in options.only:
                continue
            found = [
                distance(Path(folder), name, given, rate, sample, options.rounds)
                for rate, sample in ((1.0, None), (0.5, None), (1.0, 3))
            ]
            cells = [title, *(f"{value:.2g}" for value in found), verdict(found[0], found[1])]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
