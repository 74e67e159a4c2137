"""Client memory on a real disk: who may open it, what fills it, what damages it, and what stays in main memory."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from client import session
from client import train as client_train
from client.memory import versions as memory_module
from client.memory.cache import StateCache
from client.memory.folder import list_memories, open_memory, reset_memory
from client.memory.versions import DiskMemory
from common.errors import SettingsError
from common.flower import ROOT
from common.vector import State
from strategies.protocol.messages import Reply
from tests.support.faults import FaultyGrid, bits, ran, toy
from tests.support.site import Site

RUN = "run"


def value(number: int, size: int = 3) -> State:
    return {"control": torch.full((size,), float(number))}


def place(folder: Path, version: int, client: str = "2") -> Path:
    return folder / RUN / client / "1" / f"{version:09d}.safetensors"


def same(a: State | None, b: State) -> bool:
    return a is not None and a.keys() == b.keys() and all(bits(a[key]) == bits(b[key]) for key in b)


@pytest.fixture(autouse=True)
def _as_a_new_process() -> None:
    session._cache.clear()


# --- one owner

HOLD = """
import sys, time
from client.memory.folder import open_memory
held = open_memory(sys.argv[1])
print("open", flush=True)
time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the memory open."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


@pytest.mark.timeout(60)
def test_two_processes_cannot_open_one_memory(tmp_path: Path) -> None:
    """The second is told the folder and who holds it; SIGKILL of the first one frees it."""
    with holder(tmp_path) as process:
        for again in (lambda: open_memory(tmp_path), lambda: reset_memory(tmp_path)):
            with pytest.raises(SettingsError) as refused:
                again()
            assert str(tmp_path) in str(refused.value)
            assert f"process {process.pid} on " in str(refused.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open_memory(tmp_path):
            pass


def test_two_nodes_of_one_process_cannot_either(tmp_path: Path) -> None:
    """Another client's folder is another memory; what was closed can be opened again."""
    refused = pytest.raises(SettingsError, match="in use by process")
    with open_memory(tmp_path / "a"), open_memory(tmp_path / "b"), refused:
        open_memory(tmp_path / "a")
    open_memory(tmp_path / "a").close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SettingsError, match=r"memory folder '.*file.*' cannot be used"):
            open_memory(folder)


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from client.memory.versions import DiskMemory
Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
DiskMemory(sys.argv[1]).save("run", "2", 1, 4, {"control": torch.ones(3)}, [3])
"""


@pytest.mark.timeout(60)
def test_what_a_killed_process_had_half_written_is_cleared_away(tmp_path: Path) -> None:
    """SIGKILL between write and rename: opening removes the rest and nothing else."""
    DiskMemory(tmp_path).save(RUN, "2", 1, 3, value(3), [])
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False, timeout=50)
    assert done.returncode == -signal.SIGKILL
    assert len(list(place(tmp_path, 3).parent.iterdir())) == 2
    with open_memory(tmp_path):
        assert list(place(tmp_path, 3).parent.iterdir()) == [place(tmp_path, 3)]
        assert same(DiskMemory(tmp_path).load(RUN, "2", 1, 3), value(3))


def test_new_folders_survive_a_crash_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is an entry in the one above it, which is flushed too; one that was there is not flushed again."""
    flushed: list[Path] = []
    monkeypatch.setattr(memory_module, "flush", flushed.append)
    memory = DiskMemory(tmp_path / "memory")
    memory.save(RUN, "2", 1, 1, value(1), [])
    folder = tmp_path / "memory"
    assert sorted(flushed) == [tmp_path, folder, folder / RUN, folder / RUN / "2"]
    memory.save(RUN, "2", 1, 2, value(1), [])
    assert len(flushed) == 4
    memory.save(RUN, "2", 2, 3, value(1), [])
    assert flushed[4:] == [folder / RUN / "2"]


# --- files that are not what was saved


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"), "checksum"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.unlink(), "no such file"),
        (lambda path: DiskMemory(path.parents[3], layout="other").save(RUN, "2", 1, 3, value(3), []), "layout 'other'"),
        (lambda path: (place(path.parents[3], 3, "3")).replace(path), "client '3'"),
    ],
    ids=["truncated", "changed", "empty", "missing", "layout", "client"],
)
def test_the_log_says_why_a_version_is_lost(damage, why, tmp_path, caplog) -> None:  # type: ignore[no-untyped-def]
    """And the version is lost, nothing else."""
    memory = DiskMemory(tmp_path, layout="mine")
    for client in ("2", "3"):
        memory.save(RUN, client, 1, 2, value(2), [])
        memory.save(RUN, client, 1, 3, value(3), [2])
    assert same(memory.load(RUN, "2", 1, 3), value(3))
    damage(place(tmp_path, 3))
    if not place(tmp_path, 2).exists():  # pruned by the other layout's save
        memory.save(RUN, "2", 1, 2, value(2), [3])
    with caplog.at_level(logging.WARNING, "client.memory.versions"):
        assert memory.load(RUN, "2", 1, 3) is None
    assert why in caplog.text
    assert str(place(tmp_path, 3)) in caplog.text
    assert same(memory.load(RUN, "2", 1, 2), value(2))


