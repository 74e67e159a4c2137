"""Sites that bring tables: one answer in whatever order their columns stand; who has others is refused, and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import columns
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from server.app import run
from server.rounds.checkpoint import read
from server.rounds.folder import RunFolder
from tests.support.real_tables import breast_cancer, diabetes, rows_of, sites, write_csv
from tests.support.site_grid import SiteGrid

BREAST, DIABETES = breast_cancer(), diabetes()
CELLS = [name for name in BREAST[0] if name != "diagnosis"]


def cancer(test: Path | None = None, rounds: int = 10, **task: Any) -> Experiment:
    """Breast cancer at three sites, the test set at the server."""
    given = {"name": "table", "inputs": CELLS, "target": "diagnosis", "classes": ["malignant", "benign"]}
    more = {"test_file": str(test)} if test else {}
    return Experiment.model_validate(
        {
            "name": "cancer",
            "rounds": rounds,
            "task": {**given, "standardize": True, **more, **task},
            "local": {"epochs": 3},
            "round": {"wait_for": 3, "deadline_s": 20.0},
        }
    )


def ran(grid: SiteGrid, settings: Experiment, folder: Path, **more: Any) -> tuple[dict[str, Any], list[str]]:
    """The last line of a run's history, and what it said."""
    said: list[str] = []
    return run(grid, settings, RunFolder(folder), say=said.append, strict=False, **more), said


def pooled(files: dict[str, Path], name: str) -> np.ndarray:
    """A column over all sites' files."""
    from common.data.tables import read_table

    return np.concatenate([np.asarray(read_table(path)[name], np.longdouble) for path in files.values()])


def test_shuffled_columns_standardized_over_all_sites(tmp_path: Path) -> None:
    """Breast cancer: what was the majority class from raw numbers is over 0.93; mean and deviation are those of all
    training parts in one place. The same bits with all columns in one order, from gz and from parquet."""
    files, test = sites(tmp_path, *BREAST, tested=114)
    last, _ = ran(SiteGrid(files), cancer(test), tmp_path / "run")
    assert last["central"]["accuracy"] > 0.93
    raw, _ = ran(SiteGrid(files), cancer(test, standardize=False), tmp_path / "raw")
    assert raw["central"]["accuracy"] < 0.7
    held, rows = BREAST
    parts = np.array_split(rows[114:], 3)
    alike = {
        name: write_csv(tmp_path / f"plain-{name}.csv.gz", rows_of(held, part))
        for name, part in zip(files, parts, strict=True)
    }
    again, _ = ran(SiteGrid(alike), cancer(test), tmp_path / "again")
    assert again["sha256"] == last["sha256"]
    assert again["central"] == last["central"]


def test_the_scale_is_that_of_the_training_parts(tmp_path: Path) -> None:
    files, test = sites(tmp_path, *BREAST, tested=114)
    settings = cancer(test, rounds=1)
    settings = settings.model_copy(
        update={"partition": settings.partition.model_copy(update={"holdout": 0.0})}  # all rows are training rows
    )
    ran(SiteGrid(files), settings, tmp_path / "run")
    facts = json.loads(RunFolder(tmp_path / "run").facts())
    assert list(facts["mean"]) == CELLS
    for name in CELLS:
        exact = pooled(files, name)
        assert facts["mean"][name] == pytest.approx(float(exact.mean()), rel=1e-12)
        assert facts["deviation"][name] == pytest.approx(float(exact.std()), rel=1e-12)
    roll = json.loads((tmp_path / "run" / "roll.json").read_text())
    assert len({site["columns_hash"] for site in roll}) == 1
    assert roll[0]["columns_hash"]
    assert "sums" not in roll[0]


def test_a_resumed_run_and_a_late_site_have_the_same_scale(tmp_path: Path) -> None:
    """It is in every checkpoint; who comes later is sent it, and not asked: its policy need not let sums out."""
    files, test = sites(tmp_path, *BREAST, tested=114)
    whole, _ = ran(SiteGrid(files), cancer(test, rounds=6), tmp_path / "whole")
    ran(SiteGrid(files), cancer(test, rounds=3), tmp_path / "cut")
    resumed, _ = ran(SiteGrid(files), cancer(test, rounds=6), tmp_path / "cut", resume=True)
    assert resumed["sha256"] == whole["sha256"]
    before = RunFolder(tmp_path / "cut").facts()
    late = write_csv(tmp_path / "late.csv", rows_of(BREAST[0], BREAST[1][:60]))
    grid = SiteGrid(files)
    grid.join("late", late, "")
    last, _ = ran(grid, cancer(test, rounds=8), tmp_path / "cut", resume=True)
    assert sorted(last["accepted"]) == ["late", *files]
    assert RunFolder(tmp_path / "cut").facts() == before
    newest = sorted((tmp_path / "cut" / "checkpoints").glob("*.safetensors"))[-1]
    held = read(newest)
    assert held is not None
    assert json.loads(held[0].facts) == json.loads(before)
    assert held[0].columns_hash


