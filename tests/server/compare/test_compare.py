"""Comparisons run: standard run folders, fair and resumable, whatever becomes of single cells."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import Result as Invoked
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from common.errors import SettingsError
from common.files import locked
from common.flower import ROOT
from server.__main__ import cli
from server.compare import fairness
from server.compare.cell import Job, Outcome, outcome
from server.compare.comparison import Comparison
from server.compare.plan import Plan, final_cells, rows
from server.compare.pools import ProcessPool
from server.compare.progress import CellHistory, Progress, duration, remaining_s
from server.compare.standings import Result
from server.compare.start import Means, devices, run, summary
from server.compare.tuning import choose, edges, score
from server.engines.grid import CLIENT_APP
from server.rounds.folder import RunFolder
from server.rounds.records import Headline
from tests.support.helpers import problem
from tests.support.helpers import write as write_quadratic
from tests.support.patience import limit, until

Tables = dict[str, Any]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Inline:
    """A pool that runs a cell here and now, and counts; `before` is called with each job."""

    size = 1

    def __init__(self, before: Callable[[Job], None] = lambda job: None) -> None:
        self.ran: list[str] = []
        self._before = before

    def submit(self, job: Job) -> Future[Outcome]:
        self.ran.append(os.path.relpath(job.folder, Path("folder").resolve()))
        future: Future[Outcome] = Future()
        self._before(job)
        future.set_result(outcome(job))
        return future

    def close(self) -> None:
        pass


def quadratic(**arrays: Any) -> Tables:
    """`[base.task]`: six quadratics in float64."""
    write_quadratic(Path("quadratic.npz"), **{**problem(), **arrays})
    return {"name": "quadratic", "file": str(Path("quadratic.npz").resolve()), "dtype": "float64"}


def one(curvature: float = 1.0) -> Tables:
    """A single quadratic a w^2 / 2 from w = 1, one step a round."""
    return quadratic(centers=[[0.0]], curvatures=[[curvature]], steps=[1], examples=[1], start=[1.0])


def planned(**given: Any) -> Tables:
    base = {"rounds": 3, "local": {"lr": 0.05}, "round": {"sample": 3}, **given.pop("base", {})}
    return {"name": "q", "base": {"task": quadratic(), **base}, **given}


def compare(tables: Tables, pool: Any = None, **given: Any) -> tuple[Result, list[str]]:
    """Run a plan in `folder`; the result and the folders that ran."""
    plan, pool = Plan.of(tables), pool or Inline()
    progress = Progress("q", Console(file=StringIO()))
    comparison = Comparison(plan, json.dumps(tables), Path("folder"), CLIENT_APP, "cpu", progress, **given)
    return comparison.run(lambda most: pool), getattr(pool, "ran", [])


def read(path: str) -> Any:
    return json.loads((Path("folder") / path).read_text("utf-8"))


def hashes() -> dict[str, str]:
    """Folder -> sha256 of the final weights, of all cells that finished."""
    return {
        cell["folder"]: RunFolder(Path("folder") / cell["folder"]).status()["sha256"]
        for cell in read("cells.json")["cells"]
        if cell["status"] == "finished"
    }


TWO = [{"name": "FedAvg"}, {"name": "SCAFFOLD", "strategy": {"name": "scaffold"}}]

# --- end to end


DIGITS = """
name = "digits"
seeds = [0, 1]
targets = [0.5]
base = {rounds = 2, task = {hidden = 4}, round = {sample = 2}, partition = {clients = 4}}
[[variants]]
name = "FedAvg"
[[variants]]
name = "SCAFFOLD"
strategy.name = "scaffold"
"""


def invoke(*words: str) -> Invoked:
    return CliRunner().invoke(cli, list(words))


def test_two_variants_and_two_seeds_in_worker_processes() -> None:
    """What the command leaves and says; a cell is what `simulate` makes of the same experiment, bit for bit; run again,
    nothing is left to do."""
    Path("plan.toml").write_text(DIGITS, "utf-8")
    result = invoke("compare", "plan.toml", "--workers", "2", "--run-dir", "folder")
    assert result.exit_code == 0, result.output
    assert "fair: every variant of a seed had the same partition, initial weights, sampled clients" in result.output
    assert Path("folder/plan.toml").read_text("utf-8") == DIGITS
    cells = read("cells.json")["cells"]
    assert [(cell["folder"], cell["status"], cell["error"], cell["rounds"]) for cell in cells] == [
        (f"{variant}/seed-{seed}", "finished", "", 2) for variant in ("fedavg", "scaffold") for seed in (0, 1)
    ]
    assert all(cell["seconds"] > 0 for cell in cells)
    assert read("scaffold/seed-1/cell.json") == {
        "plan": "digits",
        "variant": "SCAFFOLD",
        "point": {},
        "seed": 1,
        "stage": "final",
        "tuned": {},
        "targets": [0.5],
    }
    left = {path.name for path in Path("folder/scaffold/seed-1").iterdir()}
    assert {"history.jsonl", "experiment.toml", "model.safetensors", "checkpoints", "run.json", "memory"} <= left
    experiment = "name = 'scaffold'\nseed = 1\nstrategy.name = 'scaffold'\n" + DIGITS.splitlines()[4][8:-1].replace(
        "}, ", "}\n"
    ).replace("2, task", "2\ntask")
    Path("one.toml").write_text(experiment, "utf-8")
    alone = invoke("simulate", "one.toml", "--run-dir", "alone")
    assert alone.exit_code == 0, alone.output
    assert RunFolder("alone").status()["sha256"] == hashes()["scaffold/seed-1"]
    model = load_file("folder/scaffold/seed-1/model.safetensors")
    assert all(torch.equal(model[name], value) for name, value in load_file("alone/model.safetensors").items())
    before = hashes()
    times = {name: (Path("folder") / name / "history.jsonl").stat().st_mtime_ns for name in before}
    again = invoke("compare", "plan.toml", "--run-dir", "folder")
    assert again.exit_code == 0, again.output
    assert hashes() == before
    assert times == {name: (Path("folder") / name / "history.jsonl").stat().st_mtime_ns for name in before}


def test_the_command_tells_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 and nothing on disk for what the user wrote; 1 and a table for cells that failed."""
    assert invoke("compare", "none.toml").exit_code == 2
    Path("plan.toml").write_text(DIGITS.replace("rounds = 2", "rond = 2"), "utf-8")
    wrong = invoke("compare", "plan.toml")
    assert (wrong.exit_code, wrong.output.count("\n")) == (2, 2)
    assert "error: variant 'FedAvg', seed 0 (and 1 more of its cells): rond = 2: unknown key" in wrong.output
    Path("plan.toml").write_text(DIGITS, "utf-8")
    dry = invoke("compare", "plan.toml", "--dry-run")
    assert dry.output.endswith("4 cells, 8 rounds in all\n")
    assert not Path("runs").exists()
    monkeypatch.setattr("server.compare.start.ProcessPool", lambda devices, log, portably: Inline())
    device = invoke("compare", "plan.toml", "--workers", "1", "--device", "tpu")
    assert device.exit_code == 1, device.output
    assert "4 of 4 cells failed:\n  fedavg/seed-0: " in device.output
    assert "device 'tpu'" in device.output


