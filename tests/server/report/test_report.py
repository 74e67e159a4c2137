"""The report's numbers by hand: rounds and bytes to a target, bands, groups, percentiles, what did not finish."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from common.errors import SettingsError
from common.metrics.target import Target
from server import report
from server.__main__ import cli
from server.report import contents, details, page
from server.report.bins import bin_columns, bin_rows
from server.report.contents import Options
from server.report.found import find
from server.report.groups import Group, group
from server.report.scores import Mean, Reach, band, final, percentile, reached, running, thin
from server.report.sections import class_counts, client_values
from server.report.styles import styles
from server.report.tables import Cell, Table
from tests.support.written_runs import record, write_cell, write_run

NAN = float("nan")


def groups_of(*folders: Path) -> list[Group]:
    """The groups of folders."""
    return group(find(folders))


def rows_of(table: Table) -> list[dict[str, str]]:
    """A table's rows as column -> text."""
    return [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]


# --- arithmetic


def test_mean_and_deviation_by_hand() -> None:
    """1 and 3: mean 2, sample deviation sqrt((1 + 1)/1); of one value none; with a NaN there is no mean."""
    assert Mean.of([1.0, 3.0]) == Mean(2.0, math.sqrt(2), 2)
    assert Mean.of([4.0]) == Mean(4.0, None, 1)
    assert Mean.of([1.0, NAN]) is None
    assert Mean.of([]) is None


def test_target_by_raw_and_by_running_mean() -> None:
    """0.2, 0.9, 0.4, 0.8, 0.9: 0.8 is reached at place 1; the mean of two reaches it last (0.85)."""
    values = np.array([0.2, 0.9, 0.4, 0.8, 0.9])
    assert reached(values, 0.8) == 1
    np.testing.assert_allclose(running(values, 2), [NAN, 0.55, 0.65, 0.6, 0.85])
    assert reached(values, 0.8, 2) == 4
    assert reached(values, 0.95) is None
    assert reached(values, 0.1, 6) is None
    assert reached(np.array([NAN, 0.9]), 0.8) == 1
    assert reached(np.array([NAN, 0.9]), 0.8, 2) is None


def test_final_score_is_the_mean_of_the_last_evaluations() -> None:
    """Of all if there are fewer; a NaN among them is not left out."""
    assert final(np.array([0.1, 0.4, 0.6]), 2) == 0.5
    assert final(np.array([0.2, 0.4]), 5) == pytest.approx(0.3)
    assert math.isnan(final(np.array([0.1, NAN]), 2))
    assert math.isnan(final(np.array([]), 2))


def test_unreached_runs_are_bounds_and_never_left_out() -> None:
    """Costs 4 and 6: mean 5. One of 10 spent in vain: the mean is above (4 + 10)/2, the median infinite."""
    assert Reach.of([4.0, 6.0], [10.0, 10.0]) == Reach(2, (4.0, 6.0), 5.0)
    partly = Reach.of([4.0, None], [10.0, 10.0])
    assert (partly.reached, partly.n, partly.median) == (1, 2, math.inf)
    assert partly.cost == Mean(7.0, math.sqrt(18), 2)
    assert Reach.of([4.0, None, 6.0], [10.0] * 3).median == 6.0
    assert Reach.of([None], [10.0]) == Reach(0, (10.0,), math.inf)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 11, 100])
def test_percentile_is_numpys(count: int) -> None:
    """Linear between the sorted values."""
    values = np.random.default_rng(count).normal(size=count)
    for percent in (0, 10, 50, 90, 100):
        assert percentile(list(values), percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-12)


def test_percentile_counts_a_diverged_client_as_the_lowest() -> None:
    """0 to 10 with one NaN: it is the lowest, so the 10th percentile is the value above it."""
    assert percentile([NAN, *map(float, range(1, 11))], 10) == 1.0
    assert math.isnan(percentile([NAN, 1.0], 10))


