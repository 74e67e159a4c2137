"""What command-line options of both sides are checked for beyond their type."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A value in place of the file's: local.lr=0.1; may be given again."
    ),
]


def finite(value: Any) -> Any:
    """A callback for options of numbers: "nan" and "inf" parse as numbers, pass every range and never come true."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if each is not None and not math.isfinite(each):
            raise typer.BadParameter(f"{each} is no finite number")
    return value