# --- in this process: what is run, skipped, refused


def test_finished_cells_stay_and_new_ones_run() -> None:
    """A seed, a grid point or a variant more; other targets reach the cells that are there."""
    first, ran = compare(planned(variants=TWO, seeds=[0], targets=[0.1]))
    assert ran == ["fedavg/seed-0", "scaffold/seed-0"]
    assert [s.status for s in first.standings] == ["finished"] * 2
    assert compare(planned(variants=TWO, seeds=[0], targets=[0.2]))[1] == []
    assert read("fedavg/seed-0/cell.json")["targets"] == [0.2]
    assert compare(planned(variants=TWO, seeds=[0, 1]))[1] == ["fedavg/seed-1", "scaffold/seed-1"]
    assert compare(planned(variants=TWO, grid={"local.epochs": [1, 2]}))[1] == [
        f"{variant}__epochs-{n}/seed-0" for n in (1, 2) for variant in ("fedavg", "scaffold")
    ]


def test_more_rounds_prolong_and_give_the_same_weights() -> None:
    """Three rounds and then six are six, in each engine and so here; fewer are refused."""
    compare(planned(variants=TWO))
    _, ran = compare(planned(variants=TWO, base={"rounds": 6}))
    assert ran == ["fedavg/seed-0", "scaffold/seed-0"]
    prolonged = hashes()
    assert [cell["rounds"] for cell in read("cells.json")["cells"]] == [6, 6]
    Path("folder").rename("first")
    compare(planned(variants=TWO, base={"rounds": 6}))
    assert hashes() == prolonged
    with pytest.raises(SettingsError, match=r"seed 0: '.*fedavg/seed-0' holds a run with rounds = 6, the plan says 3"):
        compare(planned(variants=TWO))


