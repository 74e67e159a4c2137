"""What command-line options of both sides are checked for beyond their type."""

from __future__ import annotations

import math
from typing import Any

import typer


def finite(value: Any) -> Any:
    """A callback for options of numbers: "nan" and "inf" parse as numbers, pass every range and never come true."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if each is not None and not math.isfinite(each):
            raise typer.BadParameter(f"{each} is no finite number")
    return value
