"""Whether the variants of a comparison had the same data, the same start and the same clients, seen in their runs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from server.compare.plan import Cell
from server.rounds.folder import RunFolder

FACTS = {"plan": "partition", "initial": "initial weights", "sampled": "sampled clients"}
"""Key of what is compared -> its name for people."""


def verify(root: Path, cells: Iterable[Cell]) -> dict[str, Any]:
    """For each grid point and seed, which finished final cells differ from most of the others, and in what.

    `{"same": [...], "checked": n, "deviations": [{"what", "variant", "point", "seeds"}]}`; `same` names what no
    variant deviates in. `plan` and `initial` are read from run.json, `sampled` from the histories over the rounds that
    all have run. A deviation is a fact to be told, not an error: a variant may have another model or participation.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps([cell.point, cell.seed], sort_keys=True), []).append(cell)
    found: dict[str, dict[str, Any]] = {}
    for group in groups.values():
        for cell, what in _deviations(root, group):
            key = json.dumps([what, cell.variant, cell.point], sort_keys=True)
            entry = {"what": what, "variant": cell.variant, "point": cell.point, "seeds": []}
            found.setdefault(key, entry)["seeds"].append(cell.seed)
    deviating = {entry["what"] for entry in found.values()}
    checked = sum(len(group) for group in groups.values() if len(group) > 1)
    return {"checked": checked, "same": [w for w in FACTS if w not in deviating], "deviations": list(found.values())}


def _deviations(root: Path, cells: Sequence[Cell]) -> Iterable[tuple[Cell, str]]:
    folders = [RunFolder(root / cell.folder) for cell in cells]
    sampled = [[record["sampled"] for record in folder.history()] for folder in folders]
    shared = min(map(len, sampled))
    for what in FACTS:
        if what == "sampled":
            values = [hashlib.sha256(json.dumps(rounds[:shared]).encode()).hexdigest() for rounds in sampled]
        else:
            values = [str(folder.status().get(what)) for folder in folders]
        # Of equally frequent ones the first: the plan's first variant is what the others are compared with.
        usual = Counter(values).most_common(1)[0][0]
        yield from ((cell, what) for cell, value in zip(cells, values, strict=True) if value != usual)


def lines(fairness: dict[str, Any]) -> list[str]:
    """For people."""
    if not fairness["checked"]:
        return []
    said = [FACTS[what] for what in fairness["same"]]
    told = [f"fair: every variant of a seed had the same {', '.join(said)}"] if said else []
    for entry in fairness["deviations"]:
        point = "".join(f", {key} = {json.dumps(value)}" for key, value in entry["point"].items())
        seeds = ", ".join(map(str, entry["seeds"]))
        told.append(f"not the same {FACTS[entry['what']]}: variant {entry['variant']!r}{point}, seeds {seeds}")
    return told