def test_another_plan_for_the_same_cells_is_refused() -> None:
    """What changed is named, for each variant, and nothing is touched; with the cosine schedule rounds count too."""
    compare(planned(variants=TWO))
    before = Path("folder/plan.toml").read_text("utf-8"), hashes()
    with pytest.raises(SettingsError) as caught:
        compare(planned(variants=TWO, base={"local": {"lr": 0.1}, "evaluate": {"every": 2}}))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("variant 'SCAFFOLD', seed 0: '")
    assert (
        "scaffold/seed-0' holds a run with evaluate.every = 1, the plan says 2, local.lr = 0.05, the plan says 0.1; "
        "give the plan another name or remove that folder"
    ) in lines[1]
    assert (Path("folder/plan.toml").read_text("utf-8"), hashes()) == before
    cosine = {"local": {"lr": 0.1, "schedule": "cosine"}}
    compare(planned(variants=[{"name": "cosine"}], base=cosine))
    with pytest.raises(SettingsError, match="rounds = 3, the plan says 5"):
        compare(planned(variants=[{"name": "cosine"}], base={**cosine, "rounds": 5}))
    assert compare(planned(variants=TWO, base={"checkpoint": {"keep": 1}}))[1] == []


def test_one_comparison_a_folder() -> None:
    """A second one is told who is there."""
    Path("folder").mkdir()
    with locked(Path("folder/.lock"), ""), pytest.raises(SettingsError, match=r"plan folder .* is in use by process"):
        compare(planned())
    Path("file").touch()
    nowhere = Comparison(Plan.of(planned()), "", Path("file/x"), CLIENT_APP, "cpu", Progress("q"))
    with pytest.raises(SettingsError, match=r"plan folder '.*/file/x' cannot be written: "):
        nowhere.run(lambda most: Inline())


def test_a_cell_that_fails_does_not_end_the_rest() -> None:
    """A rate that makes weights infinite: the run gives up with its reason, the others finish."""
    variants = [{"name": "wild", "local.lr": 1e300}, {"name": "tame"}]
    result, ran = compare(planned(variants=variants, seeds=[0, 1]))
    assert len(ran) == 4
    cells = {cell["folder"]: cell for cell in read("cells.json")["cells"]}
    assert [cell["status"] for cell in cells.values()] == ["failed", "failed", "finished", "finished"]
    assert cells["wild/seed-1"]["error"].startswith("no progress in round 1 after 3 tries")
    assert RunFolder("folder/wild/seed-1").status()["status"] == "failed"
    assert [s.cell.folder for s in result.failed] == ["wild/seed-0", "wild/seed-1"]
    told = summary(result)
    assert "2 of 4 cells failed:\n  wild/seed-0: no progress in round 1" in told
    assert re.search(
        r"^loss: mean of the last 5 .*\nwild  0 of 2 seeds\ntame  loss [\d.]+ ± [\d.]+, 2 of 2 seeds", told
    )
    assert compare(planned(variants=variants, seeds=[0, 1]))[1] == ["wild/seed-0", "wild/seed-1"]


def test_tidied_cells_can_be_run_anew() -> None:
    """They keep what a report needs; prolonged they start over and end where the others do."""
    compare(planned(variants=TWO, base={"rounds": 5}))
    wanted = hashes()
    Path("folder").rename("kept")
    compare(planned(variants=TWO), tidied=True)
    left = {path.name for path in Path("folder/scaffold/seed-0").iterdir()}
    assert {"history.jsonl", "model.safetensors", "cell.json"} <= left
    assert not {"memory", "checkpoints"} & left
    assert compare(planned(variants=TWO))[1] == []
    assert compare(planned(variants=TWO, base={"rounds": 5}))[1] == ["fedavg/seed-0", "scaffold/seed-0"]
    assert hashes() == wanted


