"""No reply can break a run: a wrong one costs its client the round, its reason in the history, and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from common.errors import RunError
from common.vector import State
from strategies.base import Upload
from strategies.fedavg import FedAvg
from strategies.protocol import acceptance, wire
from strategies.protocol.messages import HEAD, METRICS, STATE
from tests.support.faults import BUFFERS, SIZES, FaultyGrid, fail, head, lies, put, ran, run, toy

NAN, INF = math.nan, math.inf


def spoil(value: float, index: int = 0) -> Callable[[Tensor], Tensor]:
    """Put one bad value into a vector."""

    def change(vector: Tensor) -> Tensor:
        vector.view(-1)[index] = value
        return vector

    return change


def both(*changes: Callable[[Message], Any]) -> Callable[[Message], None]:
    def changed(reply: Message) -> None:
        for change in changes:
            change(reply)

    return changed


def without(record: str, group: str | None = None) -> Callable[[Message], None]:
    def changed(reply: Message) -> None:
        if group is None:
            del reply.content[record]
        else:
            del reply.content[record][group]  # type: ignore[union-attr]

    return changed


def extra(record: str, name: str) -> Callable[[Message], None]:
    def changed(reply: Message) -> None:
        reply.content.array_records[record][name] = wire.to_array(torch.zeros(14))

    return changed


def metrics(**values: Any) -> Callable[[Message], None]:
    def changed(reply: Message) -> None:
        reply.content[METRICS] = MetricRecord(values)

    return changed


def replaced(content: Callable[[], RecordDict]) -> Callable[[Message], Message]:
    return lambda reply: Message(content=content(), metadata=reply.metadata)


# Flower's table (FIELD.md) first, then what is asked and not answered, then garbage. The vector is (14,) float32.
WRONG: dict[str, tuple[Callable[[Message], Any], str]] = {
    "zero examples and NaN": (both(head(examples=0), put(lambda v: v * NAN)), "examples: 0 not in 1..4"),
    "status empty": (head(status="empty"), "empty"),
    "one NaN": (put(spoil(NAN)), "not finite: delta holds NaN or Inf"),
    "one Inf at the end": (put(spoil(-INF, 13)), "not finite: delta holds NaN or Inf"),
    "NaN in a buffer": (put(spoil(NAN), "buffers.float32", BUFFERS), "not finite: buffers.float32"),
    "shape (1,)": (put(lambda v: v[:1]), "layout: delta is torch.float32 (1,), expected torch.float32 (14,)"),
    "shape (2, 7)": (put(lambda v: v.view(2, 7)), "layout: delta is torch.float32 (2, 7)"),
    "shape (2, 14)": (put(lambda v: torch.stack([v, v])), "layout: delta is torch.float32 (2, 14)"),
    "0-d": (put(lambda v: v.sum()), "layout: delta is torch.float32 ()"),
    "empty": (put(lambda v: v[:0]), "layout: delta is torch.float32 (0,)"),
    "float16": (put(lambda v: v.half()), "layout: delta is torch.float16"),
    "float64": (put(lambda v: v.double()), "layout: delta is torch.float64"),
    "int64 as float": (
        put(lambda v: v.float(), "buffers.int64", BUFFERS),
        "layout: buffers.int64 is torch.float32 (2,), expected torch.int64 (2,)",
    ),
    "bool as uint8": (put(lambda v: v.byte(), "buffers.bool", BUFFERS), "layout: buffers.bool is torch.uint8"),
    "-5 examples": (head(examples=-5), "examples: -5 not in 1..4, the roll's number"),
    "NaN examples": (head(examples=NAN), "malformed: examples = 'nan' is no int"),
    "more examples than the roll's": (head(examples=5), "examples: 5 not in 1..4"),
    "another run": (head(run="other"), "mismatch: expected run, client, generation, round, layout"),
    "another client": (head(client="3"), "mismatch"),
    "another generation": (head(generation=2), "mismatch"),
    "an older round": (head(round=1), "mismatch"),
    "another layout": (head(layout="0" * 16), "mismatch"),
    "another rate": (head(lr=0.1), "mismatch: local rate 0.1, expected 0.2"),
    "no steps": (head(steps=0), "steps: 0 local steps"),
    "an unknown status": (head(status="fine"), "fine"),
    "no delta": (without(STATE, "delta"), "layout: upload [], expected ['delta']"),
    "a group too many": (extra(STATE, "more"), "layout: upload ['delta', 'more'], expected ['delta']"),
    "no buffers": (without(BUFFERS), "layout: buffers [], expected"),
    "a buffer too many": (extra(BUFFERS, "buffers.int8"), "layout: buffers ["),
    "no arrays": (without(STATE), "layout: upload [], expected"),
    "no head": (without(HEAD), "malformed: no record 'fedkeel'"),
    "half a head": (without(HEAD, "steps"), "malformed: steps = 'None' is no int"),
    "a bool for an int": (head(steps=True), "malformed: steps = 'True' is no int"),
    "a list for an int": (head(steps=[1, 2]), "malformed: steps = '[1, 2]' is no int"),
    "a list of metrics": (metrics(loss=[1.0, 2.0]), "malformed: metric loss is a list"),
    "NaN loss": (metrics(loss=NAN), "not finite: training loss nan"),
    "no loss": (without(METRICS), "not finite: training loss nan"),
    "nothing": (replaced(RecordDict), "malformed: no record"),
    "records of other kinds": (
        replaced(lambda: RecordDict({HEAD: MetricRecord({"a": 1}), STATE: ConfigRecord({"a": 1})})),
        "malformed: no record",
    ),
    "other records in the place of arrays": (
        lambda reply: reply.content.__setitem__(STATE, ConfigRecord({"delta": b"1234"})),
        "layout: upload []",
    ),
    "an empty record": (lambda reply: reply.content.__setitem__(STATE, ArrayRecord()), "layout: upload []"),
    "an error message": (fail, "offline: gone"),
}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The reference: client 2's reply of round 2 is lost."""
    return ran(tmp_path_factory.mktemp("lost"), toy(), FaultyGrid(lies("2", fail))).final


