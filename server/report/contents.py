"""The tables of a report."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.display import size
from server.report.groups import Group, point
from server.report.runs import PLAN, SOURCES, TUNED, Run, inner, read_json
from server.report.scores import Mean, Reach, final
from server.report.tables import BOUND, DASH, Cell, Table, bold_best, plain, spread, text

HIDDEN = ("seed", "name", "checkpoint.every", "checkpoint.keep")
"""Settings that decide nothing, or that every run has its own of."""

WHOSE = {
    "central": "the server's test set",
    "personal": "each client's own model on its own examples, mean weighted by examples",
    "clients": "the clients' evaluation examples, mean weighted by them",
    "train": "training, reported by the clients",
}


@dataclass(frozen=True)
class Options:
    """What a report is asked for: target accuracies, `smoothing` (evaluations in the running mean that has to reach a
    target) and `window` (last evaluations whose mean is the final score)."""

    targets: tuple[float, ...] = ()
    smoothing: int = 1
    window: int = 5


def summary(groups: Sequence[Group], options: Options) -> Table:
    """A row a group."""
    window = options.window
    columns: dict[str, Callable[[Group], Cell]] = {
        "group": _name,
        "seeds": lambda one: Cell(one.count, len(one.used)),
        "rounds": lambda one: _range([run.done for run in one.used]),
        "accuracy": lambda one: _whose(one, spread(one.final("accuracy", window))),
        "last": lambda one: _whose(one, spread(one.final("accuracy", 1))),
        "best": lambda one: spread(one.best("accuracy")),
        "worst client": lambda one: spread(one.final("worst", window)),
        "10th percentile": lambda one: spread(one.final("p10", window)),
        "loss": lambda one: spread(one.final("loss", window)),
        "train loss": lambda one: spread(one.final("train loss", window)),
    }
    for name in own_metrics(groups):
        columns[name] = lambda one, name=name: spread(one.final(name, window), "{:.4g}")  # type: ignore[misc]
    columns |= {
        "drift": lambda one: spread(one.mean("drift"), "{:.3f}"),
        "bytes": lambda one: _bytes(one.total("bytes")),
        "seconds": lambda one: spread(one.total("seconds"), "{:.1f}"),
        "simulated s": lambda one: spread(one.total("clock"), "{:.1f}"),
        "dropped": lambda one: _count(sum(sum(run.dropped.values()) for run in one.used)),
        "void": lambda one: _count(sum(sum(run.void.values()) for run in one.used)),
    }
    rows = [[take(one) for take in columns.values()] for one in groups]
    if _comparable(groups):
        rows = bold_best(rows, list(columns).index("accuracy"))
    return Table("Summary", list(columns), rows, _summary_notes(groups, options)).without_empty()


def _name(one: Group) -> Cell:
    return Cell(one.label + ("" if one.complete else " †"))


def _whose(one: Group, cell: Cell) -> Cell:
    """Marks what is of clients' own models."""
    return Cell(f"{cell.text} own", cell.value) if one.source == "personal" and cell.value is not None else cell


def _comparable(groups: Sequence[Group]) -> bool:
    """Whether all groups answer the same question: one task, one split, one point of a grid, the same data."""
    return len({(one.source, _asked(one)) for one in groups}) == 1


def _asked(one: Group) -> str:
    """The group's question: task, split and point of a grid."""
    about = {key: found for key, found in one.settings.items() if key.startswith(("task.", "partition."))}
    return json.dumps([one.plan, one.point, about], sort_keys=True, default=str)


def _summary_notes(groups: Sequence[Group], options: Options) -> list[str]:
    last = f"the mean of the last {options.window} evaluations" if options.window > 1 else "the last evaluation"
    notes = [
        f"Mean ± sample standard deviation over the seeds of a group; a single seed has no deviation. Accuracy, loss, "
        f"worst client and 10th percentile: {last} of a run (of all, if there are fewer); last: the last one; best: a "
        f"run's highest; drift: mean over rounds of the mean pairwise cosine of the uploads; bytes: sent in training, both directions."
    ]
    for source in (*SOURCES, "train"):
        labels = [one.label for one in groups if one.source == source]
        if labels:
            who = "Accuracy and loss" if len(labels) == len(groups) else f"Accuracy and loss of {some(labels)}"
            whose = "are clients' own models: " if source == "personal" else "are of "
            notes.append(f"{who} {whose}{WHOSE[source]}.")
    if not all(one.complete for one in groups):
        notes.append("† No run of this group came to its end: the numbers are of what there is.")
    if any(0 < len(one.used) < len(one.runs) and one.complete for one in groups):
        notes.append('Seeds "k of n": the other runs did not come to their end and are in no number here.')
    return notes


