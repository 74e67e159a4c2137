"""What comes from the network again and again is told now and then: whoever tries must not fill a log."""

from __future__ import annotations

import time
from collections.abc import Hashable

SILENT_S = 60.0
MOST = 1000
"""Things that are remembered; there may be any number."""


class Seldom:
    """Says of each thing whether it is due: once in `SILENT_S` seconds."""

    def __init__(self) -> None:
        self._last: dict[Hashable, float] = {}

    def due(self, what: Hashable) -> bool:
        """Whether to tell of it now."""
        now = time.monotonic()
        if now - self._last.get(what, -SILENT_S) < SILENT_S:
            return False
        if len(self._last) > MOST:
            self._last.clear()
        self._last[what] = now
        return True
