"""Where data files lie."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import SettingsError


def find(file: str, what: str, folders: bool = False) -> Path:
    """The path of a data file (or, with `folders`, folder): as it is, else in the folder that FEDKEEL_DATA names."""
    places = [Path(file).expanduser()]
    if "FEDKEEL_DATA" in os.environ:
        places.append(Path(os.environ["FEDKEEL_DATA"]) / file)
    for place in places:
        if place.is_file() or (folders and place.is_dir()):
            return place
    looked = " and ".join(str(place.absolute()) for place in places)
    hint = "" if len(places) > 1 else "; FEDKEEL_DATA names no other folder"
    kind = "file or folder" if folders else "file"
    raise SettingsError(f"{what} = {file!r}: no such {kind}; looked for {looked}{hint}")
