"""A SuperLink as Prometheus sees it: its sites, its runs, its queue."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.errors import RunError, SettingsError
from server.deploy.gate import Owners
from server.deploy.queue import Queue
from server.deploy.runs_api import Books
from server.watch import link_metrics
from server.watch.link_metrics import MOST_RUNS, RUNS, SITES, STATES, LinkMetrics
from server.watch.names import MOST_SITES
from tests.server.deploy.test_users import ALICE, World, text

PREFIX = "fedkeel_superlink_"


def a_site(name: str, status: str = "online", seen_at: float | None = 5.0, refused: str = "") -> dict[str, Any]:
    return {"name": name, "status": status, "seen_at": seen_at, "refused": refused}


def a_run(name: str, status: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "status": status, "queue": "", "round": 0, "rounds": None, "round_at": None, **more}


def asking(sites: Sequence[Any], runs: Sequence[Any], allowed: Any = None) -> LinkMetrics:
    """Metrics of a SuperLink that answers so."""
    metrics = LinkMetrics(allowed)
    metrics.follow({SITES: sites, RUNS: runs}.__getitem__)
    return metrics


def values(metrics: LinkMetrics) -> dict[tuple[str, ...], float]:
    """Series' name and the values of its labels -> number."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return {
        (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_metrics, "FRESH_S", 0.0)


def test_sites_are_those_of_the_nodes_file_also_those_that_never_came() -> None:
    sites = [a_site("a"), a_site("a", "offline", 2.0), a_site("b", "offline", 3.0, "no such layout"), a_site("evil")]
    got = values(asking(sites, [], lambda: {"a": (), "b": (), "c": ()}))
    assert {key: value for key, value in got.items() if "site" in key[0]} == {
        ("site_connected", "a"): 1,  # two keys, one of them here
        ("site_connected", "b"): 0,
        ("site_connected", "c"): 0,
        ("site_last_seen_timestamp_seconds", "a"): 5,
        ("site_last_seen_timestamp_seconds", "b"): 3,
        ("site_refused", "a"): 0,
        ("site_refused", "b"): 1,
        ("site_refused", "c"): 0,
    }
    assert (got["nodes", "online"], got["nodes", "offline"], got["answers",]) == (2, 2, 1)


def test_a_nodes_file_that_is_broken_leaves_the_sites_as_they_were() -> None:
    answers: list[Any] = [["a"], SettingsError("broken"), ["b"]]

    def allowed() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    metrics = asking([a_site("a")], [], allowed)
    assert [("site_connected", "a") in values(metrics) for _ in range(3)] == [True, True, False]


def test_without_a_nodes_file_any_number_of_names_makes_a_bounded_number_of_series() -> None:
    sites: list[Any] = []
    metrics = asking(sites, [])
    for turn in range(3):
        sites[:] = [a_site(f"{turn}-{number}") for number in range(MOST_SITES)] + [a_site("")]
        got = values(metrics)
        assert got["nodes", "online"] == MOST_SITES + 1
    assert got == {**got, ("site_connected", "other"): 1}
    assert sum(key[0] == "site_connected" for key in got) == 1  # those of before are gone, the names they took are not


def test_runs_have_a_state_a_round_and_a_place_in_the_queue() -> None:
    runs = [
        a_run("late", "waiting", queue="q7"),
        a_run("again", "waiting", queue="q8", round=3),
        a_run("now", "running", round=4, rounds=9, round_at=77.0),
        a_run("again", "failed", round=3, rounds=5),
        a_run("again", "finished", round=5, rounds=5),  # an older one of that name
    ]
    got = values(asking([], runs))
    assert {key[1:] for key, value in got.items() if key[0] == "run_state" and value} == {
        ("late q7", "waiting"),
        ("again q8", "waiting"),
        ("now", "running"),
        ("again", "failed"),
    }
    assert (got["run_queue_place", "late q7"], got["run_queue_place", "again q8"]) == (1, 2)
    assert (got["run_round", "now"], got["run_rounds", "now"]) == (4, 9)
    assert got["run_last_round_timestamp_seconds", "now"] == 77
    assert (got["runs", "waiting"], got["runs", "finished"], got["runs", "lost"]) == (2, 1, 0)


