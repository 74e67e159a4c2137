"""Who is waited for, and how long: quorum, deadline, over-selection, late replies, nodes that come and go, garbage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client.app import app
from common import vector
from common.errors import RunError, SettingsError
from server.app import run as run_app
from server.engines.inprocess import NODE, InProcessGrid
from server.rounds.folder import RunFolder
from strategies.protocol import wire
from strategies.protocol.members import Member, sample
from strategies.protocol.messages import HEAD, METRICS, STATE, Refused, ReplyHead, RollReply
from tests.support.faults import BUFFERS, FaultyGrid, Ran, fail, head, lies, put, ran, run, toy
from tests.support.helpers import Simulation, experiment


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Three rounds of SCAFFOLD without a fault."""
    return ran(tmp_path_factory.mktemp("clean"), toy("scaffold")).final


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same, client 2's reply of round 2 lost."""
    return ran(tmp_path_factory.mktemp("lost"), toy("scaffold"), FaultyGrid(lies("2", fail))).final


def once(names: str, round: int = 2) -> Callable[[str, int, Message], Message]:
    """The replies of these clients are lost in the first try of a round."""
    rest = set(names)

    def lie(name: str, now: int, reply: Message) -> Message:
        if now == round and name in rest:
            rest.remove(name)
            return fail(reply)
        return reply

    return lie


# --- quorum


def test_a_round_below_quorum_is_void_and_tried_again(tmp_path: Path, clean: dict[str, bytes]) -> None:
    """Neither model nor acknowledgements move: the second try ends where a run without the fault does."""
    result = ran(tmp_path, toy("scaffold", round={"quorum": 4}), FaultyGrid(once("13")))
    assert [len(line["void"]) for line in result.history] == [0, 1, 0]
    void = result.history[1]["void"][0]
    assert void["cause"] == "3 valid uploads, quorum 4 (1: offline: gone; 3: offline: gone)"
    assert void["dropped"] == {"1": "offline: gone", "3": "offline: gone"}
    assert result.final == clean


def test_a_retry_draws_another_sample(tmp_path: Path) -> None:
    """Who is asked is a function of seed, round and try."""
    result = ran(tmp_path, toy(round={"sample": 3, "quorum": 3}, seed=3), FaultyGrid(once("01234")))
    tried = [void["sampled"] for void in result.history[1]["void"]] + [result.history[1]["sampled"]]
    assert len(tried) > 1
    assert tried == [sample(3, 2, number, "01234", 3) for number in range(len(tried))]


def test_the_default_quorum_is_half_of_all(tmp_path: Path, clean: dict[str, bytes]) -> None:
    """Three of five make a round, two do not."""
    assert len(ran(tmp_path / "a", toy("scaffold"), FaultyGrid(once("12"))).history[1]["accepted"]) == 3
    result = ran(tmp_path / "b", toy("scaffold"), FaultyGrid(once("123")))
    assert result.history[1]["void"][0]["cause"].startswith("2 valid uploads, quorum 3 (")
    assert result.final == clean


def test_rounds_without_progress_end_the_run_with_the_cause(tmp_path: Path) -> None:
    """max_void tries; what was reached is kept, to be resumed."""
    gone = {"0", "1", "2"}
    grid = FaultyGrid(lambda name, round, reply: fail(reply) if round == 2 and name in gone else reply)
    result = run(tmp_path, toy("scaffold", round={"max_void": 2}), grid)
    assert isinstance(result.error, RunError)
    assert str(result.error).startswith("no progress in round 2 after 2 tries; the last one: 2 valid uploads, quorum 3")
    assert "0: offline: gone; 1: offline: gone; 2: offline: gone" in str(result.error)
    assert [line["round"] for line in result.history] == [1]
    assert result.checkpoint.round == 1
    assert sum(text.startswith("round 2 is void: ") for text in result.said) == 2


# --- deadline, late and doubled replies


def test_a_client_that_never_answers_costs_the_deadline(tmp_path: Path, lost: dict[str, bytes]) -> None:
    """Not more, and the round goes on with the others."""
    started = time.monotonic()
    grid = FaultyGrid(held=lambda name, round, now: (name, round) == ("2", 2))
    result = ran(tmp_path, toy("scaffold", round={"deadline_s": 0.5}), grid)
    assert result.dropped(2) == {"2": "timed out"}
    assert 0.5 <= result.history[1]["seconds"]["collect"] < 1.5
    assert time.monotonic() - started < 10
    assert result.final == lost


