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
    text = "-".join(map(_value, value)) if isinstance(value, list) else value if isinstance(value, str) else None
    if text is None:
        text = json.dumps(value, sort_keys=True, default=str)
    readable = slug(text)
    # What the readable form leaves out (a sign, a bracket, capitals) must still tell two values apart.
    return readable if readable == text else f"{readable}-{_hash(json.dumps(value, default=str))}".strip("-")


def shortened(text: str) -> str:
    """At most 80 characters; a hash stands for what is cut off."""
    return text if len(text) <= MOST else f"{text[: MOST - 9].rstrip('-._')}-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