def test_what_was_loaded_is_apart_from_its_file(tmp_path: Path) -> None:
    """A mapped file that is cut off under its reader ends the process; one that is overwritten changes what was
    checked already."""
    memory, size = DiskMemory(tmp_path), 100_000
    memory.save(RUN, "2", 1, 3, value(3, size), [])
    loaded = memory.load(RUN, "2", 1, 3)
    with place(tmp_path, 3).open("r+b") as file:
        file.seek(200)
        file.write(bytes(100_000))
        file.truncate(100_000)
    assert same(loaded, value(3, size))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_memory_of_another_model_is_lost_memory(tmp_path: Path) -> None:
    """The same run name, client and round, saved by a model of another width: no broadcast, no wrong tracker."""
    folder = tmp_path / "memory"
    flat = {"name": "benchmarks.flat:task"}
    narrow, wide = (Site(folder, toy("scaffold", task=flat | {"size": size}), trusted=True) for size in (3, 4))
    assert narrow.train(1).head.status == "ok"
    assert wide.train(2, accepted=1).head.status == "memory-lost"
    assert narrow.train(2, accepted=1).head.status == "ok"


# --- a disk that is full or read-only


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write larger files: a real OSError, also without the right to mount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system; RLIMIT_FSIZE stands for it in the other tests")
    yield folder
    # Lazily: whatever a failed test still holds open must not leave the file system behind.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the room there is."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return path


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "filler")


def test_a_failed_write_fails_the_round_and_nothing_else(tmp_path: Path) -> None:
    """The reply names client, round, stage and cause; nothing half written; the next try works and says the same as
    one that never failed."""
    site = Site(tmp_path / "memory", toy("scaffold"))
    assert site.train(1).head.status == "ok"
    with files_of_at_most(100):
        reply = site.train(2, accepted=1)
    assert reply.head.status == "error"
    assert reply.head.reason.startswith("client 2, round 2, save: disk-full: the site's disk is full")
    assert reply.state == {}
    assert left(tmp_path) == ["000000001.safetensors"]
    again, never = site.train(2, accepted=1), Site(tmp_path / "other", toy("scaffold"))
    never.train(1)
    assert same(again.state, never.train(2, accepted=1).state)


def test_a_full_disk_costs_rounds_and_no_bit(small_disk: Path, tmp_path: Path) -> None:
    """It fills up after round 1: no client can save, the try is void. With room again the run goes on, to the weights
    of one that never failed."""
    fillers: list[Path] = []

    def after(record: dict[str, object]) -> None:
        if record["round"] == 1:
            fillers.append(fill(small_disk))

    class Emptied(FaultyGrid):
        def push_messages(self, messages):  # type: ignore[no-untyped-def]
            if fillers and len(self.asked) >= 10:
                fillers.pop().unlink()
            return super().push_messages(messages)

    result = ran(tmp_path / "run", toy("scaffold"), Emptied(memory=str(small_disk)), show=after)
    [void] = result.history[1]["void"]
    assert set(void["dropped"]) == {"0", "1", "2", "3", "4"}
    assert "client 2, round 2, save: OSError: [Errno 28] No space left on device" in void["dropped"]["2"]
    assert result.history[1]["dropped"] == {}
    assert result.final == ran(tmp_path / "reference", toy("scaffold")).final
    assert not [name for name in left(small_disk) if name.startswith(".")]


def test_versions_that_nobody_will_ask_for_make_room(small_disk: Path) -> None:
    """What is not to be kept goes only if room is missing, and then the write works; what is to be kept stays."""
    memory, size = DiskMemory(small_disk), 20_000
    memory.save(RUN, "2", 1, 1, value(1, size), [])
    memory.save(RUN, "2", 1, 2, value(2, size), [1])
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        memory.save(RUN, "2", 1, 3, value(3, size), [1, 2])
    assert same(memory.load(RUN, "2", 1, 1), value(1, size))
    memory.save(RUN, "2", 1, 3, value(3, size), [1])
    assert left(small_disk) == ["000000001.safetensors", "000000003.safetensors"]
    assert same(memory.load(RUN, "2", 1, 1), value(1, size))