def test_a_late_reply_is_counted_and_dropped(tmp_path: Path, lost: dict[str, bytes]) -> None:
    """It comes with the next round; the weights are those of a run in which it never came."""
    grid = FaultyGrid(held=lambda name, round, now: (name, round) == ("2", 2) and now == 2)
    result = ran(tmp_path, toy("scaffold", round={"deadline_s": 0.5}), grid)
    assert [line["late"] for line in result.history] == [0, 0, 1]
    assert result.dropped(2) == {"2": "timed out"}
    assert result.final == lost


def test_doubled_replies_count_once(tmp_path: Path, clean: dict[str, bytes]) -> None:
    """Whether they come together or one after the other."""
    result = ran(tmp_path, toy("scaffold"), FaultyGrid(copies=3))
    assert result.final == clean
    assert [line["late"] for line in result.history] == [0, 0, 0]


def test_over_selection_closes_the_round_at_the_sample(tmp_path: Path) -> None:
    """Five asked, three wanted: two that are silent are not waited for; one that failed does not count as a reply."""
    settings = toy(round={"sample": 3, "over_select": 2, "deadline_s": 60})
    silent = ran(tmp_path / "a", settings, FaultyGrid(held=lambda name, round, now: name in {"0", "4"}))
    assert [line["accepted"] for line in silent.history] == [["1", "2", "3"]] * 3
    assert silent.dropped(2) == {"0": "late", "4": "late"}
    one_by_one = FaultyGrid(lies("0", fail), lambda name, round, now: name == "4", order=lambda replies: replies[:1])
    failed = ran(tmp_path / "b", settings, one_by_one)
    assert failed.history[1]["accepted"] == ["1", "2", "3"]
    assert failed.dropped(2) == {"0": "offline: gone", "4": "late"}


def test_in_process_nobody_trains_for_nothing(tmp_path: Path) -> None:
    """Messages that a closed round no longer waits for are not run later, and not kept."""
    trained: list[str] = []

    def counting(message: Message, context: Context) -> Message:
        trained.append(message.metadata.message_type)
        return app(message, context)

    grid = InProcessGrid(counting)  # type: ignore[arg-type]
    result = ran(tmp_path, toy(rounds=5, round={"sample": 3, "over_select": 2}), grid)
    assert trained.count("train") == 15
    assert result.history[4]["late"] == 0
    assert len(grid._waiting) == 2


# --- nodes


def test_a_node_that_is_away_is_waited_for(tmp_path: Path, clean: dict[str, bytes]) -> None:
    """An outage shorter than the deadline costs no try."""
    grid, since = FaultyGrid(), []

    def nodes() -> list[int]:
        if grid.now == 1:
            since.append(time.monotonic())
        return [] if since and since[-1] - since[0] < 0.4 else [NODE]

    grid.nodes = nodes
    result = ran(tmp_path, toy("scaffold"), grid)
    assert result.final == clean
    assert [line["void"] for line in result.history] == [[], [], []]


def test_nobody_there_ends_the_run_after_the_deadlines(tmp_path: Path) -> None:
    """The cause says who is here and what was needed."""
    grid = FaultyGrid()
    grid.nodes = lambda: [NODE] if grid.now < 2 else []
    result = run(tmp_path, toy(round={"deadline_s": 0.2, "max_void": 2}), grid)
    assert isinstance(result.error, RunError)
    assert "no progress in round 3 after 2 tries; the last one: 0 clients are here, quorum 3" in str(result.error)


def test_a_restarted_client_comes_back_once_its_old_node_is_gone(tmp_path: Path, clean: dict[str, bytes]) -> None:
    """Two nodes with one name: the second is refused, with a line that names both, until the first one has left."""
    grid = FaultyGrid()
    grid.nodes = lambda: [[NODE], [NODE], [NODE, 7], [7]][grid.now]
    result = ran(tmp_path, toy("scaffold", rounds=4), grid)
    assert result.said == ["refused node 7: name: client '0' is here twice, on nodes 2 and 7"]
    assert result.history[3]["accepted"] == ["0", "1", "2", "3", "4"]
    assert result.final == ran(tmp_path / "again", toy("scaffold", rounds=4)).final


