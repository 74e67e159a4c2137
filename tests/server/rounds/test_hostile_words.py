"""What a client writes is bounded and cleaned on arrival: it cannot fill a disk, drive a terminal or fake a round."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MetricRecord, RecordDict

from common.flower import versions
from server.rounds.folder import HISTORY, ROLL
from server.rounds.prepare import prepare
from strategies.protocol import members
from strategies.protocol.messages import (
    HEAD,
    METRICS,
    Answer,
    Refused,
    RollReply,
    cleaned,
    read_head,
    write_head,
)
from tests.support.faults import FaultyGrid, head, ran, toy

ESCAPES = "\x1b[2J\x1b[1;1Hround 7 accuracy 0.99\r\n\u202egnp.\u2066\x00\x07\n" * 40


def hostile(kind: str) -> Any:
    return {"str": ESCAPES, "int": 2**62, "float": 1e300, "list[str]": [ESCAPES] * 3, "list[int]": [2**62] * 3}[kind]


@pytest.mark.parametrize(("cls", "name"), [(cls, item.name) for cls in Answer.__subclasses__() for item in fields(cls)])
def test_every_text_of_a_client_is_bounded_and_one_printable_line(cls: type[Answer], name: str) -> None:
    """Whatever field it stands in, of whatever answer: a new field is asked as well."""
    item = next(each for each in fields(cls) if each.name == name)  # type: ignore[arg-type]
    blank = {"str": "", "int": 0, "float": 0.0, "list[str]": ["x"], "list[int]": [1]}
    values = {each.name: blank[str(each.type)] for each in fields(cls)}  # type: ignore[arg-type]
    values[name] = hostile(str(item.type))
    read = getattr(read_head(cls, _content(cls(**values))), name)
    for text in read if isinstance(read, list) else [read]:
        if isinstance(text, str):
            assert text.isprintable()
            assert "\n" not in text
            assert len(text) <= 4 * item.metadata.get("most", 200)


def _content(answer: Any) -> Any:
    return RecordDict({HEAD: write_head(answer)})


def test_long_lists_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.protocol.messages.MOST_CLIENTS", 5)
    reply = RollReply(["a"] * 6, [1], [1], [1], [""], "", "", "", "")
    with pytest.raises(Refused, match="malformed: names has 6 entries; allowed: 5"):
        read_head(RollReply, _content(reply))


def flood(reply: Message) -> None:
    """100,000 metrics, each with a long name."""
    reply.content[METRICS] = MetricRecord({f"{'m' * 50}{index}": 1.0 for index in range(100_000)})


def named(reply: Message) -> None:
    reply.content[METRICS] = MetricRecord({"loss": 1.0, ESCAPES[:40]: 1.0})


@pytest.mark.parametrize(
    "change",
    [
        head(status="error", reason="x" * 5_000_000),
        head(status=ESCAPES),
        head(reason=ESCAPES, status="error"),
        flood,
        named,
    ],
)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_what_a_client_writes_cannot_fill_or_fake_what_people_read(
    change: Callable[[Message], None], kind: str, tmp_path: Path
) -> None:
    def lie(name: str, now: int, reply: Message) -> Message:
        if name == "2" and now and reply.metadata.message_type.startswith(kind):
            change(reply)
        return reply

    settings = toy(evaluate={"clients": "all"})
    result = ran(tmp_path, settings, FaultyGrid(lie))
    history = (tmp_path / HISTORY).read_text()
    assert len(history) < 40_000
    assert not [each for each in history if not each.isprintable() and each != "\n"]
    assert len(history.splitlines()) == 3
    for line in result.said:
        assert line.isprintable()
    if kind == "train":
        assert set(result.dropped(2)) == {"2"}


def test_roll_and_refusals_are_clean(tmp_path: Path) -> None:
    """Device and versions reach roll.json and the console."""

    def lie(name: str, now: int, reply: Message) -> Message:
        if not name:
            reply.content.config_records[HEAD]["device"] = ESCAPES
            reply.content.config_records[HEAD]["versions"] = versions() + ESCAPES * 1000
        return reply

    result = ran(tmp_path, toy(), FaultyGrid(lie))
    assert all(text.isprintable() and len(text) < 3000 for text in result.said)
    for member in json.loads((tmp_path / ROLL).read_text()):
        assert member["device"].isprintable()
        assert len(member["versions"]) <= 800


@pytest.mark.parametrize("labels", ["[1, -2]", "[1.5]", "nonsense", "{}", "[" * 60_000, f"[{2**41}]", '["1"]'])
def test_class_counts_are_numbers(labels: str) -> None:
    prepared = prepare(toy())
    reply = RollReply(["a"], [1], [1], [1], [labels], prepared.model.layout_hash, "", "cpu", versions())
    message = Message(_content(reply), dst_node_id=1, message_type="query")
    with pytest.raises(Refused, match="labels: class counts of 'a'"):
        members.members_of(1, message, prepared.model.layout_hash, "")


@pytest.mark.parametrize("text", ["plain words", "\u00e9\u4e2d", ESCAPES, "a\r\nb", "\ud800", "x" * 10**6])
def test_cleaned(text: str) -> None:
    line = cleaned(text, 500)
    assert line.isprintable()
    assert len(line) <= 1000
    assert cleaned(line) == line
    line.encode()
