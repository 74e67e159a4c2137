"""Names as labels of metrics: a bounded number of them, whoever chose them."""

from __future__ import annotations

MOST_SITES = 500
"""Names that get series of their own, the first to be seen; all later ones are "other". A name in a record is on the
roll: of nodes.toml, where there are keys, else of the first to come."""


class Names:
    """Remembers which names have series."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def shown(self, name: str) -> str:
        """The label of a name."""
        if name not in self._known and len(self._known) < MOST_SITES:
            self._known.add(name)
        return name if name in self._known else "other"
