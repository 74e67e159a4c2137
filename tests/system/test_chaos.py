"""Real processes that are killed and stopped in each phase of a round, behind networks that are cut, stalled and slow.

SCAFFOLD keeps an error for ever: a client's control that is of one round too many or too few stays in the weights. With
a quorum of all clients a round that lost one is void and tried again, so that the accepted sets are those of a run that
nobody touched, and so must be its weights. With a smaller quorum the sets differ: the weights must be those of the same
rounds in this process with the same clients accepted. Both bit for bit, with the server's control and the clients'
controls on their disks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.app import app
from common.experiment import Experiment
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from tests.support.faults import ran
from tests.support.gated import Phase
from tests.support.patience import until
from tests.support.processes import Federation, check, experiment

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SIZE = 50_000
VECTOR = 4 * SIZE  # bytes
ALL = ["0", "1", "2"]
PHASES = ["pull", "train", "save", "saved", "upload"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation")) as federation:
        yield federation


@pytest.fixture
def federation(running: Federation) -> Federation:
    running.mend()
    return running


@pytest.fixture
def folder(federation: Federation, request: pytest.FixtureRequest) -> RunFolder:
    return RunFolder(federation.folder / f"run-{request.node.name}")


def gates_of(name: str, phase: str) -> list[tuple[str, Phase]]:
    """What holds a client in a phase: before it pulls, client 0 is held in the round before."""
    if phase == "pull":
        return [("0", "train"), (name, "saved")]
    return [(name, "saved" if phase == "upload" else phase)]  # type: ignore[list-item]


def arm(federation: Federation, name: str, phase: str, rounds: int = 1) -> None:
    """The client will come to the phase after it has passed some rounds."""
    for who, gate in gates_of(name, phase):
        federation.gates.arm(who, gate, rounds)


def reach(federation: Federation, name: str, phase: str) -> None:
    """Wait until the client is held in the phase: in "upload" its reply is half sent; in "pull" it has answered one
    round and the next has not begun."""
    gates, proxy = federation.gates, federation.proxies[name]
    for who, gate in gates_of(name, phase):
        gates.wait(who, gate)
    if phase == "upload":
        held = proxy.hold("up", VECTOR)
        gates.open(name, "saved")
        assert held.wait(60)
    if phase == "pull":
        before = proxy.forwarded["up"]
        gates.open(name, "saved")
        until(lambda: proxy.forwarded["up"] > before + 2 * VECTOR, "the reply is sent")
        time.sleep(0.3)  # its last small objects


def release(federation: Federation, name: str, phase: str) -> None:
    """Nothing holds the phase any more."""
    for who, gate in gates_of(name, phase):
        federation.gates.open(who, gate)
    federation.proxies[name].flow()


def seen(folder: RunFolder, name: str, after: int = 0) -> bool:
    """Whether a client was accepted in a later round."""
    return any(record["round"] > after and name in record["accepted"] for record in folder.history())


def missed(folder: RunFolder, name: str, after: int = 0) -> bool:
    """Whether a later round went without it."""
    return any(record["round"] > after and name not in record["accepted"] for record in folder.history())


def rounds_done(folder: RunFolder) -> int:
    return max((int(record["round"]) for record in folder.history()), default=0)


def untouched(settings: Experiment, folder: RunFolder, tmp_path: Path) -> None:
    """All were accepted in each round, and the history's weights are those of a run in this process."""
    history = folder.history()
    assert [record["accepted"] for record in history] == [ALL] * settings.rounds
    straight = ran(tmp_path / "in-process", settings, InProcessGrid(app)).history
    assert [record["sha256"] for record in history] == [record["sha256"] for record in straight]
    assert {record["generation"] for record in history} == {1}


def voids(history: list[dict[str, Any]]) -> int:
    return sum(len(record["void"]) for record in history)


# --- clients