@pytest.mark.parametrize("what", WRONG)
def test_a_bad_reply_costs_its_client_the_round_and_nothing_else(
    what: str, tmp_path: Path, lost: dict[str, bytes]
) -> None:
    """Dropped in round 2 with its reason; all bits of the server's state are those of a run without that reply."""
    change, reason = WRONG[what]
    result = ran(tmp_path, toy(), FaultyGrid(lies("2", change)))
    assert [sorted(line["dropped"]) for line in result.history] == [[], ["2"], []]
    assert result.dropped(2)["2"].startswith(reason)
    assert result.history[1]["accepted"] == ["0", "1", "3", "4"]
    assert result.final == lost


@pytest.mark.parametrize("algorithm", ["scaffold", "hafedho", "fednova", "fedcm", "fedadam"])
def test_what_the_client_keeps_of_a_refused_round_is_not_used(algorithm: str, tmp_path: Path) -> None:
    """NaN and lost are one and the same, also in the rounds after, though the client has moved on in both."""
    group = "gradient" if algorithm == "hafedho" else "delta"
    settings = toy(algorithm, rounds=4)
    spoilt = ran(tmp_path / "a", settings, FaultyGrid(lies("2", put(spoil(NAN), group))))
    lost = ran(tmp_path / "b", settings, FaultyGrid(lies("2", fail)))
    assert list(spoilt.dropped(2)) == ["2"]
    assert spoilt.final == lost.final


def test_the_aggregate_is_the_mean_of_the_accepted(tmp_path: Path) -> None:
    """From first principles, in float64: x + sum n_i Delta_i / sum n_i over the clients but 2; BatchNorm as well."""
    grid = FaultyGrid(lies("2", put(spoil(NAN)), round=1))
    result = ran(tmp_path, toy(rounds=1), grid)
    good = [0, 1, 3, 4]
    weights = np.array([SIZES[i] for i in good]) / sum(SIZES[i] for i in good)
    deltas = np.stack([grid.true[str(i), 1].double().numpy() for i in good])
    expected = result.at(0).state["model"].double().numpy() + weights @ deltas
    assert np.allclose(result.checkpoint.state["model"].double().numpy(), expected, rtol=0, atol=1e-7)


# --- FIELD.md: dtypes and order


def test_counters_and_masks_keep_their_dtype(tmp_path: Path) -> None:
    """int64 counters take the largest (7 and 8 are 8, not 7.5), bool masks the union; both stay what they are."""
    result = ran(tmp_path, toy())
    buffers = result.checkpoint.buffers
    assert {name: value.dtype for name, value in buffers.items()} == {
        "buffers.float32": torch.float32,
        "buffers.int64": torch.int64,
        "buffers.bool": torch.bool,
    }
    assert buffers["buffers.int64"].tolist() == [9, 9]  # client 4: three batches of 4 in each of three rounds
    assert buffers["buffers.bool"].any()


@pytest.mark.parametrize("algorithm", ["fedadam", "fedyogi", "fedams", "fedadagrad", "fedavgm"])
def test_buffers_never_meet_a_server_optimizer_and_nothing_becomes_float64(algorithm: str, tmp_path: Path) -> None:
    """BatchNorm's variance is the clients' mean, above 0; the model and all moments stay float32, as they are sent."""
    result = ran(tmp_path, toy(algorithm, rounds=4))
    plain = ran(tmp_path / "plain", toy("fedavg", rounds=1))
    first = ran(tmp_path / "first", toy(algorithm, rounds=1))
    assert torch.equal(first.checkpoint.buffers["buffers.float32"], plain.checkpoint.buffers["buffers.float32"])
    assert bool((result.checkpoint.buffers["buffers.float32"][3:] > 0).all())
    assert {value.dtype for value in result.checkpoint.state.values()} == {torch.float32}