def targets(groups: Sequence[Group], options: Options) -> Table:
    """A row a group and target."""
    columns = ("group", "target", "reached", "rounds", "median rounds", "bytes", "seconds", "simulated s")
    rows = []
    for one in groups:
        for target in options.targets:
            rounds = one.reach(target, "round", options.smoothing)
            if rounds is None:
                continue
            cells = [
                _name(one),
                Cell(f"{target:g}", target),
                Cell(f"{rounds.reached} of {rounds.n}", rounds.reached),
                reach(rounds, "{:.1f}", "rounds"),
                Cell(f"> {max(rounds.costs):.0f}", BOUND + max(rounds.costs))
                if math.isinf(rounds.median)
                else plain(rounds.median, "{:.1f}"),
                reach(one.reach(target, "bytes", options.smoothing), ""),
                reach(one.reach(target, "seconds", options.smoothing), "{:.1f}"),
                reach(one.reach(target, "clock", options.smoothing), "{:.1f}"),
            ]
            rows.append(cells)
    smooth = f"the mean of {options.smoothing} evaluations in a row is" if options.smoothing > 1 else "an evaluation is"
    notes = [
        f"Until {smooth} at least the target; bytes in both directions. Mean ± sample standard deviation over the "
        f'seeds, where all reached it. Where some did not, "> x" is a lower bound of the mean: those count with all '
        f"that they spent; the median counts them as never. Where none did, the rounds that were run."
    ]
    return Table("To the target accuracy", columns, rows, notes).without_empty()


def reach(found: Reach | None, pattern: str, unit: str = "") -> Cell:
    """The cost of a target as a cell: mean ± deviation, a lower bound "> x", or "not reached"."""
    if found is None or (cost := found.cost) is None:
        return Cell(DASH)
    if found.reached == found.n:
        return spread(cost, pattern) if pattern else _bytes(cost)
    if unit and not found.reached:
        low, high = min(found.costs), max(found.costs)
        text = f"not reached in {low:.0f}{'' if low == high else f' to {high:.0f}'} {unit}"
        return Cell(text, BOUND + cost.mean)
    shown = pattern.format(cost.mean) if pattern else size(cost.mean)
    return Cell(f"> {shown}", BOUND + cost.mean)


def pivots(groups: Sequence[Group], options: Options) -> list[Table]:
    """Variants x points of a grid, as papers print them; [] unless there are several of both."""
    points = list({json.dumps(one.point, default=str): one.point for one in groups}.values())
    plans = {one.plan for one in groups}
    variants = list(dict.fromkeys(one.variant for one in groups))
    by = {(one.variant, json.dumps(one.point, default=str)): one for one in groups}
    if len(points) < 2 or len(variants) < 2 or len(plans) > 1 or len(by) < len(groups):
        return []

    def table(title: str, cell: Any, largest: bool) -> Table:
        rows = []
        for variant in variants:
            cells = [by.get((variant, json.dumps(p, default=str))) for p in points]
            rows.append([Cell(variant), *(Cell(DASH) if one is None else cell(one) for one in cells)])
        for column in range(1, len(points) + 1) if len({one.source for one in groups}) == 1 else ():
            rows = bold_best(rows, column, largest)
        return Table(f"{title} by variant and point", ["variant", *map(point, points)], rows)

    tables = [table("Accuracy", lambda one: spread(one.final("accuracy", options.window)), True)]
    if not any(one.has("accuracy") for one in groups):
        return []
    for target in options.targets:
        for axis, pattern in (("round", "{:.1f}"), ("bytes", "")):
            word = "Rounds" if axis == "round" else "Bytes"
            unit = "rounds" if axis == "round" else ""

            def cell(
                one: Group, target: float = target, axis: str = axis, pattern: str = pattern, u: str = unit
            ) -> Cell:
                return reach(one.reach(target, axis, options.smoothing), pattern, u)

            tables.append(table(f"{word} to {target:g}", cell, False))
    return tables


def runs(all_: Sequence[Group], options: Options) -> Table:
    """A row a run."""
    columns: tuple[str, ...] = (
        "run",
        "group",
        "seed",
        "state",
        "rounds",
        "accuracy",
        "best",
        "bytes",
        "seconds",
        "weights",
    )
    columns = (*columns, "first weights", "partition", "versions")
    rows = []
    for one in all_:
        for run in one.runs:
            taken = run.metrics.get("accuracy")
            single = Group("", {}, "", [run])
            rows.append(
                [
                    Cell(str(run.folder)),
                    text(one.label),
                    Cell(str(run.seed), run.seed if isinstance(run.seed, int) else None),
                    text(run.state),
                    Cell(f"{run.done} of {run.planned}" if run.planned else str(run.done), run.done),
                    plain(final(taken.values, options.window) if taken else None),
                    spread(single.best("accuracy")),
                    _bytes(single.total("bytes")),
                    spread(single.total("seconds"), "{:.1f}"),
                    text(run.sha256[:12]),
                    text(str(run.status.get("initial") or "")[:12]),
                    text(str(run.status.get("plan") or "")[:12]),
                    text("; ".join(sorted({str(m.get("versions")) for m in run.roll if m.get("versions")}))),
                ]
            )
    return Table("Runs", columns, rows).without_empty()


