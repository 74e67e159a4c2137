"""One site cannot own a run nor end it: what it counts, announces and sends is held against the others, and a round has
one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

import client.app as client_app
from client.app import app
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import versions
from server.rounds import reply_limits
from server.rounds.exchange import Exchange
from server.rounds.prepare import prepare
from server.rounds.roster import Roster
from strategies.protocol import members
from strategies.protocol.acceptance import largest
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.members import MOST_TIMES, implausible, shares
from strategies.protocol.messages import (
    HEAD,
    RollHead,
    RollReply,
    read_head,
    write_head,
)
from tests.support.faults import BUFFERS, FaultyGrid, head, lies, put, ran, run, toy

ESCAPES = "\x1b[2J\x1b[1;1Hround 7 accuracy 0.99\r\n\u202egnp.\u2066\x00\x07\n" * 40

# --- what a client counts


def test_shares_by_hand() -> None:
    """8, 1, 1 under 0.5: the first is cut to 1/2, the others share the rest. 6, 3, 1 under 0.4: 6/10 is cut to 0.4, 3/4
    of the other 0.6 is 0.45 and cut too, the third gets 0.2."""
    assert shares([8, 1, 1]) == [0.8, 0.1, 0.1]
    assert shares([8, 1, 1], 0.5) == [0.5, 0.25, 0.25]
    assert shares([6, 3, 1], 0.4) == pytest.approx([0.4, 0.4, 0.2])
    assert shares([8, 1, 1], 1 / 3) == shares([8, 1, 1], 0.1) == [1 / 3] * 3
    assert shares([5], 0.5) == [1.0]


@pytest.mark.parametrize("most", [0.05, 0.2, 0.34, 0.5, 0.9, 1.0])
def test_nobody_is_above_the_share_and_all_add_up_to_one(most: float) -> None:
    source = torch.Generator().manual_seed(0)
    for count in (2, 3, 7, 30):
        examples = [1 + int(each) for each in torch.rand(count, generator=source).pow(8) * 2**40]
        found = shares(examples, most)
        assert sum(found) == pytest.approx(1, abs=1e-12)
        assert max(found) <= max(most, 1 / count) + 1e-12
        ordered = [share for _, share in sorted(zip(examples, found, strict=True))]
        assert ordered == sorted(ordered)


def test_a_share_that_binds_nobody_changes_no_bit(tmp_path: Path) -> None:
    plain, bound = (ran(tmp_path / str(most), toy(round={"most_share": most} if most else {})) for most in (None, 0.9))
    assert bound.final == plain.final


def test_a_bounded_share_moves_the_model_as_told(tmp_path: Path) -> None:
    """Uniform weights are what the smallest possible share means."""
    bound = ran(tmp_path / "a", toy(round={"most_share": 0.2}))
    uniform = ran(tmp_path / "b", toy(strategy="fedavg").model_copy(update={"strategy": _uniform()}))
    assert bound.final == uniform.final


def _uniform() -> Any:
    return Experiment.model_validate({"strategy": {"name": "fedavg", "weights": "uniform"}}).strategy


def test_shares_beside_trackers_by_data_are_refused() -> None:
    settings = Experiment.model_validate(
        {"strategy": {"name": "scaffold", "weights": "data"}, "round": {"most_share": 0.5}}
    )
    with pytest.raises(SettingsError, match=r"round.most_share = 0.5 beside trackers .* allowed: strategy.weights"):
        prepare(settings)


def test_who_outweighs_all_others_is_told_before_round_one(tmp_path: Path) -> None:
    said = ran(tmp_path, toy(task={"sizes": [6, 60, 4, 8, 12]})).said
    assert [text for text in said if "client 1 holds 60 of 90 training examples, 66.7%" in text]
    assert not [text for text in ran(tmp_path / "b", toy()).said if "holds" in text]


# --- what a site announces


class Sites:
    """A grid of sites that bring data: each node answers the roll with what it is said to hold; keeps notices."""

    def __init__(self, prepared: Any) -> None:
        self.layout, self.holds, self.told = prepared.model.layout_hash, dict[int, int](), dict[int, str]()
        self._replies: dict[str, Message] = {}

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at="then") for node in self.holds]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            asked, node = read_head(RollHead, message.content), message.metadata.dst_node_id
            if asked.notice:
                self.told[node] = asked.notice
                continue
            message.metadata.__dict__["_message_id"] = f"{node}-{len(self._replies)}"
            reply = RollReply([f"site-{node}"], [self.holds[node]], [0], [1], [""], self.layout, "", "cpu", versions())
            self._replies[message.metadata.message_id] = Message(
                type(message.content)({HEAD: write_head(reply)}), reply_to=message
            )
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(each) for each in message_ids if each in self._replies]


def roster(**tables: Any) -> tuple[Roster, Sites, Coordinator, list[str]]:
    prepared = prepare(toy(**tables))
    sites, said = Sites(prepared), list[str]()
    coordinator = Coordinator.begin(prepared.strategy, prepared.experiment, "r", prepared.model)
    return (
        Roster(sites, prepared.experiment, coordinator, "", said.append, own_data=True),  # type: ignore[arg-type]
        sites,
        coordinator,
        said,
    )


@pytest.mark.parametrize("liar_first", [True, False])
def test_an_absurd_number_of_examples_is_not_believed(liar_first: bool) -> None:
    """Whether the liar comes before the others or after them: the others' roll and total are as without it."""
    found, sites, coordinator, said = roster()
    lie = 100 * MOST_TIMES + 1
    sites.holds = {1: lie} if liar_first else {2: 100, 3: 120}
    found.refresh()
    sites.holds = {1: lie, 2: 100, 3: 120}
    found.refresh()
    found.doubt()
    found.refresh()  # and it stays out
    assert sorted(found.members) == ["site-2", "site-3"]
    assert coordinator.total == 220
    assert "client 'site-1' announced 100001 training examples" in said[-1]
    assert "round.most_share" in said[-1]
    assert sites.told == {1: f"refused: {said[-1].partition(': ')[2]}"}  # the site hears it, too


