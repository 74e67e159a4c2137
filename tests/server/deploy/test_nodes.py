"""Who may join: the file of sites, keys that wait, that change and that expire, and a SuperLink that follows."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.common.constant import PUBLIC_KEY_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store import ObjectStoreFactory
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.deploy import keys
from common.deploy.audit import AuditLog
from common.errors import RunError, SettingsError
from server.__main__ import cli
from server.commands import doctor
from server.deploy import nodes, superlink_program, waiting
from server.deploy.admission import Admission, reconcile
from server.deploy.control import Node

DAY = datetime.date(2027, 1, 1)


class Known:
    """A SuperLink's list of keys, which takes none back."""

    def __init__(self) -> None:
        self.sites: dict[bytes, str] = {}
        self.removed: set[bytes] = set()

    def nodes(self) -> list[Node]:
        return [Node(number, name, key) for number, (key, name) in enumerate(self.sites.items())]

    def register(self, node: Node) -> None:
        if node.public_key in self.removed:
            raise RunError("Public key already in use")
        self.sites[node.public_key] = node.name

    def unregister(self, node: Node) -> None:
        del self.sites[node.public_key]
        self.removed.add(node.public_key)


def pair(folder: Path, name: str) -> Path:
    return keys.generate(folder / f"{name}.key")


def pem(path: Path) -> bytes:
    return keys.read_public(path.read_bytes(), "it")


def fingerprint(path: Path) -> str:
    return keys.fingerprint(pem(path))


def in_step(link: Known, file: Path, said: list[str], day: datetime.date = DAY) -> None:
    reconcile(link, nodes.admitted(nodes.read(file), {}, day), said.append)  # type: ignore[arg-type]


def names(file: Path) -> dict[bytes, str]:
    return nodes.admitted(nodes.read(file), {}, DAY)


def test_sites_come_and_go(tmp_path: Path) -> None:
    file, link, said = tmp_path / "nodes.toml", Known(), list[str]()
    for name in ("site-1", "site-2"):
        nodes.add(file, name, pair(tmp_path, name))
    in_step(link, file, said)
    assert link.sites == names(file)
    nodes.remove(file, "site-1")
    nodes.add(file, "site-3", pair(tmp_path, "site-3"))
    in_step(link, file, said)
    assert link.sites == names(file)
    nodes.add(file, "site-1", tmp_path / "site-1.key.pub")
    in_step(link, file, said)
    assert "needs a new one" in said[-1]
    nodes.remove(file, "site-1")
    nodes.add(file, "site-1", pair(tmp_path, "new"))
    in_step(link, file, said)
    assert link.sites == names(file)


def test_one_name_and_one_key_for_each_site(tmp_path: Path) -> None:
    file, public = tmp_path / "nodes.toml", pair(tmp_path, "a")
    nodes.add(file, "a", public)
    before = file.read_bytes()
    for name, key, word in (
        ("a", pair(tmp_path, "b"), "has a key already"),
        ("a", public, "has this key already"),
        ("b", public, "the same key"),
        ("../b", public, "is no name: a name has"),
        ("b", tmp_path / "a.key", "never leaves"),
        ("b", tmp_path / "none", "cannot be read"),
        ("b", None, "one of them"),
    ):
        with pytest.raises(SettingsError, match=word):
            nodes.add(file, name, key)
    with pytest.raises(SettingsError, match="there are: a"):
        nodes.remove(file, "b")
    assert file.read_bytes() == before
    assert before.startswith(b'[nodes]\na = "ecdsa-sha2-nistp384 ')  # as files of before