def test_band_by_hand() -> None:
    """Rounds 1, 2 of both: 0.1/0.3 and 0.2/0.6; costs 10/20 and 30/40. Round 3 of the first alone is drawn alone."""
    one = (np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 50.0]), np.array([0.1, 0.2, 0.5]))
    other = (np.array([1.0, 2.0]), np.array([20.0, 40.0]), np.array([0.3, 0.6]))
    found = band([one, other])
    np.testing.assert_allclose(found.x[:2], [15, 35])
    np.testing.assert_allclose(found.mean, [0.2, 0.4, NAN])
    spread = np.array([math.sqrt(0.02), math.sqrt(0.08), NAN])
    assert found.low is not None
    assert found.high is not None
    np.testing.assert_allclose(found.low, found.mean - spread)
    np.testing.assert_allclose(found.high, found.mean + spread)
    np.testing.assert_allclose(found.single[0][1], [NAN, 0.2, 0.5])
    np.testing.assert_allclose(found.single[1][1], [NAN, 0.6, NAN])
    alone = band([one])
    assert (alone.low, alone.high, alone.single) == (None, None, ())


def test_a_seed_that_diverges_ends_the_mean() -> None:
    """Where one seed is NaN there is no mean of the others; they are drawn as they are."""
    rounds = np.array([1.0, 2.0, 3.0])
    found = band([(rounds, rounds, np.array([0.1, NAN, NAN])), (rounds, rounds, np.array([0.3, 0.5, 0.7]))])
    np.testing.assert_allclose(found.mean, [0.2, NAN, NAN])
    np.testing.assert_allclose(found.single[1][1], [0.3, 0.5, 0.7])


def test_thinned_curves_keep_their_ends() -> None:
    """At most so many, the first and the last among them."""
    assert thin(3, 500).tolist() == [0, 1, 2]
    kept = thin(5000, 500)
    assert (len(kept), kept[0], kept[-1]) == (500, 0, 4999)


def test_heat_maps_sort_by_the_last_value_and_average_neighbors() -> None:
    """Last values 0.9, 0.1, -, 0.5 (of the round before): empty, worst, ..., best."""
    values = np.array([[0.1, 0.9], [0.2, 0.1], [NAN, NAN], [0.5, NAN]])
    rows, names, binned = bin_rows(values, ["a", "b", "c", "d"], 4)
    assert (names, binned) == (["c", "b", "d", "a"], False)
    rows, names, binned = bin_rows(values, ["a", "b", "c", "d"], 2)
    assert (names, binned) == (["1-2", "3-4"], True)
    np.testing.assert_allclose(rows, [[0.2, 0.1], [0.3, 0.9]])
    columns, rounds = bin_columns(np.array([[1.0, 3.0, NAN, 5.0]]), [1, 2, 3, 4], 2)
    assert rounds == [2, 4]
    np.testing.assert_allclose(columns, [[2.0, 5.0]])


def test_a_diverged_seed_is_no_number(tmp_path: Path) -> None:
    """Nor left out: the cell says of how many runs the score is not finite."""
    write_run(tmp_path / "a", [0.1, 0.2], seed=0)
    write_run(tmp_path / "b", [record(1, 0.3), record(2, NAN)], seed=1)
    (row,) = rows_of(contents.summary(groups_of(tmp_path), Options()))
    assert row["accuracy (last 5)"] == "not finite: 1 of 2"
    assert row["best"] == "0.2500 ± 0.0707"


# --- runs and groups