def test_killed_in_each_phase_and_started_again(federation: Federation, folder: RunFolder, tmp_path: Path) -> None:
    """SIGKILL of clients before one pulls, in training, before and after the memory is in place, in the upload. Rounds
    are void until, with its disk and in a new process, each client takes part in the next try. No memory is lost."""
    settings = experiment(7, quorum=3, deadline_s=3, size=SIZE)
    waves = [{"0": "train", "1": "saved", "2": "upload"}, {"1": "pull", "2": "save"}]
    for name, phase in waves[0].items():
        arm(federation, name, phase, 2)
    federation.submit(settings, folder)
    for wave, following in zip(waves, [*waves[1:], {}], strict=True):
        for name, phase in wave.items():
            reach(federation, name, phase)
        for name in wave:
            federation.kill(name)
        for name, phase in wave.items():
            release(federation, name, phase)
        for name, phase in following.items():
            arm(federation, name, phase, 2)
        for name in wave:
            federation.start(name)
    history = federation.finish(folder, 200)
    assert voids(history) >= len(waves)
    untouched(settings, folder, tmp_path)
    check(settings, folder, federation.folder / "memory")


@pytest.mark.rest
def test_killed_and_the_others_go_on(federation: Federation, folder: RunFolder) -> None:
    """With a quorum of one the round closes without the killed clients, which come back later with their old memory."""
    settings = experiment(8, quorum=1, deadline_s=2, size=SIZE)
    wave = {"1": "train", "2": "upload"}
    for name, phase in wave.items():
        arm(federation, name, phase, 2)
    federation.submit(settings, folder)
    for name, phase in wave.items():
        reach(federation, name, phase)
    done = rounds_done(folder)
    for name in wave:
        federation.kill(name)
    federation.gates.arm("0", "train", 1)  # Then the run waits for them.
    for name, phase in wave.items():
        release(federation, name, phase)
        federation.start(name)
    federation.gates.wait("0", "train")
    assert missed(folder, "1", done)
    assert missed(folder, "2", done)
    for name in wave:  # They are not alone in what is tried meanwhile.
        federation.gates.arm(name, "train")
    for name in wave:
        federation.gates.wait(name, "train", 60)
    for name in ALL:
        federation.gates.open(name, "train")
    history = federation.finish(folder)
    assert history[-1]["accepted"] == ALL
    check(settings, folder, federation.folder / "memory")


@pytest.mark.rest
def test_stopped_and_continued_in_the_round(federation: Federation, folder: RunFolder, tmp_path: Path) -> None:
    """SIGSTOP in each phase and SIGCONT half a second later: no round is void."""
    settings = experiment(2 * len(PHASES) + 1, quorum=3, deadline_s=60, size=SIZE)
    arm(federation, "1", PHASES[0])
    federation.submit(settings, folder)
    for phase, following in zip(PHASES, [*PHASES[1:], None], strict=True):
        reach(federation, "1", phase)
        federation.signal("1", signal.SIGSTOP)
        release(federation, "1", phase)
        time.sleep(0.5)
        if following:
            arm(federation, "1", following)
        federation.signal("1", signal.SIGCONT)
    history = federation.finish(folder)
    assert (voids(history), history[-1]["late"]) == (0, 0)
    untouched(settings, folder, tmp_path)
    check(settings, folder, federation.folder / "memory")


@pytest.mark.rest
def test_stopped_beyond_the_deadline(federation: Federation, folder: RunFolder) -> None:
    """SIGSTOP in each phase until the round is over: its reply is late and dropped, its memory unused."""
    settings = experiment(5 * len(PHASES), quorum=2, deadline_s=2, size=SIZE)
    arm(federation, "1", PHASES[0])
    federation.submit(settings, folder)
    for phase, following in zip(PHASES, [*PHASES[1:], None], strict=True):
        reach(federation, "1", phase)
        done = rounds_done(folder)
        federation.signal("1", signal.SIGSTOP)
        release(federation, "1", phase)
        until(lambda done=done: missed(folder, "1", done), "a round without it")  # type: ignore[misc]
        if following:
            arm(federation, "1", following)
        federation.signal("1", signal.SIGCONT)
    history = federation.finish(folder)
    assert history[-1]["late"] >= len(PHASES) - 1
    check(settings, folder, federation.folder / "memory")