@pytest.mark.parametrize(
    "text",
    [
        "nodes = 1",
        "[nodes]\na = 1",
        '[nodes]\na = "x"',
        "[sites]\n",
        "[nodes",
        '[nodes]\n"../a" = "x"',
        "\xff",
        "[nodes]\na = []",
        '[nodes]\na = "SHA256:short"',
        "[nodes]\na = {expires = 2027-01-01}",
        f'[nodes]\na = {{key = "SHA256:{"A" * 43}", expires = "soon"}}',
        f'[nodes]\na = {{key = "SHA256:{"A" * 43}", expires = 2027-01-01T00:00:00}}',
        f'[nodes]\na = "SHA256:{"A" * 43}"\nb = "SHA256:{"A" * 43}"',
        f'[nodes]\na = ["SHA256:{"A" * 43}", "SHA256:{"A" * 43}"]',
    ],
)
def test_a_file_of_sites_that_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=r"nodes\.toml"):
        nodes.read(file)
    with pytest.raises(SettingsError, match="server nodes add"):
        nodes.read(tmp_path / "none.toml")


def test_a_site_changes_its_key_without_a_gap(tmp_path: Path) -> None:
    """Two keys for a while: at no moment has the site none, and the old one is out for good once it is retired."""
    file, link, said = tmp_path / "nodes.toml", Known(), list[str]()
    old, new, third = (pair(tmp_path, name) for name in ("old", "new", "third"))
    nodes.add(file, "a", old)
    in_step(link, file, said)
    nodes.add(file, "a", new, also=True)
    in_step(link, file, said)
    assert link.sites == {pem(old): "a", pem(new): "a"}
    assert not link.removed
    with pytest.raises(SettingsError, match="nodes retire a"):
        nodes.add(file, "a", third, also=True)
    with pytest.raises(SettingsError, match="has no key"):
        nodes.retire(file, "a", fingerprint(third))
    assert nodes.retire(file, "a") == fingerprint(old)
    in_step(link, file, said)
    assert link.sites == {pem(new): "a"}
    with pytest.raises(SettingsError, match="has one key"):
        nodes.retire(file, "a")


def test_a_key_ends_with_its_last_day(tmp_path: Path) -> None:
    file, link, said = tmp_path / "nodes.toml", Known(), list[str]()
    nodes.add(file, "a", pair(tmp_path, "a"), expires=DAY, day=DAY)
    nodes.add(file, "b", pair(tmp_path, "b"))
    in_step(link, file, said, DAY)
    assert sorted(link.sites.values()) == ["a", "b"]
    in_step(link, file, said, DAY + datetime.timedelta(days=1))
    assert list(link.sites.values()) == ["b"]
    with pytest.raises(SettingsError, match="is over"):
        nodes.add(file, "c", pair(tmp_path, "c"), expires=DAY, day=DAY + datetime.timedelta(days=1))
    # A later day, in time: the same key goes on.
    nodes.add(file, "a", tmp_path / "a.key.pub", expires=datetime.date(2030, 1, 1))
    assert nodes.read(file)["a"][0].expires == datetime.date(2030, 1, 1)
    (key,) = nodes.read(file)["a"]
    said_when = [key.ends_soon(datetime.date(2029, 12, day)) for day in (1, 2)]
    assert said_when == ["", "expires in 30 days, on 2030-01-01"]


def test_the_operator_is_warned_before_a_key_ends(tmp_path: Path) -> None:
    """In the server's log, once a day, and by doctor."""
    file, said, link = tmp_path / "nodes.toml", list[str](), Known()
    soon = nodes.today() + datetime.timedelta(days=3)
    nodes.add(file, "a", pair(tmp_path, "a"), expires=soon)
    day = [nodes.today()]
    follower = Admission(file, link, said.append, today=lambda: day[0])  # type: ignore[arg-type]
    for _ in range(3):
        follower.look()
    assert [line for line in said if "expires in 3 days" in line] == [said[-1]]
    day[0] += datetime.timedelta(days=1)
    follower.look()
    assert "expires in 2 days" in said[-1]
    day[0] = soon + datetime.timedelta(days=1)
    follower.look()
    assert not link.sites
    warned = [check for check in doctor._nodes(file, tmp_path) if check.word == "warn"]
    assert "of a expires in 3 days" in warned[0].detail