def test_rounds_and_bytes_to_target_on_a_written_history(tmp_path: Path) -> None:
    """150 bytes and 2 s a round, evaluated every second round: 0.5 is reached in rounds 4 and 6."""
    write_run(tmp_path / "a", [None, 0.3, None, 0.5, None, 0.7], seed=0)
    write_run(tmp_path / "b", [None, 0.1, None, 0.4, None, 0.6], seed=1)
    (one,) = groups_of(tmp_path / "a", tmp_path / "b")
    rounds, sent = (one.reach(Target(0.5), axis, 1) for axis in ("round", "bytes"))
    assert rounds == Reach(2, (4.0, 6.0), 5.0)
    assert sent == Reach(2, (600.0, 900.0), 750.0)
    table = contents.targets([one], Options.of((0.5, 0.65, 0.9)))
    assert rows_of(table) == [
        {
            "group": "fedavg: written",
            "target": "0.5",
            "reached": "2 of 2",
            "rounds": "5.0 ± 1.4",
            "median rounds": "5.0",
            "bytes": "750 ± 212 B",
            "seconds": "10.0 ± 2.8",
        },
        {
            "group": "fedavg: written",
            "target": "0.65",
            "reached": "1 of 2",
            "rounds": "> 6.0",
            "median rounds": "> 6",
            "bytes": "> 900 B",
            "seconds": "> 12.0",
        },
        {
            "group": "fedavg: written",
            "target": "0.9",
            "reached": "0 of 2",
            "rounds": "not reached in 6 rounds",
            "median rounds": "> 6",
            "bytes": "> 900 B",
            "seconds": "> 12.0",
        },
    ]


def test_smoothing_asks_for_a_running_mean(tmp_path: Path) -> None:
    """A lucky evaluation reaches a target, the mean of two in a row later."""
    write_run(tmp_path / "a", [0.2, 0.9, 0.4, 0.8, 0.9])
    table = contents.targets(groups_of(tmp_path), Options.of((0.8,), smoothing=2))
    assert rows_of(table)[0]["rounds"] == "5.0"
    assert "the mean of 2 evaluations in a row" in table.notes[0]


def test_simulated_time_is_an_axis_where_the_history_has_it(tmp_path: Path) -> None:
    """`clock` is of a round: summed."""
    write_run(tmp_path / "a", [record(r, 0.3 * r, clock=5.0) for r in (1, 2, 3)])
    (one,) = groups_of(tmp_path / "a")
    assert one.reach(Target(0.6), "clock", 1) == Reach(1, (10.0,), 10.0)
    assert rows_of(contents.summary([one], Options()))[0]["simulated s"] == "15.0"


def test_groups_are_runs_that_differ_in_the_seed_alone(tmp_path: Path) -> None:
    """Another alpha is another group; so is the same seed once more."""
    write_run(tmp_path / "a", [0.1, 0.2], seed=0)
    write_run(tmp_path / "b", [0.1, 0.4], seed=1)
    write_run(tmp_path / "c", [0.1, 0.4], seed=1, alpha=0.1)
    write_run(tmp_path / "d", [0.1, 0.4], seed=1)
    found = groups_of(tmp_path)
    assert [[run.folder.name for run in one.runs] for one in found] == [["a", "b"], ["c"], ["d"]]
    assert [one.label for one in found] == [
        "fedavg: written (a)",
        "fedavg: written (c)",
        "fedavg: written (d)",
    ]
    table, common = details.differing(found)
    assert [row["partition.alpha"] for row in rows_of(table)] == ["0.5", "0.1", "0.5"]
    assert common["strategy.name"] == "fedavg"
    assert "seed" not in common


def test_runs_of_before_and_of_now_are_one_group(tmp_path: Path) -> None:
    """Older folders lack the hyperparameters that nobody set: those have their defaults. Another value is another
    group."""
    for seed, more in enumerate(("", 'weights = "data"', 'weights = "uniform"')):
        folder = write_run(tmp_path / str(seed), [0.5, 0.6], seed=seed)
        text = (folder / "experiment.toml").read_text("utf-8")
        (folder / "experiment.toml").write_text(text.replace("[strategy]\n", f"[strategy]\n{more}\n"), "utf-8")
    groups = groups_of(*(tmp_path / str(seed) for seed in range(3)))
    assert sorted(len(each.runs) for each in groups) == [1, 2]


