"""A live page of runs: rounds as they come, curves, sites, the queue, a stop button. Nobody waits for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.page.serve import Page  # a command without a page imports nothing of it


def page_at(address: str | None, title: str = "", **options: Any) -> AbstractContextManager[Page | None]:
    """A page at [HOST:]PORT, entered; without an address None. `options`: as those of `Page`."""
    if address is None:
        return nullcontext()
    from server.page.serve import Page  # as above

    return Page(address, title, **options)
