"""Everything in a report as files for other programs: CSV and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import SettingsError
from server.report import frames
from server.report.contents import Options
from server.report.groups import Group
from server.report.runs import Run, records
from server.report.scores import final, reached

# Imported where used: pandas takes half a second that only frames and exported tables need.

KEYS = ("run", "group", "plan", "variant", "point", "seed", "stage", "state")
Fields = dict[str, Any]


def export(groups: Sequence[Group], tuned: Sequence[Run], options: Options, folder: Path) -> list[Path]:
    """Write `history` (a row a round and run), `clients` (a row a round, run, client and metric), `summary` and
    `targets` (a row a run, and of a group and target a row a run), each as .csv and .parquet.

    Raises SettingsError if the folder cannot be written.
    """
    import pandas as pd

    runs = [(group, run) for group in groups for run in group.runs] + [(None, run) for run in tuned]
    histories, clients = [], []
    for group, run in runs:
        history = records(run.folder)
        if not history:
            continue
        keys = _keys(group, run)
        histories.append(_keyed(frames.history(history).reset_index(), keys))
        clients.append(_keyed(frames.clients(history), keys))
    tables = {
        "history": pd.concat(histories, ignore_index=True),
        "clients": pd.concat(clients, ignore_index=True),
        "runs": pd.DataFrame([_run(group, run, options) for group, run in runs if run.has_history]),
        "summary": pd.DataFrame([_summary(group, options) for group in groups]),
        "targets": pd.DataFrame(list(_targets(groups, options)), columns=TARGETS),
    }
    written = []
    try:
        for name, frame in tables.items():
            written += _write(frame, folder / name)
    except OSError as error:
        raise SettingsError(f"tables in {str(folder)!r} cannot be written: {error}") from None
    return written


def _keys(group: Group | None, run: Run) -> Fields:
    words = dict.fromkeys(KEYS, "")
    cell = run.cell
    return words | {
        "run": str(run.folder),
        "group": group.label if group else "",
        "plan": str(cell.get("plan") or ""),
        "variant": group.variant if group else str(cell.get("variant") or ""),
        "point": _point(cell.get("point")),
        "seed": run.seed if isinstance(run.seed, int) else -1,
        "stage": run.stage,
        "state": run.state,
    }


def _point(found: Any) -> str:
    return json.dumps(found, sort_keys=True, default=str) if found else ""


def _keyed(frame: Any, keys: Fields) -> Any:
    """The frame with the run's keys before its columns, as categories: they are the same in each row."""
    import pandas as pd

    for place, (key, value) in enumerate(keys.items()):
        column: Any = value if isinstance(value, int) else pd.Categorical.from_codes([0] * len(frame), [value])
        frame.insert(place, key, column)
    return frame


def _run(group: Group | None, run: Run, options: Options) -> Fields:
    row = _keys(group, run) | {"rounds": run.done, "planned": run.planned, "sha256": run.sha256}
    row |= {key: run.status.get(key) for key in ("initial", "plan")} | {"source": run.source, "headline": run.headline}
    row |= {axis: float(values[-1]) for axis, values in run.axes.items() if axis != "round"}
    row |= {f"final.{name}": final(series.values, options.window) for name, series in run.metrics.items()}
    row |= {f"dropped.{cause}": count for cause, count in run.dropped.items()}
    row |= {f"void.{cause}": count for cause, count in run.void.items()}
    row |= {f"tuned.{key}": str(value) for key, value in (run.cell.get("tuned") or {}).items()}
    return row | {key: str(value) for key, value in run.settings.items() if key not in row}


def _summary(group: Group, options: Options) -> Fields:
    row: Fields = {"group": group.label, "plan": group.plan, "variant": group.variant, "point": _point(group.point)}
    row |= {"runs": len(group.runs), "n": len(group.used), "complete": group.complete, "window": options.window}
    names = sorted({name for run in group.used for name in run.metrics})
    found = {name: group.final(name, options.window) for name in names}
    found |= {f"best.{group.headline}": group.best(group.headline), "mean.drift": group.mean("drift")}
    found |= {axis: group.total(axis) for axis in ("bytes", "seconds", "clock")}
    for name, mean in found.items():
        if mean is not None:
            row |= {f"{name}.mean": mean.mean, f"{name}.deviation": mean.deviation}
    return row


TARGETS = (*KEYS, "metric", "target", "smoothing", "reached", "rounds", "bytes", "seconds", "clock", "used")


def _targets(groups: Sequence[Group], options: Options) -> Iterator[Fields]:
    for group in groups:
        used = group.used
        for run in group.runs:
            for target in options.targets:
                metric = target.metric or run.headline
                if metric not in run.metrics:
                    continue
                place = reached(run.metrics[metric].values, target.value, options.smoothing, run.better(metric))
                row = _keys(group, run) | {"metric": metric, "target": target.value, "smoothing": options.smoothing}
                row |= {"reached": place is not None, "used": run in used}
                for column, axis in (("rounds", "round"), *((a, a) for a in ("bytes", "seconds", "clock"))):
                    known = place is not None and axis in run.axes
                    row[column] = float(run.axis(axis, metric)[place]) if known else None
                yield row


def _write(frame: Any, path: Path) -> list[Path]:
    import pyarrow
    from pyarrow import csv, parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    plain = [
        field.with_type(pyarrow.string()) if pyarrow.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    parquet.write_table(table, path.with_suffix(".parquet"))
    csv.write_csv(table.cast(pyarrow.schema(plain)), path.with_suffix(".csv"))
    return [path.with_suffix(".csv"), path.with_suffix(".parquet")]
