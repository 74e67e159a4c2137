"""Names of folders made from what people wrote: readable, the same wherever it stands in a plan."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MOST = 80


def slug(name: str) -> str:
    """A name as that of a folder: lower case letters, digits, "." and single "-"."""
    return shortened(re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-."))


def point_slug(point: Mapping[str, Any]) -> str:
    """A grid point as part of a folder's name: `alpha-0.1_sample-5`; sorted, so that a plan's order is free."""
    short = {key: key.rpartition(".")[2] for key in point}
    clash = len(set(short.values())) < len(short)
    parts = [f"{slug(key if clash else short[key])}-{_value(point[key])}" for key in sorted(point)]
    return shortened("_".join(parts))


def _value(value: Any) -> str:
    """A value as it stands if it can be read back from that: a word, a number, several numbers; else with a hash."""
    exact = json.dumps(value, sort_keys=True, default=str)
    if isinstance(value, str):
        text, plain = value, re.match("[a-z]", value) is not None and value not in ("true", "false", "null")
    elif isinstance(value, list):
        text, plain = "-".join(map(_value, value)), len(value) > 1 and all(map(_positive, value))
    else:
        text, plain = exact, value is not None
    readable = slug(text)
    return readable if plain and readable == text else f"{readable}-{_hash(exact)}".strip("-")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def shortened(text: str) -> str:
    """At most 80 characters; a hash stands for what is cut off."""
    return text if len(text) <= MOST else f"{text[: MOST - 9].rstrip('-._')}-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
