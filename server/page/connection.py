"""A browser's connection: one that asks for nothing is not kept."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

FIRST_S = 10.0
"""So long a connection may take to ask for something: who only holds places keeps nobody out for longer."""


class Connection(H11Protocol):
    """As uvicorn's, with an end for one that has not asked in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(FIRST_S, self._unless_asked)

    def connection_lost(self, error: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(error)

    def _unless_asked(self) -> None:
        if self.cycle is None:
            self.transport.abort()
