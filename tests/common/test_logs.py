"""Logging as text and as JSON: one line a record, whatever the record holds."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from common.deploy import logs
from common.deploy.logs import JsonFormatter, json_line
from common.flower import ROOT


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, flower = logging.getLogger(), logging.getLogger("flwr")
    kept = [(logger, list(logger.handlers), list(logger.filters), logger.level) for logger in (root, flower)]
    hooks = sys.excepthook, threading.excepthook
    yield
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    for logger, handlers, filters, level in kept:
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().err.splitlines()]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    before = datetime.now(UTC)
    logging.getLogger("client.node.resident").info(
        "joined %s\nas %s", "host:9092", "a", extra={"node": 7, "site": "b", "_own": 1}
    )
    [line] = lines(capsys)
    at = datetime.fromisoformat(line.pop("time"))
    assert -0.001 <= (at - before).total_seconds() < 5
    assert line == {
        "level": "INFO", "logger": "client.node.resident", "message": "joined host:9092\nas a", "node": 7, "site": "b",
    }  # fmt: skip


def test_time_is_utc_iso_8601_in_milliseconds() -> None:
    record = logging.makeLogRecord({"created": 1_700_000_000.0004, "msg": "x"})
    assert json.loads(JsonFormatter().format(record))["time"] == "2023-11-14T22:13:20.000Z"


def test_an_exception_is_text_on_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        logging.getLogger("server.rounds.loop").exception("round %d failed", 3, stack_info=True)
    [line] = lines(capsys)
    assert line["message"] == "round 3 failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: bad\nvalue")
    assert line["stack"].startswith("Stack")


AWKWARD = {
    "nan": (math.nan, None),
    "inf": ([1.0, math.inf, {"a": -math.inf}], [1.0, None, {"a": None}]),
    "path": (Path("/a"), "/a"),
    "bytes": (b"\xff", "b'\\xff'"),
    "keys": ({1: "a", None: "b", (1, 2): "c"}, {"1": "a", "None": "b", "(1, 2)": "c"}),
    "surrogate": ("a\udcffb", "a\udcffb"),
    "separators": ("a\u2028b\x00c\r\n", "a\u2028b\x00c\r\n"),
    "large": (2**80, 2**80),
}


@pytest.mark.parametrize(("value", "expected"), AWKWARD.values(), ids=AWKWARD)
def test_any_value_is_valid_json_on_one_line(value: Any, expected: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    logging.getLogger("server").warning("x", extra={"field": value})
    [line] = lines(capsys)
    assert line["field"] == expected
    assert "\n" not in json_line("x", field=value)
    assert json.loads(json_line("x", field=value))["field"] == expected


def test_a_value_within_itself_ends() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert json.loads(json_line("x", field=endless))["field"]


def test_fields_never_hide_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    extra = {"level": 1, "time": 2, "logger": 3, "exception": 4}
    logging.getLogger("server").warning("x", extra=extra)
    [line] = lines(capsys)
    assert (line["level"], line["logger"], "exception" in line) == ("WARNING", "server", False)
    assert [line[f"{key}_"] for key in extra] == [1, 2, 3, 4]


def test_a_wrong_format_string_keeps_its_line() -> None:
    record = logging.makeLogRecord({"msg": "%d rounds", "args": ("no number",)})
    assert json.loads(JsonFormatter().format(record))["message"] == "%d rounds ('no number',)"


def test_levels_are_ours_and_warnings_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    for name in ("client.node.resident", "server.rounds.loop", "common.x", "strategies.y", "matplotlib", "httpx"):
        logging.getLogger(name).debug("debug")
        logging.getLogger(name).info("info")
        logging.getLogger(name).warning("warning")
    said = [(line["logger"], line["message"]) for line in lines(capsys)]
    ours = ("client.node.resident", "server.rounds.loop", "common.x", "strategies.y")
    assert said == [(n, m) for n in ours for m in ("info", "warning")] + [
        ("matplotlib", "warning"),
        ("httpx", "warning"),
    ]


def test_warnings_of_python_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logs.configure("json")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    [line] = lines(capsys)
    assert (line["logger"], line["level"]) == ("py.warnings", "WARNING")
    assert "DeprecationWarning: old thing" in line["message"]


def test_text_is_as_before_and_a_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    logs.configure("text")
    logging.getLogger("client.node.resident").info("joined %s", "here")
    assert capsys.readouterr().err.split(" ", 2)[2] == "joined here\n"


@pytest.mark.parametrize("order", ["before", "after"])
def test_flower_logs_once_in_the_same_form_whenever_it_is_imported(order: str) -> None:
    """In a process of its own: flwr adds its handler when it is imported."""
    steps = ["from flwr.supercore.logger import log", "logs.configure('json')"]
    code = "\n".join([
        "import logging, sys", "from common.deploy import logs", *(steps if order == "before" else steps[::-1]),
        "log(logging.WARNING, 'first'); log(logging.INFO, 'info'); log(logging.WARNING, 'second')",
        "threading = __import__('threading')",
        "t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); t.join()",
        "raise RuntimeError('last')",
    ])  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert [(line["logger"], line["message"]) for line in said] == [
        ("flwr", "first"),
        ("flwr", "second"),
        ("common.deploy.logs", "not caught in worker: division by zero"),
        ("common.deploy.logs", "not caught: last"),
    ]
    assert "ZeroDivisionError" in said[2]["exception"]
    assert "RuntimeError: last" in said[3]["exception"]
    assert done.returncode == 1


def test_json_line_is_an_event() -> None:
    line = json.loads(json_line("round", round=3, accuracy=0.5, loss=None))
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {"event": "round", "round": 3, "accuracy": 0.5, "loss": None}
