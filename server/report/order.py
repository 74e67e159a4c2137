"""The order of a report's rows: that of the plan's file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import SettingsError
from common.settings import tables_of, text_of
from server.compare.plan import axes, combinations
from server.compare.standings import PLAN
from server.report.groups import Group


def ordered(groups: Sequence[Group]) -> list[Group]:
    """Points as the grid goes, in each the variants as they are written; plans, and groups of no plan, as they came."""
    came: dict[Path | None, int] = {}
    files: dict[Path, tuple[list[str], list[str]]] = {}

    def place(one: Group) -> tuple[int, int, int]:
        folder = one.runs[0].folder.resolve().parent.parent if one.plan else None
        at = came.setdefault(folder, len(came))
        if folder is None:
            return at, 0, 0
        if folder not in files:
            files[folder] = _of(folder / PLAN)
        variants, points = files[folder]
        return at, _index(points, _key(one.point)), _index(variants, one.variant)

    found = sorted(groups, key=place)
    for number, one in enumerate(found):
        one.number = number
    return found


def _of(path: Path) -> tuple[list[str], list[str]]:
    """Names of the variants and keys of the points; nothing of a file that is missing or broken."""
    try:
        tables = tables_of(text_of(path, "plan file"), PLAN)
        variants = [str(one.get("name")) for one in tables.get("variants") or ()]
        return variants, [_key(point) for point in combinations(axes(tables.get("grid") or {}, "grid"))]
    except (SettingsError, ValueError, AttributeError, TypeError):
        return [], []


def _key(point: dict[str, Any]) -> str:
    return json.dumps(point, sort_keys=True, default=str)


def _index(known: Sequence[str], name: str) -> int:
    """After all others if it is not known: the file was changed since."""
    return known.index(name) if name in known else len(known)
