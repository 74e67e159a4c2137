"""Objects by name, as "module:attribute"."""

from __future__ import annotations

import importlib
from typing import Any


def load(reference: str) -> Any:
    """Import what a reference names. Raises ValueError if it is none, and whatever the import raises."""
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ValueError("allowed: package.module:function")
    return getattr(importlib.import_module(module), attribute)
