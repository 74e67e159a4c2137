"""Names that people give: to experiments, to sites. They become names of folders."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator

MOST_SHOWN = 80


def shown(value: Any) -> str:
    """A value for an error message: its repr, of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


def name_fault(name: str) -> str:
    """Why a text cannot name an experiment or a client, which become folders, as a sentence; "" if it can."""
    if re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        return ""
    return (
        f"{shown(name)} is no name: a name has 1 to 100 of the letters a to z and A to Z, digits, '.', '_' and '-', "
        "and begins with a letter or a digit"
    )


def _named(name: str) -> str:
    if fault := name_fault(name):
        raise ValueError(fault.partition(": ")[2])
    return name


Name = Annotated[str, AfterValidator(_named)]
"""A field that holds a name."""