# --- tuning


def test_the_best_candidate_runs_with_all_seeds() -> None:
    """w <- (1 - lr) w from w = 1, so after k rounds the loss is (1 - lr)^(2k) / 2, and 0 for lr = 1."""
    variants = [{"name": "tuned", "tune": {"local.lr": [0.5, 1.0, 1.25]}}]
    tuning = {"seeds": [7, 8], "rounds": 2, "window": 2}
    tables = {"name": "q", "base": {"task": one(), "rounds": 3}, "variants": variants, "tuning": tuning, "seeds": [0]}
    result, ran = compare(tables)
    assert len(ran) == 7
    assert ran[-1] == "tuned/seed-0"
    tuned = read("tuned.json")["tuned"]
    assert tuned["winner"] == {"local.lr": 1.0}
    means = [-(0.25 + 0.0625) / 4, 0.0, -(0.0625 + 0.00390625) / 4]
    assert [entry["score"] for entry in tuned["scores"]] == means
    assert tuned["scores"][0] == {
        "tuned": {"local.lr": 0.5},
        "score": means[0],
        "seeds": {"7": means[0], "8": means[0]},
    }
    assert tuned["hints"] == []
    cell = read("tuned/seed-0/cell.json")
    assert (cell["tuned"], cell["scores"], cell["stage"]) == ({"local.lr": 1.0}, tuned["scores"], "final")
    candidate = read("tuning/tuned/lr-0.5/seed-7/cell.json")
    assert (candidate["stage"], candidate["tuned"], candidate["seed"]) == ("tune", {"local.lr": 0.5}, 7)
    assert len(RunFolder("folder/tuning/tuned/lr-0.5/seed-7").history()) == 2
    assert len(RunFolder("folder/tuned/seed-0").history()) == 3
    assert "local.lr = 1.0" in summary(result)
    assert compare(tables)[1] == []
    assert read("tuned/seed-0/cell.json") == cell
    wider = {**tables, "variants": [{"name": "tuned", "tune": {"local.lr": [0.5, 1.0, 1.25, 2.0]}}]}
    assert compare(wider)[1] == [f"tuning/tuned/lr-2.0/seed-{seed}" for seed in (7, 8)]


def test_candidates_that_fail_lose_and_the_edge_is_told() -> None:
    """Of 1e300 (not finite: the run fails), 0.5 and 1.5, which are equally good, the first good one wins."""
    variants = [{"name": "tuned", "tune": {"local.lr": [1e300, 1.5, 0.5]}}, {"name": "plain"}]
    base = {"task": one(), "rounds": 2, "round": {"max_void": 1}}
    result, ran = compare({"name": "q", "base": base, "variants": variants})
    assert len(ran) == 5
    assert read("tuned.json")["tuned"]["winner"] == {"local.lr": 1.5}
    assert [entry["score"] is None for entry in result.choices["tuned"].scores] == [True, False, False]
    assert result.choices["tuned"].hints == []
    assert [s.cell.folder for s in result.failed] == ["tuning/tuned/lr-1e-300-" + hashed("1e+300") + "/seed-100"]
    lost = {
        "name": "q2",
        "base": base,
        "variants": [{"name": "lost", "tune": {"local.lr": [1e300]}}, {"name": "plain"}],
    }
    gone, _ = compare(lost)
    assert {s.cell.folder: s.error for s in gone.failed}["lost/seed-0"] == (
        "none of its candidates finished with a finite score"
    )


def hashed(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:8]


def test_a_winner_that_changes_does_not_replace_what_is_there() -> None:
    """The final cells of the old one stay; the row fails and says what to do."""
    tables = {"name": "q", "base": {"task": one(), "rounds": 2}}
    compare({**tables, "variants": [{"name": "tuned", "tune": {"local.lr": [0.25, 0.5]}}]})
    result, ran = compare({**tables, "variants": [{"name": "tuned", "tune": {"local.lr": [0.25, 0.5, 1.0]}}]})
    assert ran == ["tuning/tuned/lr-1.0/seed-100"]
    assert [s.cell.folder for s in result.failed] == ["tuned/seed-0"]
    assert result.failed[0].error.startswith("the best candidate is now {\"local.lr\": 1.0}: variant 'tuned', ")
    assert "holds a run with local.lr = 0.5, the plan says 1.0; give the plan another name" in result.failed[0].error


