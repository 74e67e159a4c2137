"""Compare runs: one self-contained HTML page and the same table as Markdown."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import SettingsError
from server.display import headline, personal, size
from server.folder import HISTORY, read_history
from server.plots import curves

Record = dict[str, Any]
COLUMNS = ("run", "rounds", "accuracy", "loss", "rounds to target", "bytes to target", "bytes", "seconds", "dropped")


def write(folders: Sequence[Path], target: float, out: Path) -> str:
    """Write the page and return the table as Markdown.

    Raises SettingsError for a folder without a history or a page that cannot be written. A run that never reached
    the target says so.
    """
    names = [folder.resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    runs = {label: history(folder) for label, folder in zip(labels, folders, strict=True)}
    rows = [row(name, records, target) for name, records in runs.items()]
    with tempfile.TemporaryDirectory() as temporary:
        picture = curves(runs, Path(temporary) / "curves.png").read_bytes()
    try:
        out.write_text(_page(rows, target, picture), "utf-8")
    except OSError as error:
        raise SettingsError(f"page {str(out)!r} cannot be written: {error}") from None
    return markdown(rows)


def history(folder: Path) -> list[Record]:
    """A run's records."""
    records = list(read_history(folder / HISTORY))
    if not records:
        raise SettingsError(f"{str(folder)!r} holds no run: no line in {HISTORY}")
    return records


def row(name: str, records: Sequence[Record], target: float) -> tuple[str, ...]:
    """One run as cells of `COLUMNS`."""
    sent, reached = 0, None
    for record in records:
        sent += record["bytes_down"] + record["bytes_up"]
        accuracy = headline(record, "accuracy")
        if reached is None and accuracy is not None and accuracy >= target:
            reached = (record["round"], sent)
    last = records[-1]
    return (
        name,
        str(last["round"]),
        _number(headline(last, "accuracy")) + (" own" if personal(last) else ""),
        _number(headline(last, "loss")),
        str(reached[0]) if reached else f"not in {last['round']}",
        size(reached[1]) if reached else "-",
        size(sent),
        f"{sum(record['seconds']['total'] for record in records):.1f}",
        str(sum(len(record["dropped"]) for record in records)),
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in rows])


def _page(rows: Sequence[Sequence[str]], target: float, picture: bytes) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    image = base64.b64encode(picture).decode()
    style = (
        "body{font:15px sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:right}td:first-child{text-align:left}"
    )
    return (
        f"<!doctype html><meta charset='utf-8'><title>Fedkeel runs</title><style>{style}</style>"
        f"<h1>Runs</h1><p>Target accuracy {target:g}.</p><table><tr>{head}</tr>{body}</table>"
        f"<p><img alt='accuracy and loss against rounds and bytes' src='data:image/png;base64,{image}'></p>"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