def test_cells_are_grouped_by_variant_and_point(tmp_path: Path) -> None:
    """Whatever their settings; tuning runs are in a table of their own; targets are the plan's."""
    plan = tmp_path / "plan"
    for seed in (0, 1):
        for alpha in (0.1, 1.0):
            for variant, gain in (("FedAvg", 0.1), ("SCAFFOLD", 0.2)):
                accuracies = [gain * alpha, gain + alpha / 2 + seed / 10]
                tuned = {"local.lr": 0.05} if variant == "SCAFFOLD" else {}
                write_cell(
                    plan, variant, accuracies, seed=seed, point={"partition.alpha": alpha}, tuned=tuned, targets=[0.6]
                )
    for rate, accuracy in ((0.05, 0.5), (0.1, 0.4)):
        write_cell(
            plan, "SCAFFOLD", [accuracy], seed=100, stage="tune", tuned={"local.lr": rate},
            point={"partition.alpha": 0.1}, place=f"tuning/lr-{rate}",
        )  # fmt: skip
    runs = find([plan])
    found = group(runs)
    assert sorted(one.label for one in found) == [
        "FedAvg (partition alpha = 0.1)",
        "FedAvg (partition alpha = 1)",
        "SCAFFOLD (partition alpha = 0.1)",
        "SCAFFOLD (partition alpha = 1)",
    ]
    assert all(len(one.runs) == 2 for one in found)
    tuning = rows_of(details.tuning(runs, found))
    assert [(r["variant"], r["candidate"], r["score"], r["winner"]) for r in tuning] == [
        ("SCAFFOLD (partition alpha = 0.1)", "local lr = 0.05", "0.5000", "chosen"),
        ("SCAFFOLD (partition alpha = 0.1)", "local lr = 0.1", "0.4000", "–"),
    ]
    first, *others = contents.pivots(found, Options.of((0.6,), window=1))
    assert first.columns == ["variant", "partition alpha = 0.1", "partition alpha = 1"]
    assert rows_of(first)[1] == {
        "variant": "SCAFFOLD",
        "partition alpha = 0.1": "0.3000 ± 0.0707",
        "partition alpha = 1": "0.7500 ± 0.0707",
    }
    assert not any(cell.best for row in first.rows for cell in row)  # within the spread of two seeds
    assert [table.title.split(" by ")[0] for table in others] == ["Rounds to 0.6", "Bytes to 0.6"]
    assert not any(cell.best for row in others[0].rows for cell in row[:2])  # nobody reached it: nobody was best
    text = report.write([plan], [], tmp_path / "page.html")
    assert "| 0.6 |" in text
    assert "| 0.9 |" not in text


def test_unfinished_runs_are_listed_and_enter_no_mean(tmp_path: Path) -> None:
    """Of three seeds one stopped at 2 of 3 rounds: the mean is of the other two, "2 of 3"."""
    write_run(tmp_path / "a", [0.1, 0.2, 0.4], seed=0)
    write_run(tmp_path / "b", [0.1, 0.2, 0.6], seed=1)
    write_run(tmp_path / "c", [0.9, 0.9], seed=2, rounds=3, status={"status": "stopped", "error": "power\n cut"})
    runs = find([tmp_path])
    (one,) = group(runs)
    row = rows_of(contents.summary([one], Options(window=1)))[0]
    assert (row["seeds"], row["accuracy"]) == ("2 of 3", "0.5000 ± 0.1414")
    (left,) = rows_of(details.unfinished(runs))
    assert (left["state"], left["rounds"], left["cause"]) == ("stopped", "2 of 3", "power cut")


def test_a_group_without_a_finished_run_is_marked(tmp_path: Path) -> None:
    """Its numbers are of what there is, with a dagger and a note."""
    write_run(tmp_path / "a", [0.1, 0.2], rounds=5, status={"status": "running"})
    table = contents.summary(groups_of(tmp_path), Options(window=1))
    assert table.rows[0][0].text == "fedavg: written †"
    assert rows_of(table)[0]["seeds"] == "0 of 1 (unfinished: 1)"
    assert any(note.startswith("† No run") for note in table.notes)