def test_a_fingerprint_takes_the_key_that_knocks_and_no_other(tmp_path: Path) -> None:
    file, link, said = tmp_path / "nodes.toml", Known(), list[str]()
    own, stranger = pair(tmp_path, "own"), pair(tmp_path, "stranger")
    where = waiting.place(file, None)
    assert where == tmp_path / "nodes.waiting.json"
    nodes.add(file, "a", fingerprint=keys.spoken(fingerprint(own)))
    follower = Admission(file, link, said.append, where)  # type: ignore[arg-type]
    follower.look()
    assert not link.sites
    knocks = waiting.Knocks(where)
    knocks.add(pem(stranger), "ipv4:192.0.2.9:4242")
    follower.look()
    assert not link.sites
    assert fingerprint(stranger) in said[-1]
    assert "192.0.2.9" in said[-1]
    knocks.add(pem(own), "ipv4:192.0.2.5:4242")
    follower.look()
    follower.look()
    assert link.sites == {pem(own): "a"}
    assert sum("waits to be let in" in line for line in said) == 1


def test_a_key_that_waits_is_listed_and_let_in_by_its_fingerprint(tmp_path: Path) -> None:
    file, own = tmp_path / "nodes.toml", pair(tmp_path, "own")
    file.write_text("[nodes]\n")
    waiting.Knocks(tmp_path / "nodes.waiting.json").add(pem(own), "ipv4:192.0.2.5:4242")
    run = CliRunner()
    listed = run.invoke(cli, ["nodes", "list", "--file", str(file)]).output
    assert fingerprint(own) in listed
    assert keys.spoken(fingerprint(own)) in listed
    for words in (["add", "a", "--fingerprint", fingerprint(own), "--expires", "2999-01-01"], ["list"]):
        done = run.invoke(cli, ["nodes", *words, "--file", str(file)])
        assert done.exit_code == 0, done.output
    assert "waiting" not in done.output
    assert "until 2999-01-01" in done.output
    log = AuditLog(tmp_path / "audit.jsonl")
    for words in (["add", "a", "--also", str(pair(tmp_path, "new"))], ["retire", "a"], ["remove", "a"]):
        done = run.invoke(cli, ["nodes", *words, "--file", str(file)])
        assert done.exit_code == 0, done.output
    noted = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [each["what"] for each in noted] == ["nodes add", "nodes retire", "nodes remove"]
    assert noted[1]["key"] == fingerprint(own)
    assert run.invoke(cli, ["nodes", "add", "b", "--fingerprint", "SHA256:x", "--file", str(file)]).exit_code == 2
    assert run.invoke(cli, ["nodes", "add", "b", "--expires", "soon", "--file", str(file)]).exit_code == 2