def test_with_a_bounded_share_or_uniform_weights_it_is_taken() -> None:
    for tables in ({"round": {"most_share": 0.5}}, {"strategy": "scaffold"}):
        found, sites, coordinator, _ = roster(**tables)
        sites.holds = {1: 10**9, 2: 100, 3: 120}
        found.refresh()
        found.doubt()
        assert len(found.members) == 3
        assert coordinator.total == 10**9 + 220


@pytest.mark.parametrize("examples", [2**40 + 1, 2**63 - 1])
def test_more_than_any_site_holds_is_refused_even_alone(examples: int) -> None:
    found, sites, _, said = roster()
    sites.holds = {1: examples}
    found.refresh()
    assert not found.members
    assert "no site holds so many" in said[-1]


def test_two_cannot_say_what_is_usual() -> None:
    assert not implausible("a", {"a": 10**9, "b": 1})
    assert not implausible("a", {"a": 10**9, "b": 1, "idle": 0})
    assert not implausible("a", {"a": MOST_TIMES * 2, "b": 2, "c": 2})
    assert implausible("a", {"a": MOST_TIMES * 2 + 1, "b": 2, "c": 2})


# --- uploads against each other


@pytest.mark.parametrize("group", ["delta", "buffer"])
@pytest.mark.parametrize("factor", [1e6, 1e12])
def test_an_upload_far_beyond_the_others_is_dropped_and_named(group: str, factor: float, tmp_path: Path) -> None:
    """The run then has the bits of one in which that client's reply was lost."""
    grid = FaultyGrid()
    honest = ran(tmp_path / "honest", toy(), grid)
    name = "delta" if group == "delta" else next(iter(_floating()))
    change = put(lambda value: value * factor, name, "state" if group == "delta" else BUFFERS)
    lied = ran(tmp_path / "lied", toy(), FaultyGrid(lies("2", change)))
    lost = ran(tmp_path / "lost", toy(), FaultyGrid(lies("2", head(status="error"))))
    assert lied.final == lost.final != honest.final
    reason = lied.dropped(2)["2"]
    assert reason.startswith(f"outlier: {name} has norm")
    assert "times the usual" in reason
    assert "round.norm_factor = 1000" in reason
    assert lied.history[1]["causes"] == {"2": "invalid"}


def _floating() -> list[str]:
    prepared = prepare(toy())
    return [name for name, value in prepared.model.buffers.items() if value.is_floating_point()]


def test_the_factor_is_a_setting_and_zero_turns_it_off(tmp_path: Path) -> None:
    thrice = lies("2", put(lambda value: value * 30))
    assert not ran(tmp_path / "a", toy(), FaultyGrid(thrice)).dropped(2)
    assert ran(tmp_path / "b", toy(round={"norm_factor": 5.0}), FaultyGrid(thrice)).dropped(2)
    huge = lies("2", put(lambda value: value * 1e6))
    assert not ran(tmp_path / "c", toy(round={"norm_factor": 0.0}), FaultyGrid(huge)).dropped(2)


def test_of_two_uploads_none_is_an_outlier(tmp_path: Path) -> None:
    """Nobody can say which of them lies."""
    settings = toy(round={"sample": 2})
    assert not any(line["dropped"] for line in ran(tmp_path, settings, FaultyGrid(_always(1e6))).history)


def _always(factor: float) -> Callable[[str, int, Message], Message]:
    def lie(name: str, now: int, reply: Message) -> Message:
        if name == "2" and now:
            put(lambda value: value * factor)(reply)
        return reply

    return lie


