"""What a source of labelled data holds, unchecked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Raw:
    """What a source holds, unchecked: arrays of n examples each. Labels are integers or text; `classes` are their names
    or number, where the source declares them."""

    inputs: NDArray[Any] | None
    labels: NDArray[Any] | None
    groups: NDArray[Any] | None = None
    test_inputs: NDArray[Any] | None = None
    test_labels: NDArray[Any] | None = None
    classes: tuple[str, ...] | int | None = None
    columns: tuple[str, ...] = ()
    """Which column each number of an input is, where the inputs are columns side by side."""