def test_large_values_that_cancel_have_one_sum(tmp_path: Path) -> None:
    """1e8, 1, -1e8 move the model by exactly 1/3 of 1, in every order of arrival."""
    values = {"0": 1e8, "1": 1.0, "2": -1e8}
    settings = toy(rounds=1, task={"sizes": [4, 4, 4]})
    finals = []
    for number, order in enumerate(itertools.permutations(range(3))):

        def lie(name: str, round: int, reply: Message) -> Message:
            if name:
                put(lambda v: torch.full_like(v, values[name]))(reply)
            return reply

        def arrange(replies: list[Message], order: tuple[int, ...] = order) -> list[Message]:
            return [replies[i] for i in order] if len(replies) == 3 else replies

        result = ran(tmp_path / str(number), settings, FaultyGrid(lie, order=arrange))
        finals.append(result.final)
        moved = result.at(1).state["model"].double() - result.at(0).state["model"].double()
        assert torch.allclose(moved, torch.tensor(1 / 3).double(), atol=1e-7)
    assert all(final == finals[0] for final in finals)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fednova", "hafedho"])
def test_the_order_of_arrival_changes_no_bit(algorithm: str, tmp_path: Path) -> None:
    """Replies are summed in name order."""
    settings = toy(algorithm)
    forward = ran(tmp_path / "a", settings)
    backward = ran(tmp_path / "b", settings, FaultyGrid(order=lambda replies: replies[::-1]))
    assert forward.final == backward.final
    assert backward.history[0]["accepted"] == ["0", "1", "2", "3", "4"]


def test_a_client_without_examples_is_not_asked(tmp_path: Path) -> None:
    """It is on the roll, takes no part in rounds, and the run is that of the others alone."""
    grid = FaultyGrid()
    result = ran(tmp_path, toy(task={"sizes": [6, 0, 4]}), grid)
    assert {name for name, _ in grid.asked} == {"0", "2"}
    assert result.checkpoint.known == {"0": 6, "1": 0, "2": 4}


# --- bounds


def test_the_norm_bound_drops_large_uploads(tmp_path: Path) -> None:
    """round.max_upload_norm = 10 drops a delta of norm 10.001 and takes one of 9.999, naming both numbers."""

    def scaled(length: float) -> Callable[[Message], None]:
        return put(lambda v: v / v.norm() * length)

    settings = toy(round={"max_upload_norm": 10.0})
    result = ran(tmp_path / "a", settings, FaultyGrid(lies("2", scaled(10.001))))
    assert result.dropped(2) == {"2": "norm: delta has norm 10.001 > round.max_upload_norm = 10"}
    assert ran(tmp_path / "b", settings, FaultyGrid(lies("2", scaled(9.999)))).dropped(2) == {}


def test_an_exception_in_a_clients_task_is_named_and_costs_only_that_client(tmp_path: Path) -> None:
    """The history names client, round, stage and exception; the others go on to the end."""
    result = ran(tmp_path, toy(task={"broken": "3"}))
    assert len(result.history) == 3
    for line in result.history:
        reason = f"failed: client 3, round {line['round']}, train: ArithmeticError: label -1"
        assert line["dropped"] == {"3": reason}
    assert result.history[2]["accepted"] == ["0", "1", "2", "4"]


def test_an_aggregate_that_overflows_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite uploads, an infinite model: the round is void, tried again, and the weights are those of a clean run."""
    monkeypatch.setattr(acceptance, "largest", lambda dtype: math.inf)  # no upload that is taken gets this far
    tries = itertools.count()

    def lie(name: str, round: int, reply: Message) -> Message:
        if round == 2 and name in "01" and next(tries) < 2:
            put(lambda v: torch.full_like(v, 3e38))(reply)
        return reply

    settings = toy("scaffold", server={"lr": 3.0}, round={"norm_factor": 0.0})
    result = ran(tmp_path / "a", settings, FaultyGrid(lie))
    assert [len(line["void"]) for line in result.history] == [0, 1, 0]
    assert result.history[1]["void"][0]["cause"] == "the aggregate of round 2 is not finite"
    assert result.final == ran(tmp_path / "b", settings).final


def test_fednova_drops_a_response_that_is_not_positive(tmp_path: Path) -> None:
    """It divides by each client's a_i. With eta mu = 2 two steps come back to where they began, so clients of two are
    dropped and the round goes on without them; one step or three make a_i = 1."""
    result = ran(tmp_path, toy("fednova", local={"lr": 0.25, "batch_size": 4, "proximal_mu": 8.0}))
    reason = "meaningless: a_i = -0.0 of 2 local steps is not positive"
    assert [line["dropped"] for line in result.history] == [{"0": reason, "3": reason}] * 3


def test_an_aggregate_without_a_value_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A division by zero in an algorithm makes the round void and never leaves the loop."""

    def aggregate(self: FedAvg, state: State, uploads: Sequence[Upload]) -> State:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    result = run(tmp_path, toy(), FaultyGrid())
    assert isinstance(result.error, RunError)
    assert "the aggregate of round 1 has no value" in str(result.error)
