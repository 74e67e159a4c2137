"""The live page over real HTTP in this process: what comes, who may, what a hostile name can do, and that it ends."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.deploy.audit import AuditLog
from common.errors import RunError, SettingsError
from server.deploy import certs
from server.deploy import users as book
from server.deploy.control import Control
from server.deploy.users import Role
from server.page import connection, page_at
from server.page.serve import Page
from server.page.sources import LinkRuns, OneRun
from server.page.trail import MOST_POINTS, Trail
from server.page.web import TEMPLATES
from server.rounds.folder import RunFolder
from tests.server.page.live import HOSTILE, add, held, line, reading, running, served, token, user_in_no_time
from tests.support.patience import limit, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that take no time."""
    monkeypatch.setattr(book, "N", 2)
    monkeypatch.setattr(book, "NOBODY", user_in_no_time())


def ask(page: Page, method: str, path: str, **more: Any) -> httpx.Response:
    """One call of the page."""
    with httpx.Client(timeout=10, trust_env=False) as client:
        return client.request(method, page.url + path, **more)


# --- what comes


def test_rounds_come_as_they_are_written_and_only_once(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", [line(1), line(2, dropped=[1])])
    with served(folder) as page, reading(page) as seen:
        seen.until(lambda seen, _: len(seen.rounds) == 2)
        assert seen.hello == {"user": "", "role": "look", "asks": False, "actions": [], "id": ""}
        assert [point[0] for point in seen.rounds] == [1, 2]
        assert seen.rounds[1][5:7] == [2, 3]
        assert seen.rounds[1][-1] == [["timed out", ["site-1"], 1]]
        assert seen.sites["site-1"]["state"] == "timed out"
        assert seen.sites["site-1"]["causes"] == {"timed out": 1}
        assert seen.state["metric"]
        assert seen.state["algorithm"] == "fedavg"
        add(folder, line(3))
        last = seen.until(lambda seen, _: len(seen.rounds) == 3)
        assert [point[0] for point in last["rounds"]] == [3]
        assert set(last["sites"]["rows"]) == {"site-0", "site-1", "site-2"}
        RunFolder(folder).note("warning: something")
        last = seen.until(lambda seen, _: seen.notes)
        assert "rounds" not in last
        assert "sites" not in last
        RunFolder(folder).set_status("finished", rounds=20)
        seen.until(lambda seen, _: seen.runs["run"]["status"] == "finished")


def test_a_stream_goes_on_where_the_last_one_broke_off(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", [line(n) for n in range(1, 4)])
    with served(folder) as page:
        with reading(page) as seen:
            seen.until(lambda seen, _: len(seen.rounds) == 3)
        add(folder, line(4))
        with reading(page, last=seen.last) as again:
            again.until(lambda seen, _: seen.rounds)
            assert [point[0] for point in again.rounds] == [4]
            assert again.resets == 0
        far = f"{page.hub.epoch}.{'9' * 30}.run"
        for strange in ("other.5.run", seen.last.replace(".run", ".else"), "9", "x.y.z", far):
            with reading(page, last=strange) as whole:
                whole.until(lambda seen, _: len(seen.rounds) == 4)
                assert whole.resets


def test_a_run_that_is_resumed_is_shown_anew(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", [line(n) for n in range(1, 6)])
    with served(folder) as page, reading(page) as seen:
        seen.until(lambda seen, _: len(seen.rounds) == 5)
        RunFolder(folder).cut_history(3)
        add(folder, line(4))
        seen.until(lambda seen, _: len(seen.rounds) == 4)
        assert [point[0] for point in seen.rounds] == [1, 2, 3, 4]
        assert seen.sites["site-0"]["rounds"] == 4


def test_much_is_bounded(tmp_path: Path) -> None:
    """Ten thousand rounds: a thousand points at first, those of the end with who was dropped; the sums count all."""
    folder = running(tmp_path / "run", [line(n, dropped=[1]) for n in range(1, 10_001)], 10_000)
    trail = Trail(RunFolder(folder))
    trail.take(trail.look(), 1)
    found = trail.since(-1)
    assert len(found["rounds"]) <= MOST_POINTS
    assert found["rounds"][0][0] == 1
    assert [point[0] for point in found["rounds"][-3:]] == [9998, 9999, 10_000]
    assert found["rounds"][0][-1] is None
    assert found["rounds"][-1][-1] == [["timed out", ["site-1"], 1]]
    assert found["sites"]["rows"]["site-1"]["causes"] == {"timed out": 10_000}
    assert len(json.dumps(found)) < 150_000
    assert trail.since(1) == {}
    add(folder, line(10_001))
    trail.take(trail.look(), 2)
    assert len(json.dumps(trail.since(1))) < 1500


STRANGE = [
    {"round": 4},
    {"round": "five"},
    {"round": 6, "accepted": None, "sampled": None, "dropped": None, "causes": None, "void": None, "seconds": None},
    {"round": 7, "train": {"loss": {"weighted": float("nan")}}, "bytes_up": float("inf"), "seconds": {"total": "x"}},
    {
        "round": 8,
        "dropped": {HOSTILE: HOSTILE * 1000},
        "causes": {HOSTILE: HOSTILE},
        "void": [{"dropped": {"a": None}}],
    },
    {"round": 9, "central": {"accuracy": 10**400, "loss": True}},
    {"round": 10, "accepted": [HOSTILE, 3], "dropped": []},
    [],
    7,
]


def test_strange_lines_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    """Nothing of a history, however it came to be so, keeps the page from what follows, nor makes it send no JSON."""
    folder = running(tmp_path / "run", [line(1)])
    with (folder / "history.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in STRANGE) + '{"round": 11, \n')
    add(folder, line(12))
    (folder / "roll.json").write_text('[{"name": "site-9"}, 3, {"x": 1}]')
    with served(folder) as page, reading(page) as seen:
        seen.until(lambda seen, _: seen.rounds and seen.rounds[-1][0] == 12)
        assert "site-9" in seen.sites
        for name, site in seen.sites.items():
            assert len(name) <= 100
            assert len(site["why"]) <= 300
            assert (name + site["why"] + site["state"]).isprintable()


def test_the_curve_is_of_what_a_run_is_judged_by(tmp_path: Path) -> None:
    """Named by the records, else known from those that were evaluated; a loss is not shown twice."""
    train = {"loss": {"weighted": 2.0}}
    auc = {"headline": {"metric": "auc", "higher": True}, "train": train}
    cases = {
        "auc": ([auc, auc | {"central": {"auc": 0.7, "loss": 0.5}}], [[None, None, 2.0], [0.7, 0.5, 2.0]]),
        "accuracy": ([{"central": {"accuracy": 0.6}}, {"train": train}], [[0.6, None, None], [None, None, 2.0]]),
        "loss": ([{"central": {"loss": 0.5}, "train": train}], [[0.5, None, 2.0]]),
    }
    for metric, (records, expected) in cases.items():
        folder = running(tmp_path / metric, [{"round": n, **each} for n, each in enumerate(records, 1)])
        trail = Trail(RunFolder(folder))
        trail.take(trail.look(), 1)
        found = trail.since(-1)
        assert found["state"]["metric"] == metric
        assert [point[1:4] for point in found["rounds"]] == expected


# --- who may


def test_without_users_it_is_read_only(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", [line(1)])
    with served(folder) as page:
        answer = ask(page, "POST", "runs/run/stop", headers={"Authorization": "Bearer x:y"})
        assert (answer.status_code, "without --users" in answer.text) == (403, True)
        assert RunFolder(folder).stop() is None


def test_with_users_nothing_is_told_to_a_stranger(tmp_path: Path) -> None:
    file, folder = tmp_path / "users.toml", running(tmp_path / "run", [line(1)])
    look = token(file, "ann", Role.look)
    with served(folder, users=file) as page:
        assert "written" not in ask(page, "GET", "").text
        assert ask(page, "GET", "events").status_code == 401
        wrong = ask(page, "GET", "events", headers={"Authorization": "Bearer ann:wrong"})
        assert (wrong.status_code, "not known" in wrong.json()["detail"]) == (401, True)
        with reading(page, headers=look) as seen:
            seen.until(lambda seen, _: seen.rounds)
            assert (seen.hello["user"], seen.hello["role"], seen.hello["actions"]) == ("ann", "look", ["stop"])
            book.remove(file, "ann")
            add(folder, line(2))
            assert "removed" in seen.until(lambda seen, name: name == "out")["why"]


@pytest.mark.parametrize(("role", "status"), [(Role.look, 403), (Role.submit, 403), (Role.operate, 200)])
def test_only_an_operator_stops_a_run_and_it_is_written_down(tmp_path: Path, role: Role, status: int) -> None:
    file, folder = tmp_path / "users.toml", running(tmp_path / "run", [line(1)])
    who = token(file, "olga", role)
    with served(folder, users=file) as page:
        assert ask(page, "POST", "runs/run/stop").status_code == 401
        assert ask(page, "POST", "runs/run/resume", headers=who).status_code in (403, 404)
        assert ask(page, "POST", "runs/else/stop", headers=who).status_code in (403, 404)
        assert RunFolder(folder).stop() is None
        answer = ask(page, "POST", "runs/run/stop", headers=who)
        assert answer.status_code == status
    allowed = status == 200
    assert (RunFolder(folder).stop() is not None) == allowed
    written = AuditLog(folder / "audit.jsonl").last("stopped")
    if allowed:
        assert RunFolder(folder).stop.by() == "olga"
        assert written is not None
        assert (written["actor"], written["outcome"], written["run"]) == ("olga", "asked", "run")
    else:
        assert written is None


def test_a_run_that_has_ended_is_not_stopped(tmp_path: Path) -> None:
    file, folder = tmp_path / "users.toml", running(tmp_path / "run", [line(1)])
    who = token(file, "olga", Role.operate)
    RunFolder(folder).set_status("finished")
    with served(folder, users=file) as page:
        answer = ask(page, "POST", "runs/run/stop", headers=who)
        assert (answer.status_code, answer.json()["detail"]) == (409, "the run is finished already")


# --- a SuperLink


def run_of(id: str, name: str, status: str, folder: Path | str = "", **more: Any) -> dict[str, Any]:
    """A row of runs_api."""
    known = {"id": id, "queue": "", "name": name, "status": status, "round": 1, "rounds": 9, "since": "", "owner": ""}
    return {**known, "folder": str(folder), "error": "", **more}


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Page, list[Any], dict[str, Any]]]:
    """A page of two runs and one that waits, of a SuperLink that is not there; what was asked of it, what it says."""
    first = running(tmp_path / "first", [line(1)])
    second = running(tmp_path / "second", [line(n) for n in range(1, 4)])
    answers: dict[str, Any] = {
        "/fedkeel/v1/runs": [
            run_of("", "third", "waiting", queue="q3", owner="sam"),
            run_of("22", "second", "running", second, owner="sam"),
            run_of("11", "first", "finished", first),
        ],
        "/fedkeel/v1/sites": [
            {"name": "north", "node": "1", "status": "online", "seen": "now", "refused": HOSTILE, "examples": 3}
            | dict.fromkeys(("versions", "arithmetic", "device"), "")
        ],
    }
    asked: list[Any] = []

    def called(self: Control, method: str, path: str, body: Any = None, timeout_s: float = 0) -> Any:
        asked.append((self.token.partition(":")[0], method, path))
        if "11" in path:
            raise RunError(f"the server at {self.address}: first is finished already")
        return {"name": "x", "status": "stopping"}

    def looked(path: str) -> Any:
        if isinstance(answer := answers[path], Exception):
            raise answer
        return answer

    monkeypatch.setattr(Control, "ask", called)
    file = tmp_path / "users.toml"
    token(file, "first", Role.look)
    with Page("127.0.0.1:0", users=file) as page:
        page.hub.follow(LinkRuns(looked, Control("127.0.0.1:1")), looked)
        yield page, asked, answers


def test_all_runs_of_a_superlink_and_its_queue(link: Any, tmp_path: Path) -> None:
    page, _, answers = link
    who = token(tmp_path / "users.toml", "olga", Role.operate)
    with reading(page, headers=who) as seen:
        seen.until(lambda seen, _: len(seen.rounds) == 3 and seen.here)
        assert list(seen.runs) == ["q3", "22", "11"]
        assert seen.run == "22"  # the one that goes on
        assert seen.here["north"]["refused"].isprintable()
    with reading(page, "11", who) as seen:
        seen.until(lambda seen, _: seen.rounds)
        assert (seen.run, len(seen.rounds)) == ("11", 1)
    with reading(page, "nothing", who) as seen:
        seen.until(lambda seen, _: seen.runs)
        assert (seen.run, seen.rounds) == ("", [])
    with reading(page, headers=who) as seen:
        seen.until(lambda seen, _: len(seen.rounds) == 3)
        answers["/fedkeel/v1/runs"] = RunError("no answer")
        last = seen.until(lambda seen, _: True)
        while "silent" not in last:
            last = seen.until(lambda seen, _: True)
        assert last["silent"] == "no answer"
    until(lambda: held(page.hub)["listeners"] == 0, "streams are forgotten")
    assert held(page.hub)["watched"] == 0


def test_a_button_asks_the_superlink_in_the_name_of_who_pressed_it(link: Any, tmp_path: Path) -> None:
    """The page has no right of its own: the SuperLink decides, and writes down who it was."""
    page, asked, _ = link
    who = {name: token(tmp_path / "users.toml", name, Role(name)) for name in ("submit", "operate", "look")}
    with reading(page, headers=who["look"]) as seen:
        seen.until(lambda seen, _: seen.runs)
    assert ask(page, "POST", "runs/22/stop", headers=who["look"]).status_code == 403
    assert ask(page, "POST", "runs/99/stop", headers=who["operate"]).status_code == 404
    assert ask(page, "POST", "runs/22/delete", headers=who["operate"]).status_code == 404
    assert asked == []
    assert ask(page, "POST", "runs/22/stop", headers=who["operate"]).json() == {"status": "stopping"}
    assert ask(page, "POST", "runs/q3/stop", headers=who["submit"]).status_code == 200
    refused = ask(page, "POST", "runs/11/resume", headers=who["operate"])
    assert (refused.status_code, refused.json()["detail"]) == (409, "first is finished already")
    assert asked == [
        ("operate", "POST", "/fedkeel/v1/runs/22/stop"),
        ("submit", "POST", "/fedkeel/v1/runs/q3/stop"),
        ("operate", "POST", "/fedkeel/v1/runs/11/resume"),
    ]


# --- what a browser may do


@pytest.mark.parametrize("path", ["", "page.css", "page.js", "chart.js", "events", "nothing"])
def test_a_browser_loads_and_runs_only_what_is_here(tmp_path: Path, path: str) -> None:
    file = tmp_path / "users.toml"
    token(file, "ann", Role.look)
    with served(running(tmp_path / "run", []), users=file) as page:
        answer = ask(page, "GET", path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.status_code == {"events": 401, "nothing": 404}.get(path, 200)


def test_the_page_needs_nothing_beside_itself_and_sets_no_markup() -> None:
    """No address of another machine, no style or script in the page, nothing that makes elements of a text."""
    for path in TEMPLATES.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|url\(", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
        if path.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "local host", "[::1].x"]
)
def test_a_name_that_is_made_to_point_here_is_not_answered(tmp_path: Path, host: str) -> None:
    with served(running(tmp_path / "run", [])) as page:
        answer = ask(page, "GET", "", headers={"Host": host})
        assert answer.status_code in (400, 403)
        assert "<" not in answer.text


def test_it_is_called_by_address_localhost_or_its_own_name(tmp_path: Path) -> None:
    with served(running(tmp_path / "run", [])) as page:
        for host in ("localhost", "LOCALHOST:81", "127.0.0.1:9", "[::1]:9", "192.0.2.7"):
            assert ask(page, "GET", "", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_button_of_another_page_is_not_heeded(tmp_path: Path, origin: str) -> None:
    file, folder = tmp_path / "users.toml", running(tmp_path / "run", [line(1)])
    who = token(file, "olga", Role.operate)
    with served(folder, users=file) as page:
        assert ask(page, "POST", "runs/run/stop", headers={**who, "Origin": origin}).status_code == 403
        assert RunFolder(folder).stop() is None
        own = {**who, "Origin": page.url.rstrip("/")}
        assert ask(page, "POST", "runs/run/stop", headers=own).status_code == 200


# --- where it listens, and its end


def test_addresses_that_cannot_be_are_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--page: {port}: this port is in use"), Page(str(port)):
            pass
    with pytest.raises(SettingsError, match=r"--page: 'x:y' is not \[HOST:\]PORT"):
        Page("x:y")
    with pytest.raises(SettingsError, match="open to other machines and nothing would be encrypted"):
        Page("0.0.0.0:0", users=Path("users.toml"))
    with pytest.raises(SettingsError, match="say with --users who may look"):
        Page("0.0.0.0:0", certificates=Path("certs"))
    with page_at(None) as nothing:
        assert nothing is None


def test_nobody_who_looks_costs_nothing(tmp_path: Path) -> None:
    """Until somebody connects there is one thread that waits, and nothing is read."""
    before = threading.active_count()
    with served(running(tmp_path / "run", [line(1)])) as page:
        assert threading.active_count() == before + 1
        time.sleep(0.05)
        assert page.hub.since("run", -1, -1)[1] == 0
    assert threading.active_count() == before


def test_it_ends_at_once_with_streams_open_and_tells_them(tmp_path: Path) -> None:
    """Also with a browser that reads nothing, and one that sends nothing."""
    folder = running(tmp_path / "run", [line(n, 50) for n in range(1, 200)])
    with served(folder) as page, reading(page) as seen:
        seen.until(lambda seen, _: seen.rounds)
        address = ("127.0.0.1", int(page.url.rstrip("/").rpartition(":")[2]))
        with socket.create_connection(address) as deaf, socket.create_connection(address):
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            deaf.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: page.hub.watching == 2, "the deaf one looks")
            add(folder, line(200, 50))
            started = time.monotonic()
            page.__exit__()
            took = time.monotonic() - started
            assert took < 1.0 or took < limit(1.0)
        seen.until(lambda seen, name: name == "end")
        assert seen.rounds[-1][0] == 200  # the last round came too


def test_who_only_holds_places_is_turned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that asks for nothing, or never ends to ask, ends; a stream that is older goes on."""
    monkeypatch.setattr(connection, "FIRST_S", 0.3)
    folder = running(tmp_path / "run", [line(1)])
    with served(folder) as page, reading(page) as seen:
        seen.until(lambda seen, _: seen.rounds)
        address = ("127.0.0.1", int(page.url.rstrip("/").rpartition(":")[2]))
        for words in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with socket.create_connection(address, timeout=5) as holding:
                holding.sendall(words)
                with suppress(ConnectionResetError):
                    assert holding.recv(100) == b""
        add(folder, line(2))
        seen.until(lambda seen, _: len(seen.rounds) == 2)


def test_beyond_this_machine_it_is_encrypted_and_has_the_names_of_the_certificate(tmp_path: Path) -> None:
    file, made = tmp_path / "users.toml", certs.write(tmp_path / "certs", ["fl.example.org"], [], 30)
    who = token(file, "ann", Role.look)
    trust = ssl.create_default_context(cafile=str(made.ca))
    with Page("0.0.0.0:0", users=file, certificates=made.folder) as page:
        page.hub.follow(OneRun(RunFolder(running(tmp_path / "run", [line(1)])), "written", 20))
        assert page.url.startswith("https://")
        port = page.url.rstrip("/").rpartition(":")[2]
        with httpx.Client(verify=trust, trust_env=False, timeout=10) as client:
            base = f"https://127.0.0.1:{port}/"
            assert client.get(base, headers={"Host": f"fl.example.org:{port}"}).status_code == 200
            assert client.get(base, headers={"Host": "other.example.org"}).status_code == 403
            assert client.get(base + "events").status_code == 401
            with client.stream("GET", base + "events", headers=who) as answer:
                assert answer.status_code == 200
            with pytest.raises(httpx.TransportError):
                client.get(f"http://127.0.0.1:{port}/")


def test_a_hub_that_fails_shows_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error in looking is told once, and what can be shown is."""
    folder = running(tmp_path / "run", [line(1)])

    def broken(path: str) -> Any:
        raise ZeroDivisionError

    with served(folder) as page:
        page.hub.follow(None, broken)
        with reading(page) as seen:
            until(lambda: "cannot show everything" in caplog.text, "it is told")
            seen.until(lambda seen, _: seen.rounds)