def test_failed_cells_without_a_run_are_listed(tmp_path: Path) -> None:
    """They stand in the plan's cells.json alone."""
    plan = tmp_path / "plan"
    write_cell(plan, "FedAvg", [0.1, 0.2])
    cells = [
        {"folder": "fedavg/seed-0", "status": "finished", "error": ""},
        {"folder": "fedavg/seed-1", "status": "failed", "error": "out of memory", "variant": "FedAvg", "seed": 1},
    ]
    (plan / "cells.json").write_text(json.dumps({"plan": "plan", "cells": cells}), "utf-8")
    runs = find([plan])
    assert [(r["state"], r["cause"]) for r in rows_of(details.unfinished(runs))] == [("failed", "out of memory")]
    assert [one.count for one in group(runs)] == ["1 of 2"]


def test_worst_client_and_percentile(tmp_path: Path) -> None:
    """Of clients 0.0, 0.1, ..., 1.0 the worst has 0 and the 10th percentile is 0.1."""
    each = {str(client): client / 10 for client in range(11)}
    clients = {"accuracy": {"weighted": 0.5, "mean": 0.5, "worst": 0.0, "client": "0", "n": 11}}
    write_run(tmp_path / "a", [record(1, 0.5, clients=clients, each={"accuracy": each})])
    (row,) = rows_of(contents.summary(groups_of(tmp_path), Options()))
    assert (row["worst client"], row["10th percentile"]) == ("0.0000", "0.1000")


def test_dropped_and_void_are_counted_by_cause(tmp_path: Path) -> None:
    """Summed over rounds and seeds; bytes and models a round."""
    lines = [
        record(
            1, 0.5, dropped={"0": "timed out"}, causes={"0": "timed out"}, void=[{"cause": "1 valid uploads, quorum 2"}]
        ),
        record(2, 0.5, dropped={"0": "norm: 5 is above 4", "1": "timed out"}, causes={"1": "timed out"}, late=3),
    ]
    folder = write_run(tmp_path / "a", lines)
    header = json.dumps({"w": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(20))
    (row,) = rows_of(details.communication(groups_of(tmp_path)))
    assert row == {
        "group": "fedavg: written",
        "down a round": "100 B",
        "up a round": "50 B",
        "vectors down": "5.0",
        "vectors up": "2.5",
        "late replies": "3",
        "dropped: norm": "1",
        "dropped: timed out": "2",
        "void: below quorum": "1",
    }


def test_fairness_is_told(tmp_path: Path) -> None:
    """Same partition and first weights for every strategy of a seed; other sampled clients are seen."""
    write_run(tmp_path / "a", [0.1, 0.2])
    write_run(tmp_path / "b", [record(1, 0.1, sampled=["1", "2"]), record(2, 0.2)], strategy="scaffold")
    assert details.fairness(groups_of(tmp_path)) == [
        "Partition of a seed: the same for all groups with one task and split.",
        "First weights of a seed: the same for all groups with one task and split.",
        "Sampled clients of a seed: NOT the same for all groups with one task and split in 1 of 1 seeds.",
    ]


# --- histories as they come


def test_loss_curves_never_mix_evaluation_and_training(tmp_path: Path) -> None:
    """Evaluated every second round: two losses and four training losses."""
    write_run(tmp_path / "a", [None, 0.3, None, 0.5])
    (run,) = find([tmp_path])
    assert run.axis("round", "loss").tolist() == [2, 4]
    assert run.axis("round", "train loss").tolist() == [1, 2, 3, 4]


def test_personal_accuracy_says_whose_it_is(tmp_path: Path) -> None:
    """Own models answer another question: marked, and not set against others in bold."""
    own = {"accuracy": {"weighted": 0.9, "mean": 0.9, "worst": 0.8, "client": "0", "n": 2}}
    write_run(tmp_path / "a", [record(1, None, central={}, personal=own)], strategy="fedper")
    write_run(tmp_path / "b", [record(1, 0.8)])
    table = contents.summary(groups_of(tmp_path), Options(window=1))
    assert [row["accuracy"] for row in rows_of(table)] == ["0.9000 own", "0.8000"]
    assert not any(cell.best for row in table.rows for cell in row)
    assert any("are clients' own models" in note for note in table.notes)


def test_odd_histories_make_a_page(tmp_path: Path) -> None:
    """NaN, broken lines, unknown keys, missing files, a quadratic's distances, training loss alone, another `every`."""
    write_run(tmp_path / "nan", [record(1, NAN), record(2, 0.5), record(3, NAN)])
    broken = write_run(tmp_path / "broken", [record(1, 0.5, future={"x": [1]}), record(2, 0.6)], seed=3, name="broken")
    with (broken / "history.jsonl").open("a") as file:
        file.write('[1]\n{"round": "x"}\n{"round": 3, "cen')
    (broken / "roll.json").write_text('{"no": "list"')
    distances = {"distance_uniform": 0.5, "distance_data": 0.25}
    write_run(tmp_path / "quadratic", [record(r, None, central={}, task=distances) for r in (1, 2)], name="quadratic")
    write_run(tmp_path / "training", [None, None, None], name="training")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "history.jsonl").write_text('{"round": 1, "central": {"accuracy": 0.5}, "bytes_down": null}\n')
    text = report.write([tmp_path], [0.55], tmp_path / "page.html", tables=tmp_path / "tables")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert {"bare", "fedavg: broken", "fedavg: quadratic", "fedavg: training"} <= rows.keys()
    frame = pd.read_parquet(tmp_path / "tables" / "history.parquet")
    assert len(frame) == 3 + 2 + 2 + 3 + 1
    summary = rows_of(contents.summary(groups_of(tmp_path / "quadratic"), Options()))
    assert (summary[0]["distance_uniform"], summary[0]["distance_data"]) == ("0.5", "0.25")
    assert contents.targets(groups_of(tmp_path / "training"), Options.of((0.5,))).rows == []


