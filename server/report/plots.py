"""Curves of runs as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from server.rounds.records import Record, headline, train_loss, valued

# Imported where used: matplotlib takes half a second that a report without pictures, and every run, can do without.


TRAIN_LOSS = "training loss"


def curves(runs: Mapping[str, Sequence[Record]], path: Path) -> Path:
    """Headline and loss against rounds and against bytes, one line a run; PNG or SVG by the path's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = [record for history in runs.values() for record in history]
    heads = dict.fromkeys([*(headline(record).metric for record in records if headline(record).of), "loss"])
    keys = [key for key in heads if any(valued(record, key) is not None for record in records)]
    keys = keys or [key for key in (TRAIN_LOSS,) if any(train_loss(record) is not None for record in records)]
    figure, axes = plt.subplots(max(1, len(keys)), 2, figsize=(10, 3.6 * max(1, len(keys))), squeeze=False)
    for row, key in enumerate(keys):
        for name, history in runs.items():
            rounds, sent, values = _series(history, key)
            axes[row][0].plot(rounds, values, label=name)
            axes[row][1].plot(sent, values, label=name)
        for column, label in enumerate(("round", "MB sent, both directions")):
            axes[row][column].set(xlabel=label, ylabel=key)
            axes[row][column].grid(alpha=0.3)
        axes[row][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _series(history: Sequence[Record], key: str) -> tuple[list[int], list[float], list[float]]:
    rounds, sent, values, total = [], [], [], 0.0
    for record in history:
        total += record["bytes_down"] + record["bytes_up"]
        value = train_loss(record) if key == TRAIN_LOSS else valued(record, key)
        if value is not None:
            rounds.append(record["round"])
            sent.append(total / 1e6)
            values.append(value)
    return rounds, sent, values
