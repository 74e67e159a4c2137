"""Plans of comparisons: which cells they mean, and what is told about what cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import SettingsError
from common.settings import merged
from server.compare.folder_names import point_slug, slug
from server.compare.plan import Cell, Plan, final_cells, rows, tune_cells
from server.compare.start import outline
from server.compare.vetting import compare_with_folder, expand
from server.rounds.folder import RunFolder
from strategies.registry import settled, written_out

BASE = {"rounds": 3, "partition": {"clients": 3}, "task": {"hidden": 4}}


def plan(**given: Any) -> Plan:
    return Plan.of({"name": "p", "base": BASE, **given})


def faults(**given: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        expand(plan(**given))
    return str(caught.value).splitlines()


# --- expansion

TEXT = """
name = "fednova"
seeds = [0, 1]
targets = [0.5, 0.6]
[base]
rounds = 6
seed = 9
name = "other"
[base.partition]
clients = 4
[grid]
"partition.alpha" = [0.1, 1]
round.sample = [2]
[[variants]]
name = "FedNova (momentum)"
"strategy.name" = "fednova"
local = {momentum = 0.9, epochs = 2}
[variants.tune]
"local.lr" = [0.02, 5e-5]
[[variants]]
name = "FedAvg"
local.epochs = 3
[tuning]
seeds = [100, 101]
rounds = 2
"""


def test_every_cell_of_a_plan_with_all_that_it_can_have() -> None:
    """Two points x two variants x two seeds, and for the tuned one two candidates x two seeds a point."""
    read = Plan.parse(TEXT)
    cells = expand(read)
    points = ["alpha-0.1_sample-2", "alpha-1_sample-2"]
    tune = [
        f"tuning/fednova-momentum__{point}/lr-{lr}/seed-{seed}"
        for point in points
        for lr in ("0.02", "5e-05")
        for seed in (100, 101)
    ]
    final = [
        f"{variant}__{point}/seed-{seed}"
        for point in points
        for variant in ("fednova-momentum", "fedavg")
        for seed in (0, 1)
    ]
    assert [cell.folder for cell in cells] == tune + final
    assert [cell.stage for cell in cells] == ["tune"] * 8 + ["final"] * 8
    by_folder = {cell.folder: cell for cell in cells}
    one = by_folder["tuning/fednova-momentum__alpha-0.1_sample-2/lr-5e-05/seed-101"]
    assert (one.variant, one.point, one.seed, one.tuned) == (
        "FedNova (momentum)",
        {"partition.alpha": 0.1, "round.sample": 2},
        101,
        {"local.lr": 5e-5},
    )
    settings = one.experiment
    assert settings.model_dump(exclude_unset=True) == {
        "name": "fednova-momentum__alpha-0.1_sample-2__lr-5e-05",
        "seed": 101,
        "rounds": 2,
        "partition": {"clients": 4, "alpha": 0.1},
        "round": {"sample": 2},
        "strategy": {"name": "fednova"},
        "local": {"momentum": 0.9, "epochs": 2, "lr": 5e-5},
    }
    last = by_folder["fedavg__alpha-1_sample-2/seed-1"].experiment
    assert (last.name, last.seed, last.rounds, last.local.epochs) == ("fedavg__alpha-1_sample-2", 1, 6, 3)
    assert last.partition.alpha == 1


def test_a_winner_makes_the_final_cells() -> None:
    """With the candidate's values and the experiment's own rounds."""
    row = rows(Plan.parse(TEXT))[0]
    assert [candidate["local.lr"] for candidate in row.candidates] == [0.02, 5e-5]
    cells = final_cells(Plan.parse(TEXT), row, row.candidates[1])
    assert [(cell.experiment.local.lr, cell.experiment.rounds, cell.tuned) for cell in cells] == [
        (5e-5, 6, {"local.lr": 5e-5})
    ] * 2
    assert tune_cells(plan(), rows(plan())[0]) == []


def test_a_plan_without_anything_is_its_base() -> None:
    """One variant called base, seed 0."""
    cells = expand(plan())
    assert [(cell.folder, cell.variant, cell.point, cell.seed) for cell in cells] == [("base/seed-0", "base", {}, 0)]
    assert cells[0].experiment.rounds == 3


def test_order_changes_no_folder() -> None:
    """Variants, seeds, grid keys and their values in another order: the same cells."""
    variants = [{"name": "A"}, {"name": "B", "tune": {"local.lr": [0.1, 0.2], "local.epochs": [1, 2]}}]
    grid = {"partition.alpha": [0.1, 0.5], "round.sample": [1, 2]}
    turned = {key: grid[key][::-1] for key in reversed(grid)}
    other = [{"name": "B", "tune": {"local.epochs": [2, 1], "local.lr": [0.2, 0.1]}}, {"name": "A"}]
    first = expand(plan(variants=variants, grid=grid, seeds=[0, 1]))
    second = expand(plan(variants=other, grid=turned, seeds=[1, 0]))

    def known(cells: list[Cell]) -> dict[str, Any]:
        return {cell.folder: cell.experiment.identity for cell in cells if cell.stage == "tune" or not cell.tuned}

    assert known(first) == known(second)
    assert len(known(first)) == 4 * (4 + 2)


def test_base_from_a_file_beside_the_plan(tmp_path: Path) -> None:
    """Wherever the command was typed."""
    (tmp_path / "base.toml").write_text('name = "b"\nrounds = 4\nstrategy.name = "scaffold"')
    (tmp_path / "plan.toml").write_text('name = "p"\nbase = "base.toml"')
    text, read = Plan.read(tmp_path / "plan.toml")
    assert text.startswith('name = "p"')
    assert expand(read)[0].experiment.strategy.name == "scaffold"
    (tmp_path / "plan.toml").write_text('name = "p"\nbase = "no.toml"')
    with pytest.raises(SettingsError, match=r"plan.toml: base '.*no.toml' cannot be read: .*No such file"):
        Plan.read(tmp_path / "plan.toml")
    (tmp_path / "base.toml").write_text("rounds = ")
    (tmp_path / "plan.toml").write_text('name = "p"\nbase = "base.toml"')
    with pytest.raises(SettingsError, match=r"base.toml is not valid TOML"):
        Plan.read(tmp_path / "plan.toml")


def test_dotted_keys_and_tables_are_one() -> None:
    """Both reach into tables and leave the rest of them; the tables given are not changed."""
    tables = {"local": {"lr": 1, "epochs": 2}, "rounds": 1}
    assert merged(tables, {"local.lr": 3, "a.b.c": 4}) == {
        "local": {"lr": 3, "epochs": 2},
        "rounds": 1,
        "a": {"b": {"c": 4}},
    }
    assert merged(tables, {"local": {"lr": 3}, "rounds": {"x": 1}}) == {
        "local": {"lr": 3, "epochs": 2},
        "rounds": {"x": 1},
    }
    assert tables == {"local": {"lr": 1, "epochs": 2}, "rounds": 1}


@pytest.mark.parametrize(
    ("point", "name"),
    [
        ({}, ""),
        ({"partition.alpha": 0.1}, "alpha-0.1"),
        ({"local.batch_size": 32, "round.sample": 5}, "batch-size-32_sample-5"),
        ({"server.lr": 1.0, "local.lr": 0.1}, "local.lr-0.1_server.lr-1.0"),
        ({"local.betas": [0.9, 0.99]}, "betas-0.9-0.99"),
        ({"local.nesterov": True}, "nesterov-true"),
        ({"strategy.name": "scaffold"}, "name-scaffold"),
    ],
)
def test_folders_of_points_are_readable(point: dict[str, Any], name: str) -> None:
    """Key and value, sorted; the whole key where two end alike."""
    assert point_slug(point) == name


def test_folders_of_different_points_differ() -> None:
    """Also where the readable part is the same, or too long."""
    values: list[Any] = ["a_b", "a-b", "A-b", "a b", ["a", "b"], [["a"], "b"], "é", "x" * 300, "x" * 301, "", None]
    values += [-1, 1, "1", "-1", [1], [1, 2], [2, 1], ["1", 2], "1-2", True, "true", {"a": 1}, {}, []]
    names = [point_slug({"k": value}) for value in values]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 80
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for name in names)
    assert slug("FA-GC + Muon (0.02)") == "fa-gc-muon-0.02"


def test_long_names_still_name_an_experiment() -> None:
    """An experiment's name has at most 100 characters."""
    cells = expand(plan(variants=[{"name": "x" * 90}], grid={"partition.alpha": [0.12345678901234567]}))
    assert len(cells[0].experiment.name) <= 100


