"""A file that grows while another process writes it."""

from __future__ import annotations

import os
from pathlib import Path


class Tail:
    """The new whole lines of a file that grows, or that is cut or replaced by another one as a whole."""

    def __init__(self, path: Path, skip: bool = False) -> None:
        self._path, self._offset, self._file = path, 0, 0
        self.anew = True
        """Whether the last call began at the start of the file."""
        if skip and path.exists():
            self._offset, self._file = path.stat().st_size, path.stat().st_ino

    def lines(self) -> list[str]:
        """What was added since the last call; all, if the file is another one or shorter than it was."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                self.anew = about.st_ino != self._file or about.st_size < self._offset
                if self.anew:
                    self._file, self._offset = about.st_ino, 0
                file.seek(self._offset)
                added = file.read()
        except OSError:
            self.anew = False
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        # Not `splitlines`, for which more ends a line than what ends a line of these files.
        return whole.decode("utf-8", "replace").split("\n")[:-1]
