"""The tables behind the first ones: runs, communication, settings, tuning, fairness."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import SettingsError
from common.settings import tables_of, text_of
from server.compare.standings import PLAN, TUNED
from server.report.contents import Options, headline_column
from server.report.groups import Group, point, question
from server.report.runs import Run, inner, read_json
from server.report.scores import Mean, final
from server.report.tables import DASH, Cell, Table, byte_count, count, in_one_unit, plain, spread, text

HIDDEN = ("seed", "name", "checkpoint.every", "checkpoint.keep")
"""Settings that decide nothing, or that every run has its own of."""


def runs(all_: Sequence[Group], options: Options) -> Table:
    """A row a run."""
    columns = (
        "run",
        "group",
        "seed",
        "state",
        "rounds",
        headline_column(all_, options),
        "best",
        "bytes",
        "seconds",
        "weights",
    )
    columns += ("first weights", "partition", "versions")  # type: ignore[assignment]
    rows = []
    for one in all_:
        for run in one.runs:
            taken = run.metrics.get(run.headline)
            single = Group("", {}, "", [run])
            rows.append(
                [
                    Cell(str(run.folder)),
                    text(one.label),
                    Cell(str(run.seed), run.seed if isinstance(run.seed, int) else None),
                    text(run.state),
                    Cell(f"{run.done} of {run.planned}" if run.planned else str(run.done), run.done),
                    plain(final(taken.values, options.window) if taken else None),
                    spread(single.best(run.headline)),
                    byte_count(single.total("bytes")),
                    spread(single.total("seconds"), "{:.1f}"),
                    text(run.sha256[:12]),
                    text(str(run.status.get("initial") or "")[:12]),
                    text(str(run.status.get("plan") or "")[:12]),
                    text("; ".join(sorted({str(m.get("versions")) for m in run.roll if m.get("versions")}))),
                ]
            )
    rows = in_one_unit(rows, [columns.index("bytes")])
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
            byte_count(Mean.of([run.totals.get(way, 0.0) / len(run.axes["round"]) for run in used]))
            for way in ("down", "up")
        ]
        for way in ("down", "up"):
            sizes = [
                run.totals.get(way, 0.0) / len(run.axes["round"]) / run.model_bytes for run in used if run.model_bytes
            ]
            cells.append(plain(sum(sizes) / len(sizes) if sizes and len(sizes) == len(used) else None, "{:.1f}"))
        cells.append(count(int(sum(run.totals.get("late", 0.0) for run in used))))
        cells += [count(sum(run.dropped[cause] for run in used)) for cause in causes]
        cells += [count(sum(run.void[cause] for run in used)) for cause in voids]
        rows.append([Cell(one.label), *cells])
    notes = [
        "Bytes are those of the training messages of valid tries, of all clients of a round together. Vectors: the "
        "same in units of the whole model as stored (model.safetensors). Dropped: answers left out, by cause; void: "
        "tries at a round that changed nothing; both summed over the seeds."
    ]
    rows = in_one_unit(rows, (1, 2))
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
    if run.headline not in run.metrics:
        return None
    settings: dict[str, Any] = {}
    if (folder := _plan_folder(run)) is not None:
        with suppress(SettingsError):
            settings = tables_of(text_of(folder / PLAN, "plan file"), PLAN).get("tuning", {})
    values, best = run.metrics[run.headline].values, max if run.better(run.headline) else min
    return float(best(values)) if settings.get("score") == "best" else final(values, settings.get("window", 5))


def fairness(groups: Sequence[Group]) -> list[str]:
    """For each seed, task and split: whether all groups had the same partition, first weights and sampled clients."""
    lines = []
    sets: dict[tuple[str, str], list[Run]] = {}
    for one in groups:
        for run in one.used:
            sets.setdefault((question(one), str(run.seed)), []).append(run)
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