# --- what cannot work


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"sedes": [1]}, "plan: sedes = [1]: unknown key; allowed here: name, seeds, targets, base, grid, variants"),
    "name": ({"name": "a b"}, "plan: name = 'a b': a name has 1 to 100 of"),
    "no seeds": ({"seeds": []}, "plan: seeds = []: List should have at least 1 item"),
    "seeds twice": ({"seeds": [1, 1]}, "plan: seeds = [1, 1]: seeds are different numbers, 0 or above"),
    "seed below 0": ({"seeds": [-1]}, "plan: seeds = [-1]: seeds are different numbers"),
    "target": (
        {"targets": ["mae"]},
        "plan: targets = ['mae']: 'mae' is no target; allowed: a number, of the headline, ",
    ),
    "no variants": ({"variants": []}, "plan: variants = []: List should have at least 1 item"),
    "variant without name": ({"variants": [{"rounds": 3}]}, "plan: variants.0.name = {'rounds': 3}: Field required"),
    "variant twice": (
        {"variants": [{"name": "A +"}, {"name": "a"}]},
        "plan: variant 'a' and variant 'A +' would share the folder 'a': give them other names",
    ),
    "variant of signs": (
        {"variants": [{"name": "+"}]},
        "plan: variant '+': its name makes no folder's name of its own",
    ),
    "variant tuning": ({"variants": [{"name": "Tuning"}]}, "plan: variant 'Tuning': its name makes no folder's name"),
    "seed in a variant": (
        {"variants": [{"name": "A", "seed": 3}]},
        "plan: variant 'A': seed cannot be set here: the plan's `seeds` give it",
    ),
    "name in the grid": ({"grid": {"name": ["a"]}}, "plan: grid: name cannot be set here: a cell's name is its folder"),
    "no list": ({"grid": {"local.lr": 0.1}}, "plan: grid: local.lr = 0.1: give a list of values"),
    "empty list": ({"grid": {"local": {"lr": []}}}, "plan: grid: local.lr = []: give a list of values"),
    "value twice": ({"grid": {"local.lr": [1, 1.0]}}, "plan: grid: local.lr = [1, 1.0]: a value is given twice"),
    "key twice": (
        {"grid": {"local.lr": [1], "local": {"lr": [2]}}},
        "plan: grid: local.lr is given twice",
    ),
    "key twice in a variant": (
        {"variants": [{"name": "A", "local.lr": 1, "local": {"lr": 2}}]},
        "plan: variant 'A': local.lr is given twice",
    ),
    "grid and variant": (
        {"grid": {"local.lr": [0.1]}, "variants": [{"name": "A", "local": {"lr": 0.2}}]},
        "plan: variant 'A': local.lr is set here and varied by the grid",
    ),
    "grid and tune": (
        {"grid": {"local.lr": [0.1]}, "variants": [{"name": "A", "tune": {"local.lr": [0.2]}}]},
        "plan: variant 'A': local.lr is tuned here and varied by the grid",
    ),
    "variant and tune": (
        {"variants": [{"name": "A", "local.lr": 0.1, "tune": {"local.lr": [0.2]}}]},
        "plan: variant 'A': local.lr is set and tuned",
    ),
    "tune no list": (
        {"variants": [{"name": "A", "tune": {"local.lr": 0.1}}]},
        "plan: variant 'A', tune: local.lr = 0.1: give a list of values",
    ),
    "tuning": ({"tuning": {"score": "first"}}, "plan: tuning.score = 'first': Input should be 'last' or 'best'"),
    "tuning key": ({"tuning": {"seed": 1}}, "plan: tuning.seed = 1: unknown key; allowed here: seeds, rounds, score"),
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_wrong_in_a_plan_is_told(given: str) -> None:
    """Key, value and what is allowed."""
    values, message = WRONG[given]
    with pytest.raises(SettingsError) as caught:
        plan(**values)
    assert str(caught.value).startswith(message)


