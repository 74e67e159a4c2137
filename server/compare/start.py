"""Comparisons as the command and notebooks start them: who runs the cells, what is said before and after."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch

from common.errors import SettingsError
from common.partition import split_cache as plans
from server.compare import fairness
from server.compare.comparison import Comparison
from server.compare.plan import Cell, Plan, Tuning, rows
from server.compare.pools import LOG, Pool, ProcessPool, RayPool
from server.compare.progress import Progress
from server.compare.standings import Result, Standing
from server.compare.vetting import expand
from server.rounds.stopping import Stop


@dataclass(frozen=True)
class Means:
    """What a comparison runs with. `client`: the ClientApp by name; `workers`: processes, default all cores; `ray`: the
    address of a cluster, "auto" or "local"; `tidied`: finished cells keep no client memory and no checkpoints."""

    client: str
    device: str = "cpu"
    workers: int | None = None
    ray: str | None = None
    tidied: bool = False


def run(plan: Plan, text: str, root: Path, means: Means, progress: Progress, stop: Stop = lambda: None) -> Result:
    """Check a whole plan, then run it in the folder `root`; `text`: the plan as it was written.

    Raises SettingsError with every fault of the plan before anything runs.
    """
    plans.share()
    cells = expand(plan)
    portably = _portably(cells)

    def pool(most: int) -> Pool:
        count = means.workers or worker_count(cells, means.device)
        if means.ray is not None:
            gpus = 0.0 if means.device == "cpu" else 1.0
            return RayPool(means.ray, count, max(cell.experiment.local.threads for cell in cells), gpus, portably)
        return ProcessPool(devices(means.device, min(most, count)), root.resolve() / LOG, portably)

    comparison = Comparison(plan, text, root, means.client, means.device, progress, tidied=means.tidied)
    with progress:
        return comparison.run(pool, stop)


def _portably(cells: Sequence[Cell]) -> bool:
    """Whether all cells are portable. A worker process computes in one way for its life."""
    kinds = {cell.experiment.local.arithmetic for cell in cells}
    if len(kinds) > 1:
        raise SettingsError("local.arithmetic differs from cell to cell: all cells of a plan compute in one way")
    return kinds == {"portable"}


def outline(plan: Plan) -> str:
    """The cells of a plan, rounds in all and what the tuning adds. Raises SettingsError with every fault."""
    cells = expand(plan)
    tuned = {row.slug: len(row.candidates) for row in rows(plan) if row.variant.tune}
    lines = []
    for cell in cells:
        best = tuned.get(cell.folder.rpartition("/")[0]) if cell.stage == "final" else None
        lines.append(f"{cell.folder}  {cell.experiment.rounds} rounds" + (f", best of {best}" if best else ""))
    final = [cell for cell in cells if cell.stage == "final"]
    tune = [cell for cell in cells if cell.stage == "tune"]
    lines.append(f"{len(final)} cells, {_rounds(final)} rounds in all")
    if tune:
        lines.append(f"tuning adds {len(tune)} cells, {_rounds(tune)} rounds")
    return "\n".join(lines)


def _rounds(cells: Sequence[Cell]) -> int:
    return sum(cell.experiment.rounds for cell in cells)


def summary(result: Result) -> str:
    """What a comparison says at its end: each row's score over its seeds (the mean of the last evaluations, as in the
    report), fairness, cells that failed."""
    groups: dict[str, list[Standing]] = {}
    for standing in result.standings:
        if standing.cell.stage == "final":
            groups.setdefault(standing.cell.folder.rpartition("/")[0], []).append(standing)
    width = max(map(len, groups), default=0)
    heads = {each.history.headline.metric for group in groups.values() for each in group if each.history.headline}
    named = ", ".join(sorted(heads)) or "score"
    lines = [f"{named}: mean of the last {Tuning().window} evaluations ± deviation over seeds"]
    lines += [f"{slug:<{width}}  {_score(group)}" for slug, group in groups.items()]
    lines += fairness.lines(result.fairness)
    if result.failed:
        lines.append(f"{len(result.failed)} of {len(result.standings)} cells failed:")
        lines += [f"  {each.cell.folder}: {each.error}" for each in result.failed]
    lines.append(f"plan folder {result.folder}")
    return "\n".join(lines)


def _score(group: Sequence[Standing]) -> str:
    done = [each for each in group if each.status == "finished"]
    values = [fmean(each.history.recent) for each in done if each.history.recent]
    deviation = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    head = next((each.history.headline for each in done if each.history.headline), None)
    reached = f"{head.metric} {fmean(values):.4f}{deviation}, " if values and head else ""
    tuned = done[0].cell.tuned if done else {}
    chosen = "".join(f", {key} = {json.dumps(value)}" for key, value in tuned.items())
    return f"{reached}{len(done)} of {len(group)} seeds{chosen}"


def worker_count(cells: Sequence[Cell], device: str) -> int:
    """As many workers as the cores have room for, or one for each accelerator."""
    if device in ("cuda", "auto"):
        if torch.cuda.device_count():
            return torch.cuda.device_count()
    elif device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(cell.experiment.local.threads for cell in cells))


def devices(device: str, workers: int) -> list[str]:
    """The device of each worker: "cuda" and "auto" are spread over all accelerators."""
    if device in ("cuda", "auto") and (count := torch.cuda.device_count()):
        return [f"cuda:{number % count}" for number in range(workers)]
    return [device] * workers
