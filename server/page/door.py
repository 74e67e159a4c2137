"""What stands before the page: by which names it answers, whose buttons it heeds, what a browser is to forbid it."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.deploy.addresses import ip_address
from common.settings import printable

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Door:
    """ASGI middleware. A name that is not its own in Host is one that somebody has made to point here (DNS rebinding):
    an address and localhost cannot be made to."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                for key, value in HEADERS.items():
                    headers[key] = value
                message["headers"] = headers.raw
            await send(message)

        if why := self._fault(scope):
            await PlainTextResponse(why + "\n", 403)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)

    def _fault(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = re.sub(r":\d{1,5}$", "", host).strip("[]").rstrip(".").lower()
        if name not in self._names and ip_address(name) is None:
            return f"this page is not called {printable(name[:100])}: open it by its address, or name it in --page"
        origin = headers.get("origin")
        if scope["method"] not in ("GET", "HEAD") and origin is not None and origin != f"{scope['scheme']}://{host}":
            return "this is another page's button"
        return ""
