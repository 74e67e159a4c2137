"""Nested tables as dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key, such as "local.lr", and value of everything that is no table itself."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
