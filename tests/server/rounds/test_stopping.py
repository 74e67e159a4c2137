"""A run that is asked to stop: its round is finished or as if it had never begun; and who is missed, and why."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from server.app import run as run_app
from server.engines.inprocess import NODE, InProcessGrid
from server.rounds import exchange
from server.rounds.folder import RunFolder
from server.rounds.stopping import StopFile, StopOnSignal, Stopped, earliest
from strategies.protocol.messages import KINDS, Refused
from tests.support.faults import FaultyGrid, fail, head, lies, ran, run, toy


def asked_in_round(round: int, grid: FaultyGrid, grace_s: float) -> Callable[[], float | None]:
    """A stop that comes while this round's replies are collected."""
    until: list[float] = []

    def stop() -> float | None:
        if grid.now >= round and not until:
            until.append(time.monotonic() + grace_s)
        return until[0] if until else None

    return stop


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "hafedho"])
def test_a_round_that_can_be_finished_is(algorithm: str, tmp_path: Path) -> None:
    settings = toy(algorithm, rounds=4)
    straight = ran(tmp_path / "straight", settings)
    grid = FaultyGrid(memory=str(tmp_path / "memory"))
    stopped = run(tmp_path / "run", settings, grid, stop=asked_in_round(2, grid, 60))
    assert isinstance(stopped.error, Stopped)
    assert [line["round"] for line in stopped.history] == [1, 2]
    assert stopped.checkpoint.round == 2
    resumed = ran(tmp_path / "run", settings, FaultyGrid(memory=str(tmp_path / "memory")), resume=True)
    assert resumed.final == straight.final


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "hafedho"])
def test_a_round_that_cannot_is_void_and_runs_again_with_the_same_clients(algorithm: str, tmp_path: Path) -> None:
    """Quorum would have been met without the one that is missing: the round is not taken without it."""
    settings = toy(algorithm, rounds=4, round={"sample": 3, "quorum": 1})
    straight = ran(tmp_path / "straight", settings)
    missing = straight.history[1]["sampled"][0]
    held = FaultyGrid(held=lambda name, round, now: (name, round) == (missing, 2), memory=str(tmp_path / "memory"))
    started = time.monotonic()
    stopped = run(tmp_path / "run", settings, held, stop=asked_in_round(2, held, 0.3))
    assert time.monotonic() - started < 10
    assert isinstance(stopped.error, Stopped)
    assert stopped.checkpoint.round == 1
    resumed = ran(tmp_path / "run", settings, FaultyGrid(memory=str(tmp_path / "memory")), resume=True)
    assert [line["sampled"] for line in resumed.history] == [line["sampled"] for line in straight.history]
    assert resumed.final == straight.final


def test_one_that_waits_for_clients_stops_too(tmp_path: Path) -> None:
    grid = FaultyGrid()
    grid.nodes = list
    result = run(tmp_path, toy(), grid, stop=lambda: time.monotonic())
    assert isinstance(result.error, Stopped)


def test_the_status_tells_and_an_old_request_does_not_stop_the_next_run(tmp_path: Path) -> None:
    folder, settings = RunFolder(tmp_path / "run"), toy(rounds=3)

    def ask(record: dict[str, object]) -> None:
        if record["round"] == 2:
            folder.stop.ask(5)

    last = run_app(FaultyGrid(memory=str(tmp_path)), settings, folder, say=lambda text: None, show=ask)
    assert (last["round"], folder.status()["status"], folder.status()["exit_code"]) == (2, "stopped", 0)
    last = run_app(FaultyGrid(memory=str(tmp_path)), settings, folder, resume=True, say=lambda text: None)
    assert (last["round"], folder.status()["status"]) == (3, "finished")


def test_requests(tmp_path: Path) -> None:
    file = StopFile(tmp_path)
    assert file() is None
    file.ask(7)
    until = StopFile(tmp_path)()
    assert until is not None
    assert 6 < until - time.monotonic() <= 7
    file.clear()
    file.clear()
    assert StopFile(tmp_path)() is None
    (tmp_path / "stop").touch()
    assert StopFile(tmp_path)() is not None
    assert earliest(lambda: None, lambda: 3.0, lambda: 2.0)() == 2.0
    assert earliest(lambda: None)() is None


