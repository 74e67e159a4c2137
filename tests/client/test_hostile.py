"""A server that wants to know: every field of every experiment, set to what it should not be, at a site with planted
secrets. No answer holds one, in any form; what is said instead is a code."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from client import reasons
from client.reasons import CODES
from common.errors import SettingsError
from strategies.protocol.messages import HEAD
from strategies.registry import REGISTRY
from tests.support.planted import FORMS, SECRETS, Planted, every_field, experiment_with, found, plant, texts
from tests.support.today import DAY

WORDS = [
    "os:environ", "os:getcwd", "builtins:repr", "subprocess:getoutput", "tests.support.planted:told", "os:", ":", "os",
    "~", "~root", "~nobody", "~/memory", "$PLANTED", "${HOME}", "%HOME%", "{PLANTED}", "{0.__class__}", "*", "..",
    "../*", ".", "/", "/proc/self/environ", "/proc/self/cwd/x", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1",
    "//host/share", "gpt2", "fancyzhx/ag_news", "label", "x", "a\0b", "", "\ud800", "\x1b[2J", "x" * 5000,
]  # fmt: skip
OTHER = [-1, 0, 1, 10**30, math.inf, 1e-300, True, None, [], {}, ["x"], {"x": 1}, [1, 2], "1", [["x"]]]
FIELDS = every_field() | {
    f"{name}: strategy.{field}": ("npz", Any)
    for name, entry in REGISTRY.items()
    for field in entry.cls.__dataclass_fields__
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    with pytest.MonkeyPatch.context() as patcher:
        yield plant(tmp_path_factory.mktemp("hostile"), patcher)


def experiment(name: str, value: Any) -> str:
    """The JSON text of an experiment with one hostile field."""
    tables = experiment_with(name, FIELDS[name][0], value)
    if ": strategy." in name:
        tables["strategy"]["name"] = name.split(":")[0]
    return json.dumps(tables)


def cases(site: Planted) -> list[tuple[str, Any]]:
    """Fields that take text with every word and every planted path, the others with what is no value of theirs."""
    words = [*WORDS, *site.names(), *[os_path[1:] for os_path in site.names()[:2]]]
    return [
        (name, value)
        for name, (_, kind) in FIELDS.items()
        for value in [*(words if texts(kind)[0] and ": strategy." not in name else WORDS[::9]), *OTHER]
    ]


def ways(site: Planted) -> list[Planted]:
    """The site as it is, with a table of its own, without data, and with files and tasks that it allows: then readers
    and tasks fail over what is in them."""
    policy = site.root / "policy.toml"
    policy.write_text(f"files = [{json.dumps(str(site.folder))}]\nshare_labels = true\n")
    csv = site.config["data"].replace("own.npz", "own.csv")
    broken = str(site.folder / "broken.csv")
    allowed = {"policy": str(policy), "allow-tasks": "tests.support.planted:told os:environ os:getcwd builtins:repr"}
    return [
        Planted(site.root, {**site.config, **more})
        for more in ({}, {"data": csv}, {"data": ""}, allowed, {**allowed, "data": csv}, {**allowed, "data": broken},
                     {**allowed, "data": ""})
    ]  # fmt: skip


def ask(planted: Planted, name: str, value: Any) -> None:
    """All three messages; fails with what leaked."""
    text = experiment(name, value)
    for reply in planted.answers(text):
        assert not found(reply, text), (planted.config, name, value)
        _coded(reply)


def _coded(reply: Message) -> None:
    """What went wrong is one of the documented codes, with an event."""
    head = reply.content.config_records[HEAD]
    reason = str(head.get("error") or head.get("reason") or "")
    if reason and head.get("status") not in ("memory-lost", "late"):
        code = re.search(r": ([a-z-]+): .*\(event [0-9a-f]{6}\)$", reason, re.DOTALL)
        assert code, reason
        assert code[1] in CODES
        assert len(reason) <= reasons.MOST_REASON


@pytest.mark.parametrize("part", range(4))
def test_no_field_brings_a_secret(part: int, site: Planted) -> None:
    """Some of all cases, others each day; every field is among them, and every word in one that names a file."""
    chance = random.Random(f"{DAY} {part}")
    sites, every = ways(site), cases(site)
    by_field = {name: [value for field, value in every if field == name] for name in FIELDS}
    for name in list(by_field)[part::4]:
        opened = texts(FIELDS[name][1])[1]
        for value in chance.sample(by_field[name], 8 if opened else 1):
            ask(chance.choice(sites), name, value)


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", range(7))
def test_no_field_brings_a_secret_of_many(way: int, site: Planted) -> None:
    """Four hundred cases at each kind of site, other ones each day."""
    planted = ways(site)[way]
    for name, value in random.Random(f"{DAY} {way}").sample(cases(site), 400):
        ask(planted, name, value)


@pytest.mark.parametrize(
    "task", ["os:environ", "os:getcwd", "builtins:repr", "tests.support.planted:told", "os:x", ":"]
)
def test_no_task_brings_what_is_there(task: str, site: Planted) -> None:
    """Code is not run that was not allowed; and what is allowed and fails says no word of its own."""
    for planted in ways(site):
        ask(planted, "task.name", task)


def test_every_planted_file_in_every_reader(site: Planted) -> None:
    """Files that the site allowed, or brings, and that do not do: their headers, cells and names stay in its log."""
    allowed = ways(site)[3]
    for path, task in product(site.files(), ("images", "text", "shakespeare", "quadratic")):
        named = json.dumps({"task": {"name": task, "file": str(path)}, "local": {"batch_size": 2, "steps": 1}})
        plan = json.dumps({"partition": {"kind": "file", "file": str(path)}})
        brought = Planted(site.root, {**allowed.config, "data": str(path)})
        own = json.dumps(
            {"task": {"name": task, **({"shape": [1], "classes": 2} if task in ("images", "npz") else {})}}
        )
        named_data = Planted(site.root, {**allowed.config, "data": ""})
        for planted, text in (
            (allowed, named),
            (named_data, named),
            (named_data, plan),
            (brought, own),
            (brought, named),
        ):
            for reply in planted.answers(text):
                assert not found(reply, text), (path, text)
                _coded(reply)


HEADS = {
    "run": WORDS, "client": WORDS, "layout": WORDS, "phase": WORDS, "digest": WORDS, "experiment": WORDS,
    "holds": OTHER, "order": OTHER, "epochs": OTHER, "steps": OTHER,
}  # fmt: skip


@pytest.mark.parametrize("field", HEADS)
def test_no_head_brings_a_secret(field: str, site: Planted) -> None:
    """Every setting of a message, also of another type; also none."""
    good = json.dumps(experiment_with("rounds", "npz", 3))
    for value in [*(each for each in HEADS[field] if each != "\ud800"), *site.names()[:3]]:  # no text on the wire
        for kind in (MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY):
            head = {"experiment": good, "run": "run", "client": "a", "layout": "x", "round": 1, "generation": 1,
                    "accepted": 0, "share": 0.5, "lr": 0.1, field: value}  # fmt: skip
            try:
                content = RecordDict({HEAD: ConfigRecord(head)})
            except (TypeError, ValueError):
                continue  # Flower itself carries no such value.
            reply = site.answer(kind, content)
            assert not found(reply, str(value))
            _coded(reply)
            assert reply.has_content(), "an answer of the app's own, not an exception for whoever runs it"
    for kind in (MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY):
        reply = site.answer(kind, RecordDict())
        assert "message-invalid" in str(reply.content.config_records[HEAD])


# --- the look itself, and what the site keeps


def test_the_look_finds_what_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one's own machine errors are told in full: there the same server is told the secrets."""
    site = plant(tmp_path, monkeypatch)
    open_site = Planted(site.root, {**site.config, "trusted": True, "data": ""})
    leaks = set()
    for path in site.files():
        text = json.dumps({"task": {"name": "images", "file": str(path)}})
        leaks |= set(found(open_site.roll(text)[0]))
    leaks |= set(found(open_site.roll(json.dumps({"task": {"name": "tests.support.planted:told"}}))[0]))
    assert {SECRETS[kind].encode() for kind in ("Own", "Header", "Folder", "Array")} <= leaks
    assert len(FORMS) > 100


