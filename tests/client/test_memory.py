"""Acknowledged versions on all three homes of client memory; damage, loss and foreign files on disk."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from client.memory.cache import StateCache
from client.memory.versions import ContextMemory, DiskMemory, Memory, RamMemory
from common.vector import State
from server.rounds.folder import RunFolder
from server.rounds.stopping import Stopped
from tests.support.faults import FaultyGrid, Ran, bits, fail, lies, ran, run, toy
from tests.support.helpers import Simulation

KEEP = 2
RUN, OTHER = "run-1", "run-2"


def value(number: int) -> State:
    return {"control": torch.full((3,), float(number)), "loss": torch.tensor(number, dtype=torch.float64)}


def same(a: State | None, b: State) -> bool:
    return (
        a is not None
        and a.keys() == b.keys()
        and all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and bits(a[k]) == bits(b[k]) for k in b)
    )


class Protocol(RuleBasedStateMachine):
    """A server that asks, accepts or refuses, checkpoints, crashes and resumes; a client that may lose its disk.

    What the client loads is what it trained in exactly the version asked for, or nothing: after its disk was lost,
    or for a generation that it has left behind. Then a new generation begins.
    """

    def fresh(self) -> Memory:
        raise NotImplementedError

    def reopen(self) -> None:
        """The client process starts anew."""

    @initialize()
    def start(self) -> None:
        self.home = self.fresh()
        self.round, self.accepted, self.generation, self.count = 0, 0, 1, 0
        self.lost = False
        self.left = 1  # the newest generation that the client has trained in
        self.truth: dict[tuple[int, int], State] = {}
        self.checkpoints = [(0, 1, 0)]
        for stranger in ((OTHER, "2"), (RUN, "3")):
            self.home.save(*stranger, 1, 1, value(-1), [])

    @rule(accept=st.booleans(), save=st.booleans())
    def train(self, accept: bool, save: bool) -> None:
        """One round for this client; the checkpoint that follows it may not be written in time."""
        if self.accepted:
            loaded = self.home.load(RUN, "2", self.generation, self.accepted)
            if loaded is None:
                assert self.lost or self.left > self.generation, "an accepted version was dropped"
                self.generation, self.accepted, self.lost = self.generation + 1, 0, False
            else:
                assert same(loaded, self.truth[self.generation, self.accepted])
        keep = {accepted for _, generation, accepted in self.checkpoints if generation == self.generation}
        self.round, self.count = self.round + 1, self.count + 1
        self.truth[self.generation, self.round] = value(self.count)
        self.home.save(RUN, "2", self.generation, self.round, value(self.count), keep | {self.accepted})
        self.left = max(self.left, self.generation)
        if accept:
            self.accepted = self.round
        if save:
            self.checkpoints = [*self.checkpoints, (self.round, self.generation, self.accepted)][-KEEP:]

    @rule(back=st.integers(0, KEEP - 1))
    def crash(self, back: int) -> None:
        """The server resumes from one of the kept checkpoints; later ones were damaged."""
        self.checkpoints = self.checkpoints[: len(self.checkpoints) - min(back, len(self.checkpoints) - 1)]
        self.round, self.generation, self.accepted = self.checkpoints[-1]

    @rule()
    def restart(self) -> None:
        self.reopen()

    @precondition(lambda self: self.accepted > 0)
    @rule()
    def lose(self) -> None:
        """The client's disk is gone."""
        self.home, self.lost = self.fresh(), True
        for stranger in ((OTHER, "2"), (RUN, "3")):
            self.home.save(*stranger, 1, 1, value(-1), [])

    def teardown(self) -> None:
        if hasattr(self, "home"):
            assert same(self.home.load(OTHER, "2", 1, 1), value(-1))
            assert same(self.home.load(RUN, "3", 1, 1), value(-1))


class Ram(Protocol):
    def fresh(self) -> Memory:
        return RamMemory()