def test_class_counts_of_the_roll(tmp_path: Path) -> None:
    """As lists or by label, padded; who does not share is left out; in natural order."""
    labels = ["[1, 2]", '{"2": 3}', "", "not json", "[4]"]
    roll = [{"name": str(10 - n), "labels": text} for n, text in enumerate(labels)]
    write_run(tmp_path / "a", [0.5], roll=roll)
    (run,) = find([tmp_path])
    assert class_counts(run) == (["6", "9", "10"], [[4, 0, 0], [0, 0, 3], [1, 2, 0]])


def test_heat_map_values_are_accuracies_else_training_losses(tmp_path: Path) -> None:
    """Clients in natural order; a client that was not asked has no value."""
    write_run(tmp_path / "a", [record(1, 0.5, each={"accuracy": {"10": 0.1, "9": 0.2}}), record(2, 0.5)])
    write_run(tmp_path / "b", [record(1, 0.5, losses={"1": 2.0}), record(2, 0.5, losses={"0": None, "1": 1.0})])
    first, second = (client_values(run) for run in find([tmp_path / "a", tmp_path / "b"]))
    assert (*first[:2], first[2].tolist(), *first[3:]) == ("accuracy", True, [[0.2], [0.1]], ["9", "10"], [1])
    assert (*second[:2], *second[3:]) == ("training loss", False, ["0", "1"], [1, 2])
    np.testing.assert_array_equal(second[2], [[NAN, NAN], [2.0, 1.0]])


# --- the page and the files


HOSTILE = '<script>alert(1)</script> & "$x_1$" | ü\u2028'


