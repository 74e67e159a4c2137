"""Where data files lie, and which of them may be opened."""

from __future__ import annotations

import os
from pathlib import Path

from common.data.grant import granted
from common.errors import SiteError


def find(file: str, what: str, folders: bool = False) -> Path:
    """The path of a data file (or, with `folders`, folder) that the setting `what` names: as it is, else in the folder
    that FEDKEEL_DATA names.

    Every file that an experiment names is found here, and nowhere else: at a site only those are that it has granted.
    Raises Denied for others, whether there are such or not, and SettingsError if there is none.
    """
    return _found(granted().paths(_places(file), what, file), file, what, folders)


def own(file: str, what: str, folders: bool = False) -> Path:
    """The same for a path that this machine's owner typed, such as --data: it needs no grant."""
    return _found(_places(file), file, what, folders)


def _places(file: str) -> list[str]:
    root = os.environ.get("FEDKEEL_DATA")
    return [os.path.expanduser(file), *([os.path.join(root, file)] if root is not None else [])]


def _found(places: list[str], file: str, what: str, folders: bool) -> Path:
    for place in map(Path, places):
        if place.is_file() or (folders and place.is_dir()):
            return place
    looked = " and ".join(os.path.abspath(place) for place in places)
    hint = "" if "FEDKEEL_DATA" in os.environ else "; FEDKEEL_DATA names no other folder"
    kind = "file or folder" if folders else "file"
    raise SiteError("data-absent", f"{what} = {file!r}: no such {kind}; looked for {looked}{hint}")