def test_all_faults_of_all_cells_are_told_at_once() -> None:
    """Each with the first cell that has it and how many more do: unknown keys, pairs without meaning, data, clients."""
    variants = [
        {"name": "A", "strategy.name": "fednova", "local.optimizer": "adam"},
        {"name": "B", "strategy.muu": 3},
        {"name": "C", "tune": {"local.lr": [0.1, -1]}},
        {"name": "D", "round.sample": 5, "localx": 3},
        {"name": "E", "round.sample": 5},
        {"name": "F", "task.hiden": 3},
        {"name": "fine"},
    ]
    found = faults(variants=variants, grid={"partition.alpha": [0.1, 0.5]}, seeds=[0, 1])
    assert [line.split(": ", 2)[:2] for line in found] == [
        ["variant 'C', partition.alpha = 0.1, local.lr = -1, seed 100 (and 1 more of its cells)", "local.lr = -1"],
        ["variant 'A', partition.alpha = 0.1, seed 0 (and 3 more of its cells)", found[1].split(": ")[1]],
        ["variant 'B', partition.alpha = 0.1, seed 0 (and 3 more of its cells)", "strategy.muu = 3"],
        ["variant 'D', partition.alpha = 0.1, seed 0 (and 3 more of its cells)", "localx = 3"],
        ["variant 'E', partition.alpha = 0.1, seed 0 (and 1 more of its cells)", found[4].split(": ")[1]],
        ["variant 'F', partition.alpha = 0.1, seed 0 (and 3 more of its cells)", "[task]"],
    ]
    for words, line in zip(
        (
            "Input should be greater than 0",
            "'fednova' has no meaning with local.optimizer = 'adam'",
            "'fedavg' has no such hyperparameter; allowed: weights",
            "unknown key; allowed here: name, seed, rounds",
            "round.sample = 5 is more than the 3 clients of the partition",
            "hiden = 3: unknown key; allowed here:",
        ),
        found,
        strict=True,
    ):
        assert words in line