def records(*accuracy: float | None, loss: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"round": k, "train": {"loss": {"weighted": 9.0}}}
        | ({} if a is None else {"central": {"accuracy": a, "loss": loss}, "each": {}})
        for k, a in enumerate(accuracy)
    ]


def test_scores() -> None:
    """The mean of the last evaluations, or the best; rounds that were not evaluated do not count."""
    tuning = Plan.of({"name": "p", "tuning": {"window": 2}}).tuning
    assert score(records(0.5, None, 0.25, None, 0.75), tuning) == 0.5
    best = Plan.of({"name": "p", "tuning": {"score": "best"}}).tuning
    assert score(records(0.5, None, 0.9, None, 0.75), best) == 0.9
    assert score(records(float("nan"), 0.5, 0.25), best) == 0.5
    assert score(records(0.5, 0.5, float("nan")), tuning) is None
    assert score(records(0.5, 0.5, loss=float("inf")), tuning) is None
    assert score(records(None), tuning) is score([], tuning) is score(None, tuning) is None


def test_choice_over_seeds_ties_and_edges() -> None:
    """The mean decides, of equal ones the first; numbers at the end of their list are told, words are not."""
    tune = {"local.lr": [0.1, 0.2, 0.3], "local.optimizer": ["sgd", "adam"]}
    plan = Plan.of({"name": "p", "variants": [{"name": "A", "tune": tune}], "tuning": {"seeds": [1, 2]}})
    row = rows(plan)[0]
    table = {0.1: (0.9, 0.1), 0.2: (0.6, 0.6), 0.3: (0.6, 0.6)}
    choice = choose(row, plan.tuning, lambda c, seed: records(table[c["local.lr"]][seed - 1]))
    assert choice.winner == {"local.lr": 0.2, "local.optimizer": "sgd"}
    assert [entry["score"] for entry in choice.scores] == [0.5, 0.5, 0.6, 0.6, 0.6, 0.6]
    assert choice.hints == []
    failing = choose(row, plan.tuning, lambda c, seed: None if seed == 2 and c["local.lr"] != 0.3 else records(0.5))
    assert failing.winner == {"local.lr": 0.3, "local.optimizer": "sgd"}
    assert failing.hints == ["local.lr = 0.3 is the largest value tried: a wider grid may hold a better one"]
    assert edges(row, {"local.lr": 0.1, "local.optimizer": "sgd"}) == [
        "local.lr = 0.1 is the smallest value tried: a wider grid may hold a better one"
    ]
    assert choose(row, plan.tuning, lambda c, seed: None).winner is None


# --- fairness


def test_what_differs_between_variants_is_told_not_refused() -> None:
    """Another start (quadratics with another `start` are another plan too), another participation."""
    base = planned()["base"]
    other = Path("other.npz").resolve()
    write_quadratic(other, **{**problem(), "start": [1.0] * 5})
    variants = [*TWO, {"name": "Fewer", "round.sample": 2}, {"name": "Elsewhere", "task.file": str(other)}]
    result, _ = compare({"name": "q", "base": base, "variants": variants, "seeds": [0, 1], "grid": {"rounds": [2, 3]}})
    found = result.fairness
    assert (found["checked"], found["same"]) == (16, [])
    assert found["deviations"] == [
        {"what": what, "variant": variant, "point": {"rounds": rounds}, "seeds": [0, 1]}
        for rounds in (2, 3)
        for what, variant in (("plan", "Elsewhere"), ("initial", "Elsewhere"), ("sampled", "Fewer"))
    ]
    assert read("cells.json")["fairness"] == found
    assert "not the same sampled clients: variant 'Fewer', rounds = 3, seeds 0, 1" in fairness.lines(found)


def test_prolonged_and_shorter_runs_are_compared_where_both_have_run() -> None:
    """A grid of one variant has nothing to compare; histories of other lengths are compared over the shorter."""
    result, _ = compare(planned(variants=[TWO[0], {**TWO[1], "rounds": 5}]))
    assert result.fairness == {"checked": 2, "same": ["plan", "initial", "sampled"], "deviations": []}
    alone, _ = compare(planned(variants=TWO[:1]))
    assert (alone.fairness["checked"], fairness.lines(alone.fairness)) == (0, [])


