"""The page over HTTP: the files of the page, a stream of what changes, buttons; who may, and what a browser may do."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from common.deploy.serving import in_thread
from common.errors import RunError, SettingsError
from server.deploy.users import Role, User, Users, Wrong
from server.page.door import Door
from server.page.hub import Hub
from server.page.table import MOST_TEXT, Row, text

log = logging.getLogger("server.page")

TEMPLATES = Path(__file__).with_name("templates")
FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "stream.js": "text/javascript",
    "chart.js": "text/javascript",
    "tables.js": "text/javascript",
    "sites.js": "text/javascript",
    "words.js": "text/javascript",
}
MOST_STREAMS = 50
BEAT_S = 10.0
"""A sign of life as often, where nothing changes; then too it is asked whether a user still may look."""
WORDS = {
    401: "this token is not known here, or was removed",
    429: "too many wrong tokens: try again in a minute",
}


def application(hub: Hub, users: Users | None, title: str, names: Collection[str]) -> Door:
    """The page of a hub. Without `users` whoever reaches it looks, and nobody changes anything. `names`: what it may be
    called as a host, beside addresses and localhost."""
    web = _Web(hub, users, title)
    routes = [
        Route("/", web.shell),
        Route("/events", web.events),
        Route("/runs/{key}/{action}", web.act, methods=["POST"]),
        *(Route(f"/{name}", web.file) for name in FILES),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Wrong: _wrong, 500: _failed})
    app.router.redirect_slashes = False
    return Door(app, names)


class _Web:
    def __init__(self, hub: Hub, users: Users | None, title: str) -> None:
        self._hub, self._users = hub, users
        pages = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
        # With users, a stranger is not even told what runs.
        shell = pages.get_template("page.html").render(title="" if users else title, asks=users is not None)
        self._shell = HTMLResponse(shell)
        self._files = {name: (TEMPLATES / name).read_bytes() for name in FILES}

    async def shell(self, request: Request) -> Response:
        return self._shell

    async def file(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/")
        return Response(self._files[name], media_type=FILES[name])

    async def events(self, request: Request) -> Response:
        """Server-sent events, each a JSON object of what changed; the id of the last one received, sent as
        Last-Event-ID, says from where to go on."""
        user = await self._user(request)
        if self._hub.watching >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} browsers look at this page: close one")
        return StreamingResponse(self._frames(request, user), media_type="text/event-stream")

    async def act(self, request: Request) -> Response:
        """A button. The token comes in a header that no other page can make a browser send."""
        if self._users is None:
            raise HTTPException(403, "this page is read-only: it was started without --users")
        user, source = await self._user(request), self._hub.source
        if not user.role.covers(Role.submit):
            raise HTTPException(403, f"{user.name} may {user.role}; this needs {Role.operate}, or a run of one's own")
        if source is None:
            raise HTTPException(409, "nothing runs yet")
        token = request.headers["authorization"].partition(" ")[2].strip()
        key, action = request.path_params["key"], request.path_params["action"]
        try:
            status = await in_thread(lambda: source.act(user, token, key, action), "page asks")
        except (RunError, SettingsError, OSError) as error:
            raise HTTPException(409, text(error, 2 * MOST_TEXT)) from None
        return JSONResponse({"status": status})

    async def _user(self, request: Request) -> User:
        if (users := self._users) is None:
            return User("", Role.look, "")
        header = request.headers.get("authorization", "")
        address = request.client.host if request.client else "unknown"
        return await in_thread(lambda: users.user(header, address), "page asks")

    async def _frames(self, request: Request, user: User) -> AsyncIterator[str]:
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        hub, wanted, key = self._hub, request.query_params.get("run", ""), ""
        tick, before = _place(request.headers.get("last-event-id", ""), hub.epoch)
        yield _frame("hello", self._hello(user))
        with hub.listening(tell):
            try:
                while True:
                    changed.clear()
                    ended = hub.ended
                    if (chosen := hub.chosen(wanted)) != key:
                        hub.watch(chosen, key)
                        # What an earlier stream showed is gone on with only if it was of this run.
                        trail_tick = tick if not key and chosen == before else -1
                        key = chosen
                        found, tick = hub.since(key, tick, trail_tick)
                        found = {"run": key, **({"reset": True} if trail_tick < 0 else {}), **found}
                    else:
                        found, tick = hub.since(key, tick, tick)
                    if found:
                        yield _frame("news", found, f"{hub.epoch}.{tick}.{key}")
                    if ended:
                        yield _frame("end", {})
                        return
                    try:
                        await asyncio.wait_for(changed.wait(), BEAT_S)
                    except TimeoutError:
                        yield ": here\n\n"
                    await self._user(request)
            except Wrong as error:
                yield _frame("out", {"why": WORDS.get(error.status, str(error))})
            finally:
                hub.watch("", key)

    def _hello(self, user: User) -> Row:
        source = self._hub.source
        actions = list(source.actions) if source and self._users else []
        return {"user": user.name, "role": user.role.value, "asks": self._users is not None, "actions": actions}


def _place(last: str, epoch: str) -> tuple[int, str]:
    """Tick and run of the last event that a browser got from this process; -1 for none."""
    head, _, rest = last.partition(".")
    tick, _, key = rest.partition(".")
    return (int(tick), key) if head == epoch and tick.isascii() and tick.isdecimal() and len(tick) < 20 else (-1, "")


def _frame(event: str, data: Row, id: str = "") -> str:
    # JSON in ASCII: no line of it ends before its end.
    body = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return (f"id: {id}\n" if id else "") + f"event: {event}\ndata: {body}\n\n"


async def _wrong(_: Request, error: Exception) -> Response:
    status = getattr(error, "status", 401)
    return JSONResponse({"detail": WORDS.get(status, str(error))}, status)


async def _refused(_: Request, error: Exception) -> Response:
    status: Any = getattr(error, "status_code", 400)
    return JSONResponse({"detail": getattr(error, "detail", "")}, status)


async def _failed(_: Request, error: Exception) -> Response:
    log.error("the page failed", exc_info=error)
    return JSONResponse({"detail": "see the log of this process"}, 500)
