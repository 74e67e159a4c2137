"""HTML from the templates in `templates/`, which escape all that is put into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).with_name("templates")

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def render(template: str, **values: Any) -> str:
    """A whole template."""
    return _ENVIRONMENT.get_template(template).render(values)


def part(macro: str, *values: Any) -> str:
    """A macro of `parts.html`."""
    return str(getattr(_ENVIRONMENT.get_template("parts.html").module, macro)(*values))
