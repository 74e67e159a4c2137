"""The report's page in a real headless browser, offline: what is seen, what is loaded, sorting, phone and paper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server import report
from server.__main__ import cli
from tests.support.browser import browser as browser  # the fixture
from tests.support.written_runs import record, write_cell

SECTIONS = [
    "summary", "unfinished", "targets", "curves", "clients", "agreement", "communication", "partition", "tuning",
    "settings", "runs",
]  # fmt: skip
HOSTILE = "<script>document.title = 'gone'</script>"


@dataclass
class Seen:
    """A page in the browser, with what it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan of three variants (one of a hostile name), two points, two seeds, a tuning, a failed cell."""
    root = tmp_path_factory.mktemp("page")
    plan = root / "plan"
    roll = [{"name": str(n), "labels": json.dumps([n, 9 - n, 3]), "versions": "flwr 1.39.0"} for n in range(4)]
    for place, variant in enumerate(("FedAvg", "SCAFFOLD", HOSTILE)):
        for alpha in (0.1, 1.0):
            for seed in (0, 1):
                lines = []
                for number in range(1, 9):
                    accuracy = min(1.0, number / 10 + place / 20 + seed / 50)
                    each = {"accuracy": {str(n): accuracy * (1 - n / 10) for n in range(4)}}
                    worst = {"weighted": accuracy, "mean": accuracy, "worst": accuracy * 0.7, "client": "3", "n": 4}
                    clients = {"accuracy": worst}
                    lines.append(record(number, accuracy, each=each, clients=clients, clock=1.5, drift=0.1 * place))
                tuned = {"local.lr": 0.1} if place == 1 else {}
                failed = {"status": "failed", "error": "power cut"} if (place, alpha, seed) == (2, 1.0, 1) else {}
                write_cell(
                    plan, variant, lines, seed=seed, point={"partition.alpha": alpha}, roll=roll, alpha=alpha,
                    tuned=tuned, status=failed, targets=[0.5, 0.8], place=f"v{place}-{alpha}",
                )  # fmt: skip
    write_cell(plan, "SCAFFOLD", [0.1, 0.2], seed=100, stage="tune", tuned={"local.lr": 0.1}, place="tuning/x")
    report.write([plan], [], root / "report.html", window=1, command=["python", "-m", "server", "report"])
    return root / "report.html"


@pytest.fixture
def seen(browser: Any, written: Path) -> Iterator[Seen]:
    """The page at the width of a desk, offline."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    found = Seen(context.new_page())
    found.page.on("console", lambda message: found.said.append(message.text))
    found.page.on("pageerror", lambda error: found.said.append(str(error)))
    found.page.on("request", lambda request: found.asked.append(request.url))
    found.page.goto(written.as_uri())
    yield found
    context.close()


def test_it_loads_itself_alone_and_says_nothing(seen: Seen, written: Path) -> None:
    """No request but the file (a `data:` picture is none), no error, no warning; a name is no script."""
    assert [url for url in seen.asked if not url.startswith("data:")] == [written.as_uri()]
    assert seen.said == []
    assert seen.page.title() == "plan"


def test_all_sections_are_visible(seen: Seen) -> None:
    """Each with its heading, reached by a link."""
    assert seen.page.eval_on_selector_all("main > section", "all => all.map(one => one.id)") == SECTIONS
    for name in SECTIONS:
        assert seen.page.locator(f"#{name}-h").is_visible()
        assert seen.page.locator(f"#{name}").bounding_box()["height"] > 50
        assert seen.page.locator(f'nav a[href="#{name}"]').is_visible()
    assert "1 run did not come to an end" in seen.page.locator(".warning").inner_text()