def test_a_number_is_predicted_from_numbers_and_categories(tmp_path: Path) -> None:
    """Diabetes, sex as a category: the error is that of regression, in the target's own units."""
    files, test = sites(tmp_path, *DIABETES, tested=90)
    names = [name for name in DIABETES[0] if name != "progression"]
    settings = Experiment.model_validate(
        {
            "rounds": 15,
            "task": {
                "name": "table",
                "inputs": names,
                "categories": {"sex": [1, 2]},
                "target": "progression",
                "predict": "number",
                "standardize": True,
                "model": "linear",
                "test_file": str(test),
            },
            "local": {"lr": 0.05},
            "round": {"wait_for": 3},
        }
    )
    last, _ = ran(SiteGrid(files), settings, tmp_path / "run")
    facts = json.loads(RunFolder(tmp_path / "run").facts())
    assert "sex" not in facts["mean"]
    spread = float(np.std([DIABETES[0]["progression"][i] for i in DIABETES[1][:90]]))
    assert last["central"]["mse"] ** 0.5 < 0.8 * spread  # R2 above 0.36; ordinary least squares has 0.4 to 0.5
    assert last["central"]["mae"] < last["central"]["mse"] ** 0.5
    assert last["central"]["loss"] == pytest.approx(
        last["central"]["mse"] / facts["deviation"]["progression"] ** 2, rel=1e-12
    )


# --- who differs


def without_names(test: Path | None = None, **task: Any) -> Experiment:
    """The same numbers by position, as of old."""
    given = {"name": "images", "shape": [3], "classes": 2, "pooled": False, "labels": "y", **task}
    return Experiment.model_validate(
        {"rounds": 2, "task": given, "round": {"wait_for": 3, "deadline_s": 1.0, "quorum": 1}}
    )


def table(folder: Path, name: str, columns: list[str], size: int = 30) -> Path:
    rng = np.random.default_rng(len(name))
    held: dict[str, Any] = {column: rng.normal(0, 1, size).tolist() for column in columns}
    return write_csv(folder / f"{name}.csv", {**held, "y": [i % 2 for i in range(size)]})


ODD = [["patient", "bp", "bmi"], ["bp", "age", "bmi"]]