def test_of_many_runs_those_have_series_that_go_on_or_are_new() -> None:
    runs = [a_run(f"old-{number}", "finished") for number in range(500)] + [a_run("slow", "running")]
    runs += [a_run("odd", "of-another-release")]
    got = values(asking([], runs))
    names = {key[1] for key in got if key[0] == "run_round"}
    assert len(names) == MOST_RUNS
    assert {"slow", "odd", "old-0"} <= names
    assert sum(key[0] == "run_state" for key in got) == MOST_RUNS * len(STATES)


def test_a_superlink_that_does_not_answer_is_told_and_its_sites_are_not(caplog: pytest.LogCaptureFixture) -> None:
    metrics, gone = LinkMetrics(), True
    assert values(metrics) == {("answers",): 0}  # not there yet: no warning either
    assert not caplog.text

    def ask(path: str) -> Any:
        if gone:
            raise RunError("no answer from the Flower server")
        return []

    metrics.follow(ask)
    assert [values(metrics), values(metrics)] == [{("answers",): 0}] * 2
    assert caplog.text.count("no answer") == 1
    gone = False
    assert values(metrics)["answers",] == 1


def test_many_who_ask_at_once_cost_the_superlink_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_metrics, "FRESH_S", 60.0)
    asked: list[str] = []
    metrics = LinkMetrics()
    metrics.follow(lambda path: asked.append(path) or [])
    threads = [threading.Thread(target=lambda: list(metrics.collect())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [SITES, RUNS]


def test_what_the_books_of_a_superlink_say_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Flower's words to series: a run that goes on, one that waits, a site that is here, one that left."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path / "books")
    for name in ("a", "b"):
        world.books.add(ALICE, text(name))
    world.turns.look()
    path = Path(world.flower.config[1]["run-dir"])
    (path / "history.jsonl").write_text('{"round":1}\n{"round":2,"time":"2026-01-02T03:04:05.000Z"}\n')
    (path / "roll.json").write_text(json.dumps([{"node": 1, "name": "0"}]))
    world.nodes = [
        SimpleNamespace(node_id=1, name="", status="online", last_deactivated_at=None, online_until=9e9),
        SimpleNamespace(
            node_id=2, name="x", status="offline", last_deactivated_at="2026-01-01T00:00:00+00:00", online_until=0.0
        ),
        SimpleNamespace(node_id=3, name="y", status="registered", last_deactivated_at=None, online_until=None),
    ]
    got = values(asking(world.books.sites(), world.books.everything()))
    assert (got["run_state", "a", "starting"], got["run_state", "b q2", "waiting"]) == (1, 1)
    assert (got["run_round", "a"], got["run_last_round_timestamp_seconds", "a"]) == (2, 1767323045)
    assert (got["site_connected", "0"], got["site_connected", "x"], got["site_connected", "y"]) == (1, 0, 0)
    assert got["site_last_seen_timestamp_seconds", "x"] == 1767225600
    assert ("site_last_seen_timestamp_seconds", "y") not in got


def test_hundreds_of_old_runs_do_not_make_a_scrape_slow(tmp_path: Path) -> None:
    """Each has a roll, notes and a long history, of which the end alone is read."""
    import time

    line = json.dumps({"round": 1, "padding": "x" * 1000}) + "\n"
    infos = []
    for number in range(200):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        (folder / "history.jsonl").write_text(line * 200)
        (folder / "run.json").write_text('{"status": "finished", "claim": "", "rounds": 200}')
        (folder / "roll.json").write_text(json.dumps([{"node": i, "name": str(i)} for i in range(10)]))
        (folder / "notes.log").write_text("2026-01-01T00:00:00.000Z said\n" * 100)
        infos.append(
            SimpleNamespace(
                run_id=number, override_config={"run-dir": str(folder)}, pending_at="", starting_at="", running_at="",
                status=SimpleNamespace(status="finished", sub_status="completed", details=""),
            )
        )  # fmt: skip
    books = Books(Queue(tmp_path), Owners(tmp_path / "o"), None, lambda: infos, list)  # type: ignore[arg-type]
    started = time.perf_counter()
    values(asking(books.sites(), books.everything()))
    assert time.perf_counter() - started < 2.0  # 0.1 s on a quiet core
