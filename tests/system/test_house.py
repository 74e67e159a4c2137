"""The house keeps its order: what import-linter cannot see."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from common.flower import ROOT

PACKAGES = ("server", "client", "strategies", "common")
HEAD = "# Imported where used:"
"""Of a module whose imports inside functions all have one reason."""


def unexplained(path: Path) -> list[str]:
    """Imports inside functions and under TYPE_CHECKING without a comment beside or above them."""
    text = path.read_text("utf-8")
    lines, found = text.splitlines(), []
    if any(line.startswith(HEAD) for line in lines):
        return []
    explained = 0
    for node in sorted(_hidden(ast.parse(text)), key=lambda node: node.lineno):
        own = any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
        above = lines[node.lineno - 2].strip().startswith("#") or node.lineno - 1 == explained
        if own or above:
            explained = node.end_lineno or node.lineno
        else:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    return found


def _hidden(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    checking = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    inside = [node for outer in (*functions, *checking) for node in ast.walk(outer)]
    return list({id(node): node for node in inside if isinstance(node, (ast.Import, ast.ImportFrom))}.values())


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_inside_a_function_says_what_it_saves(package: str) -> None:
    """A circle is cut by moving a definition, not by importing late."""
    assert [line for path in sorted((ROOT / package).rglob("*.py")) for line in unexplained(path)] == []


def test_names_of_rooms_are_not_those_that_the_bundle_drops() -> None:
    """Flower's bundle leaves out folders called lib, env and build."""
    folders = {path.name for package in ("server", "client") for path in (ROOT / package).rglob("*") if path.is_dir()}
    assert not folders & {"lib", "env", "build"}
