"""`python -m server partition`: an experiment's partition plan as a file, a picture and a few numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import tasks
from common.errors import SettingsError
from common.experiment import Experiment
from common.files import write_atomically
from common.partition import file as plan_files
from common.partition.assignment import Assignment
from common.tasks.classification import Classification

PICTURES = (".png", ".svg", ".pdf")


def partition(experiment: Experiment, out: Path | None = None, picture: Path | None = None) -> str:
    """Make the plan of an experiment, write it to `out` (JSON) and draw it as `picture`; returns a short table.

    Raises SettingsError for settings that cannot work, a task without pooled examples, an ending that is no picture's,
    and a file that cannot be written.
    """
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise SettingsError(f"--picture {str(picture)!r}: ending {picture.suffix!r}; allowed: {', '.join(PICTURES)}")
    task = tasks.create(experiment.task, experiment.partition, experiment.seed)
    if not isinstance(task, Classification):
        raise SettingsError(
            f"task.name = {experiment.task.name!r} has no pooled examples that a plan splits; allowed: tasks of classes"
        )
    assignment, labels = task.assignment, task.pool().targets.numpy()
    if out is not None:
        text = plan_files.text(assignment, labels, experiment.partition, experiment.task.name)
        _write(out, text.encode())
    if picture is not None:
        _draw(assignment, task, picture)
    return summary(assignment, len(labels))


def summary(assignment: Assignment, examples: int) -> str:
    """How many clients hold how much of a data set of so many examples, and how unequal they are, a line each."""
    train, evaluate = (np.array([len(part) for part in side]) for side in (assignment.clients, assignment.holdout))
    both = train + evaluate
    label_skew, size_skew = skew(assignment.class_counts)
    lines = {
        "clients": f"{len(both):,}, of them {(both == 0).sum():,} empty, {(both == 1).sum():,} of one example",
        "examples": f"{both.sum():,} of {examples:,}: {train.sum():,} for training, {evaluate.sum():,} for evaluation",
        "training examples": _spread(train),
        "classes": _spread((assignment.class_counts > 0).sum(axis=1)),
        "label skew": f"{label_skew:.3f} (part of the examples that lie where an iid split would not have them)",
        "size skew": f"{size_skew:.3f} (standard deviation of the clients' sizes / their mean)",
        "shift": assignment.shift + (f", strength {assignment.shift_strength:g}" if assignment.shift_strength else ""),
        "plan": assignment.hash,
    }
    return "\n".join(f"{name:18} {text}" for name, text in lines.items())


def skew(class_counts: NDArray[np.int64]) -> tuple[float, float]:
    """How unequal clients are, from their examples by class (clients, classes).

    Label skew: sum_i n_i/n 1/2 sum_c |p_ic - p_c|, in [0, 1): how many of the examples lie where an iid split would not
    have them. Size skew: the standard deviation of all clients' sizes over their mean.
    """
    sizes = class_counts.sum(axis=1)
    if not sizes.sum():
        return 0.0, 0.0
    expected = np.outer(sizes, class_counts.sum(axis=0) / sizes.sum())
    return float(np.abs(class_counts - expected).sum() / (2 * sizes.sum())), float(sizes.std() / sizes.mean())


def _spread(values: NDArray[Any]) -> str:
    return f"{values.min():,} to {values.max():,} a client, median {np.median(values):,g}"


def _draw(assignment: Assignment, task: Classification, path: Path) -> None:
    # matplotlib takes a second, a table needs none.
    from server.report.pictures import partition_picture

    content = io.BytesIO()
    picture = partition_picture(assignment.class_counts, task.names(), _class_names(assignment, task))
    picture.savefig(content, format=path.suffix[1:].lower())
    _write(path, content.getvalue())


def _class_names(assignment: Assignment, task: Classification) -> list[str] | None:
    """What the task calls its classes, as many as the plan counts; None if it has no names for them."""
    names = list(getattr(task, "class_names", None) or [])
    return names[: assignment.class_counts.shape[1]] if len(names) >= assignment.class_counts.shape[1] else None


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise SettingsError(f"{str(path)!r} cannot be written: {error}") from None