def test_a_read_only_disk_fails_the_round(small_disk: Path) -> None:
    """As a full one; and a node cannot even start on it."""
    site = Site(small_disk, toy("scaffold"))
    site.train(1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    reply = site.train(2, accepted=1)
    assert "round 2, save: memory-failed: " in reply.head.reason
    with pytest.raises(SettingsError, match="Read-only file system"):
        open_memory(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert site.train(2, accepted=1).head.status == "ok"


# --- tensors that stay on the device


def cached(folder: Path, limit: int = 1 << 20) -> tuple[DiskMemory, StateCache]:
    cache = StateCache(limit)
    return DiskMemory(folder, cache=cache), cache


def no_reads(patch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> State:
        raise AssertionError("the disk was read")

    patch.setattr(memory_module, "read", read)


def test_the_newest_version_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very tensor that was saved comes back; older versions come from the disk, and another process reads."""
    memory, cache = cached(tmp_path)
    old, new = value(1), value(2)
    memory.save(RUN, "2", 1, 1, old, [])
    memory.save(RUN, "2", 1, 2, new, [1])
    with monkeypatch.context() as patch:
        no_reads(patch)
        loaded = memory.load(RUN, "2", 1, 2)
        assert loaded is not None
        assert loaded["control"] is new["control"]
        for other in (lambda: memory.load(RUN, "2", 1, 1), lambda: DiskMemory(tmp_path).load(RUN, "2", 1, 2)):
            with pytest.raises(AssertionError, match="was read"):
                other()
        assert same(memory.load(RUN, "2", 1, 2), new), "asking for another version drops nothing"
        cache.clear()
        with pytest.raises(AssertionError, match="was read"):
            memory.load(RUN, "2", 1, 2)
    assert same(memory.load(RUN, "2", 1, 1), old)


def test_a_deployed_client_reads_no_disk_from_round_to_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And replies the same bits as one whose process starts anew each round."""
    warm, cold = Site(tmp_path / "a", toy("scaffold")), Site(tmp_path / "b", toy("scaffold"))
    for round in (1, 2, 3):
        with monkeypatch.context() as patch:
            no_reads(patch)
            first = warm.train(round, accepted=round - 1)
        session._cache.clear()
        second = cold.train(round, accepted=round - 1)
        assert first.head.status == second.head.status == "ok"
        assert same(first.state, second.state)
        session._cache.clear()
        warm.train(round, accepted=round - 1)  # fills the cache again


@pytest.mark.parametrize("what", ["gone", "truncated", "replaced", "edited"])
def test_the_disk_stays_the_truth(what: str, tmp_path: Path) -> None:
    """A file that is lost or another one is not covered up by the cache, nor a tensor that was changed in place."""
    memory, _ = cached(tmp_path)
    state = value(1)
    memory.save(RUN, "2", 1, 1, state, [])
    path = place(tmp_path, 1)
    if what == "gone":
        path.unlink()
    elif what == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "replaced":
        DiskMemory(tmp_path).save(RUN, "2", 1, 1, value(7), [])
    else:
        state["control"][1:] += 1
    loaded = memory.load(RUN, "2", 1, 1)
    expected = {"replaced": value(7), "edited": value(1)}.get(what)
    assert loaded is None if expected is None else same(loaded, expected)


def test_a_failed_save_is_not_remembered(tmp_path: Path) -> None:
    """Neither the new version nor anything in place of the old one."""
    memory, cache = cached(tmp_path)
    memory.save(RUN, "2", 1, 1, value(1), [])
    for keep in ([1], []):  # nor does anything make room where room is not what is missing
        with files_of_at_most(10), pytest.raises(OSError, match="too large"):
            memory.save(RUN, "2", 1, 2, value(2), keep)
    assert memory.load(RUN, "2", 1, 2) is None
    assert same(memory.load(RUN, "2", 1, 1), value(1))
    assert cache.size == 12


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    """One version a client, so many bytes in all; the longest unused goes first, and a part of a large tensor does not
    hold the whole."""
    memory, cache = cached(tmp_path, limit=100)
    for client in ("1", "2", "3"):
        for version in (1, 2):
            memory.save(RUN, client, 1, version, value(version, 10), [1])
    assert cache.size == 80  # clients 2 and 3, version 2
    two, three = memory.load(RUN, "2", 1, 2), memory.load(RUN, "3", 1, 2)
    memory.load(RUN, "2", 1, 2)
    memory.save(RUN, "1", 1, 3, value(3, 10), [])
    for client, before, stays in (("2", two, True), ("3", three, False)):
        now = memory.load(RUN, client, 1, 2)
        assert before is not None
        assert now is not None
        assert (now["control"] is before["control"]) == stays
    memory.load(RUN, "1", 1, 3)
    large = torch.arange(1000.0)
    memory.save(RUN, "4", 1, 1, {"control": large[5:8]}, [])
    held = memory.load(RUN, "4", 1, 1)
    assert held is not None
    assert held["control"].untyped_storage().nbytes() == 12
    memory.save(RUN, "5", 1, 1, value(1, 1000), [])
    assert cache.size == 92
    assert same(memory.load(RUN, "5", 1, 1), value(1, 1000))


def test_clients_of_several_threads_share_the_cache(tmp_path: Path) -> None:
    """Each thread's client gets its own versions."""
    memory, cache = cached(tmp_path, limit=400)
    wrong: list[str] = []

    def client(name: str) -> None:
        for version in range(1, 30):
            memory.save(RUN, name, 1, version, value(version * int(name), 10), [version])
            if not same(memory.load(RUN, name, 1, version), value(version * int(name), 10)):
                wrong.append(name)

    threads = [threading.Thread(target=client, args=(str(number),)) for number in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.size <= 400


# --- the write and the reply


def test_the_disk_writes_while_the_reply_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin; the reply leaves when both are done."""
    writing, building, done = threading.Event(), threading.Event(), []
    save, build = DiskMemory.save, client_train._reply

    def slow_save(self, *args):  # type: ignore[no-untyped-def]
        writing.set()
        assert building.wait(10)
        save(self, *args)
        done.append(args[3])

    def slow_build(*args):  # type: ignore[no-untyped-def]
        building.set()
        assert writing.wait(10)
        return build(*args)

    monkeypatch.setattr(DiskMemory, "save", slow_save)
    monkeypatch.setattr(client_train, "_reply", slow_build)
    assert Site(tmp_path, toy("scaffold")).train(3).head.status == "ok"
    assert done == [3]


@pytest.mark.parametrize("failing", ["save", "reply"])
def test_neither_error_is_swallowed(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the write or of the reply's records; the system's own words stay in the site's log."""

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    target, name = (DiskMemory, "save") if failing == "save" else (client_train, "_reply")
    monkeypatch.setattr(target, name, broken)
    reply: Reply = Site(tmp_path, toy("scaffold")).train(3)
    assert reply.head.status == "error"
    assert reply.head.reason.startswith("client 2, round 3, save: memory-failed: ")
    assert "OSError: [Errno 5] Input/output error" in caplog.text


# --- list and reset


def test_what_lies_in_a_memory_is_listed(tmp_path: Path) -> None:
    """By run, client and generation, also while a node is at work; damage is named, half-written files are not."""
    memory = DiskMemory(tmp_path, layout="mine")
    for run, client, generation, version in (("b", "2", 1, 1), ("b", "2", 1, 2), ("a", "2", 3, 9), ("a", "1", 1, 4)):
        memory.save(run, client, generation, version, value(version), [1, 2])
    damaged = tmp_path / "b" / "2" / "1" / "000000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    (damaged.parent / ".000000003.safetensors.99").write_bytes(b"half")
    (tmp_path / "a" / "2" / "notes").mkdir()
    with open_memory(tmp_path / "other"), open_memory(tmp_path):
        found = list_memories(tmp_path)
    assert [(one.run, one.client, one.generation, one.versions) for one in found] == [
        ("a", "1", 1, (4,)),
        ("a", "2", 3, (9,)),
        ("b", "2", 1, (1, 2)),
    ]
    assert [list(one.damaged) for one in found] == [[], [], [1]]
    assert found[2].bytes == sum(path.stat().st_size for path in damaged.parent.glob("0*"))
    assert all(0 <= one.age_s < 60 for one in found)


def test_a_memory_is_reset(tmp_path: Path) -> None:
    """One run or all; never under a node that holds it; then the client says that its memory is lost."""
    site = Site(tmp_path, toy("scaffold"))
    site.train(1)
    DiskMemory(tmp_path).save("other", "2", 1, 1, value(1), [])
    with open_memory(tmp_path), pytest.raises(SettingsError, match="in use"):
        reset_memory(tmp_path)
    with pytest.raises(SettingsError, match=r"run 'nun' is not in .*; there: other, run"):
        reset_memory(tmp_path, "nun")
    removed = reset_memory(tmp_path, "run")
    assert (removed.runs, removed.files) == (("run",), 1)
    assert removed.bytes > 0
    assert [one.run for one in list_memories(tmp_path)] == ["other"]
    assert site.train(2, accepted=1).head.status == "memory-lost"
    assert reset_memory(tmp_path).runs == ("other",)
    assert list_memories(tmp_path) == []
    for missing in (list_memories, reset_memory):
        with pytest.raises(SettingsError, match="does not exist"):
            missing(tmp_path / "nowhere")