def test_cells_say_the_numbers(seen: Seen) -> None:
    """FedAvg at alpha 0.1: 0.80 and 0.82 last, so 0.81 ± 0.0141; 0.5 in round 5 of both, 0.8 in round 8; 1200 bytes."""
    row = seen.page.locator("#summary table").first.locator("tbody tr", has_text="FedAvg (partition alpha = 0.1)")
    cells = [text.strip() for text in row.locator("th, td").all_inner_texts()]
    heads = seen.page.locator("#summary table").first.locator("thead th").all_inner_texts()
    found = dict(zip(heads, cells, strict=True))
    assert found["seeds"] == "2"
    assert found["accuracy"] == "0.810 ± 0.014"
    assert found["worst client"] == "0.567 ± 0.010"
    assert found["bytes"] == "1.2 kB"
    assert found["simulated s"] == "12.0"
    rows = seen.page.locator("#targets table").first.locator("tbody tr", has_text="FedAvg (partition alpha = 0.1)")
    assert [text.split("\t")[1:4] for text in rows.all_inner_texts()] == [
        ["0.5", "2 of 2", "5.0 ± 0.0"],
        ["0.8", "2 of 2", "8.0 ± 0.0"],
    ]
    failed = seen.page.locator("#unfinished tbody tr").all_inner_texts()
    assert len(failed) == 1
    assert "power cut" in failed[0]
    assert seen.page.locator("th", has_text=HOSTILE).count() > 0


def test_the_result_comes_first(seen: Seen) -> None:
    """Who is ahead at each point and whether beyond the spread, a chart, a line for a caption; above the tables."""
    said = seen.page.locator("#first .said").all_inner_texts()
    # Of the third variant at alpha = 1 one seed of two failed.
    third, second = (
        "has the highest accuracy, 0.910 ± 0.014 (2 seeds); next is SCAFFOLD, 0.860 ± 0.014",
        "a lead beyond",
    )
    assert said[0].startswith(f"At partition alpha = 0.1, {HOSTILE} {third}: {second} the spread of seeds")
    assert "a single seed cannot say" in said[1]
    assert seen.page.locator("#first figure svg").first.is_visible()
    line = seen.page.locator("#first .caption").inner_text()
    assert "4 clients" in line
    assert "8 rounds; seeds 0, 1." in line
    bottom = seen.page.locator("#first").bounding_box()
    assert bottom["y"] + bottom["height"] < seen.page.locator("#summary").bounding_box()["y"]


def test_the_summary_fits_and_has_more_on_demand(seen: Seen) -> None:
    """1,400 px wide nothing scrolls sideways; a checkbox, which works without the script, brings all digits."""
    seen.page.set_viewport_size({"width": 1400, "height": 1000})
    wide = "one => one.scrollWidth > one.clientWidth"
    box = seen.page.locator("#summary .scroll").first
    assert not box.evaluate(wide)
    heads = box.locator("thead th:visible").all_inner_texts()
    assert "best" not in heads
    assert "train loss" not in heads
    assert "agreement" in heads
    assert "drift" not in heads
    seen.page.locator("#summary .more input").first.check()
    assert "best" in box.locator("thead th:visible").all_inner_texts()
    assert box.get_by_text("0.8100 ± 0.0141").first.is_visible()
    assert not box.get_by_text("0.810 ± 0.014", exact=True).first.is_visible()


def test_charts_have_size_and_words(seen: Seen) -> None:
    """Every picture is drawn, named for a screen reader, and has lines; text in it is text."""
    boxes = seen.page.eval_on_selector_all(
        "figure svg", "all => all.map(one => [one.getBoundingClientRect().width, one.getBoundingClientRect().height])"
    )
    # 2 on top; 2 points x (accuracy, loss) x 4 axes, 2 x 2 of clients, 6 heat maps, 2 of agreement, one partition.
    assert len(boxes) == 2 + 16 + 4 + 6 + 2 + 1
    assert all(width > 200 and height > 100 for width, height in boxes)
    names = seen.page.eval_on_selector_all("figure svg", "all => all.map(one => one.getAttribute('aria-label'))")
    assert all(names)
    assert any("FedAvg (partition alpha = 0.1) ends at 0.81" in name for name in names)
    assert seen.page.locator("#curves figure svg text", has_text="kB sent").first.is_visible()
    drawn = seen.page.locator('#curves figure >> nth=0 >> [data-series="0"] path')
    assert drawn.first.bounding_box()["width"] > 100


def test_tables_are_tables_for_everyone(seen: Seen) -> None:
    """Captions, scopes, a language, regions that the keyboard reaches."""
    assert seen.page.get_attribute("html", "lang") == "en"
    for table in seen.page.locator("table").all():
        assert table.locator("caption").count() == 1
        assert table.locator("thead th:not([scope=col])").count() == 0
        assert table.locator("tbody tr > :first-child:not(th[scope=row])").count() == 0
    assert seen.page.locator(".scroll:not([tabindex='0'][aria-label])").count() == 0


