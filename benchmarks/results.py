"""What a plan found, as it is kept in docs/results/: with the plan and the log that produced it.

    python -m server compare experiments/plans/NAME.toml --workers 2 --tidy 2>&1 | tee NAME.log
    python -m benchmarks.results runs/PLAN --log NAME.log

Writes docs/results/PLAN/: plan.toml, tuned.json and cells.json as they ran, compare.log, report.md (the tables),
summary.csv, targets.csv and curves.csv (accuracy, loss, bytes and sha256 of the weights, by round).
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import pandas as pd

from server.report import write

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CURVES = ("variant", "point", "seed", "round", "accuracy", "loss", "bytes_down", "bytes_up", "sha256")
LASTING = re.compile(r"\[\d+/\d+\]|fair|not the same|accuracy|best of|cells failed|  tuning/|real|user|sys")


def keep(plan: Path, log: Path) -> Path:
    """Write the folder of a plan's results; returns it."""
    target = RESULTS / plan.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("plan.toml", "tuned.json", "cells.json"):
        if (plan / name).exists():
            shutil.copy(plan / name, target / name)
    with tempfile.TemporaryDirectory() as temporary:
        tables = Path(temporary)
        write([plan], [], tables / "page.html", tables=tables)
        for name in ("report.md", "summary.csv", "targets.csv"):
            text = (tables / name).read_text("utf-8")
            (target / name).write_text(text.replace(str(plan.parent), "runs"), "utf-8")
        history = pd.read_parquet(tables / "history.parquet")
    final = history[history["stage"] == "final"]
    final.loc[final["accuracy"].notna(), list(CURVES)].to_csv(target / "curves.csv", index=False, float_format="%.6g")
    lines = [line for line in log.read_text("utf-8").splitlines() if LASTING.search(line)]
    (target / "compare.log").write_text("\n".join(lines) + "\n", "utf-8")
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--log", type=Path, required=True)
    arguments = parser.parse_args()
    print(keep(arguments.plan.resolve(), arguments.log))