class Disk(Protocol):
    folder = ""

    def fresh(self) -> Memory:
        self.teardown_folder()
        self.folder = mkdtemp(prefix="memory-")
        return DiskMemory(self.folder, durable=False)

    def reopen(self) -> None:
        self.home = DiskMemory(self.folder, durable=False)

    def teardown_folder(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder)

    def teardown(self) -> None:
        super().teardown()
        self.teardown_folder()


class Cached(Disk):
    """As a resident client: the newest version stays in main memory until its process ends."""

    def fresh(self) -> Memory:
        super().fresh()
        self.reopen()
        return self.home

    def reopen(self) -> None:
        self.home = DiskMemory(self.folder, durable=False, layout="l", cache=StateCache())


class InContext(Protocol):
    def fresh(self) -> Memory:
        self.records = RecordDict()
        return ContextMemory(self.records)

    def reopen(self) -> None:
        """Flower carries the context to another process."""
        self.records = recorddict_from_proto(recorddict_to_proto(self.records))
        self.home = ContextMemory(self.records)


for machine in (Ram, Disk, Cached, InContext):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRam, TestDisk, TestInContext = Ram.TestCase, Disk.TestCase, InContext.TestCase
TestCached = Cached.TestCase


HOMES: dict[str, Callable[[Path], Memory]] = {
    "ram": lambda folder: RamMemory(),
    "disk": DiskMemory,
    "context": lambda folder: ContextMemory(RecordDict()),
}


@pytest.mark.parametrize("home", HOMES)
def test_versions_are_pruned_and_generations_left_behind(home: str, tmp_path: Path) -> None:
    """What is not to be kept goes, and so does an older generation; a late older generation touches no newer one."""
    memory = HOMES[home](tmp_path)

    def there(generation: int) -> list[int]:
        return [v for v in range(9) if memory.load(RUN, "2", generation, v) is not None]

    for version in (1, 2, 4, 5):
        memory.save(RUN, "2", 1, version, value(version), range(9))
    assert there(1) == [1, 2, 4, 5]
    memory.save(RUN, "2", 1, 6, value(6), [2, 3, 5])
    assert there(1) == [2, 5, 6]
    memory.save(RUN, "2", 2, 7, value(7), [5])
    assert (there(1), there(2)) == ([], [7])
    memory.save(RUN, "2", 1, 8, value(8), [])
    assert there(2) == [7]
    assert memory.load(RUN, "2", 3, 7) is None


@pytest.mark.parametrize("home", HOMES)
def test_every_kind_of_number_survives(home: str, tmp_path: Path) -> None:
    """bfloat16, 0-d, empty, integer and bool tensors, -0.0 and NaN, bit for bit; an empty state is not a lost one."""
    memory = HOMES[home](tmp_path)
    state = {
        "bf16": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0),
        "half": torch.tensor([[6e-8], [65504.0]], dtype=torch.float16),
    }
    memory.save(RUN, "2", 1, 1, state, [])
    memory.save(RUN, "2", 1, 2, {}, [1])
    assert same(memory.load(RUN, "2", 1, 1), state)
    assert memory.load(RUN, "2", 1, 2) == {}


# --- disk


def stored(folder: Path) -> tuple[DiskMemory, Path]:
    DiskMemory(folder, durable=False).save(RUN, "2", 1, 3, value(3), [])
    return DiskMemory(folder), folder / RUN / "2" / "1" / "000000003.safetensors"


def test_a_truncated_file_is_gone(tmp_path: Path) -> None:
    """At whatever length a crash or a full disk cut it off."""
    memory, path = stored(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert memory.load(RUN, "2", 1, 3) is None
    path.write_bytes(whole)
    assert same(memory.load(RUN, "2", 1, 3), value(3))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, place: int, flip: int) -> None:
    """Anywhere, in the header too: the file is gone, or (in the header's padding) as it was."""
    memory, path = stored(tmp_path_factory.getbasetemp() / "flipped")
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    path.write_bytes(content)
    assert (loaded := memory.load(RUN, "2", 1, 3)) is None or same(loaded, value(3))


