"""Names that people give: to experiments, to sites. They become names of folders."""

from __future__ import annotations

import re

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


def is_name(text: str) -> bool:
    """Whether a text is a name: letters, digits, '.', '_' and '-', at most 100, no leading sign."""
    return re.fullmatch(NAME, text) is not None
