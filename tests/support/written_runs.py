"""Run folders written by hand, as server/rounds/loop.py and `compare` write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXPERIMENT = """name = "{name}"
seed = {seed}
rounds = {rounds}
[partition]
alpha = {alpha}
[strategy]
name = "{strategy}"
"""


def record(round: int, accuracy: float | None = None, **given: Any) -> dict[str, Any]:
    """A line of a history: 100 bytes down and 50 up, 2 seconds a round; `given` replaces or adds keys."""
    line: dict[str, Any] = {
        "round": round,
        "sampled": ["0", "1"],
        "accepted": ["0", "1"],
        "dropped": {},
        "causes": {},
        "void": [],
        "late": 0,
        "losses": {"0": 1.0 / round, "1": 2.0 / round},
        "train": {"loss": {"weighted": 1.5 / round, "mean": 1.5 / round, "worst": 2.0 / round, "client": "1", "n": 2}},
        "bytes_down": 100,
        "bytes_up": 50,
        "drift": 0.5,
        "sha256": f"{round:064x}",
        "seconds": {"collect": 1.5, "total": 2.0},
    }
    if accuracy is not None:
        line |= {"central": {"accuracy": accuracy, "loss": 1 - accuracy}, "clients": {}, "each": {}, "task": {}}
    return line | given


def write_run(
    folder: Path,
    lines: Sequence[Mapping[str, Any]] | Sequence[float | None],
    *,
    seed: int = 0,
    name: str = "written",
    strategy: str = "fedavg",
    alpha: float = 0.5,
    rounds: int | None = None,
    status: Mapping[str, Any] | None = None,
    roll: Sequence[Mapping[str, Any]] = (),
    cell: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder with these records, or with one record for each accuracy (None: a round without evaluation)."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        line if isinstance(line, Mapping) else record(number, line) for number, line in enumerate(lines, start=1)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records), "utf-8")
    planned = len(records) if rounds is None else rounds
    text = EXPERIMENT.format(name=name, seed=seed, rounds=planned, alpha=alpha, strategy=strategy)
    (folder / "experiment.toml").write_text(text, "utf-8")
    known = {"status": "finished", "plan": "p" * 64, "initial": f"{seed:064x}", "rounds": planned}
    (folder / "run.json").write_text(json.dumps(known | dict(status or {})), "utf-8")
    (folder / "roll.json").write_text(json.dumps(list(roll)), "utf-8")
    if cell is not None:
        (folder / "cell.json").write_text(json.dumps(dict(cell)), "utf-8")
    return folder


def write_cell(
    plan: Path,
    variant: str,
    lines: Sequence[Mapping[str, Any]] | Sequence[float | None],
    *,
    seed: int = 0,
    point: Mapping[str, Any] | None = None,
    stage: str = "final",
    tuned: Mapping[str, Any] | None = None,
    targets: Sequence[float] = (),
    place: str = "",
    **given: Any,
) -> Path:
    """A cell of a plan as a run folder."""
    cell = {"plan": plan.name, "variant": variant, "point": point or {}, "seed": seed, "stage": stage}
    cell |= {"tuned": tuned or {}, "targets": list(targets)}
    slug = "".join(c if c.isalnum() else "-" for c in variant.lower())
    slug += "".join(f"__{key}-{value}" for key, value in (point or {}).items())
    folder = plan / (place or slug) / f"seed-{seed}"
    return write_run(folder, lines, seed=seed, cell=cell, **given)
