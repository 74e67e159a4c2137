"""Evaluations: sums that add up, a headline with its direction, failures that are told."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import Denied, RunError, SettingsError
from common.experiment import Experiment
from common.metrics.ready import ALLOWED, ready
from common.tasks.scoring import Scoring
from server.rounds.evaluate import summarize
from server.rounds.prepare import prepare
from server.rounds.records import headline, valued
from server.watch.display import cells, columns, lines
from tests.support.faults import FaultyGrid, Ran, lies, ran, run
from tests.support.measured import SIZES, Measured


def measured(rounds: int = 2, evaluate: dict[str, Any] | None = None, **options: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "rounds": rounds,
            "task": {"name": "tests.support.measured:task", **options},
            "local": {"lr": 0.1, "batch_size": 8},
            "evaluate": {"batch_size": 6, **(evaluate or {})},
            "tracking": {"use": []},
        }
    )


def pooled(result: Ran, names: list[str]) -> dict[str, float]:
    """The same metrics of the same model on the clients' examples in one place, in one batch."""
    settings = measured(evaluate={"metrics": names})
    prepared = prepare(settings)
    point = result.checkpoint
    prepared.model.load(point.state["model"], point.buffers)
    held = [prepared.task.client(name).evaluate for name in prepared.task.names()]
    data = type(held[0])(torch.cat([each.inputs for each in held]), torch.cat([each.targets for each in held]))
    scoring = Scoring(prepared.task, prepared.model.module, settings.evaluate)
    return scoring.values(scoring.measure(prepared.model.module, data, len(data)))


NAMES = [*(name for name in ALLOWED["classes"] if not name.endswith("K")), "top-2", "recall@3"]


def test_metrics_of_clients_are_those_of_pooled_data(tmp_path: Path) -> None:
    """Every ready metric of classes, over clients of unequal size and batches that do not divide them, one class held
    by nobody: 1e-9 of the value on all examples in one batch. None of them is the mean of the clients' values."""
    result = ran(tmp_path, measured(evaluate={"metrics": NAMES}))
    last, wanted = result.history[-1]["clients"], pooled(result, NAMES)
    assert set(last) == set(wanted) >= {"iou.0", "iou.3", "f1", "auroc", "loss"}
    for name, value in wanted.items():
        if name in ("loss", "mae"):  # sums of a batch in the model's own float32
            assert last[name]["weighted"] == pytest.approx(value, rel=1e-6)
            continue
        found = last[name]["weighted"]
        assert (math.nan if found is None else found) == pytest.approx(value, abs=1e-9, nan_ok=True), name
    assert last["f1"]["weighted"] != pytest.approx(last["f1"]["mean"], abs=1e-3)
    assert result.history[-1]["headline"] == {"metric": "f1", "higher": True}


def test_a_metric_of_ones_own_is_named_and_stands_for_the_run(tmp_path: Path) -> None:
    name = "tests.support.measured:top"
    result = ran(tmp_path, measured(evaluate={"metrics": [name], "headline": "top"}))
    right = sum(found * size for found, size in zip(each(result, "top").values(), SIZES, strict=True))
    assert headline(result.history[-1]).value == pytest.approx(right / sum(SIZES), abs=1e-15)
    assert result.folder.status()["headline"] == "top"
    assert result.folder.status()["metrics"] == {"loss": False, "mae": False, "top": True}


def each(result: Ran, metric: str) -> dict[str, float]:
    found: dict[str, float] = result.history[-1]["each"][metric]
    return found


@pytest.mark.parametrize("server", [False, True])
def test_less_is_better_of_errors(tmp_path: Path, server: bool) -> None:
    """The worst client of an error is the one that has most of it, and the headline says which way is better."""
    who = {"clients": "all"}
    result = ran(tmp_path, measured(evaluate={"headline": "mae", **who}, server=server))
    found, values = result.history[-1]["clients"]["mae"], each(result, "mae")
    assert found["client"] == max(values, key=lambda name: values[name])
    assert found["worst"] == max(values.values())
    head = headline(result.history[-1])
    assert (head.metric, head.higher, head.of) == ("mae", False, "central" if server else "clients")


HOW = {
    "raises": "ZeroDivisionError: no such class",
    "vector": "metric mae: a tensor of shape (2,); needed: a number",
    "text": "metric mae: a str; needed: a number",
    "none": "metric mae: a NoneType; needed: a number",
}