def test_what_knocks_is_bounded_and_kept_for_a_day(tmp_path: Path) -> None:
    """Keys can be made up by whoever reaches the port; what is none is passed over, and so is a full disk."""
    file, now = tmp_path / "w.json", [datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)]
    knocks = waiting.Knocks(file, lambda: now[0])
    for junk in (b"", b"x", b"\xff" * 500, b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"):
        knocks.add(junk, "x")
    assert waiting.read(file) == {}
    made = [pair(tmp_path, str(number)) for number in range(waiting.MOST + 3)]
    for each in made:
        knocks.add(pem(each), "\x1b[31m" * 1000)
    held = waiting.read(file)
    assert len(held) == waiting.MOST
    assert next(iter(held)) == fingerprint(made[-1])
    assert fingerprint(made[0]) not in held
    now[0] += datetime.timedelta(days=2)
    waiting.Knocks(file, lambda: now[0]).add(pem(made[0]), "y")
    assert list(waiting.read(file)) == [fingerprint(made[0])]
    waiting.Knocks(tmp_path / "1.key" / "w.json").add(pem(made[0]), "y")  # no folder


@pytest.mark.parametrize("text", ["", "[]", "{", '{"SHA256:x": {}}', '{"SHA256:x": 1}', '{"SHA256:x": {"key": "k"}}'])
def test_a_damaged_list_of_waiting_keys_is_an_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(text)
    assert waiting.read(tmp_path / "w.json") == {}


def test_a_waiting_key_under_another_fingerprint_is_none(tmp_path: Path) -> None:
    """Who writes the file cannot make one key pass for another."""
    own, other = pair(tmp_path, "own"), pair(tmp_path, "other")
    waiting.Knocks(tmp_path / "w.json").add(pem(own), "x")
    held = json.loads((tmp_path / "w.json").read_text())
    (tmp_path / "w.json").write_text(json.dumps({fingerprint(other): held[fingerprint(own)]}))
    assert waiting.read(tmp_path / "w.json") == {}


@given(st.text(max_size=100))
def test_no_text_is_more_than_no_fingerprint(text: str) -> None:
    with pytest.raises(SettingsError, match="is no fingerprint"):
        keys.read_fingerprint(text, "it")


def test_a_fingerprint_in_every_form(tmp_path: Path) -> None:
    print_ = fingerprint(pair(tmp_path, "a"))
    spoken = keys.spoken(print_)
    assert len(spoken.split()) == 16
    for text in (print_, f" {print_}\n", spoken, spoken.upper(), spoken.replace(" ", ":"), spoken.replace(" ", "")):
        assert keys.read_fingerprint(text, "it") == print_


# --- what the SuperLink's own program adds to Flower's


@pytest.fixture
def servicer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetServicer:
    for method in ("ActivateNode", "RegisterNode"):
        monkeypatch.setattr(FleetServicer, method, getattr(FleetServicer, method))
    superlink_program.wrap(
        "ActivateNode",
        superlink_program.why_not_activated,
        [superlink_program.whose, superlink_program.twin],
        [
            superlink_program.Refusals(AuditLog(tmp_path / "audit.jsonl")).of_a_call,
            superlink_program.knocking(waiting.Knocks(tmp_path / "w.json")),
        ],
    )
    state = InMemoryLinkState(SimpleNamespace(), ObjectStoreFactory().store())  # type: ignore[arg-type]
    return FleetServicer(SimpleNamespace(state=lambda: state), ObjectStoreFactory(), True)  # type: ignore[arg-type]


def activate(servicer: FleetServicer, key: bytes, signed: bytes | None = None, heartbeat: float = 30.0) -> Any:
    told = SimpleNamespace(
        invocation_metadata=lambda: ((PUBLIC_KEY_HEADER, signed or key),), peer=lambda: "ipv4:192.0.2.5:1"
    )
    return servicer.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=heartbeat), told)  # type: ignore[arg-type]


def test_one_process_of_a_name_whatever_its_key(servicer: FleetServicer, tmp_path: Path) -> None:
    """Two keys of a name: the second one waits until the first is gone. And nobody comes in with another's key."""
    old, new, other = (pem(pair(tmp_path, name)) for name in ("old", "new", "other"))
    state = servicer.state_factory.state()
    for key, name in ((old, "a"), (new, "a"), (other, "b")):
        state.create_node("x", "x", key, 30.0, name=name)
    first = activate(servicer, old).node_id
    with pytest.raises(FlowerError, match="a is in use with its other key"):
        activate(servicer, new)
    activate(servicer, other)
    state.deactivate_node(first)
    with pytest.raises(FlowerError, match="that another key signed"):
        activate(servicer, new, signed=other)
    assert activate(servicer, new).node_id != first
    with pytest.raises(FlowerError, match="with its other key"):
        activate(servicer, old)
    assert waiting.read(tmp_path / "w.json") == {}
    told = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    # What is tried again and again is one line.
    assert [(line["what"], line["site"], line["key"]) for line in told] == [("refused", "a", keys.fingerprint(new))] * 2


def test_who_is_refused_for_an_unknown_key_waits(servicer: FleetServicer, tmp_path: Path) -> None:
    """But not a doctor's look, nor a key that somebody else signed for."""
    own, other = (pem(pair(tmp_path, name)) for name in ("own", "other"))
    for signed, heartbeat in ((own, 0.0), (other, 30.0)):
        with pytest.raises(FlowerError):
            activate(servicer, own, signed, heartbeat)
    assert waiting.read(tmp_path / "w.json") == {}
    with pytest.raises(FlowerError) as refused:
        activate(servicer, own)
    assert "is not registered" in str(refused.value.public_details)
    assert list(waiting.read(tmp_path / "w.json")) == [keys.fingerprint(own)]