def test_names_cannot_become_html_or_mathematics(tmp_path: Path) -> None:
    """Of runs, variants, clients, causes: escaped on the page and in Markdown, `$` no formula."""
    name = 'a<img src=x onerror=alert(1)>"$y^$'
    each = {name: 0.5, HOSTILE: 0.7}
    line = record(1, 0.5, each={"accuracy": each}, dropped={"0": HOSTILE}, causes={"0": HOSTILE})
    roll = [{"name": name, "labels": "[1, 2]", "versions": HOSTILE}, {"name": HOSTILE, "labels": "[3, 4]"}]
    plan = tmp_path / "<b>plan"
    for variant in (HOSTILE, "other"):
        for alpha in (1, HOSTILE):
            status = {"status": "failed", "error": HOSTILE} if variant == "other" else {}
            place = f"{variant == 'other'}{alpha == 1}"
            write_cell(plan, variant, [line], point={"x": alpha}, roll=roll, status=status, place=place)
    text = report.write([plan], [0.4], tmp_path / "page.html", command=["report", HOSTILE])
    made = (tmp_path / "page.html").read_text("utf-8")
    assert made.count("<script>") == 1
    assert "<img" not in made
    assert "onerror=alert(1)&gt;" in made
    assert "<script>" not in text
    assert "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(len(re.split(r"(?<!\\)\|", row)) >= 4 for row in rows)


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    """No address at all; each id once; each reference has its id."""
    each = {str(client): client / 3 for client in range(3)}
    roll = [{"name": str(n), "labels": "[1, 2]"} for n in range(3)]
    write_run(tmp_path / "a", [record(r, r / 4, each={"accuracy": each}) for r in (1, 2, 3)], roll=roll)
    report.write([tmp_path], [0.5], tmp_path / "page.html")
    made = (tmp_path / "page.html").read_text("utf-8")
    plain = re.sub(r"data:image/png;base64,[^\"]*", "data:", made)
    assert not re.findall(r"https?:|//[a-z]+\.", plain)
    assert {value.split(":")[0] for value in re.findall(r'(?:src|href)="([^"#]+)', plain)} == {"data"}
    ids = re.findall(r'\sid=["\']?([^"\'\s>]+)', plain)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', plain)) <= set(ids)


def test_markdown_and_html_of_a_table() -> None:
    """Best in bold, a pipe escaped, scopes and sort values."""
    table = Table("T", ("a", "b"), [[Cell("x|y"), Cell("1.0", 1.0, best=True)], [Cell("z"), Cell("–")]], ["note"])
    assert table.markdown() == "## T\n\n| a | b |\n| --- | --- |\n| x\\|y | **1.0** |\n| z | – |\n\nnote"
    made = table.html()
    assert '<th scope="col">b</th>' in made
    assert '<th scope="row">x|y</th><td data-value="1"><b>1.0</b></td>' in made


def test_files_hold_everything(tmp_path: Path) -> None:
    """A row a round and run with its keys, a row a client, and the groups' means; CSV and Parquet alike."""
    plan = tmp_path / "plan"
    for seed in (0, 1):
        write_cell(plan, "FedAvg", [0.1, 0.5 + seed / 10], seed=seed, point={"partition.alpha": 0.1}, targets=[0.55])
    write_cell(plan, "FedAvg", [0.1], seed=100, stage="tune", tuned={"local.lr": 0.1}, place="tuning/x")
    folder = tmp_path / "out" / "tables"
    text = report.write([plan], [], tmp_path / "page.html", tables=folder, window=1)
    assert (folder / "report.md").read_text("utf-8") == text + "\n"
    names = {"history", "clients", "runs", "summary", "targets"}
    frames: dict[str, Any] = {}
    for name in names:
        frames[name] = pd.read_parquet(folder / f"{name}.parquet")
        plain = pd.read_csv(folder / f"{name}.csv")
        assert list(plain.columns) == list(frames[name].columns)
        assert len(plain) == len(frames[name])
    history = frames["history"]
    assert history["seed"].tolist() == [0, 0, 1, 1, 100]
    assert history["stage"].tolist() == ["final"] * 4 + ["tune"]
    assert history["central.accuracy"].tolist() == [0.1, 0.5, 0.1, 0.6, 0.1]
    assert history["point"].iloc[0] == '{"partition.alpha": 0.1}'
    assert {"train.loss", "steps"} & set(frames["clients"]["metric"])
    assert frames["summary"]["accuracy.mean"].tolist() == pytest.approx([0.55])
    assert frames["summary"]["accuracy.deviation"].tolist() == pytest.approx([math.sqrt(0.005)])
    targets = frames["targets"]
    assert targets["reached"].tolist() == [False, True]
    assert targets["bytes"].iloc[1] == 300