@pytest.mark.parametrize("how", HOW)
def test_a_client_whose_metrics_fail_is_told(how: str, tmp_path: Path) -> None:
    """In the history with cause and reason, once beside the rounds, and as 2/3 in the table; the training loss stands
    nowhere for it."""
    result = ran(tmp_path, measured(5, broken=["1"], how=how))
    for record in result.history:
        assert record["evaluated"]["asked"] == 3
        assert HOW[how] in record["evaluated"]["dropped"]["1"]
        assert record["evaluated"]["causes"] == {"1": "failed"}
        assert record["clients"]["mae"]["n"] == 2
    assert cells(result.history[-1])[1] == f"{valued(result.history[-1], 'mae'):.4f} 2/3"
    told = [text for text in result.said if "the evaluation of client 1 is left out" in text]
    assert len(told) == 3
    assert told[-1].endswith("no more is said of it while it goes on")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("server", [False, True])
def test_where_nobody_can_evaluate_the_run_fails_with_the_cause(how: str, server: bool, tmp_path: Path) -> None:
    result = run(tmp_path, measured(broken=["0", "1", "2"], how=how, server=server))
    assert isinstance(result.error, RunError)
    assert HOW[how] in str(result.error)
    assert ("measured.py:" in str(result.error)) == (how == "raises")
    assert result.history == []


@pytest.mark.parametrize("how", ["nan", "inf"])
def test_a_number_that_is_none_is_null(how: str, tmp_path: Path) -> None:
    """At one client, and at all: the history is JSON, the client counts as the worst, the metric does not vanish."""
    one = ran(tmp_path / "one", measured(broken=["1"], how=how, evaluate={"headline": "mae"}))
    everybody = ran(tmp_path / "all", measured(broken=["0", "1", "2"], how=how, evaluate={"headline": "mae"}))
    for result in (one, everybody):
        for line in (result.folder.path / "history.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
    found = one.history[-1]["clients"]["mae"]
    assert (found["worst"], found["client"], found["n"]) == (None, "1", 2)
    assert each(one, "mae")["1"] is None
    assert cells(one.history[-1])[1].endswith(" 2/3")
    assert everybody.history[-1]["clients"]["mae"]["weighted"] is None
    assert cells(everybody.history[-1])[1] == "- 0/3"
    assert headline(everybody.history[-1]).metric == "mae"


def test_away_is_no_failure_of_the_metrics(tmp_path: Path) -> None:
    """Nobody answers in time: the round stands, without a value, and that is told."""

    def silent(grid: FaultyGrid) -> bool:
        return any(m.metadata.message_type.startswith("evaluate") for _, _, m in grid._ready.values())

    settings = Experiment.model_validate(measured().model_dump(exclude_unset=True) | {"round": {"deadline_s": 0.3}})
    grid = FaultyGrid()
    grid.held = lambda name, round, now: silent(grid)
    result = ran(tmp_path, settings.model_copy(update={"rounds": 1}), grid)
    assert result.history[-1]["evaluated"]["causes"] == dict.fromkeys("012", "timed out")
    assert cells(result.history[-1])[1] == "- 0/3"
    assert any("clients 0, 1, 2 is left out: timed out" in text for text in result.said)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("f2", "'f2' is unknown; allowed: "),
        ("top-9", "there are 4 classes"),
        ("tests.support.measured:nothing", "is a str; allowed: a common.metrics.metric.Metric"),
        ("tests.support.measured:absent", "cannot be imported"),
        (":x", "allowed: package.module:name"),
    ],
)
def test_a_metric_that_is_none_is_told_before_anything_runs(name: str, told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)):
        prepare(measured(evaluate={"metrics": [name]}))


def test_a_headline_that_nobody_measures_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    result = run(tmp_path, measured(evaluate={"headline": "acuracy"}))
    assert "evaluate.headline = 'acuracy' is no metric of this task; allowed: loss, mae" in str(result.error)


def test_a_task_that_measures_other_things_than_its_kind_has_another_headline() -> None:
    """One's own subclass of a classification may have metrics of its own alone."""
    task = Measured([], "", [], False)
    task.headline = "accuracy"
    scoring = Scoring(task, task.model(), measured().evaluate)
    assert scoring.headline([]) == "accuracy"
    assert scoring.headline(["loss", "mae"]) == "mae"


def test_one_sites_word_names_no_metric(tmp_path: Path) -> None:
    """What a minority tells is no metric of the run: it would be the headline by its name's place alone."""

    def lie(name: str, round: int, reply: Any) -> Any:
        for record in reply.content.metric_records.values():
            if name == "1" and "mae" in record and reply.metadata.message_type.startswith("evaluate"):
                record["aaa"] = 1e9
        return reply

    result = ran(tmp_path, measured(), FaultyGrid(lie=lie))
    assert set(result.history[-1]["clients"]) == {"mae", "loss"}
    assert result.history[-1]["headline"]["metric"] == "mae"