@pytest.mark.rest
def test_one_leaves_and_another_joins(federation: Federation, folder: RunFolder) -> None:
    """SIGTERM of a client that trains: it answers first, then leaves; a new one is put on the roll in mid-run."""
    settings = experiment(9, quorum=2, deadline_s=4, size=SIZE)
    arm(federation, "1", "train", 2)
    federation.submit(settings, folder)
    reach(federation, "1", "train")
    leaving = rounds_done(folder) + 1
    federation.signal("1", signal.SIGTERM)
    time.sleep(0.3)
    federation.gates.arm("0", "train", 1)  # The rest of the run waits for the new one.
    release(federation, "1", "train")
    until(lambda: "1" in federation.clients["1"].ended(), "client 1 leaves")
    federation.restart("3")
    federation.gates.open("0", "train")
    try:
        history = federation.finish(folder)
    finally:
        federation.signal("3", signal.SIGTERM)
        until(lambda: "3" in federation.clients["3"].ended(), "client 3 leaves")
    assert "exit code 0" in federation.clients["1"].ended()["1"]
    assert history[leaving - 1]["accepted"] == ALL
    assert history[-1]["accepted"] == ["0", "2", "3"]
    check(settings, folder, federation.folder / "memory")


# --- the server


@pytest.mark.rest
def test_server_app_killed_and_resumed(federation: Federation, folder: RunFolder, tmp_path: Path) -> None:
    """SIGKILL of the server app while clients train, while one uploads, between a round's line and its checkpoint,
    after the checkpoint, and at its start. The clients stay; the resumed run ends as one that nobody touched."""
    settings = experiment(12, quorum=3, deadline_s=30, size=SIZE)
    gates = federation.gates
    arm(federation, "1", "train", 2)
    federation.submit(settings, folder)

    def again(phase: str = "", gate: Phase | None = None) -> None:
        federation.kill_app()
        if gate:
            gates.open("server", gate)
        if phase:
            release(federation, "1", phase)
        federation.submit(settings, folder, resume=True)

    reach(federation, "1", "train")
    again("train")
    for gate in ("save", "saved"):
        done = rounds_done(folder)
        until(lambda done=done: rounds_done(folder) > done, "a round")  # type: ignore[misc]
        gates.arm("server", gate)
        gates.wait("server", gate)
        again(gate=gate)
    arm(federation, "1", "upload", 1)
    reach(federation, "1", "upload")
    again("upload")
    folder.set_status("resumed")
    until(lambda: folder.status().get("status") == "running", "the server app starts")
    again()
    federation.finish(folder)
    untouched(settings, folder, tmp_path)
    check(settings, folder, federation.folder / "memory")


@pytest.mark.rest
def test_superlink_killed_and_resumed(federation: Federation, folder: RunFolder, tmp_path: Path) -> None:
    """SIGKILL of the SuperLink and all its processes, once while clients train and once while one uploads. It starts
    again on the same ports with nothing of its own; the clients, alive all the time, join it and the run goes on."""
    settings = experiment(7, quorum=3, deadline_s=30, size=SIZE)
    pids = [federation.clients[name].pid(name) for name in ALL]
    arm(federation, "1", "train", 2)
    federation.submit(settings, folder)
    for phase, following in (("train", "upload"), ("upload", None)):
        reach(federation, "1", phase)
        federation.kill_link()
        release(federation, "1", phase)
        if following:
            arm(federation, "1", following, 2)
        federation.start_link()
        federation.wait_for_nodes(3)
        federation.submit(settings, folder, resume=True)
    federation.finish(folder)
    assert [federation.clients[name].pid(name) for name in ALL] == pids
    assert not any(federation.clients[name].ended() for name in ALL)
    untouched(settings, folder, tmp_path)
    check(settings, folder, federation.folder / "memory")