# --- progress


def test_time_left_is_that_of_the_rounds_left_at_each_variants_pace() -> None:
    """Slow took 2 s a round, quick 1 s; a new variant takes what all did, 1.5 s. Two workers, no cell is split."""
    seen = [("slow", 4, 8.0), ("quick", 4, 4.0), ("new", 0, 0.0)]
    assert remaining_s([("slow", 2), ("quick", 2), ("new", 2)], seen, 1) == 4 + 2 + 3
    assert remaining_s([("slow", 2), ("quick", 2), ("new", 2)], seen, 2) == 4.5
    assert remaining_s([("slow", 10), ("quick", 1)], seen, 2) == 20
    assert remaining_s([], seen, 2) == 0
    assert remaining_s([("slow", 2)], [("slow", 0, 0.0)], 2) is None
    assert (duration(None), duration(3725.4)) == ("-:--:--", "1:02:05")


def value(history: CellHistory) -> float | None:
    return history.headline.value if history.headline else None


def test_a_history_is_followed_as_it_grows() -> None:
    """A line that is not whole yet waits; one that was cut is read anew."""
    line = json.dumps({"round": 1, "seconds": {"total": 2.0}, "central": {"accuracy": 0.5}}) + "\n"
    history = CellHistory(Path())
    assert (history.look().round, history.headline) == (0, None)
    path = Path("history.jsonl")
    path.write_text(line + line.replace("1", "2")[:10])
    assert (history.look().round, history.seconds, value(history)) == (1, 2.0, 0.5)
    path.write_text(line + line.replace("1", "2").replace("0.5", "0.75"))
    assert (history.look().round, history.seconds, value(history)) == (2, 4.0, 0.75)
    assert list(history.recent) == [0.5, 0.75]
    path.write_text(line)
    assert (history.look().round, history.seconds) == (1, 2.0)


def test_a_terminal_shows_a_bar_and_the_cells_that_run() -> None:
    """Cells, rounds, time left and each running cell's round and accuracy."""
    console = Console(file=StringIO(), force_terminal=True, width=100)
    history = CellHistory(Path())
    history.round, history.headline = 3, Headline("accuracy", True, 0.5, "central")
    with Progress("q", console) as progress:
        progress.update((1, 4), (7, 16), 65.0, [("fedavg/seed-0", history, 4)])
        progress._live.refresh()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("q  cells 1/4  rounds 7/16  0:00:00  left 0:01:05", "fedavg/seed-0  3/4  accuracy 0.5000"):
        assert words in shown


# --- worker processes that end


SLOW = {"local": {"lr": 0.01, "epochs": 1}, "rounds": 80, "checkpoint": {"every": 5}}


def rounds_of(folder: str) -> int:
    return len(RunFolder(Path("folder") / folder).history())


@contextmanager
def reference(tables: Tables) -> Iterator[dict[str, str]]:
    """The weights of an undisturbed comparison of the same plan."""
    compare(tables)
    wanted = hashes()
    Path("folder").rename("undisturbed")
    yield wanted


