"""The door of the control port: who calls, and whether that role may. In front of Flower's own HTTP application."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.proto.control_pb2 import StartRunResponse, StopRunRequest
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.files import write_atomically
from server.deploy.users import Role, User, Users, Wrong

FLOWER, OWN, RUNTIME = "/v1/control/", "/fedkeel/v1/", "/v1/runtime/"
"""Flower's control API, ours, and that of the server apps, which have tokens of their own."""

LOOKS = ("list-", "get-run-series", "show-federation", "stream-")
MOST_BODY = 2**20
NOT_PERMITTED = 9  # Flower's code, so that its own commands print the sentence

Told = Callable[[str, str, str], None]
"""Who, what and why it was refused; "" as why: a run, what by its id, was submitted."""


class Owners:
    """Run id -> who submitted it, in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()

    def all(self) -> dict[str, str]:
        """Every owner that is known."""
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def note(self, run_id: int, name: str) -> None:
        """This user has submitted this run."""
        with self._lock:
            write_atomically(self._path, json.dumps({**self.all(), str(run_id): name}).encode())


def needed(method: str, path: str) -> Role | None:
    """The role that a call needs; None: none, it has another guard or tells nothing. What is unknown needs the most."""
    if path.startswith(RUNTIME) or path == "/health":
        return None
    if path.startswith(FLOWER):
        call = path.removeprefix(FLOWER)
        if call.startswith(LOOKS):
            return Role.look
        # A user may stop a run of one's own: see `Gate`.
        return Role.submit if call in ("start-run", "stop-run") else Role.operate
    if path.startswith(OWN):
        return Role.look if method == "GET" else Role.submit  # each handler knows whose run it is
    return Role.operate


class Gate:
    """ASGI middleware. `scope["state"]["user"]` is who called, for the handlers behind."""

    def __init__(self, app: ASGIApp, users: Users, owners: Owners, told: Told) -> None:
        self._app, self._users, self._owners, self._told = app, users, owners, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            await (
                self._app(scope, receive, send) if scope["type"] == "lifespan" else send({"type": "websocket.close"})
            )
            return
        role = needed(scope["method"], scope["path"])
        if role is None:
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        address = (scope.get("client") or ("unknown", 0))[0]
        name = "nobody"
        try:
            user = await run_in_threadpool(self._users.user, header, address)
            name = user.name
            if not user.role.covers(role):
                raise Wrong(403, f"{name} may {user.role}; this needs {role}")
            if scope["path"] == f"{FLOWER}stop-run" and user.role is not Role.operate:
                receive = await self._own_run(user, receive)
        except Wrong as error:
            self._told(name if name != "nobody" else address, scope["path"], str(error))
            answer = JSONResponse({"code": NOT_PERMITTED, "detail": str(error)}, error.status)
            await answer(scope, receive, send)
            return
        scope.setdefault("state", {})["user"] = user
        if scope["path"] == f"{FLOWER}start-run":
            send = self._noting(user, send)
        await self._app(scope, receive, send)

    async def _own_run(self, user: User, receive: Receive) -> Receive:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > MOST_BODY or not message.get("more_body"):
                break
        try:
            run_id = StopRunRequest.FromString(body).run_id
        except Exception:  # protobuf raises errors of its own in its C part
            raise Wrong(403, f"{user.name} may stop runs of one's own; this names none") from None
        if self._owners.all().get(str(run_id)) != user.name:
            raise Wrong(403, f"run {run_id} is not {user.name}'s; to stop it needs {Role.operate}")
        read = False

        async def again() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        return again

    def _noting(self, user: User, send: Send) -> Send:
        status, body = 0, b""

        async def noted(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                body += message.get("body", b"")
                if status == 200 and not message.get("more_body"):
                    await run_in_threadpool(self._note, user, body)
            await send(message)

        return noted

    def _note(self, user: User, body: bytes) -> None:
        if run_id := _run_id(body):
            self._owners.note(run_id, user.name)
            self._told(user.name, str(run_id), "")


def _run_id(body: bytes) -> int:
    try:
        return int(StartRunResponse.FromString(body).run_id)
    except Exception:  # as above
        return 0


def user_of(request: Any) -> User:
    """Who called, for a handler; without users, whoever reaches the port may do all."""
    return getattr(request.state, "user", None) or User("", Role.operate, "")
