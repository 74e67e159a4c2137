"""Names for clients that have none: one image started many times, each as another client of the same experiment.

A name is a folder below one root that all of them see, and holding it is holding that folder's lock. So it is free once
its process has ended, however it ended, and whoever takes it next finds what the client of that name remembers.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from client.memory.folder import OpenMemory, open_memory
from common.files import InUse

log = logging.getLogger("client.memory.names")

AGAIN_S = 1.0
MOST = 10**6


def claim(root: Path, most: int | None, stop: threading.Event) -> tuple[str, OpenMemory] | None:
    """The lowest free name "0", "1", ... below `root`, and its memory folder, held.

    `most`: of the first so many names; waits until one of them is free. None if `stop` comes first. Raises
    SettingsError if the folder cannot be used.
    """
    said = False
    while not stop.is_set():
        for name in map(str, range(most or MOST)):
            with suppress(InUse):
                return name, open_memory(root / name)
        if not said:
            log.info("all %s names in %s are held; waiting until one is free", most, root)
            said = True
        stop.wait(AGAIN_S)
    return None