SUMS = {
    "none": {},
    "too few": {"top": [1.0]},
    "another": {"top": [1.0, 2.0], "other": [1.0]},
    "a number": {"top": 1.0},
}


@pytest.mark.parametrize("sent", SUMS)
def test_sums_that_were_not_asked_for_are_dropped_alone(sent: str, tmp_path: Path) -> None:
    def lie(reply: Any) -> None:
        if reply.metadata.message_type.startswith("evaluate"):
            del reply.content["sums"]
            if SUMS[sent]:
                from flwr.app import MetricRecord

                reply.content["sums"] = MetricRecord(SUMS[sent])

    result = ran(tmp_path, measured(top=True), FaultyGrid(lie=lies("2", lie)))
    assert result.history[0]["evaluated"]["dropped"] == {}
    assert result.history[1]["evaluated"]["causes"] == {"2": "invalid"}
    assert result.history[1]["clients"]["top"]["n"] == 2


def test_sums_that_are_no_numbers_spoil_nobody_elses(tmp_path: Path) -> None:
    def lie(reply: Any) -> None:
        if reply.metadata.message_type.startswith("evaluate"):
            reply.content.metric_records["sums"]["top"] = [math.nan, math.inf]

    result = ran(tmp_path, measured(top=True), FaultyGrid(lie=lies("2", lie)))
    found, values = result.history[1]["clients"]["top"], each(result, "top")
    assert (found["n"], found["client"], found["worst"], values["2"]) == (2, "2", None, None)
    assert found["weighted"] == pytest.approx((values["0"] * SIZES[0] + values["1"] * SIZES[1]) / sum(SIZES[:2]))


def test_a_resumed_run_has_the_same_headline(tmp_path: Path) -> None:
    """Also in rounds between evaluations, where nothing tells it."""
    rare = {"every": 3, "metrics": ["f1"]}
    ran(tmp_path / "a", measured(4, evaluate=rare))
    ran(tmp_path / "a", measured(5, evaluate=rare), resume=True)
    heads = [record["headline"]["metric"] for record in Ran(*_at(tmp_path / "a")).history]
    assert heads[3:] == ["f1", "f1"]


def _at(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    from server.rounds.folder import RunFolder

    return RunFolder(folder), RunFolder(folder).history()


def test_the_training_loss_has_a_column_of_its_own(tmp_path: Path) -> None:
    """Where nothing is evaluated the others are empty; heads are told again where they change."""
    result = ran(tmp_path, measured(evaluate={"clients": "none"}))
    record = result.history[-1]
    assert columns(record) == ("round", "loss", "train loss", "clients", "down", "up", "seconds")
    assert cells(record)[1:3] == ("-", f"{record['train']['loss']['weighted']:.4f}")
    assert len(lines(record, ())) == 2
    assert len(lines(record, columns(record))) == 1


def test_a_name_with_a_dot_is_a_metric_like_any_other() -> None:
    values = {"val.acc": {"a": 0.5, "b": 1.0}}
    found = summarize({"a": 1, "b": 3}, values, lambda name: True, {})
    assert found["val.acc"] == {"weighted": 0.875, "mean": 0.75, "worst": 0.5, "client": "a", "n": 2}


def test_a_task_without_a_word_of_metrics_is_refused() -> None:
    class Silent(Measured):
        outputs = Measured.__mro__[1].outputs
        metrics = Measured.__mro__[1].metrics

    with pytest.raises(SettingsError, match=r"Silent says nothing of metrics: write outputs\(\) and judge\(\)"):
        Scoring(Silent([], "", [], False), torch.nn.Linear(3, 4), measured().evaluate)


def test_ready_metrics_need_to_know_what_outputs_are() -> None:
    with pytest.raises(SettingsError, match="does not say what its outputs are"):
        ready("f1", "", lambda: 3)
    with pytest.raises(SettingsError, match="does not say how many outputs it has"):
        ready("f1", "classes", lambda: None)


@pytest.mark.parametrize(("names", "told"), [(["f1-micro", "top-2"], ""), (["f1"], "'f1' tells class counts")])
def test_a_site_that_shares_no_labels_takes_part_in_no_metric_that_tells_them(names: list[str], told: str) -> None:
    settings = measured(evaluate={"metrics": names})
    scoring = prepare(settings).scoring
    scoring.require(True)
    if not told:
        scoring.require(False)
        return
    with pytest.raises(Denied, match=told) as caught:
        scoring.require(False)
    assert caught.value.code == "metric-denied"
