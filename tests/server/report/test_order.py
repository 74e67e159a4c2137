"""What stands where in a report, in which words: the plan's order, whole keys, one unit, one scale, bold and tests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from server import report
from server.report import charts, contents, details, paired
from server.report.caption import caption
from server.report.charts import Heat
from server.report.contents import Options
from server.report.found import find
from server.report.groups import Group, group, point
from server.report.order import ordered
from server.report.scores import Mean, beyond, three
from server.report.sections import heats_of
from server.report.styles import DRAWN, GREY, MARKERS, Style
from server.report.tables import Cell, Table, bold_best, bound, byte_count, in_one_unit, rounded, spread
from tests.support.written_runs import record, write_cell, write_run

PLAN = """name = "plan"
seeds = [0, 1]
[grid]
"partition.alpha" = [1.0, 0.1]
[[variants]]
name = "Zebra"
[[variants]]
name = "Ape"
"""


def groups_of(*folders: Path) -> list[Group]:
    """The groups of folders, as a report has them."""
    return ordered(group(find(folders)))


def column(cells: Sequence[Cell]) -> list[list[Cell]]:
    """A table's rows of one column."""
    return [[cell] for cell in cells]


def test_rows_are_in_the_plans_order(tmp_path: Path) -> None:
    """Points as the grid lists them, variants as written, whatever ran first; an unknown variant last; no file, as
    they came."""
    for variant in ("Ape", "New", "Zebra"):
        for alpha in (0.1, 1.0):
            write_cell(tmp_path / "plan", variant, [0.5], point={"partition.alpha": alpha})
    came = [one.label for one in groups_of(tmp_path / "plan")]
    assert came == sorted(came)
    (tmp_path / "plan" / "plan.toml").write_text(PLAN, "utf-8")
    found = groups_of(tmp_path / "plan")
    assert [(one.variant, one.point["partition.alpha"]) for one in found] == [
        ("Zebra", 1.0), ("Ape", 1.0), ("New", 1.0), ("Zebra", 0.1), ("Ape", 0.1), ("New", 0.1),
    ]  # fmt: skip
    assert [one.number for one in found] == list(range(6))
    for broken in ("name = ", 'variants = 3\ngrid = {"a" = 1}', '[grid]\n"x" = 3'):
        (tmp_path / "plan" / "plan.toml").write_text(broken, "utf-8")
        assert [one.label for one in groups_of(tmp_path / "plan")] == came


def test_keys_are_whole() -> None:
    """Two rates are told apart, also where they stand alone."""
    assert point({"server.lr": 1.0, "local.lr": 0.1}) == "server lr = 1, local lr = 0.1"
    assert point({"server.lr": 0.5}) == "server lr = 0.5"
    assert point({}) == ""


def test_bytes_of_a_column_have_one_unit() -> None:
    """That of the largest, with the digits that the smallest needs; bounds too; once more changes nothing."""
    means = [Mean(1_200.0, 0.0, 2), Mean(15_500_000.0, 500_000.0, 2), None]
    cells = [byte_count(mean) for mean in means] + [bound(Mean(7_800_000.0, 1.0, 2), "")]
    made = in_one_unit(column(cells), [0])
    assert [row[0].text for row in made] == [
        "0.0012 ± 0.0000 MB",
        "15.5000 ± 0.5000 MB",
        "–",
        "> 7.8000 MB",
    ]
    assert [row[0].text for row in in_one_unit(made, [0])] == [row[0].text for row in made]
    assert made[0][0].short == "0.0012 MB"
    assert [cell.text for cell in cells[:2]] == ["1.2 ± 0.0 kB", "15.5 ± 0.5 MB"]


def test_three_digits_and_all_of_them() -> None:
    """Of a column's largest number; what that would make nothing of has its own."""
    made = rounded(column([spread(Mean(0.81319, 0.0076, 3)), spread(Mean(0.5, None, 1))]), [0])
    assert [(row[0].short, row[0].text) for row in made] == [
        ("0.813 ± 0.008", "0.8132 ± 0.0076"),
        ("0.500", "0.5000"),
    ]
    tiny = rounded(column([spread(Mean(123.4, 5.0, 3)), spread(Mean(0.001, 0.0, 3))]), [0])
    assert [row[0].short for row in tiny] == ["123 ± 5", "0.001"]
    assert three(Mean(0.00012345, None, 1)) == "0.000123"