def test_a_node_with_another_number_of_examples_is_refused_as_a_whole(tmp_path: Path) -> None:
    """Nothing of it enters the roll, so that trackers stay averages over the same clients."""
    coordinator = Simulation(experiment(tmp_path, "scaffold"), "01").coordinator
    known, control = dict(coordinator.known), coordinator.state["control"]
    with pytest.raises(Refused, match="client '0' announced 30 training examples at first and 7 now"):
        coordinator.admit([Member("5", 1, 3, 0, 1), Member("0", 1, 7, 0, 1)])
    assert coordinator.known == known
    assert coordinator.state["control"] is control


# --- garbage


HEADS = [*ReplyHead.__dataclass_fields__, *RollReply.__dataclass_fields__, "more"]
SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.text(max_size=5), st.binary(max_size=5)
)
LISTS = st.one_of(st.lists(st.integers(-5, 5), max_size=3), st.lists(st.floats(), max_size=3), st.just(["0", "0"]))
ARRAYS = st.builds(
    Array,
    st.sampled_from([*vector.DTYPES, "object", ""]),
    st.lists(st.integers(-1, 9), max_size=3).map(tuple),
    st.sampled_from([wire.RAW, "numpy.ndarray", ""]),
    st.binary(max_size=80),
)
RECORDS = st.one_of(
    st.dictionaries(st.sampled_from(HEADS), SCALARS, max_size=3).map(ConfigRecord),
    st.dictionaries(st.text(max_size=3), st.floats() | st.lists(st.floats(), max_size=2), max_size=3).map(MetricRecord),
    st.dictionaries(st.sampled_from(["delta", "control", "x"]), ARRAYS, max_size=2).map(ArrayRecord),
)
CHANGES = st.one_of(
    st.tuples(st.just("head"), st.sampled_from(HEADS), SCALARS | LISTS),
    st.tuples(st.just("array"), st.sampled_from(["delta", "control"]), ARRAYS),
    st.tuples(
        st.just("metric"), st.sampled_from(["loss", "accuracy"]), st.floats() | st.lists(st.floats(), max_size=2)
    ),
    st.tuples(st.just("record"), st.sampled_from([HEAD, STATE, BUFFERS, METRICS, "x"]), RECORDS | st.none()),
)


def garble(reply: Message, change: tuple[str, str, Any]) -> None:
    kind, key, value = change
    if kind == "head" and HEAD in reply.content.config_records:
        reply.content.config_records[HEAD][key] = value
    elif kind == "array" and STATE in reply.content.array_records:
        reply.content.array_records[STATE][key] = value
    elif kind == "metric" and METRICS in reply.content.metric_records:
        reply.content.metric_records[METRICS][key] = value
    elif kind == "record":
        reply.content.pop(key, None)
        if value is not None:
            reply.content[key] = value


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["train", "evaluate", "query"]), st.lists(CHANGES, min_size=1, max_size=3))
def test_no_reply_whatever_it_holds_raises_out_of_the_loop(
    tmp_path_factory: pytest.TempPathFactory, kind: str, changes: list[tuple[str, str, Any]]
) -> None:
    """Any mutation of a reply to TRAIN, EVALUATE or the roll call of a node that joins: two rounds are completed."""

    def lie(name: str, round: int, reply: Message) -> Message:
        joining = reply.metadata.src_node_id == 7
        if reply.metadata.message_type.startswith(kind) and (name == "1" or joining):
            for change in changes:
                garble(reply, change)
        return reply

    grid = FaultyGrid(lie)
    grid.nodes = lambda: [NODE] if grid.now == 0 else [NODE, 7]
    settings = toy("scaffold", rounds=2, task={"sizes": [4, 4, 4]}, evaluate={"clients": "all"})
    result = run(tmp_path_factory.mktemp("garbage"), settings, grid)
    assert result.error is None
    assert [line["round"] for line in result.history] == [1, 2]
    assert all({"0", "2"} <= set(line["accepted"]) for line in result.history)
    assert bool(torch.isfinite(result.checkpoint.state["model"]).all())


def evaluated(folder: Path, change: Callable[[Message], Any]) -> Ran:
    def lie(name: str, round: int, reply: Message) -> Message:
        if name == "1" and reply.metadata.message_type.startswith("evaluate"):
            return change(reply) or reply
        return reply

    return ran(folder, toy(rounds=1, evaluate={"clients": "all"}), FaultyGrid(lie))


