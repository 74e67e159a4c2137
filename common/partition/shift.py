"""Feature shift: what a client's inputs look like, beside which examples it holds.

Client i of N, counted from 1, with the strength s of `partition.shift_strength`:

    noise       x + N(0, (s i/N)^2) in units of [0, 1], after NIID-Bench's feature skew (arXiv 2102.02079, 4.3), whose
                text calls s i/N the variance; here it is the standard deviation
    rotation    by 0, 90, 180 or 270 degrees counter-clockwise, client after client in turn; exact, no strength
    brightness  x (1 - s i/N): the last one sees the least light
    contrast    m + (1 - s i/N) (x - m) with the mean m of each example

uint8 inputs stand for x = byte / 255 and stay uint8, rounded and clipped; floats are neither. A client's training and
evaluation examples are shifted once, where they are loaded; a central test set never is, nor a site's own file.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.data.examples import ClientData, Examples
from common.errors import SettingsError
from common.partition.assignment import Assignment
from common.seeds import derive

BLOCK = 4096
"""Examples that are changed at a time: bounds the memory for a client of very many."""


def check_shift(assignment: Assignment, inputs: Tensor) -> None:
    """Raise SettingsError if inputs (n, ...) cannot be shifted in the plan's way: token ids, rotated vectors."""
    if assignment.shift == "none":
        return
    what, shape = f"partition.shift = {assignment.shift!r}", tuple(inputs.shape[1:])
    if inputs.dtype != torch.uint8 and not inputs.is_floating_point():
        raise SettingsError(
            f"{what}: one input of this task is {inputs.dtype} {shape}; allowed: uint8 and floats, for others 'none'"
        )
    if assignment.shift == "rotation" and _sides(inputs) is None:
        raise SettingsError(
            f"{what}: one input of this task is {shape}; allowed for square images (h, h), (h, h, channels) or "
            "(channels, h, h); for others noise, brightness, contrast or none"
        )


def shifted(data: ClientData, assignment: Assignment, client: int) -> ClientData:
    """The data of client number `client` (from 0) as this plan's shift makes it: new tensors, or `data` itself.

    A function of the plan's seed, the client's number and the examples alone; training and evaluation examples get
    noise of their own. Raises SettingsError as `check_shift` does.
    """
    if assignment.shift == "none":
        return data
    check_shift(assignment, data.train.inputs)
    return ClientData(
        _examples(data.train, assignment, client, "train"),
        _examples(data.evaluate, assignment, client, "evaluate"),
        data.steps,
    )


def _examples(examples: Examples, assignment: Assignment, client: int, part: str) -> Examples:
    sides = _sides(examples.inputs)
    if assignment.shift == "rotation" and sides:
        return Examples(torch.rot90(examples.inputs, client % 4, sides).contiguous(), examples.targets)
    strength = assignment.shift_strength * (client + 1) / len(assignment.clients)
    chance = np.random.default_rng(derive(assignment.seed, "shift", str(client), part))
    blocks = [_block(block, assignment.shift, strength, chance) for block in torch.split(examples.inputs, BLOCK)]
    return Examples(torch.cat(blocks), examples.targets)


def _block(inputs: Tensor, shift: str, strength: float, chance: np.random.Generator) -> Tensor:
    """Some inputs (b, ...), changed in floats and put back into their own dtype."""
    white = 255.0 if inputs.dtype == torch.uint8 else 1.0
    values = inputs.float() if inputs.dtype == torch.uint8 else inputs
    if shift == "noise":
        # numpy's stream is the same on every machine; torch's follows the processor's vector width.
        noise = torch.from_numpy(chance.standard_normal(tuple(inputs.shape), np.float32)).to(values.dtype)
        values = values + noise * (white * strength)
    else:
        mean = values.flatten(1).mean(1).view(-1, *[1] * (inputs.ndim - 1)) if shift == "contrast" else 0.0
        values = mean + (values - mean) * (1.0 - strength)
    return values.round().clamp(0, 255).to(torch.uint8) if inputs.dtype == torch.uint8 else values


def _sides(inputs: Tensor) -> tuple[int, int] | None:
    """The two dimensions of square images, or None."""
    pairs = {3: [(1, 2)], 4: [(1, 2), (2, 3)]}.get(inputs.ndim, [])
    return next(((a, b) for a, b in pairs if inputs.shape[a] == inputs.shape[b]), None)