def test_signals() -> None:
    at_once: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal(5, lambda: at_once.append("now")) as stop:
        assert stop() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() is not None
        assert not at_once
        os.kill(os.getpid(), signal.SIGTERM)
        assert at_once == ["now"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_gets_no_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def inside() -> None:
        with StopOnSignal() as stop:
            seen.append((stop(), signal.getsignal(signal.SIGTERM)))

    seen: list[object] = []
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


# --- causes


class Restarted(FaultyGrid):
    """The node starts anew in round 2, under the same id, and what it was asked is lost."""

    since = "at first"

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=NODE, last_activated_at=self.since)]

    def pull_messages(self, message_ids: object) -> list[Message]:
        if self.now == 2 and self.since == "at first":
            self.since, self._ready = "later", {}
        return list(super().pull_messages(message_ids))  # type: ignore[arg-type]


def test_a_client_that_started_anew_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "NODES_S", 0.05)
    settings = toy("scaffold", round={"deadline_s": 60})
    straight = ran(tmp_path / "straight", settings)
    started = time.monotonic()
    result = ran(tmp_path / "run", settings, Restarted(memory=str(tmp_path / "memory")))
    assert time.monotonic() - started < 20
    assert set(result.history[1]["void"][0]["causes"].values()) == {"crashed"}
    assert result.final == straight.final


class Dying(FaultyGrid):
    """From round 2 on the first node is silent and seems to be online; another one comes with its clients."""

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node) for node in ([NODE] if self.now < 2 else [NODE, 7])]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message_id, message in zip(ids, messages, strict=True):
            if message.metadata.dst_node_id == NODE and self.now >= 2:
                del self._ready[message_id]
        return ids


def test_who_missed_a_deadline_gives_its_name_free(tmp_path: Path) -> None:
    """A client that was killed and started anew need not wait until Flower notices that its old node is gone."""
    settings = toy("scaffold", round={"deadline_s": 0.5})
    straight = ran(tmp_path / "straight", settings)
    result = ran(tmp_path / "run", settings, Dying(memory=str(tmp_path / "memory")))
    assert [len(line["void"]) for line in result.history] == [0, 1, 0]
    assert set(result.history[1]["void"][0]["causes"].values()) == {"timed out"}
    assert result.final == straight.final


def test_a_node_is_held_to_the_name_of_its_key(tmp_path: Path) -> None:
    class Named(InProcessGrid):
        def get_nodes(self) -> list[NodeInfo]:
            return [NodeInfo(node_id=NODE, name="site-7")]

    from client.app import app

    result = run(tmp_path, toy(), Named(app))
    assert "a node with the key of 'site-7' says that it is '0'" in str(result.error)


def crash(reply: Message) -> Message:
    return Message(error=Error(ErrorCode.CLIENT_APP_CRASHED, ""), metadata=reply.metadata)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (fail, "offline"),
        (crash, "crashed"),
        (head(round=99), "invalid"),
        (head(examples=10**6), "invalid"),
        (head(steps=0), "invalid"),
        (head(status="error", reason="no"), "failed"),
        (head(status="empty"), "empty"),
        (head(status="refused", reason="policy"), "refused"),
        (head(status="nonsense"), "invalid"),
        (head(run=3), "invalid"),
    ],
)
def test_a_dropped_client_has_a_cause(change: Callable[[Message], Message | None], kind: str, tmp_path: Path) -> None:
    result = ran(tmp_path, toy(), FaultyGrid(lies("1", change)))
    assert result.history[1]["causes"] == {"1": kind}
    assert set(result.history[1]["dropped"]) == {"1"}
    assert result.history[0]["causes"] == result.history[2]["causes"] == {}


def test_a_cause_is_one_of_few() -> None:
    assert all(Refused(kind, "why").kind == kind for kind in KINDS)
    assert {Refused(cause).kind for cause in ("layout", "norm", "meaningless", "")} == {"invalid"}


def test_a_finished_run_needs_nobody(tmp_path: Path) -> None:
    """Started again with --resume it ends at once, with the same last line; more rounds call the roll again."""
    settings, memory = toy("scaffold", rounds=2), str(tmp_path / "memory")
    first = ran(tmp_path / "run", settings, FaultyGrid(memory=memory))
    deserted = FaultyGrid(memory=memory)
    deserted.nodes = list
    again = ran(tmp_path / "run", settings, deserted, resume=True)
    assert again.history == first.history
    assert again.final == first.final
    longer = ran(tmp_path / "run", toy("scaffold", rounds=3), FaultyGrid(memory=memory), resume=True)
    assert len(longer.history) == 3
