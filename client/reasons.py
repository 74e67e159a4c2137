"""What a site says of something that went wrong: a code and a sentence of this project's; all else stays in its log.

An exception's text may hold a path, a column's name or a cell of the site's data, or what some library found in them.
So none leaves but those of errors that are raised where only the message had been seen (`Sayable`). Code, sentence and
the event's random number stand in the server's history and in the site's log, where the whole text and the trace are.
"""

from __future__ import annotations

import errno
import logging
import secrets
import traceback

from client.training.device import out_of_memory
from common.errors import Sayable, SettingsError, SiteError
from common.settings import printable

log = logging.getLogger("client.app")

# A reason may quote what the server sent.
MOST_REASON = 2000

CODES = {
    "approval-waits": "nobody at the site has approved this run as yet",
    "approval-denied": "somebody at the site has denied this run",
    "approvals-unusable": "the site cannot read which runs were approved",
    "experiment-denied": "the site's policy does not allow this experiment",
    "strategy-denied": "the site's policy does not allow this algorithm",
    "task-denied": "the site has not allowed this task",
    "file-denied": "the site has not allowed a file that the experiment names",
    "download-denied": "the site has not allowed a download that the experiment asks for",
    "steps-denied": "more local steps than the site's policy allows",
    "time-denied": "training takes longer than the site's policy allows",
    "statistics-denied": "the site's policy does not allow statistics of its data",
    "metric-denied": "the site does not share what a metric of this experiment would tell of its labels",
    "norm-denied": "an upload is longer than the site's policy allows",
    "experiment-invalid": "the experiment cannot work; the text says where",
    "message-invalid": "the message cannot be used; the text says why",
    "arithmetic": "this site does not compute as the experiment asks; the text says what to do",
    "client-unknown": "the task has no data of a client of this name",
    "data-missing": "this experiment needs data of the site's own (--data), and it named none",
    "data-absent": "data that the experiment or the site names are not there",
    "data-unused": "this task reads no data of a site's own, and it named some (--data)",
    "data-unreadable": "the site's data cannot be read as this experiment asks",
    "data-shape": "the site's data have another shape than this experiment's",
    "data-columns": "the site's table lacks columns of this experiment's, or has others",
    "data-cells": "cells of the site's table have no value, are no numbers or none of the declared categories",
    "data-unfit": "this experiment's model cannot take one step on the site's data",
    "data-labels": "the site's labels are none of this experiment's classes",
    "task-failed": "task or model cannot be built at this site",
    "evaluation-failed": "the model could not be evaluated by this experiment's metrics at the site",
    "device-unusable": "the device that the site chose is not there",
    "disk-full": "the site's disk is full",
    "memory-failed": "what the site remembers between rounds could not be read or written",
    "out-of-memory": "the site ran out of memory",
    "failed": "something went wrong at the site",
}
"""Code -> its sentence. Those of `Sayable` errors say more: their text follows the code instead."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_STAGE = {"open": "task-failed", "data": "data-unreadable", "evaluate": "evaluation-failed"}
"""Stage -> code of errors that name none."""


def refusal(error: BaseException, where: str, stage: str, names: bool = False) -> str:
    """The reason that a site gives; `where` says for what the server asked. What it does not say is logged here, under
    the same event. `names`: those of columns may leave the site."""
    code, event = code_of(error, stage), secrets.token_hex(3)
    columns = f": it {error.names}" if names and isinstance(error, SiteError) and error.names else ""
    said = str(error) if isinstance(error, Sayable) else f"{CODES[code]}{columns}; its log has more"
    told = clean(f"{where}: {code}: {said}"[: MOST_REASON - 20]) + f" (event {event})"
    detail = [text for text in (str(getattr(error, "detail", "")), _whole(error)) if text]
    log.warning("%s", line(clean("; ".join([told, *detail]))))
    return told


def code_of(error: BaseException, stage: str) -> str:
    """One of CODES."""
    if out_of_memory(error):
        return "out-of-memory"
    if isinstance(error, (Sayable, SiteError)):
        return error.code if error.code in CODES else "failed"
    if stage in ("memory", "save") and isinstance(error, OSError):
        return "disk-full" if error.errno in _FULL else "memory-failed"
    return _OF_STAGE.get(stage, "failed")


def _whole(error: BaseException) -> str:
    """Text and trace of an error that says nothing to the server, on one line: the text may quote the server."""
    if isinstance(error, Sayable):
        return ""
    if isinstance(error, SettingsError):
        return str(error)
    frames = (f"{each.filename}:{each.lineno} {each.name}" for each in traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {error}; raised through {' > '.join(frames)}"


def clean(text: str) -> str:
    """Without what would drive a terminal or cannot be encoded: it may quote what the server sent."""
    return "\n".join(map(printable, text.split("\n")))


def line(text: str) -> str:
    """On one line, as logs have it."""
    return text.replace("\n", "; ")