@pytest.mark.parametrize("place", [("run-2", "2", 1, 3), (RUN, "3", 1, 3), (RUN, "2", 2, 3), (RUN, "2", 1, 4)])
def test_a_foreign_file_is_gone(place: tuple[str, str, int, int], tmp_path: Path) -> None:
    """A whole file of another run, client, generation or version, copied into place, is not believed."""
    memory, path = stored(tmp_path)
    target = tmp_path / place[0] / place[1] / str(place[2]) / f"{place[3]:09d}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)
    assert memory.load(*place) is None


def test_a_crash_before_the_rename_leaves_the_old_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was written so far, beside its place, is no version and in nobody's way."""
    memory, path = stored(tmp_path)

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        for version in (3, 4):
            with pytest.raises(KeyboardInterrupt):
                memory.save(RUN, "2", 1, version, value(9), [3])
    assert len(list(path.parent.iterdir())) == 3
    assert same(memory.load(RUN, "2", 1, 3), value(3))
    assert memory.load(RUN, "2", 1, 4) is None
    memory.save(RUN, "2", 1, 4, value(4), [3])
    assert same(memory.load(RUN, "2", 1, 4), value(4))


def test_a_full_disk_leaves_the_old_version_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised: the client must not reply as if it had saved."""
    memory, path = stored(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        memory.save(RUN, "2", 1, 3, value(9), [])
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert same(memory.load(RUN, "2", 1, 3), value(3))


def test_only_durable_memory_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and its folder, before `save` returns; simulations leave it to the system."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    DiskMemory(tmp_path, durable=False).save(RUN, "2", 1, 1, value(1), [])
    assert flushed == []
    DiskMemory(tmp_path).save(RUN, "2", 1, 2, value(1), [])
    assert len(flushed) == 2


@pytest.mark.parametrize("name", ["..", ".", "", "../x", "a/b", "/etc", "a\0b", "a\nb", ".hidden", "-x", "x" * 151])
def test_names_from_the_network_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    """As a run's or a client's name; nothing is read or written."""
    memory = DiskMemory(tmp_path / "memory")
    for run_name, client in ((name, "2"), (RUN, name)):
        with pytest.raises(ValueError, match="cannot name a folder"):
            memory.load(run_name, client, 1, 1)
        with pytest.raises(ValueError, match="cannot name a folder"):
            memory.save(run_name, client, 1, 1, value(1), [])
    assert list(tmp_path.rglob("*")) == []


# --- in a run


def forget(grid: FaultyGrid, folder: Path, client: str, round: int) -> Callable[[dict[str, Any]], None]:
    """After a round, the client's disk is lost."""

    def after(record: dict[str, Any]) -> None:
        if record["round"] == round:
            [place] = folder.glob(f"*/{client}")
            shutil.rmtree(place)

    return after


def imbalance(result: Ran, memory: Path) -> float:
    """|c - mean of the accepted c_i|, from the newest checkpoint and the clients' files."""
    at, disk = result.checkpoint, DiskMemory(memory)
    total = torch.zeros_like(at.state["control"])
    for name in at.known:
        if accepted := at.accepted.get(name, 0):
            held = disk.load(at.run, name, at.generation, accepted)
            assert held is not None, (name, accepted)
            total += held["control"] / len(at.known)
    return float((at.state["control"] - total).abs().max())


@pytest.mark.parametrize("home", ["ram", "disk", "context"])
def test_the_home_changes_no_bit(home: str, tmp_path: Path) -> None:
    """A run with lost replies gives one answer, wherever memory lies."""
    memory = {"ram": "ram", "disk": str(tmp_path / "memory"), "context": ""}[home]
    result = ran(tmp_path / "run", toy("scaffold", rounds=4), FaultyGrid(lies("2", fail), memory=memory))
    reference = ran(tmp_path / "reference", toy("scaffold", rounds=4), FaultyGrid(lies("2", fail)))
    assert result.final == reference.final