def unfinished(all_: Sequence[Run]) -> Table:
    """The runs that did not come to their end, and why."""
    rows = [
        [Cell(str(r.folder)), text(r.state), Cell(f"{r.done} of {r.planned or '?'}", r.done), text(_short(r.error))]
        for r in all_
        if not r.complete
    ]
    return Table("Unfinished and failed runs", ("run", "state", "rounds", "cause"), rows)


def communication(groups: Sequence[Group]) -> Table:
    """What is sent in a round, in bytes and in models, and who was left out."""
    causes = sorted({cause for one in groups for run in one.used for cause in run.dropped})
    voids = sorted({cause for one in groups for run in one.used for cause in run.void})
    columns: tuple[str, ...] = ("group", "down a round", "up a round", "vectors down", "vectors up", "late replies")
    columns = (*columns, *(f"dropped: {cause}" for cause in causes), *(f"void: {cause}" for cause in voids))
    rows = []
    for one in groups:
        used = one.used
        cells = [
            _bytes(Mean.of([run.totals.get(way, 0.0) / len(run.axes["round"]) for run in used]))
            for way in ("down", "up")
        ]
        for way in ("down", "up"):
            sizes = [
                run.totals.get(way, 0.0) / len(run.axes["round"]) / run.model_bytes for run in used if run.model_bytes
            ]
            cells.append(plain(sum(sizes) / len(sizes) if sizes and len(sizes) == len(used) else None, "{:.1f}"))
        cells.append(_count(int(sum(run.totals.get("late", 0.0) for run in used))))
        cells += [_count(sum(run.dropped[cause] for run in used)) for cause in causes]
        cells += [_count(sum(run.void[cause] for run in used)) for cause in voids]
        rows.append([Cell(one.label), *cells])
    notes = [
        "Bytes are those of the training messages of valid tries, of all clients of a round together. Vectors: the "
        "same in units of the whole model as stored (model.safetensors). Dropped: answers left out, by cause; void: "
        "tries at a round that changed nothing; both summed over the seeds."
    ]
    return Table("Communication, dropped clients and void tries", columns, rows, notes).without_empty()


def differing(groups: Sequence[Group]) -> tuple[Table, dict[str, Any]]:
    """The settings that differ between groups, and those that all have in common."""
    keys = list(dict.fromkeys(key for one in groups for key in one.settings))
    keys = [key for key in keys if key not in HIDDEN]
    with_settings = [one for one in groups if one.settings]
    common: dict[str, Any] = {}
    varied = []
    for key in keys:
        values = {json.dumps(one.settings.get(key), default=str) for one in with_settings}
        if len(values) == 1:
            common[key] = with_settings[0].settings[key]
        else:
            varied.append(key)
    rows = [
        [Cell(one.label), *(text("" if key not in one.settings else value(one.settings[key])) for key in varied)]
        for one in groups
    ]
    return Table("Settings that differ", ("group", *varied), rows if varied else []), common


def tuning(all_: Sequence[Run], groups: Sequence[Group]) -> Table:
    """A row a candidate: its mean score over the tuning seeds, and whether it won."""
    found: dict[tuple[str, str, str], list[Run]] = {}
    for run in all_:
        if run.stage == "tune":
            key = (
                str(run.cell.get("variant")),
                json.dumps(run.cell.get("point") or {}, default=str),
                json.dumps(run.cell.get("tuned") or {}, sort_keys=True, default=str),
            )
            found.setdefault(key, []).append(run)
    won = {
        (one.variant, json.dumps(one.point, default=str), json.dumps(run.cell["tuned"], sort_keys=True, default=str))
        for one in groups
        for run in one.runs
        if run.cell.get("tuned")
    }
    rows = []
    for key, runs in found.items():
        scores = [score for run in runs if (score := _score(run)) is not None]
        variant = key[0] + (f" ({point(json.loads(key[1]))})" if json.loads(key[1]) else "")
        rows.append(
            [
                Cell(variant),
                Cell(point(json.loads(key[2]))),
                spread(Mean.of(scores)) if len(scores) == len(runs) else text(""),
                Cell(f"{sum(run.complete for run in runs)} of {len(runs)}"),
                Cell("chosen" if key in won else DASH, best=key in won),
            ]
        )
    notes = ["Each candidate's mean score over the tuning seeds. These runs are in no other table and no curve."]
    plans = {folder for key in found for run in found[key] if (folder := _plan_folder(run)) is not None}
    for folder in sorted(plans):
        tuned = read_json(folder / TUNED)
        for row, about in tuned.items() if isinstance(tuned, dict) else ():
            notes += [f"{row}: {hint}." for hint in inner({row: about}, row).get("hints") or ()]
    return Table("Tuning", ("variant", "candidate", "score", "finished", "winner"), rows, notes)


