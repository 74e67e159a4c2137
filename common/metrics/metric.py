"""A metric as sums over examples: those of batches and of clients are added, and of the total one number is made.

So a federated value is the one that pooled data would give, and no mean of means.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.errors import SettingsError
from common.settings import shown

# Imported where used: torchmetrics takes seconds that only who names one of its metrics waits for.

if TYPE_CHECKING:
    import torchmetrics

MOST_SUMS = 1 << 20
"""Numbers in a metric's sums, and in all of a client's: more would be no summary of the examples any more."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.@/ -]{0,59}")

Sums = Callable[[Any, Any], "Tensor | Sequence[float | Tensor]"]
"""(outputs, targets) of a batch -> the sums over its examples: as many numbers as the metric's `size`."""

Finalize = Callable[[Tensor], "float | Tensor | Mapping[str, float]"]
"""The total (size,) in float64 -> the value, or values by part with the metric's own under ""; NaN where there is
none."""


@dataclass(frozen=True)
class Metric:
    """Raises SettingsError for a name or size that cannot be."""

    name: str
    size: int
    sums: Sums
    finalize: Finalize
    higher: bool = True
    """Whether more is better."""
    reveals: str = ""
    """What its sums over a site's examples say of the labels there, beside the value: "class counts" for instance."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise SettingsError(
                f"a metric is called {shown(self.name)}; allowed: a letter, then up to 59 of a-z 0-9 . _ -"
            )
        if type(self.size) is not int or not 1 <= self.size <= MOST_SUMS:
            raise SettingsError(f"metric {self.name}: size = {self.size!r}; allowed: 1 to {MOST_SUMS}")

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """The sums (size,) over a batch in float64, on the outputs' device.

        Raises SettingsError, with the metric's name, for what is no list of so many numbers.
        """
        given: Any = self.sums(outputs, targets)
        try:
            if not isinstance(given, Tensor):
                given = torch.stack([torch.as_tensor(each, dtype=torch.float64).cpu() for each in given])
            found: Tensor = given.detach().double()
        except (TypeError, ValueError, RuntimeError):
            raise SettingsError(f"metric {self.name}: {described(given)}; needed: {self.size} numbers") from None
        if found.shape != (self.size,):
            raise SettingsError(f"metric {self.name}: {described(found)}; needed: {self.size} numbers")
        return found

    def values(self, total: Tensor) -> dict[str, float]:
        """What the sums (size,) come to: {name: value}, and name.part of each part. NaN where there is no number."""
        try:
            found = self.finalize(total)
        except (ArithmeticError, ValueError):
            return {self.name: math.nan}
        parts = found if isinstance(found, Mapping) else {"": found}
        return {f"{self.name}.{part}" if part else self.name: float(value) for part, value in parts.items()}


def described(value: Any) -> str:
    """What something is that should have been numbers, in a word; nothing of its content."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def of_torchmetrics(
    name: str,
    metric: torchmetrics.Metric,
    *,
    higher: bool | None = None,
    reveals: str = "",
    prepare: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    parts: torchmetrics.Metric | None = None,
    example: tuple[Tensor, Tensor] | None = None,
) -> Metric:
    """A torchmetrics metric whose states add up. `prepare`: outputs and targets as the metric wants them; `parts`: one
    of the same states that gives a value a class, called by its number; `example`: what `update` takes, for a metric
    whose states have the shape of what they are given.

    Raises SettingsError for one that does not add up, naming the state, and if nothing says which way is better.
    """
    better = metric.higher_is_better if higher is None else higher
    if better is None:
        raise SettingsError(f"metric {name}: say which way is better: higher=True or higher=False")
    _require_sums(name, metric)
    held = copy.deepcopy(metric).set_dtype(torch.float64)
    if example is not None:
        held.update(*example)
    states: dict[str, Any] = {key: getattr(held, key) for key in held._defaults}
    layout = {key: (tuple(state.shape), state.dtype) for key, state in states.items()}
    sizes = [math.prod(shape) for shape, _ in layout.values()]

    def sums(outputs: Any, targets: Any) -> Tensor:
        given = prepare(outputs, targets) if prepare else (outputs, targets)
        held.to(given[0].device)
        held.reset()
        held.update(*given)
        return torch.cat([getattr(held, key).double().reshape(-1) for key in layout])

    def value(one: torchmetrics.Metric, total: Tensor) -> Any:
        one.to(total.device)
        one.reset()
        for (key, (shape, dtype)), part in zip(layout.items(), torch.split(total, sizes), strict=True):
            setattr(one, key, part.reshape(shape).to(dtype))
        one._update_count = 1
        return one.compute()

    each = None if parts is None else copy.deepcopy(parts).set_dtype(torch.float64)

    def finalize(total: Tensor) -> float | dict[str, float]:
        whole = float(value(held, total))
        if each is None:
            return whole
        return {"": whole, **{str(place): found for place, found in enumerate(value(each, total).tolist())}}

    return Metric(name, sum(sizes), sums, finalize, better, reveals)


def _require_sums(name: str, metric: torchmetrics.Metric) -> None:
    from torchmetrics.utilities import dim_zero_sum

    for state, how in metric._reductions.items():
        if how is not dim_zero_sum or not isinstance(metric._defaults[state], Tensor):
            raise SettingsError(
                f"metric {name}: {type(metric).__name__} does not add up over sites: its state {state!r} is no sum; "
                "many have a form that is, with thresholds=200 for instance"
            )
    if not metric._reductions:
        raise SettingsError(f"metric {name}: {type(metric).__name__} has no state of its own that could be added up")
