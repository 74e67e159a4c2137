"""Command lines of this project as documents and units have them, parsed but not run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
import typer


def parsed(words: list[str]) -> dict[str, Any]:
    """What `python -m MODULE COMMAND ...` makes of its words: options that are not there raise."""
    python, m, module, *rest = words
    assert (python, m) == ("python", "-m")
    current = typer.main.get_command(import_module(f"{module}.__main__").cli)
    context = click.Context(current)
    while isinstance(current, click.Group):
        current = current.commands[rest.pop(0)]
        context = click.Context(current, parent=context)
    options, left, _ = current.make_parser(context).parse_args(rest)
    assert not left
    return options
