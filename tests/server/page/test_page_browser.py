"""The live page in a real headless browser: desk and phone, many rounds and sites, signing in, a lost connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.deploy.audit import AuditLog
from server.deploy import users as book
from server.deploy.users import Role
from server.page.serve import Page
from server.page.sources import OneRun
from server.rounds.folder import RunFolder
from tests.server.page.live import HOSTILE, add, line, running, served, token, user_in_no_time
from tests.support.browser import browser as browser  # the fixture
from tests.support.patience import until

WIDTHS = (1400, 400)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that take no time."""
    monkeypatch.setattr(book, "N", 2)
    monkeypatch.setattr(book, "NOBODY", user_in_no_time())


@dataclass
class Seen:
    """A tab, with what it said and asked for."""

    tab: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def has(self, text: str, place: str = "body") -> None:
        """Wait until this can be read there."""
        self.tab.wait_for_function(
            "([place, text]) => document.querySelector(place).innerText.includes(text)", arg=[place, text]
        )


@contextmanager
def seen(browser: Any, url: str, width: int = 1400, **options: Any) -> Iterator[Seen]:
    """A tab at an address."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    found = Seen(context.new_page())
    found.tab.set_default_timeout(20_000)
    found.tab.on("console", lambda message: found.said.append(message.text))
    found.tab.on("pageerror", lambda error: found.said.append(str(error)))
    found.tab.on("dialog", lambda dialog: found.said.append(f"dialog {dialog.message}"))
    found.tab.on("request", lambda request: found.asked.append(request.url))
    found.tab.goto(url)
    try:
        yield found
    finally:
        context.close()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 rounds of 50 sites."""
    lines = [line(n, 50, [7] if n > 3 else [], f"failed: {HOSTILE}") for n in range(1, 501)]
    return running(tmp_path_factory.mktemp("long") / "run", lines, 600)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_many_rounds_and_sites_on_a_desk_and_on_a_phone(browser: Any, long: Path, width: int, scheme: str) -> None:
    with served(long, 600) as page, seen(browser, page.url, width, color_scheme=scheme) as now:
        now.has("500 / 600", "#facts")
        tab = now.tab
        assert tab.title() == "500/600 written"
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.locator("#sites tbody tr").count() == 50
        assert tab.locator("#sites tbody tr").first.inner_text().startswith("site-7")  # what is not well comes first
        assert tab.locator("#rounds tbody tr").count() == 60
        for chart in tab.locator(".charts figure:not([hidden])").all():
            box = chart.bounding_box()
            assert box["width"] <= width
            assert box["height"] > 150
            assert len(chart.locator(".curve").get_attribute("d")) > 1000
            assert "in round 500" in chart.locator("svg").get_attribute("aria-label")
        ink, back = tab.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert (sum(map(int, back[4:-1].split(", "))) < 200) == (scheme == "dark")
        assert ink != back
        assert now.said == []
        assert {url.split("?")[0].removeprefix(page.url) for url in now.asked if not url.startswith("data:")} == {
            "", "page.css", "page.js", "chart.js", "stream.js", "tables.js", "sites.js", "words.js",
            "events",
        }  # fmt: skip


def test_a_round_that_comes_moves_nothing_else(browser: Any, tmp_path: Path) -> None:
    """Rows that stay are the same elements, a scrolled table stays where it is, and nothing is asked for anew."""
    folder = running(tmp_path / "run", [line(n, 50) for n in range(1, 41)])
    with served(folder) as page, seen(browser, page.url) as now:
        now.has("40 / 20", "#facts")
        tab = now.tab
        tab.evaluate("window.kept = document.querySelector('#sites tbody').rows[20]")
        tab.evaluate("document.querySelector('#sites .scroll').scrollTop = 100")
        asked = len(now.asked)
        add(folder, line(41, 50))
        now.has("41 / 20", "#facts")
        now.has("in round 41", "#sites")
        assert tab.evaluate("window.kept === document.querySelector('#sites tbody').rows[20]")
        assert tab.evaluate("document.querySelector('#sites .scroll').scrollTop") == 100
        assert len(now.asked) == asked
        assert now.said == []


@pytest.mark.parametrize("width", WIDTHS)
def test_what_others_wrote_is_text(browser: Any, tmp_path: Path, width: int) -> None:
    """Names, causes, reasons, notes, errors: no element comes of them, and the page stays as wide as it is."""
    word = "<script>document.title='gone'</script>" + "x" * 400
    folder = running(tmp_path / "run", [line(1), line(2, dropped=[1], why=f"{word}: {HOSTILE}")])
    (folder / "roll.json").write_text('[{"name": "<b>' + "y" * 400 + '"}]')
    RunFolder(folder).note(HOSTILE + word)
    RunFolder(folder).set_status("failed", error=word + HOSTILE)
    with served(folder) as page, seen(browser, page.url, width) as now:
        now.has("<script>", "#error")
        now.has("onerror=alert", "#notes")
        now.has("<b>", "#sites")
        assert now.tab.locator("main img, main b, main script, header script").count() == 0
        assert now.tab.evaluate("document.documentElement.scrollWidth") == width
        assert "written" in now.tab.title()
        assert now.said == []


def test_an_operator_signs_in_and_stops_a_run_once_sure(browser: Any, tmp_path: Path) -> None:
    file, folder = tmp_path / "users.toml", running(tmp_path / "run", [line(1)])
    header = token(file, "olga", Role.operate)["Authorization"].removeprefix("Bearer ")
    with served(folder, users=file) as page, seen(browser, page.url) as now:
        tab, field_ = now.tab, now.tab.locator("#token")
        field_.fill("olga:wrong")
        field_.press("Enter")
        now.has("not known", "#wrong")
        assert "written" not in tab.content()
        field_.fill(header)
        field_.press("Enter")
        now.has("olga (operate)", "#who")
        now.has("1 / 20", "#facts")
        tab.locator("#buttons button").click()
        now.has("Stop written?", "#ask")
        tab.locator("#ask button", has_text="Cancel").click()
        assert RunFolder(folder).stop() is None
        tab.locator("#buttons button").click()
        tab.locator("#ask button.danger").click()
        tab.wait_for_function("() => !document.querySelector('#ask').open")
        until(lambda: RunFolder(folder).stop() is not None, "the request is there")
        tab.reload()
        now.has("olga (operate)", "#who")  # the tab keeps the token
        tab.locator("#sign").click()
        assert tab.evaluate("sessionStorage.length") == 0
        assert "1 / 20" not in tab.locator("body").inner_text()
    written = AuditLog(folder / "audit.jsonl").last("stopped")
    assert written is not None
    assert written["actor"] == "olga"
    assert [word for word in now.said if "401" not in word] == []


def test_a_lost_connection_is_told_and_comes_back(browser: Any, tmp_path: Path) -> None:
    folder = running(tmp_path / "run", [line(1)])
    with served(folder) as page, seen(browser, page.url) as now:
        now.has("1 / 20", "#facts")
        port = page.url.rstrip("/").rpartition(":")[2]
        page.__exit__()
        now.has("The server has ended", "#link")
        assert "1 / 20" in now.tab.locator("#facts").inner_text()
        add(folder, line(2))
        with Page(port, "written") as again:
            again.hub.follow(OneRun(RunFolder(folder), "written", 20))
            now.has("2 / 20", "#facts")
            assert now.tab.locator("#link").is_hidden()
            assert now.tab.locator("#rounds tbody tr").count() == 2