def test_site_and_operator_speak_of_one_event(site: Planted, caplog: pytest.LogCaptureFixture) -> None:
    """The reason's event stands in the site's log, with all that the server is not told."""
    caplog.set_level("WARNING", "client.app")
    broken = Planted(site.root, {**site.config, "data": str(site.folder / "broken.csv")})
    _, roll = broken.roll(json.dumps(experiment_with("rounds", "npz", 3)))
    match = re.fullmatch(
        r"client a: data-unreadable: the site's data cannot be read as this experiment asks; its log has more "
        r"\(event ([0-9a-f]{6})\)",
        roll.error,
    )
    assert match
    (record,) = [each for each in caplog.records if match[1] in each.getMessage()]
    assert SECRETS["Header"] in record.getMessage() or "cells; the first line names" in record.getMessage()
    assert str(site.folder) in record.getMessage()


def test_every_code_is_of_the_documents() -> None:
    """The table of docs/policy.md has each, with its sentence."""
    from common.flower import ROOT

    text = (ROOT / "docs" / "policy.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", text, re.MULTILINE))
    assert {code: sentence for code, sentence in rows.items() if code in CODES} == CODES


def test_all_that_is_raised_with_a_code_has_one_of_these() -> None:
    """In the source: a code that nobody documented would be told as "failed"."""
    from common.flower import ROOT

    raised: set[str] = set()
    for path in (*ROOT.glob("common/**/*.py"), *ROOT.glob("client/**/*.py"), *ROOT.glob("strategies/**/*.py")):
        raised |= set(re.findall(r"(?:SiteError|Denied)\(\s*\"([a-z-]+)\"", path.read_text("utf-8")))
    assert len(raised) > 10
    assert raised <= set(CODES)
    assert SettingsError("x").args == ("x",)
