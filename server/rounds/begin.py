"""A run that begins from weights in a file: `[task] start`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from common.data.places import find
from common.errors import SettingsError
from common.model import FlatModel
from common.tensor_files import Damaged, read_tensors

SHOWN = 5
"""Names of tensors that a line tells."""


def begin_from(model: FlatModel, file: str) -> list[str]:
    """Put the tensors of a safetensors file (a run's model.safetensors, for instance) into the model's shared
    parameters and buffers of the same name and shape. Returns what did not fit, a line each kind.

    The server alone reads it: clients get the weights with the first round. Raises SettingsError if nothing fits.
    """
    path = find(file, "task.start")
    try:
        held, _ = read_tensors(path)
    except Damaged as error:
        raise SettingsError(f"task.start = {file!r}: {path}: {error}") from None
    buffers = {
        name: layout[name]
        for group, layout in model.buffer_layouts.items()
        if group in model.buffers
        for name in layout
    }
    wanted = {**model.layout, **buffers}
    here = model.module.state_dict(keep_vars=True)
    taken = {name for name in wanted if name in held and held[name].shape == here[name].shape}
    if not taken & model.layout.keys():
        raise SettingsError(
            f"task.start = {file!r}: none of its {len(held)} tensors ({_some(held)}) is a parameter of this model "
            f"({_some(model.layout)}), by name and shape"
        )
    with torch.no_grad():
        for name in taken:
            here[name].data.copy_(held[name])
    others = [name for name in wanted if name in held and name not in taken]
    left = {
        "begin anew, the file has none of that name": [name for name in wanted if name not in held],
        "begin anew, the file's have another shape": others,
        "of the file are not used: the model has no such, or they are frozen or personal": [
            name for name in held if name not in wanted
        ],
    }
    notes = [f"task.start: {len(taken)} of {len(wanted)} tensors are those of {path.name}"]
    return notes + [f"task.start: {len(names)} {what}: {_some(names)}" for what, names in left.items() if names]


def _some(names: Iterable[str]) -> str:
    all_ = sorted(names)
    return ", ".join(all_[:SHOWN]) + (f" and {len(all_) - SHOWN} more" if len(all_) > SHOWN else "")