def test_sparse_checkpoints_do_not_fill_the_disk(tmp_path: Path) -> None:
    """Checkpoints every 5 rounds, two kept: a client holds what these ask for, the accepted version and the new one."""
    memory = tmp_path / "memory"
    settings = toy("scaffold", rounds=14, checkpoint={"every": 5, "keep": 2})
    ran(tmp_path / "run", settings, FaultyGrid(memory=str(memory)))
    for place in memory.glob("*/*/1"):
        assert [int(path.stem) for path in sorted(place.iterdir())] == [5, 10, 13, 14]


def test_lost_bound_memory_starts_a_new_generation(tmp_path: Path) -> None:
    """SCAFFOLD: the try is void; in the next one c = 0 and all c_i = 0, and c is their mean again after it."""
    memory, controls = tmp_path / "memory", []

    class Watching(FaultyGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            for message in messages:
                if "state" in message.content.array_records:
                    head = message.content.config_records["fedkeel"]
                    control = message.content.array_records["state"]["control"].data
                    controls.append((head["round"], head["generation"], head["accepted"], any(control)))
            return super().push_messages(messages)

    grid = Watching(memory=str(memory))
    result = ran(tmp_path / "run", toy("scaffold", rounds=4), grid, show=forget(grid, memory, "2", 2))
    void = result.history[2]["void"]
    assert [v["cause"] for v in void] == ["client memory of 2 is lost: new generation 2"]
    assert void[0]["dropped"]["2"] == "memory-lost"
    assert [line["generation"] for line in result.history] == [1, 1, 2, 2]
    # Round 3 is asked twice: with c and version 2 of generation 1, then with nothing of generation 2.
    assert sorted(set(controls)) == [
        (1, 1, 0, False),
        (2, 1, 1, True),
        (3, 1, 2, True),
        (3, 2, 0, False),
        (4, 2, 3, True),
    ]
    assert imbalance(result, memory) < 1e-7


def test_lost_memory_of_ones_own_just_starts_empty(tmp_path: Path) -> None:
    """HaFedHo: no round is void and only client 2's own term is missing, as in a simulation that drops its version."""
    memory = tmp_path / "memory"
    grid = FaultyGrid(memory=str(memory))
    settings = toy("hafedho", rounds=4, server={"optimizer": "momentum", "momentum": 0.0})  # always sent the model
    result = ran(tmp_path / "run", settings, grid, show=forget(grid, memory, "2", 2))
    assert [line["generation"] for line in result.history] == [1] * 4
    assert all(line["void"] == [] for line in result.history)
    simulation = Simulation(settings)
    simulation.run(2)
    del simulation.versions["2", 1, 2]
    assert bits(simulation.run(2)) == bits(result.checkpoint.state["model"])


def test_under_faults_and_resumes_the_control_stays_the_mean(tmp_path: Path) -> None:
    """SCAFFOLD, 3 of 5 sampled, a third of the replies lost, stopped ten times, the newest checkpoint torn twice."""
    chance, memory = random.Random(0), tmp_path / "memory"

    def lie(name: str, round: int, reply: Message) -> Message:
        return fail(reply) if name and chance.random() < 1 / 3 else reply

    settings = toy("scaffold", rounds=40, round={"sample": 3, "quorum": 1, "max_void": 9}, checkpoint={"keep": 2})
    for piece in range(10):
        before = len(RunFolder(tmp_path / "run").history())

        def stop(rounds: int = before + 4 - (piece in (5, 8))) -> float | None:
            return time.monotonic() + 60 if len(RunFolder(tmp_path / "run").history()) >= rounds else None

        grid = FaultyGrid(lie, memory=str(memory))
        result = run(tmp_path / "run", settings, grid, resume=piece > 0, stop=stop)
        assert isinstance(result.error, Stopped)
        assert imbalance(result, memory) < 1e-7
        assert result.checkpoint.generation == 1
        if piece in (4, 7):
            newest = sorted(RunFolder(tmp_path / "run").checkpoints.glob("*"))[-1]
            newest.write_bytes(newest.read_bytes()[:-1])
    assert [line["round"] for line in result.history] == list(range(1, result.checkpoint.round + 1))