@pytest.mark.parametrize("higher", [True, False])
def test_bold_only_beyond_the_spread(higher: bool) -> None:
    """0.9 ± 0.01 is beyond 0.8 ± 0.05, not beyond 0.8 ± 0.1; single seeds have no spread; a bound may lie behind."""
    sign = 1.0 if higher else -1.0

    def bold(*means: Mean | Cell) -> list[bool]:
        cells = [mean if isinstance(mean, Cell) else spread(mean) for mean in means]
        return [row[0].best for row in bold_best(column(cells), 0, higher)]

    best = Mean(sign * 0.9, 0.01, 3)
    assert bold(best, Mean(sign * 0.8, 0.05, 3)) == [True, False]
    assert bold(best, Mean(sign * 0.8, 0.1, 3)) == [False, False]
    assert bold(best, Mean(sign * 0.5, 0.1, 3), Mean(sign * 0.85, 0.05, 3)) == [False] * 3
    assert bold(Mean(sign * 0.9, None, 1), Mean(sign * 0.1, None, 1)) == [False, False]
    assert bold(best) == [False]
    assert beyond(best, [Mean(sign * 0.8, None, 1)], higher) is False
    if not higher:
        assert bold(Mean(15.0, 1.0, 3), bound(Mean(20.0, 0.0, 3), "{:.1f}")) == [True, False]
        assert bold(Mean(15.0, 1.0, 3), bound(Mean(15.5, 0.0, 3), "{:.1f}")) == [False, False]


def test_paired_differences_are_scipys(tmp_path: Path) -> None:
    """Over shared seeds alone: interval and p as scipy's own test; Wilcoxon from six seeds on."""
    generator = np.random.default_rng(1)
    ones, others = generator.uniform(0.6, 0.9, 7), generator.uniform(0.4, 0.7, 7)
    for seed in range(7):
        write_cell(tmp_path / "plan", "A", [float(ones[seed])], seed=seed)
        if seed < 6:
            write_cell(tmp_path / "plan", "B", [float(others[seed])], seed=seed)
    write_cell(tmp_path / "plan", "B", [0.1], seed=99)
    one, other = groups_of(tmp_path / "plan")
    found = paired.paired(one, other, 1)
    assert found is not None
    expected = stats.ttest_rel(ones[:6], others[:6])
    interval = expected.confidence_interval(0.95)
    assert found.n == 6
    assert found.mean == pytest.approx(float((ones - others)[:6].mean()))
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, interval.low, interval.high))
    assert found.wilcoxon == pytest.approx(stats.wilcoxon(ones[:6], others[:6]).pvalue)
    (row,) = paired.table([one, other], 1).rows
    assert row[0].text == "A less B"


def test_few_seeds_prove_little(tmp_path: Path) -> None:
    """Said beside the number; one shared seed has a difference and no test; equal differences none, too; none shared,
    no row."""
    for seed, (first, second) in enumerate([(0.5, 0.3), (0.7, 0.5)]):
        write_cell(tmp_path / "plan", "A", [first], seed=seed)
        write_cell(tmp_path / "plan", "B", [second], seed=seed)
    write_cell(tmp_path / "plan", "C", [0.1], seed=1)
    write_cell(tmp_path / "plan", "D", [0.1], seed=7)
    write_cell(tmp_path / "plan", "E", [record(1, float("nan"))], seed=1)
    table = paired.table(groups_of(tmp_path / "plan"), 1)
    assert [[cell.text for cell in row][:4] for row in table.rows] == [
        ["A less B", "2", "+0.2000", "+0.2000 to +0.2000"],
        ["A less C", "1", "+0.6000", "–"],
    ]
    assert any("proves little" in note for note in table.notes)
    assert "p (paired t)" not in table.columns


def test_verdicts_say_no_more_than_the_numbers(tmp_path: Path) -> None:
    """Less is better of an error; within the spread nobody is ahead; another task is another question."""
    errors = {"A": (2.0, 2.2), "B": (3.0, 3.1), "C": (9.0, 9.1)}
    for variant, values in errors.items():
        for seed, value in enumerate(values):
            line = record(1, None, central={"mae": value}, clients={}, each={}, task={})
            status = {"headline": "mae", "metrics": {"mae": False}}
            write_cell(tmp_path / "plan", variant, [line], seed=seed, status=status)
    (verdict,) = paired.verdicts(groups_of(tmp_path / "plan"), 1)
    assert (verdict.best.variant, verdict.next and verdict.next.variant, verdict.beyond) == ("A", "B", True)
    for seed, value in enumerate((2.1, 2.0)):
        line = record(1, None, central={"mae": value}, clients={}, each={}, task={})
        write_cell(tmp_path / "plan", "D", [line], seed=seed, status={"headline": "mae", "metrics": {"mae": False}})
    (verdict,) = paired.verdicts(groups_of(tmp_path / "plan"), 1)
    assert (verdict.best.variant, verdict.beyond, verdict.seed_by_seed) == ("D", False, False)
    write_run(tmp_path / "other", [0.5], alpha=3.0)
    assert len(paired.verdicts(groups_of(tmp_path), 1)) == 2


def heat(values: list[list[float]], label: str = "accuracy") -> Heat:
    """A heat map of these values."""
    shape = np.array(values, np.float64)
    return Heat("g", "words", label, True, shape, [str(n) for n in range(len(shape))], [1, 2], False)