def test_many_groups_are_drawn_grey_but_for_the_best(tmp_path: Path) -> None:
    """Sixteen in color, all in the tables, and the page stays small."""
    for number in range(20):
        write_run(tmp_path / f"{number}", [0.01 * number, 0.02 * number], alpha=0.1 + number, name=f"n{number}")
    found = groups_of(tmp_path)
    style = styles(found, 1)
    colored = {one.label for one in found if style[one.number].colored}
    assert colored == {f"fedavg: n{number}" for number in range(4, 20)}
    made = page(found, find([tmp_path]), Options.of((0.5,)))
    assert "4 other groups" in made
    assert len(made) < 1_500_000


@pytest.mark.slow
@pytest.mark.rest
def test_a_hundred_long_runs_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 runs of 500 rounds, 100 clients evaluated every fifth: under 20 s of a core and 6 MB."""
    generator = np.random.default_rng(0)
    roll = [{"name": str(n), "labels": json.dumps(generator.integers(0, 40, 10).tolist())} for n in range(100)]
    for variant in range(10):
        for alpha in (0.1, 0.5):
            for seed in range(5):
                lines = []
                for number in range(1, 501):
                    accuracy = (0.5 + variant / 20) * (1 - math.exp(-number / 80)) + float(generator.normal(0, 0.01))
                    each = {str(n): accuracy + value for n, value in enumerate(generator.normal(0, 0.1, 100).tolist())}
                    own = {"weighted": accuracy, "mean": accuracy, "worst": min(each.values()), "client": "3", "n": 100}
                    more = {"each": {"accuracy": each}, "clients": {"accuracy": own}} if number % 5 == 0 else {}
                    lines.append(record(number, accuracy, drift=float(generator.normal(0.3, 0.05)), **more))
                point = {"partition.alpha": alpha}
                write_cell(tmp_path / "plan", f"v{variant}", lines, seed=seed, point=point, alpha=alpha, roll=roll)
    started = time.process_time()
    report.write([tmp_path / "plan"], [0.5, 0.6], tmp_path / "page.html")
    spent, size = time.process_time() - started, (tmp_path / "page.html").stat().st_size
    with capsys.disabled():
        print(f"{spent:.1f} s of a core, page of {size / 1e6:.1f} MB")
    assert spent < 20
    assert size < 6e6


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    """No run, tuning only, a page or tables that cannot be written; a folder twice is read once."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"empty' holds no run: no line in history\.jsonl"):
        report.write([tmp_path / "empty"], [], tmp_path / "page.html")
    write_cell(tmp_path / "tuned", "A", [0.1], stage="tune")
    with pytest.raises(SettingsError, match="holds runs of a tuning only"):
        report.write([tmp_path / "tuned"], [], tmp_path / "page.html")
    write_run(tmp_path / "a", [0.1])
    with pytest.raises(SettingsError, match=r"page '.*no/page\.html' cannot be written: "):
        report.write([tmp_path / "a"], [], tmp_path / "no" / "page.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"tables in '.*file' cannot be written: "):
        report.write([tmp_path / "a"], [], tmp_path / "page.html", tables=tmp_path / "file")
    assert len(find([tmp_path / "a", tmp_path / "a", tmp_path])) == 2


def test_the_command_takes_several_targets(tmp_path: Path) -> None:
    """Tables on stdout, the page and the files where they were asked for."""
    write_run(tmp_path / "a", [0.1, 0.5, 0.9])
    words = ["report", str(tmp_path / "a"), "--target", "0.5", "--target", "0.95", "--out", str(tmp_path / "p.html")]
    result = CliRunner().invoke(cli, [*words, "--tables", str(tmp_path / "t"), "--smoothing", "2", "--window", "1"])
    assert result.exit_code == 0, result.output
    assert "| fedavg: written | 0.5 | 1 of 1 | 3.0 | 3.0 | 450 B | 6.0 |" in result.output
    assert "| not reached in 3 rounds |" in result.output
    assert (tmp_path / "p.html").exists()
    assert (tmp_path / "t" / "report.md").exists()