def test_usual_is_what_was_usual_before_where_updates_have_become_tiny(tmp_path: Path) -> None:
    """All but one have converged: the one that still learns stays in, and a resumed run judges as one in one piece."""

    def shrink(name: str, now: int, reply: Message) -> Message:
        if now > 1 and name not in ("", "2"):
            put(lambda value: value * 1e-9)(reply)
        return reply

    whole = ran(tmp_path / "whole", toy(), FaultyGrid(shrink))
    assert not any(line["dropped"] for line in whole.history)
    assert whole.checkpoint.usual["delta"] == median_low(whole.history[0]["norms"].values())
    first = toy(rounds=1)
    ran(tmp_path / "parts", first, FaultyGrid(shrink))
    assert ran(tmp_path / "parts", toy(), FaultyGrid(shrink), resume=True).final == whole.final


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_cannot_be_squared_is_not_finite(dtype: torch.dtype) -> None:
    wide = torch.tensor(largest(dtype), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(wide * wide * 0.99)


@pytest.mark.parametrize("group", ["delta", "buffer"])
def test_huge_numbers_are_dropped_even_of_two(group: str, tmp_path: Path) -> None:
    name = "delta" if group == "delta" else next(iter(_floating()))
    change = put(lambda value: torch.full_like(value, 3e38), name, "state" if group == "delta" else BUFFERS)
    result = ran(tmp_path, toy(round={"quorum": 1}, task={"sizes": [6, 10]}), FaultyGrid(lies("1", change)))
    assert result.dropped(2)["1"].startswith(f"not finite: {name} has norm")
    assert not result.dropped(3)


# --- a model that was spoilt


@pytest.mark.parametrize("keep", [1, 3])
def test_a_spoilt_checkpoint_is_set_aside_and_a_resume_says_so(keep: int, tmp_path: Path) -> None:
    settings = toy(
        rounds=4, task={"sizes": [6, 10]}, checkpoint={"keep": keep}, local={"lr": 0.2, "batch_size": 4, "steps": 60}
    )
    broken = run(tmp_path, settings, FaultyGrid(_overflowing))
    assert isinstance(broken.error, RunError)
    text = str(broken.error)
    assert "No upload made from the model of round 2 is finite" in text
    assert "norms of the uploads that made it, the longest first: 1 " in text
    assert text.endswith("--resume goes on from round 1 and leaves out round 2")
    resumed = run(tmp_path, settings, FaultyGrid(), resume=True)
    assert resumed.error is None
    assert resumed.said[0] == (
        "resuming after round 1; that of round 2 is set aside, as no upload made from it was finite"
    )
    assert resumed.final == ran(tmp_path / "clean", settings).final
    assert not list((tmp_path / "checkpoints").glob("*.doubtful"))


def _overflowing(name: str, now: int, reply: Message) -> Message:
    """A cohort of two, both of which send what is just taken, and what comes of it."""
    if now == 2:
        put(lambda value: value * (1e17 if name == "0" else 1e18))(reply)
    if now == 3:
        put(lambda value: value * torch.inf)(reply)
    return reply


# --- one deadline


def test_an_upload_that_trickles_in_is_given_up_at_the_deadline_and_a_whole_one_is_not() -> None:
    closes = time.monotonic() + 0.2
    asked = 0

    def trickling(object_id: str) -> bytes:
        nonlocal asked
        asked += 1
        raise ObjectUnavailableError(object_id)

    with reply_limits.whole_by(lambda: closes), pytest.raises(ObjectPullError, match="not here whole by the deadline"):
        reply_limits.pull_within_bounds(["a"], trickling, initial_backoff=0.01, backoff_cap=0.02)
    assert 0 <= time.monotonic() - closes < 2
    assert asked > 3
    with (
        reply_limits.whole_by(lambda: time.monotonic() - 10),
        pytest.raises(ObjectPullError, match="cannot be put together"),  # fetched, however late: it was here
    ):
        reply_limits.pull_within_bounds(["a"], lambda object_id: b"nonsense")


def test_two_exchanges_share_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mime asks twice in a round: what the first exchange took is not there for the second."""
    given: list[float] = []
    inner = Exchange.run

    def timed(self: Exchange, messages: Any, deadline_s: float, enough: Any = None) -> dict[str, Message]:
        given.append(deadline_s)
        time.sleep(0.05)
        return inner(self, messages, deadline_s, enough)

    monkeypatch.setattr(Exchange, "run", timed)
    ran(tmp_path, toy("mime", rounds=1, round={"deadline_s": 30.0}))
    first, second = given[-2:]
    assert first == 15.0  # half of it, so that one who is silent leaves the others the rest
    assert 20 < second <= 30.0 - 0.05


# --- and the site hears of it


def test_a_notice_is_no_roll_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged as one clean line, whatever it holds, and opens nothing."""
    message = members.notices("r", {7: f"client 2: round 3: outlier {ESCAPES}"}, 30.0)[0]
    said: list[str] = []
    monkeypatch.setattr(client_app.log, "warning", lambda text, *more: said.append(text % more))
    reply = app(message, context())
    assert read_head(RollReply, reply.content).error == "heard"
    assert said[0].startswith("the server says: client 2: round 3: outlier")
    assert said[0].isprintable()


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={"name": "2"}, state=RecordDict(), run_config={})


def test_who_is_dropped_is_told() -> None:
    found, sites, _, _ = roster()
    sites.holds = {1: 10, 2: 10}
    found.refresh()
    found.tell({"site-2": "round 1: not finite: delta holds NaN or Inf"})
    assert sites.told == {2: "client site-2: round 1: not finite: delta holds NaN or Inf"}
