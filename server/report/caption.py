"""What a caption needs to say: the settings behind all numbers in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from server.report.groups import Group, shown
from server.report.runs import Run
from server.rounds.records import size

MOST = 4
"""A setting with more values than that among the groups "varies"."""


def caption(groups: Sequence[Group], window: int) -> str:
    """Algorithms, task, model, clients, cohort, split, local training, rounds, seeds, what the numbers are."""
    runs = [run for one in groups for run in one.used]

    def each(take: Callable[[Run], Any]) -> str:
        values = list(dict.fromkeys(shown(v) for run in runs if (v := take(run)) is not None))
        return "" if not values else "/".join(values) if len(values) <= MOST else "varied"

    def setting(key: str, words: str = "{}") -> str:
        found = each(lambda run: run.settings.get(key))
        return words.format(found) if found else ""

    def clients(run: Run) -> Any:
        return len(run.roll) or run.settings.get("partition.clients")

    variants = list(dict.fromkeys(one.variant for one in groups))
    algorithms = ", ".join(variants) if len(variants) <= 8 else f"{len(variants)} algorithms"
    alpha = setting("partition.alpha", "alpha {}") if "dirichlet" in setting("partition.kind") else ""
    split = " ".join(filter(None, (setting("partition.kind"), alpha)))
    model = setting("task.model") or each(lambda run: run.model_bytes and size(run.model_bytes))
    seeds = list(dict.fromkeys(str(run.seed) for run in runs))
    counts = sorted({len(one.used) for one in groups})
    parts = [
        algorithms,
        setting("task.name", "task {}"),
        f"model {model}" if model else "",
        f"{found} clients" if (found := each(clients)) else "",
        f"split {split}" if split else "",
        setting("round.sample", "{} a round"),
        " ".join(filter(None, (setting("local.optimizer"), setting("local.lr", "rate {}")))),
        setting("server.lr", "server rate {}"),
        setting("local.batch_size", "batch {}"),
        setting("local.steps", "local steps {}") or setting("local.epochs", "local epochs {}"),
        each(lambda run: run.done) + " rounds",
        f"seeds {', '.join(seeds)}" if len(seeds) <= 10 else f"{len(seeds)} seeds",
    ]
    last = f"mean of the last {window} evaluations" if window > 1 else "last evaluation"
    deviation = " ± sample standard deviation over seeds" if counts and counts[-1] > 1 else ""
    return "; ".join(filter(None, parts)) + f". {last.capitalize()}{deviation}."
