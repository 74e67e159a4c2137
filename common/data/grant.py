"""What an experiment may name on this machine: code, files and downloads. Whoever opens what a setting names asks here.

On one's own machine (in process, under VCE, `python -m server local`) everything is granted. At a site nothing is but
what its owner said, so that whoever runs a server cannot open files, run code or start downloads there by naming them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath

from common.errors import Denied
from common.settings import shown

_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Grant:
    """`None` stands for anything. Two that are equal let the same be done: what is built under one serves the other."""

    tasks: tuple[str, ...] | None = None
    """References `module:function` that may be imported."""
    files: tuple[str, ...] | None = None
    """Files, or folders with all in them: absolute paths, their parts with *, ? and [...]."""
    downloads: tuple[str, ...] | bool | None = None
    """Names that may be fetched or read from the hub's cache; True: those of this project's own data sets."""

    def task(self, name: str, setting: str = "task.name") -> None:
        """Raise Denied unless `module:name` may be imported; `setting` is the key that names it."""
        if self.tasks is not None and name not in self.tasks:
            raise Denied(
                "task-denied",
                f"{setting} = {shown(name)} is none of this project's, and the site has not allowed it "
                "(--allow-task, or `tasks` of its policy)",
            )

    def paths(self, places: Sequence[str], what: str, named: str) -> list[str]:
        """Those of `places` that may be opened; `what` = `named` is the setting. Raises Denied if there is none.

        What is not granted is told by its name alone: no file system is asked, so that the answer says nothing about
        what there is. A grant holds for what a path leads to, too: a link out of it is none.
        """
        if self.files is None:
            return list(places)
        plain = [] if named.startswith("~") or "\0" in named else [os.path.abspath(place) for place in places]
        within = [place for place in plain if self._holds(place)]
        if kept := [place for place in within if self._holds(os.path.realpath(place), real=True)]:
            return kept
        raise Denied(
            "file-denied",
            f"{what} = {shown(named)}: the site has not allowed files of this name (`files` of its policy)",
        )

    def file(self, path: str) -> bool:
        """Whether a path may be opened; nothing is said of whether there is one."""
        try:
            return bool(self.paths([path], "", path))
        except Denied:
            return False

    def download(self, name: str, what: str, own: bool = False) -> None:
        """Raise Denied unless `name` may be fetched, or be looked for where earlier downloads lie. `own`: it is one of
        this project's data sets."""
        if self.downloads is None or (own and self.downloads is True):
            return
        if isinstance(self.downloads, bool) or name not in self.downloads:
            raise Denied(
                "download-denied",
                f"{what}: the site has not allowed downloads of this name (`downloads` of its policy)",
            )

    def _holds(self, path: str, real: bool = False) -> bool:
        return any(_covers(PurePath(_real(each) if real else each), PurePath(path)) for each in self.files or ())


EVERYTHING = Grant()
NOTHING = Grant((), (), ())

_granted: ContextVar[Grant | None] = ContextVar("granted", default=None)
_otherwise = EVERYTHING


def granted() -> Grant:
    """What holds here and now."""
    held = _granted.get()
    return _otherwise if held is None else held


@contextmanager
def granting(grant: Grant) -> Iterator[None]:
    """Let a grant hold for what is called within."""
    token = _granted.set(grant)
    try:
        yield
    finally:
        _granted.reset(token)


def close() -> None:
    """From now on nothing is granted in this process outside of `granting`: what a thread or a later change opens
    beside it is refused, not let through."""
    global _otherwise
    _otherwise = NOTHING


def pattern_fault(pattern: str) -> str:
    """Why a text cannot be one of `files`, as a sentence; "" if it can."""
    whole = os.path.expanduser(pattern)
    if "\0" in whole or not os.path.isabs(whole):
        return "allowed: absolute paths, or such that begin with ~/"
    if ".." in PurePath(whole).parts or len(PurePath(whole).parts) < 2:
        return "allowed: a file or folder below /, without '..'"
    return ""


def _covers(pattern: PurePath, path: PurePath) -> bool:
    """Whether a path is what a pattern names, or lies in it."""
    return len(path.parts) >= len(pattern.parts) and all(map(fnmatchcase, path.parts, pattern.parts))


def _real(pattern: str) -> str:
    """A pattern whose fixed beginning is without links."""
    parts = PurePath(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if _WILD.search(part)), len(parts))
    return os.path.join(os.path.realpath(os.path.join(*parts[:fixed])), *parts[fixed:])
