"""What stands in front of Flower's control API in the SuperLink's process: who calls, and runs, sites and the queue."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from flwr.superlink import extensions
from starlette.middleware import Middleware

from common.deploy.audit import NAME, AuditLog
from server.deploy.gate import Gate, Owners
from server.deploy.queue import Queue
from server.deploy.runs_api import routes
from server.deploy.seldom import Seldom
from server.deploy.users import Users

USERS, TOKEN, BOOKS, AUDIT = "FEDKEEL_USERS", "FEDKEEL_OWN_TOKEN", "FEDKEEL_BOOKS", "FEDKEEL_AUDIT"
"""In the SuperLink's environment: the users file, the token of the process that started it, the folder of what it keeps
beside Flower's database, and its audit log, if that lies elsewhere."""
OWNERS = "owners.json"

log = logging.getLogger("flwr")


def install(program: Any) -> AuditLog | None:
    """Put the door before the application that `program` (Flower's module) is about to start; returns the audit log."""
    place, log_file = os.environ.pop(BOOKS, ""), os.environ.pop(AUDIT, "")
    path, own = os.environ.pop(USERS, ""), os.environ.pop(TOKEN, "")
    if not place:
        return None
    books = Path(place)
    audit = AuditLog(log_file or books / NAME, "superlink")
    owners, queue = Owners(books / OWNERS), Queue(books)

    seldom = Seldom()

    def told(who: str, what: str, why: str) -> None:
        if not why:
            audit.try_record("submitted", actor=who, run=what)
            return
        if not seldom.due((who, why)):
            return  # who guesses must not fill the disk
        log.warning("refused %s at the control port: %s: %s", who, what, why)
        audit.try_record("control", "refused", actor=who, call=what, why=why)

    before = extensions.configure_app

    def configure(app: FastAPI) -> None:
        before(app)
        app.router.routes.extend(routes(app, queue, owners, audit))

    extensions.configure_app = configure
    if path:
        door = Middleware(Gate, users=Users(Path(path), own), owners=owners, told=told)
        extensions.get_middleware = lambda: (door,)
        _close_runtime(program, books)
    return audit


def _close_runtime(program: Any, books: Path) -> None:
    """Flower's helper that starts server apps claims their tasks at the same port: with a secret, or anyone could."""
    secret = books / ".helper"
    secret.unlink(missing_ok=True)
    with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    parse, command = program._parse_superlink_lifespan_config, program._get_superexec_command
    program._parse_superlink_lifespan_config = lambda: dataclasses.replace(
        parse(), superexec_auth_secret=secret.read_bytes()
    )
    program._get_superexec_command = lambda **words: [*command(**words), "--superexec-auth-secret-file", str(secret)]
