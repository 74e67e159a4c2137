"""Records of a history as pandas frames: what notebooks get and what is exported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from common.settings import dotted
from server.rounds.records import Record, headline, valued

# Imported where used: pandas takes half a second that only frames and exported tables need.

GROUPS = ("central", "clients", "personal", "train", "task", "strategy", "seconds")
COUNTED = ("sampled", "accepted", "dropped", "void")
CLIENT_COLUMNS = ("round", "client", "metric", "value")


def history(records: Iterable[Record]) -> Any:
    """One row a round, index `round`; the columns are flat.

    The headline under its own name (`accuracy` for instance) and `loss` are of the server's test set, else of the
    clients' models or examples, NaN where nothing was evaluated; `bytes_down`, `bytes_up`, `drift`, `lr`, `late`,
    `generation`, `sha256` as recorded; of `sampled`, `accepted`, `dropped` and `void` the number; groups by dots:
    `central.accuracy`, `clients.accuracy.worst`, `train.loss.mean`, `seconds.total`, `task.distance`.
    `clients.accuracy.client` names the
    worst client.
    """
    import pandas as pd

    rows = [_row(record) for record in records]
    frame = pd.DataFrame(rows, columns=_columns(rows))
    return frame.set_index("round")


def clients(records: Iterable[Record]) -> Any:
    """One row a round, client and metric: columns `round`, `client`, `metric`, `value`.

    Metrics: those of the evaluation under their own names (`accuracy`, `loss`), `train.loss`, `steps`, `examples`.
    """
    import pandas as pd

    rows = [row for record in records for row in _client_rows(record)]
    return pd.DataFrame(rows, columns=list(CLIENT_COLUMNS)).astype({"round": "int64", "value": "float64"})


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {"round": record["round"]}
    shown = dict.fromkeys((headline(dict(record)).metric, "loss"))
    row |= {key: valued(dict(record), key) for key in shown}
    row |= {key: record.get(key) for key in ("bytes_down", "bytes_up", "drift", "lr", "late", "generation")}
    row |= {key: record[key] for key in ("server_lr",) if key in record}
    row |= {key: len(record.get(key) or ()) for key in COUNTED}
    row["sha256"] = record.get("sha256")
    for group in GROUPS:
        row |= dict(dotted(record.get(group) or {}, f"{group}."))
    numbers = (*shown, "drift")
    return row | {key: float("nan") for key in numbers if row[key] is None}


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """All keys, in the order in which they first appear; `round` also without a row."""
    return list(dict.fromkeys(["round", *(key for row in rows for key in row)]))


def _client_rows(record: Record) -> Iterator[tuple[int, str, str, float]]:
    named = dict(record.get("each") or {})
    named |= {"train.loss": record.get("losses") or {}, "steps": record.get("steps") or {}}
    named["examples"] = record.get("examples") or {}
    for metric, values in named.items():
        for client, value in values.items():
            if value is not None:
                yield record["round"], client, metric, float(value)