@pytest.mark.parametrize("odd", ODD, ids=["a patient number in place of age", "another order"])
@pytest.mark.parametrize("tells", [True, False], ids=["names may leave", "names stay"])
def test_a_site_with_other_columns_is_refused_and_told(
    odd: list[str], tells: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a vote before round 1. Names reach the operator where the policy lets them out; a site hears no name that is
    not its own, and its log has its own columns."""
    caplog.set_level("INFO", "client.app")
    files = {name: table(tmp_path, name, ["age", "bp", "bmi"]) for name in ("a", "b", "c")}
    files["c"] = table(tmp_path, "c", odd)
    grid, told = SiteGrid(files, "statistics = true\n" if tells else ""), list[str]()
    with pytest.raises(RunError, match="only 2 of 3 clients came within 1 s: a, b; refused: columns: client 'c' has "):
        run(grid, without_names(), RunFolder(tmp_path / "run"), say=told.append, strict=False)
    grid.join("d", table(tmp_path, "d", ["age", "bp", "bmi"]))
    del grid.contexts[3]
    last, _ = ran(grid, without_names(), tmp_path / "next")
    assert last["accepted"] == ["a", "b", "d"]
    notes, heard = "\n".join(told), "\n".join(grid.heard["c"])
    words = {"lacks age; has patient too many", "has its columns in another order, from bp on"}
    assert any(each in notes for each in words) == tells
    assert "task.inputs" in notes
    assert "this site's table has other columns than those of 2 others" in heard
    assert "age" not in heard
    assert ("patient" in heard) == (tells and "patient" in odd)
    assert f"the columns that are learnt from, in order: {', '.join(odd)}" in caplog.text
    roll = (tmp_path / "next" / "roll.json").read_text()
    assert ("bmi" in roll) == tells


@pytest.mark.parametrize("odd", ODD, ids=["a patient number", "another order"])
def test_a_late_site_with_other_columns_is_refused(odd: list[str], tmp_path: Path) -> None:
    """Also of a run that was resumed."""
    files = {name: table(tmp_path, name, ["age", "bp", "bmi"]) for name in ("a", "b", "c")}
    ran(SiteGrid(files), without_names(), tmp_path / "run")
    grid = SiteGrid(files)
    grid.join("d", table(tmp_path, "d", odd))
    settings = without_names().model_copy(update={"rounds": 4})
    last, said = ran(grid, settings, tmp_path / "run", resume=True)
    assert last["accepted"] == ["a", "b", "c"]
    assert "client 'd' has other columns than the run's" in "\n".join(said)


def test_two_that_differ_end_the_run_before_round_1(tmp_path: Path) -> None:
    """Nobody can say which of them is right."""
    files = {"a": table(tmp_path, "a", ["age", "bp", "bmi"]), "b": table(tmp_path, "b", ["id", "bp", "bmi"])}
    settings = without_names()
    settings = settings.model_copy(update={"round": settings.round.model_copy(update={"wait_for": 2})})
    said = r"a and b learn from different columns, or in another order: a lacks id; has age too many, and nobody"
    with pytest.raises(SettingsError, match=said):
        ran(SiteGrid(files), settings, tmp_path / "run")
    with pytest.raises(SettingsError, match="or in another order, and nobody can say"):
        ran(SiteGrid(files, ""), settings, tmp_path / "other")


def test_columns_that_the_server_knows_are_compared_at_the_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From its own test set: each site finds out for itself, and its log says which; a code leaves. Two to one does not
    matter."""
    files = {"a": table(tmp_path, "a", ["age", "bp", "bmi"])}
    files |= {name: table(tmp_path, name, ["id", "bp", "bmi"]) for name in ("b", "c")}
    own = table(tmp_path, "server", ["age", "bp", "bmi"])
    settings = without_names(test_file=str(own))
    settings = settings.model_copy(update={"round": settings.round.model_copy(update={"wait_for": 1})})
    last, said = ran(SiteGrid(files, {"a": "", "b": "", "c": "statistics = true\n"}), settings, tmp_path / "run")
    assert last["accepted"] == ["a"]
    assert last["central"]
    notes = "\n".join(said)
    assert (
        "client b: data-columns: the site's table lacks columns of this experiment's, or has others; its log" in notes
    )
    assert "or has others: it lacks age; has id too many; its log has more" in notes
    assert "client b: data-columns" in caplog.text
    assert "lacks age; has id too many; the run learns from age, bp, bmi" in caplog.text


def test_what_is_wrong_in_a_sites_cells_stays_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing cell, a word that is no category, a column that is not there: file, line and column in the site's log,
    a code at the server."""
    holes = {"age": [1, 2, None], "sex": ["f", "m", "f"], "y": [0, 1, 0]}
    good = {**holes, "age": [1, 2, 3]}
    files = {
        "a": write_csv(tmp_path / "a.csv", good),
        "b": write_csv(tmp_path / "b.csv", holes),
        "c": write_csv(tmp_path / "c.csv", {**good, "sex": ["f", "secret", "f"]}),
        "d": write_csv(tmp_path / "d.csv", {"sex": ["f"], "y": [0]}),
    }
    task = {"name": "table", "inputs": ["age", "sex"], "categories": {"sex": ["f", "m"]}, "target": "y", "classes": 2}
    settings = Experiment.model_validate({"rounds": 1, "task": task, "round": {"wait_for": 1}})
    last, said = ran(SiteGrid(files, ""), settings, tmp_path / "run")
    notes = "\n".join(said)
    assert last["accepted"] == ["a"]
    for name, code in (("b", "data-cells"), ("c", "data-cells"), ("d", "data-columns")):
        assert f"client {name}: {code}: " in notes
    for word in ("secret", "sex", "age", str(tmp_path)):
        assert word not in notes
    assert "b.csv, line 4: column 'age' has no value" in caplog.text
    assert "c.csv, line 3: column 'sex' has the value 'secret'; allowed: f, m" in caplog.text
    assert "d.csv lacks age" in caplog.text


def test_sums_leave_where_the_policy_says_so(tmp_path: Path) -> None:
    """Without `statistics` a site is refused; with a smallest count above its examples it takes part and is not in the
    sums, which is told; sums are given once, however often the roll is called."""
    files, test = sites(tmp_path, *BREAST, tested=114)
    files["small"] = write_csv(tmp_path / "small.csv", rows_of(BREAST[0], BREAST[1][:5]))
    open_, closed = "statistics = true\n", "statistics = false\n"
    policies = {"site-0": open_, "site-1": open_, "site-2": closed, "small": open_}
    last, said = ran(SiteGrid(files, policies), cancer(test, rounds=1), tmp_path / "run")
    notes = "\n".join(said)
    assert last["accepted"] == ["site-0", "site-1", "small"]
    assert "client site-2: statistics-denied: the experiment asks for mean and deviation of columns" in notes
    assert "warning: means and deviations are without columns of small: too few values" in notes


def test_a_site_that_lies_about_its_sums_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, test = sites(tmp_path, *BREAST, tested=114)
    honest = columns._sums

    def lies(session: Any, census: Any, name: str, *more: Any) -> str:
        text = honest(session, census, name, *more)
        return text.replace('"mean":[', '"mean":[1.0,') if name == "site-2" else text

    monkeypatch.setattr(columns, "_sums", lies)
    settings = cancer(test, rounds=1)
    settings = settings.model_copy(update={"round": settings.round.model_copy(update={"wait_for": 2})})
    last, said = ran(SiteGrid(files), settings, tmp_path / "run")
    assert "client 'site-2' told sums over 30 and 31 columns; this run's are 30" in "\n".join(said)
    assert last["accepted"] == ["site-0", "site-1"]