@pytest.mark.parametrize("examples", [0, -1, 3])
def test_evaluation_counts_only_what_was_asked(examples: int, tmp_path: Path) -> None:
    """A client evaluates on as many examples as it announced (2); otherwise it is left out of the means."""
    assert evaluated(tmp_path / "a", head()).history[0]["clients"]["loss"]["n"] == 5
    assert evaluated(tmp_path / "b", head(examples=examples)).history[0]["clients"]["loss"]["n"] == 4


def crash(reply: Message) -> Message:
    return Message(error=Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "gone"), metadata=reply.metadata)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (head(layout="0" * 16), "layout: client '0', '1', '2' holds a model with layout 0000000000000000"),
        (head(plan="0" * 16), ""),
        (head(error="client 0: no disk"), "roll call failed: client 0: no disk"),
        (head(examples=[1.5, 2.5, 3.5]), "malformed: examples = '[1.5, 2.5, 3.5]' is no list[int]"),
        (head(names=["0", "1"]), "malformed: roll of clients ['0', '1']"),
        (head(examples=[4, -1, 4]), "examples: negative numbers in the roll"),
        (crash, "roll call failed: gone"),
        (head(versions="flwr 1.42.0, torch 2.9"), "runs 'flwr 1.42.0, torch 2.9', the server 'flwr 1.39"),
        (head(versions="x"), "versions: client '0', '1', '2' runs 'x'"),
        (lambda reply: Message(content=RecordDict(), metadata=reply.metadata), "malformed: no record"),
    ],
)
def test_a_node_that_cannot_take_part_ends_the_run_before_round_1(
    change: Callable[[Message], Any], words: str, tmp_path: Path
) -> None:
    """With what is wrong; no folder stays behind. (This task has no plan of its own to compare.)"""
    grid = FaultyGrid(lies("", change, round=0))
    result = run(tmp_path / "run", toy(rounds=1, task={"sizes": [4, 4, 4]}), grid)
    if words:
        assert isinstance(result.error, SettingsError)
        assert words in str(result.error)
        assert not (tmp_path / "run").exists()
    else:
        assert result.error is None


def test_put_is_what_breaks_a_run_and_not_the_wrapper(tmp_path: Path, clean: dict[str, bytes]) -> None:
    """The tools of these tests change nothing of their own."""
    result = ran(tmp_path, toy("scaffold"), FaultyGrid(lies("2", put(lambda v: v))))
    assert result.final == clean
    assert ran(tmp_path / "plain", toy("scaffold"), InProcessGrid(app)).final == clean


@pytest.mark.parametrize("strict", [True, False])
def test_a_refused_client_before_round_one(strict: bool, tmp_path: Path) -> None:
    """With clients of one's own a node that holds another model ends the run at once; among clients of others it is
    refused, and named when too few came before the deadline."""

    def lie(name: str, round: int, reply: Message) -> Message:
        if round == 0:
            reply.content[HEAD]["layout"] = "other"
        return reply

    folder = RunFolder(tmp_path)
    slow = toy(round={"deadline_s": 0.3})
    expected = SettingsError if strict else RunError
    with pytest.raises(expected, match="holds a model with layout other"):
        run_app(FaultyGrid(lie), slow, folder, strict=strict, say=lambda text: None)
    assert folder.status()["exit_code"] == (2 if strict else 1)
    assert strict or any("refused node" in text for text in folder.notes())


def test_a_node_that_says_nothing_is_not_waited_for_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that seems to be online and never answers its roll call is called once, not before each round."""
    monkeypatch.setattr("server.rounds.roster.ROLL_CALL_S", 0.2)
    calls: list[Message] = []

    class Haunted(FaultyGrid):
        def get_node_ids(self) -> list[int]:
            return [*super().get_node_ids(), 99]

        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            messages = list(messages)
            calls.extend(message for message in messages if message.metadata.dst_node_id == 99)
            return list(super().push_messages([m for m in messages if m.metadata.dst_node_id != 99]))

    result = ran(tmp_path, toy(), Haunted())
    assert [line["accepted"] for line in result.history] == [list("01234")] * 3
    assert len(calls) == 1
