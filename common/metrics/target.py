"""A value of a metric that a run is to reach: 0.9 of the headline, "f1 = 0.8", "mae = 2.5"."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """`metric`: its name; "" for the one that stands for the run."""

    value: float
    metric: str = ""

    @classmethod
    def parse(cls, given: object) -> Target:
        """From a number, or from text: a number, or METRIC=NUMBER. Raises ValueError for anything else."""
        if isinstance(given, Target):
            return given
        metric, _, number = str(given).rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if isinstance(given, bool) or not math.isfinite(value) or ("=" in str(given) and not metric.strip()):
            raise ValueError(f"{given!r} is no target; allowed: a number, of the headline, or METRIC=NUMBER")
        return cls(value, metric.strip())

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}" if self.metric else f"{self.value:g}"