def test_heat_maps_only_where_there_is_something_to_see() -> None:
    """Not of one client, of one round, of one value, of specks."""
    nan = math.nan
    assert heat([[0.1, 0.2], [0.3, 0.4]]).telling
    assert not heat([[0.1, 0.2]]).telling
    assert not heat([[0.1], [0.2]]).telling
    assert not heat([[0.5, 0.5], [0.5, nan]]).telling
    assert not heat([[nan] * 40, [nan] * 38 + [0.1, 0.2]]).telling


def test_heat_maps_share_a_scale(tmp_path: Path) -> None:
    """All of one metric: from the worst hundredth to the best of all."""
    for place, top in enumerate((0.5, 0.9)):
        lines = [record(r, 0.5, each={"accuracy": {"a": top - 0.1 * r, "b": top}}) for r in (1, 2)]
        write_cell(tmp_path / "plan", f"v{place}", lines)
    write_cell(tmp_path / "plan", "flat", [record(r, 0.5, each={"accuracy": {"a": 0.1, "b": 0.1}}) for r in (1, 2)])
    maps, plain = heats_of(groups_of(tmp_path / "plan"), Options())
    assert len({scale for _, scale in maps}) == 1
    assert maps[0][1][1] == 0.9
    assert plain == ["flat"]
    assert charts.scale_of([heat([[1.0, 1.0], [1.0, 1.0]])])[0] < charts.scale_of([heat([[1.0, 1.0], [1.0, 1.0]])])[1]


def test_drift_is_called_agreement(tmp_path: Path) -> None:
    """It grows where clients agree. In all that is shown; the history keeps its key."""
    write_run(tmp_path / "a", [0.1, 0.2])
    groups, runs = groups_of(tmp_path), find([tmp_path])
    for table in (contents.summary(groups, Options()), details.communication(groups), details.runs(groups, Options())):
        assert "drift" not in " ".join([*table.columns, *table.notes])
    assert "agreement" in contents.summary(groups, Options()).columns
    assert "drift" in runs[0].metrics


def test_styles_differ_in_grey() -> None:
    """Dashes and marker of no two alike; a marker that the page can draw."""
    drawn = [Style.nth(number) for number in range(DRAWN)]
    assert len({(one.dashes, one.marker) for one in drawn}) == DRAWN
    assert len({(one.color, one.dashes) for one in drawn}) == DRAWN
    assert all(re.fullmatch(r"[MmLlHhVvAaZz0-9 .\-]+", path) for path in MARKERS.values())
    assert Style(DRAWN, GREY, "").path == ""


def test_the_caption_says_what_a_reader_asks(tmp_path: Path) -> None:
    """Algorithms, task, clients, split, rates, rounds, seeds; of many values that they vary."""
    roll = [{"name": str(n)} for n in range(7)]
    for seed in (0, 1):
        for alpha in (0.1, 1.0):
            write_cell(
                tmp_path / "plan", "FedAvg", [0.1, 0.2], seed=seed, roll=roll, alpha=alpha,
                point={"partition.alpha": alpha},
            )  # fmt: skip
    line = caption(groups_of(tmp_path / "plan"), 5)
    for words in ("FedAvg; ", "7 clients", "split iid; ", "batch 32", "2 rounds", "seeds 0, 1", "mean of the last 5"):
        assert words.lower() in line.lower(), (words, line)
    assert "\n" not in line
    for number in range(6):
        write_run(tmp_path / "many" / str(number), [0.1], alpha=0.1 + number, name=f"n{number}")
    assert "alpha" not in caption(groups_of(tmp_path / "many"), 1)  # no setting of an iid split


def test_a_table_tells_whether_there_is_more() -> None:
    """Digits or columns."""
    assert not Table("t", ("a", "b"), [[Cell("x"), Cell("1")]]).folded
    assert Table("t", ("a", "b"), [[Cell("x"), Cell("1.23", short="1.2")]]).folded
    assert Table("t", ("a", "b"), [[Cell("x"), Cell("1")]], extra=("b",)).folded


def test_ahead_seed_by_seed_within_the_spread(tmp_path: Path) -> None:
    """Seeds differ more than algorithms, but each seed says the same: no bold, and no "none is ahead" either."""
    for seed in range(4):
        for variant, gain in (("A", 0.05), ("B", 0.0)):
            write_cell(tmp_path / "plan", variant, [0.3 + 0.1 * seed + gain + 0.002 * seed * (gain > 0)], seed=seed)
    (verdict,) = paired.verdicts(groups_of(tmp_path / "plan"), 1)
    assert (verdict.best.variant, verdict.beyond, verdict.seed_by_seed) == ("A", False, True)
    report.write([tmp_path / "plan"], [], tmp_path / "page.html", window=1)
    assert "yet ahead seed by seed" in (tmp_path / "page.html").read_text("utf-8")