def test_a_seed_whose_partition_cannot_be_made_is_named() -> None:
    """Each split is made once for each seed, also where nothing else differs."""
    base = {**BASE, "partition": {"kind": "dirichlet", "clients": 3, "min_examples": 470}}
    cells = [f"seed {seed}" for seed in range(3)]
    with pytest.raises(SettingsError) as caught:
        expand(Plan.of({"name": "p", "base": base, "seeds": [0, 1, 2]}))
    assert any(str(caught.value).startswith(f"variant 'base', {cell}") for cell in cells)
    assert "min_examples" in str(caught.value)


def test_a_dry_run_counts_rounds_and_what_tuning_adds() -> None:
    """16 cells of 3 seconds each is a plan that one looks at first."""
    variants = [{"name": "A", "tune": {"local.lr": [0.1, 0.2, 0.3]}}, {"name": "B"}]
    told = outline(plan(variants=variants, seeds=[0, 1], tuning={"rounds": 2})).splitlines()
    assert told == [
        *(f"tuning/a/lr-0.{lr}/seed-100  2 rounds" for lr in (1, 2, 3)),
        "a/seed-0  3 rounds, best of 3",
        "a/seed-1  3 rounds, best of 3",
        "b/seed-0  3 rounds",
        "b/seed-1  3 rounds",
        "4 cells, 12 rounds in all",
        "tuning adds 3 cells, 6 rounds",
    ]


@pytest.mark.parametrize(("whole", "mu"), [(False, 0.01), (True, 0.01), (False, 0.02)])
def test_a_cells_folder_of_before_is_gone_on_with(whole: bool, mu: float, tmp_path: Path) -> None:
    """It may lack the hyperparameters that nobody set: they were the defaults. Another value is another run."""
    [cell] = expand(plan(base={"strategy": {"name": "hafedho"}}))
    folder = RunFolder(tmp_path / cell.folder)
    folder.checkpoints.mkdir(parents=True)
    folder.append({"round": 1})
    strategy, experiment = settled(cell.experiment)
    folder.save_settings(written_out(strategy, experiment) if whole else experiment)
    [wanted] = expand(plan(base={"strategy": {"name": "hafedho", "mu": mu}}))
    if mu == 0.01:
        compare_with_folder(tmp_path, [wanted])
        return
    with pytest.raises(SettingsError, match=r"holds a run with strategy.mu = 0.01, the plan says 0.02; give the plan"):
        compare_with_folder(tmp_path, [wanted])