# --- the network


@pytest.mark.rest
def test_connections_cut_and_refused(federation: Federation, folder: RunFolder, tmp_path: Path) -> None:
    """All connections are reset in each phase of client 1, and new ones refused for a second."""
    settings = experiment(2 * len(PHASES) + 1, quorum=3, deadline_s=20, size=SIZE)
    arm(federation, "1", PHASES[0])
    federation.submit(settings, folder)
    for phase, following in zip(PHASES, [*PHASES[1:], None], strict=True):
        reach(federation, "1", phase)
        for proxy in federation.proxies.values():
            proxy.cut()
        with federation.proxies["1"].refusing():
            release(federation, "1", phase)
            if following:
                arm(federation, "1", following)
            time.sleep(1)
    federation.finish(folder)
    untouched(settings, folder, tmp_path)
    check(settings, folder, federation.folder / "memory")


@pytest.mark.parametrize("deadline_s", [30.0, 2.0])
@pytest.mark.rest
def test_network_stalls(deadline_s: float, federation: Federation, folder: RunFolder, tmp_path: Path) -> None:
    """Nothing passes for four seconds in the middle of an upload, and then between two rounds. Within the deadline
    nothing is lost; beyond it the other two close the round and the late reply is dropped."""
    quorum = 3 if deadline_s > 4 else 2
    settings = experiment(6, quorum=quorum, deadline_s=deadline_s, size=SIZE)
    arm(federation, "1", "upload", 2)
    federation.submit(settings, folder)
    for phase, following in (("upload", "pull"), ("pull", None)):
        reach(federation, "1", phase)
        with federation.proxies["1"].stalled():
            for name, gate in gates_of("1", phase):
                federation.gates.open(name, gate)
            if following:
                arm(federation, "1", following, 1)
            time.sleep(4)
    history = federation.finish(folder)
    if quorum == 3:
        assert voids(history) == 0
        untouched(settings, folder, tmp_path)
    else:
        assert missed(folder, "1")
    check(settings, folder, federation.folder / "memory")


@pytest.mark.rest
def test_one_megabyte_a_second(federation: Federation, folder: RunFolder, tmp_path: Path) -> None:
    """A model of 1.5 MB, of which SCAFFOLD sends two each way: rounds of six seconds, none of them lost."""
    settings = experiment(2, quorum=3, deadline_s=40, size=375_000)
    for name in ALL:
        federation.proxies[name].rate = 1e6
    federation.submit(settings, folder)
    history = federation.finish(folder, 200)
    assert voids(history) == 0
    assert min(record["seconds"]["collect"] for record in history) > 5
    untouched(settings, folder, tmp_path)
    check(settings, folder, federation.folder / "memory")


@pytest.mark.rest
def test_one_in_a_hundred_pieces_resets_its_connection(
    federation: Federation, folder: RunFolder, tmp_path: Path
) -> None:
    """Each forwarded piece of up to 32 KiB resets its connection with a chance of 1 %, over twelve rounds. No reply is
    lost for a lost answer; a message that Flower handed out in an answer that was lost is never handed out again, so
    that round is void."""
    settings = experiment(12, quorum=3, deadline_s=20, size=SIZE)
    before = sum(proxy.resets for proxy in federation.proxies.values())
    for proxy in federation.proxies.values():
        proxy.reset_share = 0.01
    federation.submit(settings, folder)
    history = federation.finish(folder, 200)
    reasons = {reason for record in history for void in record["void"] for reason in void["dropped"].values()}
    assert reasons <= {"timed out"}
    assert sum(proxy.resets for proxy in federation.proxies.values()) - before >= 5
    assert not any("Traceback" in (federation.folder / f"client-{name}.log").read_text() for name in ALL)
    untouched(settings, folder, tmp_path)
    check(settings, folder, federation.folder / "memory")
