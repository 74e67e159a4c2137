"""How a process logs: lines for people, or one JSON object a line for collectors."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import Any, Literal, TextIO


class LogFormat(StrEnum):
    """How lines are written."""

    text = "text"
    json = "json"


Format = Literal["text", "json"]

_OURS = ("client", "server", "strategies", "common")
_OWN_ATTRIBUTES = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(format: Format = "text", level: int = logging.INFO) -> None:
    """Send all logging of this process to stderr, once; a second call replaces the first.

    This project's loggers say what is of `level` and above, all others warnings. Python's warnings and Flower's
    logger come in the same form; with "json" so do exceptions that nobody caught.
    """
    handler = _Stderr()
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()
    for old in [each for each in root.handlers if type(each) in (_Stderr, logging.StreamHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
    _tame_flower()
    if format == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
    else:
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is by then, not to what it was."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class JsonFormatter(logging.Formatter):
    """One line a record: time (UTC), level, logger, message, the fields of `extra`, and an exception as text."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"level": record.levelname, "logger": record.name, "message": _message(record)}
        # Names with "_" are what other libraries note for themselves.
        more = {k: v for k, v in vars(record).items() if k not in _OWN_ATTRIBUTES and not k.startswith("_")}
        taken = {"time", "exception", *fields}
        fields |= {f"{key}_" if key in taken else key: value for key, value in more.items()}
        if record.exc_info and record.exc_info[0]:
            fields["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            fields["exception"] = record.exc_text
        if record.stack_info:
            fields["stack"] = record.stack_info
        return _line(record.created, fields)


def json_line(event: str, **fields: Any) -> str:
    """A line for an event that is no log record, such as a round of a run: time (UTC), event and the fields."""
    return _line(time.time(), {"event": event, **fields})


def _line(created: float, fields: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": at, **fields}
    try:
        return json.dumps(line, allow_nan=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(_plain(line))


def _plain(value: Any, depth: int = 8) -> Any:
    """What every JSON reader takes: no NaN, no keys but text, no cycles."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if depth and isinstance(value, Mapping):
        return {str(key): _plain(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, depth - 1) for each in value]
    return str(value)[:1000]


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # A wrong format string must not cost the line.
        return f"{record.msg} {record.args!r}"


class _OneHandler(logging.Filter):
    """Takes out the coloured handler that Flower's logger gets whenever flwr is first imported.

    Its level is DEBUG, and the root's level does not count for what it passes on: here warnings pass, or what
    FLWR_LOG_LEVEL says.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        logger = logging.getLogger("flwr")
        for handler in [h for h in logger.handlers if type(h).__name__ == "ConsoleHandler"]:
            logger.removeHandler(handler)
        names = logging.getLevelNamesMapping()
        return record.levelno >= names.get(os.environ.get("FLWR_LOG_LEVEL", "").upper(), logging.WARNING)


def _tame_flower() -> None:
    logger = logging.getLogger("flwr")
    if not any(isinstance(each, _OneHandler) for each in logger.filters):
        logger.addFilter(_OneHandler())


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("common.deploy.logs").critical("not caught: %s", error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        where = args.thread.name if args.thread else "a thread"
        logging.getLogger("common.deploy.logs").critical(
            "not caught in %s: %s", where, args.exc_value, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
        )