def test_sorting_by_number_and_by_word(seen: Seen) -> None:
    """A click sorts up, a second one down; bounds come after values; the head says so."""
    table = seen.page.locator("#targets table").first
    head = table.locator("thead th", has_text="rounds").first
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"

    def rounds() -> list[float]:
        return [float(text.split()[0]) for text in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    up = rounds()
    assert up == sorted(up)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert rounds() == up[::-1]
    name = table.locator("thead th").first
    name.locator("button").click()
    words = table.locator("tbody th").all_inner_texts()
    assert words[0].startswith(HOSTILE[:8])
    assert head.get_attribute("aria-sort") is None


def test_the_legend_hides_and_shows_a_series(seen: Seen) -> None:
    """Its lines in every chart, and the same entry of the other legends."""
    button = seen.page.locator("#curves .legend button", has_text="FedAvg")
    number = button.get_attribute("data-toggle")
    lines = f'[data-series="{number}"]'
    assert seen.page.locator(f"{lines}.off").count() == 0
    button.click()
    assert seen.page.locator(f"{lines}:not(.off)").count() == 0
    assert seen.page.locator(f'#agreement .legend [data-toggle="{number}"]').get_attribute("aria-pressed") == "false"
    button.click()
    assert seen.page.locator(f"{lines}.off").count() == 0


def test_on_a_phone_only_tables_scroll(seen: Seen) -> None:
    """390 pixels wide: nothing is wider than the page but what stands in a box that scrolls; charts fill the width."""
    seen.page.set_viewport_size({"width": 390, "height": 844})
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 390
    wide = seen.page.evaluate(
        """() => Array.from(document.querySelectorAll("main *"))
             .filter(one => !one.closest(".scroll, pre, svg") && one.getBoundingClientRect().right > 391)
             .map(one => one.outerHTML)"""
    )
    assert wide == []
    assert seen.page.locator("#curves figure svg").first.bounding_box()["width"] > 330


def test_on_paper_everything_is_there(seen: Seen) -> None:
    """Printed, tables are whole and links to sections go; a PDF comes out."""
    seen.page.emulate_media(media="print")
    assert seen.page.locator("#targets table").first.is_visible()
    assert seen.page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    assert not seen.page.locator("nav").is_visible()
    assert seen.page.locator("#curves figure svg").first.bounding_box()["width"] > 100
    assert seen.page.pdf(format="A4")[:5] == b"%PDF-"


def test_without_script_everything_can_be_read(browser: Any, written: Path) -> None:
    """Tables, charts and legends; no button that does nothing."""
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(written.as_uri())
    assert page.locator("#summary table").first.is_visible()
    assert page.locator("#curves figure svg").first.is_visible()
    assert page.locator("#curves .legend li", has_text="SCAFFOLD").is_visible()
    assert page.locator("button").count() == 0
    page.locator("#summary .more input").first.check()
    assert page.locator("#summary .exact").first.is_visible()
    context.close()


@pytest.mark.slow
def test_real_runs_make_a_page(browser: Any, tmp_path: Path) -> None:
    """Two seeds of the digits experiment, five rounds each, from the command line to the browser."""
    text = Path("experiments/digits.toml").read_text("utf-8").replace("rounds = 30", "rounds = 5")
    (tmp_path / "five.toml").write_text(text, "utf-8")
    for seed in ("0", "1"):
        words = ["simulate", str(tmp_path / "five.toml"), "--run-dir", str(tmp_path / seed), "--seed", seed]
        assert CliRunner().invoke(cli, words).exit_code == 0
    out = tmp_path / "page.html"
    result = CliRunner().invoke(cli, ["report", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    context = browser.new_context(offline=True)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.goto(out.as_uri())
    assert page.locator("h1").inner_text() == "scaffold: digits-scaffold"
    assert page.locator("#summary tbody tr").all_inner_texts()[0].split("\t")[1:3] == ["2", "5"]
    assert page.locator("#partition figure svg").first.is_visible()
    assert said == []
    context.close()