def _plan_folder(run: Run) -> Path | None:
    return next((folder for folder in run.folder.resolve().parents if (folder / PLAN).exists()), None)


def _score(run: Run) -> float | None:
    """The plan's score of a tuning run."""
    if "accuracy" not in run.metrics:
        return None
    settings: dict[str, Any] = {}
    if (folder := _plan_folder(run)) is not None:
        with suppress(OSError, ValueError):
            settings = tomllib.loads((folder / PLAN).read_text("utf-8")).get("tuning", {})
    values = run.metrics["accuracy"].values
    return float(max(values)) if settings.get("score") == "best" else final(values, settings.get("window", 5))


def fairness(groups: Sequence[Group]) -> list[str]:
    """For each seed, task and split: whether all groups had the same partition, first weights and sampled clients."""
    lines = []
    sets: dict[tuple[str, str], list[Run]] = {}
    for one in groups:
        for run in one.used:
            sets.setdefault((_asked(one), str(run.seed)), []).append(run)
    compared = [runs for runs in sets.values() if len(runs) > 1]
    checks: dict[str, Callable[[list[Run]], bool | None]] = {
        "partition": lambda runs: _same(run.status.get("plan") for run in runs),
        "first weights": lambda runs: _same(run.status.get("initial") for run in runs),
        "sampled clients": lambda runs: _same(tuple(r.sampled[: min(len(x.sampled) for x in runs)]) for r in runs),
    }
    for what, same in checks.items():
        answers = [same(runs) for runs in compared]
        if compared and None not in answers:
            equal = sum(map(bool, answers))
            who = "all groups with one task and split"
            words = f"the same for {who}" if equal == len(answers) else f"NOT the same for {who}"
            of = "" if equal == len(answers) else f" in {len(answers) - equal} of {len(answers)} seeds"
            lines.append(f"{what.capitalize()} of a seed: {words}{of}.")
    return lines


def _same(values: Iterable[Any]) -> bool | None:
    found = list(values)
    return None if any(value is None for value in found) else len(set(found)) == 1


def own_metrics(groups: Sequence[Group]) -> list[str]:
    """Further metrics of the tasks: distances, objectives."""
    known = {"accuracy", "loss", "train loss", "worst", "p10", "drift"}
    return sorted({name for one in groups for run in one.used for name in run.metrics} - known)


def _bytes(mean: Mean | None) -> Cell:
    if mean is None:
        return Cell(DASH)
    number, unit = size(mean.mean).split()
    if mean.deviation is None:
        return Cell(f"{number} {unit}", mean.mean)
    # In the mean's unit: "4.1 ± 0.8 MB".
    scale = mean.mean / float(number) if float(number) else 1.0
    digits = 0 if unit == "B" else 1
    return Cell(f"{number} ± {mean.deviation / scale:.{digits}f} {unit}", mean.mean)


def _count(number: int) -> Cell:
    return Cell(str(number) if number else DASH, number)


def _range(values: Sequence[int]) -> Cell:
    low, high = min(values, default=0), max(values, default=0)
    return Cell(str(low) if low == high else f"{low} to {high}", high)


def some(labels: Sequence[str]) -> str:
    return "; ".join(labels[:3]) + (f"; and {len(labels) - 3} more" if len(labels) > 3 else "")


def _short(error: str) -> str:
    line = " ".join(error.split())
    return line if len(line) <= 300 else line[:297] + "..."


def value(found: Any) -> str:
    """A setting as it stands in a file, strings without quotes."""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


def versions(all_: Sequence[Run]) -> list[tuple[str, int]]:
    """What the clients ran, and in how many runs."""
    counted = Counter(v for run in all_ for v in {str(m.get("versions") or "") for m in run.roll} if v)
    return sorted(counted.items())


def folders(groups: Sequence[Group]) -> list[Path]:
    """Of all runs."""
    return [run.folder for one in groups for run in one.runs]