@pytest.mark.processes
@pytest.mark.rest
def test_a_killed_worker_fails_its_cell_and_is_replaced() -> None:
    """The others run on, also in its successor; run again, the cell goes on to the weights that it would have had."""
    tables = planned(base=SLOW, variants=TWO, seeds=[0, 1])
    with reference(tables) as wanted:

        def kill() -> None:
            until(lambda: rounds_of("fedavg/seed-0") > 5, "a cell that is half done")
            os.kill(int(Path("folder/fedavg/seed-0/.lock").read_text().split()[1]), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        log = Path("folder/workers.log").resolve()
        Path("folder").mkdir()
        result, _ = compare(tables, ProcessPool(["cpu"], log))
        killer.join()
        assert {s.cell.folder: s.error for s in result.failed} == {
            "fedavg/seed-0": "its worker process died: killed (signal 9), perhaps for want of memory"
        }
        assert len(hashes()) == 3
        assert 5 < rounds_of("fedavg/seed-0") < 80
        assert compare(tables)[1] == ["fedavg/seed-0"]
        assert RunFolder("folder/fedavg/seed-0").status()["after"] >= 5
        assert hashes() == wanted


HEEDING = (
    "import runpy, signal; signal.signal(2, signal.default_int_handler); runpy.run_module('server', {}, '__main__')"
)
"""As `-m server`: what a script runs in the background has SIGINT ignored, and its children inherit that."""


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEEDING, "compare", "plan.toml", "--run-dir", "folder", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


ENDINGS = [
    (signal.SIGINT, 130),
    pytest.param(signal.SIGTERM, 143, marks=pytest.mark.rest),
    pytest.param(signal.SIGKILL, -9, marks=pytest.mark.rest),
]


@pytest.mark.processes
@pytest.mark.parametrize(("sent", "code"), ENDINGS)
def test_a_comparison_that_is_ended_goes_on_later(sent: signal.Signals, code: int) -> None:
    """It ends within seconds, its children with it, also if it is killed; run again it reaches the same weights."""
    import tomli_w

    tables = planned(base=SLOW, variants=TWO)
    Path("plan.toml").write_text(tomli_w.dumps(tables), "utf-8")
    with reference(tables) as wanted:
        process = started("--workers", "2")
        until(lambda: min(rounds_of("fedavg/seed-0"), rounds_of("scaffold/seed-0")) > 5, "cells that are half done")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(sent)
        output, _ = process.communicate(timeout=limit(20))
        assert process.returncode == code, output
        assert ("stopped; run it again to go on" in output) == (sent != signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=limit(5))
        assert not alive
        if sent != signal.SIGKILL:
            assert {cell["status"] for cell in read("cells.json")["cells"]} == {"stopped"}
        assert max(rounds_of("fedavg/seed-0"), rounds_of("scaffold/seed-0")) < 80
        assert compare(tables)[1] == ["fedavg/seed-0", "scaffold/seed-0"]
        assert hashes() == wanted


def test_a_worker_that_cannot_start_fails_cells_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell waits for ever."""
    patience = limit(20)  # which asks the interpreter once how slow this machine is
    monkeypatch.setattr("server.engines.workers.sys.executable", "/bin/false")
    pool = ProcessPool(["cpu"], Path("workers.log"))
    try:
        told = [pool.submit(Job("f", "", {}, CLIENT_APP, "cpu")).result(timeout=patience) for _ in range(2)]
    finally:
        pool.close()
    assert [answer["error"] for answer in told] == ["its worker process died: exit code 1, see workers.log"] * 2


def test_devices_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all accelerators, unless one is named."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices("cuda:1", 2) == ["cuda:1", "cuda:1"]
    assert devices("cpu", 2) == ["cpu", "cpu"]


@pytest.mark.processes
@pytest.mark.rest
def test_on_a_ray_cluster() -> None:
    """The same weights, and a cell that fails does not end the rest; no cluster is told."""
    variants = [*TWO, {"name": "wild", "local.lr": 1e300}]
    tables = planned(variants=variants, seeds=[0, 1])
    with reference(tables) as wanted:
        plan, progress = Plan.of(tables), Progress("q", Console(file=StringIO()))
        result = run(plan, "", Path("folder"), Means(CLIENT_APP, workers=2, ray="local"), progress)
        assert hashes() == wanted
        assert [s.cell.folder for s in result.failed] == ["wild/seed-0", "wild/seed-1"]
        assert result.failed[0].error.startswith("no progress in round 1")
        again = run(plan, "", Path("folder"), Means(CLIENT_APP, ray="local"), progress)
        assert len(again.failed) == 2
    with pytest.raises(SettingsError, match=r"--ray 127.0.0.1:1: no cluster there"):
        run(Plan.of({**tables, "name": "r"}), "", Path("other"), Means(CLIENT_APP, ray="127.0.0.1:1"), progress)


def test_a_cell_is_found_by_its_row() -> None:
    """The folder of a final cell is its row's slug and its seed: what `tuned.json` and cells are looked up by."""
    plan = Plan.of(planned(variants=TWO, grid={"local.epochs": [1]}))
    for row in rows(plan):
        assert [cell.folder for cell in final_cells(plan, row, {})] == [f"{row.slug}/seed-0"]
