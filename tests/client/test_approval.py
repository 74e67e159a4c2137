"""Which runs a site takes part in: nobody asked, a person asked, and what a server that asks is told meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from typer.testing import CliRunner

from client.__main__ import cli
from client.app import app
from client.approval import gate, store, words
from client.approval.store import Approvals, key_of, resolved
from client.commands.options import approvals_file
from client.node.metrics import ClientMetrics
from common.deploy.chain import parsed
from common.experiment import Experiment
from common.flower import ROOT, environment
from common.tasks import TASKS
from server.deploy.processes import Family, held_ports, stop
from server.engines.inprocess import InProcessGrid, answer, stamp
from server.rounds import roster, waiting
from server.rounds.folder import RunFolder
from strategies.protocol.messages import DENIED, HEAD, WAITING, RollHead, Undecided, outline, write_head
from strategies.protocol.sums import StatisticsHead
from strategies.registry import REGISTRY, settled
from tests.support import patience
from tests.support.faults import ran, run, toy
from tests.support.patience import until
from tests.support.site import Site


@pytest.fixture(autouse=True)
def _anew() -> None:
    gate._told.clear()


def file(folder: Path) -> Path:
    return folder / "approvals.json"


def site(folder: Path, experiment: Experiment, name: str = "2", approve: str = "ask", **more: Any) -> Site:
    return Site(folder / name, experiment, name, approve=approve, approvals=str(file(folder)), **more)


def decide(folder: Path, state: Any = "approved", rounds: int = 10) -> None:
    [key] = Approvals(file(folder)).entries()
    Approvals(file(folder)).decide(key, state, rounds)


def command(folder: Path, *words: str, answer: str | None = None) -> Any:
    return CliRunner().invoke(cli, [*words, "--approvals", str(file(folder))], input=answer)


# --- at the site


def test_nothing_is_done_before_a_person_has_said_yes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Roll, training and evaluation, as a hostile server skips the roll; one line in the log, however often it asks."""
    here = site(tmp_path, toy("scaffold"))
    for _ in range(3):
        rolled = here.roll()
        assert (rolled.state, rolled.names, rolled.examples, rolled.layout) == (WAITING, ["2"], [], "")
        for reply in (here.train(), here.evaluate()):
            assert (reply.head.status, reply.head.state, reply.state, reply.metrics) == ("refused", WAITING, {}, {})
    assert not (tmp_path / "2").exists()
    [line] = [record.getMessage() for record in caplog.records if "approv" in record.getMessage()]
    [key] = Approvals(file(tmp_path)).entries()
    assert f"python -m client approve {key[:12]} --approvals {file(tmp_path)}" in line
    decide(tmp_path)
    assert here.roll().state == ""
    assert here.roll().examples[0] > 0
    assert here.train().head.status == "ok"


def test_statistics_wait_as_well(tmp_path: Path) -> None:
    """Whatever the policy says of them: they come with an experiment that nobody has approved."""
    policy = tmp_path / "policy.toml"
    policy.write_text("statistics = true\n")
    here = site(tmp_path, toy("scaffold"), policy=str(policy))
    head = write_head(StatisticsHead(here.settings.json(), "sums"))
    reply = here.ask("query.statistics", RecordDict({HEAD: head})).content.config_records[HEAD]
    assert "waits for approval" in str(reply["error"])
    assert [entry.state for entry in Approvals(file(tmp_path)).entries().values()] == ["waiting"]


def test_nothing_that_an_experiment_names_is_loaded_to_ask(tmp_path: Path) -> None:
    """No import of its module, not even to say what it is; the site had allowed the task."""
    name = "tests.client.test_approval_bait:task"
    here = site(tmp_path, toy(), **{"allow-tasks": name})
    here.settings = toy(task={"name": name})
    assert here.roll().state == WAITING
    assert here.train(experiment=here.settings.json()).head.state == WAITING
    ended = command(tmp_path, "approvals", "--show")
    assert "CODE OF ITS OWN" in ended.output
    assert "tests.client.test_approval_bait" not in sys.modules


def test_a_policy_refuses_before_anybody_is_asked(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("strategies = ['fedavg']\n")
    here = site(tmp_path, toy("scaffold"), policy=str(policy))
    assert here.roll().error
    assert here.roll().state == ""
    assert not file(tmp_path).exists()


@pytest.mark.parametrize("mode", ["policy", "all"])
def test_where_nobody_is_asked_runs_are_taken_and_noted(tmp_path: Path, mode: str) -> None:
    """And one that is revoked later stops before its next message; `approve` lets it go on."""
    here = site(tmp_path, toy("scaffold"), approve=mode)
    assert here.train().head.status == "ok"
    [entry] = Approvals(file(tmp_path)).entries().values()
    assert (entry.state, entry.by, entry.runs) == ("admitted", mode, ["run"])
    assert command(tmp_path, "revoke", "experiment", "--yes").exit_code == 0
    for reply in (here.train(2), here.evaluate()):
        assert (reply.head.status, reply.head.state) == ("refused", DENIED)
    assert here.roll().state == DENIED
    assert command(tmp_path, "approve", "run", "--yes").exit_code == 0
    assert here.train(2).head.status == "ok"


@pytest.mark.parametrize("mode", ["ask", "policy"])
def test_a_file_that_cannot_be_written(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only folder, a full disk: what nobody is asked about goes on as ever, what needs a word does not."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Approvals, "_write", full)
    reply = site(tmp_path, toy("scaffold"), approve=mode).train()
    assert (reply.head.status == "ok") is (mode == "policy")
    if mode == "ask":
        assert "approvals-unusable" in reply.head.reason


def test_without_the_setting_nothing_is_asked_or_written(tmp_path: Path) -> None:
    """In process, under VCE and in a stock SuperNode."""
    assert Site(tmp_path / "2", toy("scaffold")).train().head.status == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2"]


def test_what_was_admitted_by_a_policy_is_no_persons_word(tmp_path: Path) -> None:
    """A site that begins to ask asks about the run at hand, too."""
    assert site(tmp_path, toy("scaffold"), approve="policy").roll().state == ""
    here = site(tmp_path, toy("scaffold"))
    assert here.roll().state == WAITING
    decide(tmp_path)
    assert here.roll().state == ""
    assert site(tmp_path, toy("scaffold"), approve="policy").roll().state == ""
    assert here.roll().state == ""


def test_more_rounds_than_were_shown_are_asked_about(tmp_path: Path) -> None:
    """Fewer are not; nor is a round beyond them taken, whatever a message says of the whole."""
    here = site(tmp_path, toy("scaffold", rounds=4))
    assert here.roll().state == WAITING
    assert command(tmp_path, "approve", "experiment", "--yes").exit_code == 0
    assert here.train(4).head.status == "ok"
    assert here.train(5).head.state == WAITING
    here.settings = toy("scaffold", rounds=3)
    assert here.roll().state == ""
    here.settings = toy("scaffold", rounds=9)
    assert here.roll().state == WAITING
    listed = command(tmp_path, "approvals").output
    assert "4 rounds; waits for approval of 9 rounds" in listed
    here.settings = toy("scaffold", rounds=4)
    assert here.roll().state == ""  # what was approved stays so
    assert command(tmp_path, "approve", "experiment", "--yes").exit_code == 0
    here.settings = toy("scaffold", rounds=9)
    assert here.roll().state == ""


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"rounds": 3}, True),
        ({"checkpoint": {"every": 5}}, True),
        ({"tracking": {"use": []}}, True),
        ({"round": {"deadline_s": 5.0, "quorum": 1, "wait_for": 1, "max_void": 9, "max_upload_norm": 3.0}}, True),
        ({"round": {"sample": 2}}, False),
        ({"evaluate": {"every": 3}}, False),
        ({"local": {"lr": 0.25}}, False),
        ({"strategy": "fedavg"}, False),
        ({"seed": 1}, False),
        ({"name": "other"}, False),
        ({"task": {"name": "digits"}}, False),
    ],
)
def test_what_makes_a_run_another_one(changes: dict[str, Any], same: bool) -> None:
    """A resume may change what is the server's affair. The text on the wire and the file have one key."""
    before, after = toy("scaffold"), toy(**{"strategy": "scaffold", **changes})
    assert (resolved(before.json())[0] == resolved(after.json())[0]) is same
    assert resolved(after.json())[0] == key_of(settled(after)[1]) == resolved(settled(after)[1].json())[0]


def test_defaults_that_are_written_out_change_nothing() -> None:
    written = toy("scaffold").model_dump(mode="json")
    whole = {
        key: {k: v for k, v in each.items() if v is not None} if isinstance(each, dict) else each
        for key, each in written.items()
    }
    assert len(json.dumps(whole)) > 2 * len(toy("scaffold").json())
    assert resolved(json.dumps(whole))[0] == resolved(toy("scaffold").json())[0]


# --- the commands


def test_a_person_sees_what_they_approve(tmp_path: Path) -> None:
    """In words, then a question; "no" changes nothing; who and when is remembered, and stands in the audit log."""
    here = site(tmp_path, Experiment(name="first", task={"name": "digits"}, strategy={"name": "scaffold"}, rounds=20))  # type: ignore[arg-type]
    assert here.roll().state == WAITING
    listed = command(tmp_path, "approvals").output
    assert "first  waits for approval" in listed
    no = command(tmp_path, "approve", "first", answer="n\n")
    assert no.exit_code == 1
    for text in (
        "4,810 shared parameters, 0.02 MB",
        "2 vectors",
        "delta, control",
        "privacy",
        "none.",
        "20; all clients",
    ):
        assert text in no.output
    assert here.roll().state == WAITING
    [key] = Approvals(file(tmp_path)).entries()
    assert command(tmp_path, "approve", key[:6], answer="y\n").exit_code == 0
    assert here.roll().state == ""
    listed = command(tmp_path, "approvals", "first").output
    assert f"approved by {store.user()}, 20 rounds" in listed
    said = json.loads(command(tmp_path, "approvals", "--json").output)
    assert (said["sha256"], said["state"], said["waits"], said["by"]) == (key, "approved", False, store.user())
    again = command(tmp_path, "approve", "first", "--yes")
    assert again.exit_code == 2
    assert "nothing to be approved" in again.output
    assert command(tmp_path, "deny", "first", "--yes").exit_code == 0
    assert here.roll().state == DENIED
    lines = [parsed(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    assert [(line["what"], line["run"]) for line in lines if line] == [
        ("waiting", "run"),
        ("approved", "run"),
        ("denied", "run"),
    ]


def test_two_experiments_of_one_name_are_two_runs(tmp_path: Path) -> None:
    """Neither is approved by the name, and no name of a run that a server made up goes before another's."""
    for seed in (1, 2):
        assert site(tmp_path, toy("scaffold", seed=seed)).roll().state == WAITING
    for word in ("experiment", "run"):
        told = command(tmp_path, "approve", word, "--yes")
        assert told.exit_code == 2
        assert "name one by its hash" in told.output
    first = resolved(toy("scaffold", seed=1).json())[0]
    assert command(tmp_path, "approve", first[:10], "--yes").exit_code == 0
    assert site(tmp_path, toy("scaffold", seed=1)).roll().state == ""
    assert site(tmp_path, toy("scaffold", seed=2)).roll().state == WAITING
    assert command(tmp_path, "approve", "experiment", "--yes").exit_code == 0  # one is left that waits


@pytest.mark.parametrize("name", ["none", "zz", "'; rm", "\x1b[31m", "abc"])
def test_a_run_that_nobody_asked_for_is_told(tmp_path: Path, name: str) -> None:
    told = CliRunner().invoke(cli, ["approve", "--yes", "--approvals", str(file(tmp_path)), "--", name])
    assert told.exit_code == 2
    assert "no server has asked for a run" in told.output


def test_files_of_several_sites_are_found_below_the_memory_folder(tmp_path: Path) -> None:
    """Each site's own, one for all clients of a process: a word goes to all that know the run."""
    for name in ("a", "b"):
        path = approvals_file(None, tmp_path / name, ["x"])
        assert path == tmp_path / name / "approvals.json"
        Approvals(path).ask(key_of(settled(toy())[1]), toy(), "run")
    assert approvals_file(None, tmp_path, ["x", "y"]) == tmp_path / "approvals.json"
    assert approvals_file(None, None, ["x"]).parts[-4:] == (".fedkeel", "memory", "x", "approvals.json")
    ended = CliRunner().invoke(cli, ["approve", "experiment", "--yes", "--memory", str(tmp_path)])
    assert ended.exit_code == 0
    for name in ("a", "b"):
        [entry] = Approvals(tmp_path / name / "approvals.json").entries().values()
        assert entry.state == "approved"


def test_what_a_server_made_up_drives_no_terminal(tmp_path: Path) -> None:
    """Escapes, line ends and half characters in every text of an experiment and in the name of the run."""
    evil = "\x1b[2J\u202eapproved\r\nprivacy none\x07"
    options = {"name": "digits", "model": evil, "file": evil, evil: evil}
    experiment = toy(task=options, partition={"kind": "file", "file": evil})
    for heading, text in words.described(experiment):
        assert heading.isprintable(), heading
        assert text.isprintable(), text
    Approvals(file(tmp_path)).ask(key_of(settled(experiment)[1]), experiment, f"run{evil}\ud800")
    out = command(tmp_path, "approvals", "--show").output
    assert all(each.isprintable() or each == "\n" for each in out)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "npz", "file": "/etc/passwd"},
        {"name": "npz", "shape": [10**9, 10**9, 10**9], "classes": 10**9},
        {"name": "images", "shape": [8, 8], "classes": 10, "width": 10**12},
        {"name": "cifar10", "download": True},
        {"name": "shakespeare", "layers": 10**9},
        {"name": "text", "model": "gpt2", "pretrained": "gpt2", "classes": 2},
        {"name": "qqp"},
        {"name": "quadratic", "file": "x.npz"},
        {"name": "os:environ"},
        {"name": "digits", "hidden": float("inf")},
        {"name": "digits", "nonsense": {"deep": [1, 2, {"x": None}]}},
    ],
)
def test_any_experiment_can_be_described(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without opening a file or the network, and in a moment."""

    def denied(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network is asked")

    monkeypatch.setattr(socket.socket, "connect", denied)
    started = time.monotonic()
    lines = dict(words.described(toy(task=options)))
    assert list(lines)[:3] == ["experiment", "task", "reads"]
    assert time.monotonic() - started < 30
    if options["name"] not in TASKS:
        assert "CODE OF ITS OWN" in lines["task"]


# --- the file


@pytest.mark.parametrize("name", REGISTRY)
def test_of_every_algorithm_it_is_told_what_leaves_and_whose_model_is_evaluated(name: str) -> None:
    """Each vector by its name, or that there is none; how often the local work is gone through; its own model where it
    has one."""
    strategy, experiment = settled(toy(name, evaluate={"clients": "all"}))
    lines = dict(words.described(experiment))
    kinds = {**strategy.survey, **strategy.payload}
    if kinds:
        assert all(vector in lines["leaves a round"] for vector in kinds)
        assert not lines["leaves a round"].startswith("0")
    else:
        assert lines["leaves a round"].startswith("nothing of its model")
    own = strategy.own_models(experiment)
    assert ("means of its own model's metrics" in lines["leaves beside"]) == own
    assert ("2 times over" in lines["work a round"]) == (strategy.passes == 2)
    assert ("a whole model of its own" in lines["stays"]) == (strategy.personal and strategy.memory == "own")


def test_the_file_is_private_and_whole(tmp_path: Path) -> None:
    site(tmp_path, toy("scaffold")).roll()
    assert file(tmp_path).stat().st_mode & 0o777 == 0o600
    json.loads(file(tmp_path).read_text())


@pytest.mark.parametrize("mode", ["ask", "policy", "all"])
@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"version": 2, "runs": {}}', b"\x00\xff", b'{"version": 1, "runs": {"a": {}}}']
)
def test_a_damaged_file_is_no_approval(tmp_path: Path, damage: bytes, mode: str) -> None:
    """Every run is refused, in every mode: it may have held a "no". The server is told nothing of the file."""
    here = site(tmp_path, toy("scaffold"), approve=mode)
    file(tmp_path).write_bytes(damage)
    for said in (here.roll().error, here.train().head.reason):
        assert "approvals-unusable" in said
        assert str(tmp_path) not in said
    told = command(tmp_path, "approvals")
    assert told.exit_code == 2
    assert str(file(tmp_path)) in told.output
    assert file(tmp_path).read_bytes() == damage


def test_a_file_that_others_may_write_is_no_approval(tmp_path: Path) -> None:
    here = site(tmp_path, toy("scaffold"))
    here.roll()
    decide(tmp_path)
    assert here.roll().state == ""
    file(tmp_path).chmod(0o666)
    assert "approvals-unusable" in here.roll().error
    file(tmp_path).chmod(0o600)
    assert here.roll().state == ""


def test_join_tells_a_damaged_file_at_once(tmp_path: Path) -> None:
    file(tmp_path).write_bytes(b"{")
    ended = CliRunner().invoke(
        cli, ["join", "--server", "127.0.0.1:1", "--name", "a", "--max-wait", "0", "--approvals", str(file(tmp_path))]
    )
    assert ended.exit_code == 2
    assert "cannot be used" in ended.output


KILLED = """
import sys
from client.approval.store import Approvals, key_of
from strategies.registry import settled
from tests.support.faults import toy
approvals, number = Approvals(sys.argv[1]), 0
print("ready", flush=True)
while True:
    number += 1
    experiment = settled(toy(seed=number % 40))[1]
    approvals.ask(key_of(experiment), experiment, f"run-{number}")
"""


@pytest.mark.timeout(120)
def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    """And no lock: the next process reads and writes it."""
    Approvals(file(tmp_path)).ask("0" * 64, settled(toy())[1], "before")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(file(tmp_path))], cwd=ROOT, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(20):
            Approvals(file(tmp_path)).entries()
            time.sleep(0.01)
        os.kill(writer.pid, signal.SIGKILL)
    before = Approvals(file(tmp_path)).entries()
    assert "0" * 64 in before
    Approvals(file(tmp_path)).decide("0" * 64, "approved", 3)
    assert {path.name for path in tmp_path.iterdir()} <= {"approvals.json", ".approvals.json.lock"}


def test_words_of_several_writers_are_all_kept(tmp_path: Path) -> None:
    def write(first: int) -> None:
        approvals = Approvals(file(tmp_path))
        for seed in range(first, first + 8):
            experiment = settled(toy(seed=seed))[1]
            approvals.ask(key_of(experiment), experiment, f"run-{seed}")

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 8, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Approvals(file(tmp_path)).entries()) == 24


def test_a_server_cannot_fill_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits or was only noted gives way, oldest first; a person's words never do."""
    monkeypatch.setattr(store, "MOST_WAITING", 3)
    approvals = Approvals(file(tmp_path))
    decided = settled(toy(seed=1000))[1]
    approvals.ask(key_of(decided), decided, "kept")
    approvals.decide(key_of(decided), "denied")
    for seed in range(9):
        experiment = settled(toy(seed=seed))[1]
        approvals.ask(key_of(experiment), experiment, f"run-{seed}")
        assert key_of(experiment) in approvals.entries()
    assert len(approvals.entries()) == 4
    assert approvals.entries()[key_of(decided)].state == "denied"
    here = site(tmp_path, toy())
    here.settings = toy(task={"name": "digits", "x": "y" * 200_000})
    assert "for approval it may have" in here.roll().error


# --- the server


class Sites(InProcessGrid):
    """Several sites in one process: a node each, with the settings that `join` gives it."""

    def __init__(self, folder: Path, names: Iterable[str], modes: dict[str, str]) -> None:
        super().__init__(app, memory="ram")
        self.contexts = {
            number: Context(
                run_id=1,
                node_id=number,
                node_config={
                    "name": name,
                    "memory": str(folder / "sites" / name),
                    "trusted": True,
                    **({"approve": modes[name], "approvals": str(file(folder / name))} if name in modes else {}),
                },
                state=RecordDict(),
                run_config={},
            )
            for number, name in enumerate(names, 11)
        }
        self.replies: dict[str, Message] = {}
        self.asked: list[tuple[str, str]] = []
        self.on_ask: Callable[[str, str], None] = lambda name, kind: None

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(stamp(message))
            context = self.contexts[message.metadata.dst_node_id]
            about = str(context.node_config["name"]), str(message.metadata.message_type)
            self.asked.append(about)
            self.on_ask(*about)
            self.replies[ids[-1]] = answer(app, message, context)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(each) for each in message_ids if each in self.replies]


NAMES = ["0", "1", "2", "3", "4"]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "AGAIN_S", 0.02)
    monkeypatch.setattr(roster, "POLL_S", 0.01)


@pytest.mark.usefixtures("_quick")
def test_a_site_that_waits_is_taken_in_once_it_is_approved(tmp_path: Path) -> None:
    """The others go on; it is shown as waiting, is no failure, is never asked to train, and then is a client like any
    other. All bits are those of a run in which it joined in mid-run."""
    grid, seen, told = Sites(tmp_path, NAMES, {"2": "ask"}), [], []

    def show(record: dict[str, Any]) -> None:
        seen.append((record["sampled"], record.get("waiting", [])))
        told.append(RunFolder(tmp_path / "run").status().get("waiting"))
        if len(seen) == 2:
            decide(tmp_path / "2")
        time.sleep(0.05)

    experiment = toy("scaffold", rounds=6, round={"wait_for": 4, "quorum": 1})
    result = ran(tmp_path / "run", experiment, grid, show=show)
    without = sorted(set(NAMES) - {"2"})
    assert seen[:2] == [(without, ["2"])] * 2
    assert seen[-1] == (sorted(NAMES), [])
    assert (told[1], told[-1]) == (["2"], [])  # as run.json says it
    assert all(not record["dropped"] and not record["void"] for record in result.history)
    assert sum("waits for approval at the site" in line for line in result.said) == 1
    assert not any("refused node" in line for line in result.said)


@pytest.mark.usefixtures("_quick")
def test_the_clock_stands_while_a_site_decides(tmp_path: Path) -> None:
    """A deadline for clients to come is no deadline for people; once they decide the run begins, or ends as ever."""
    experiment = toy("fedavg", rounds=1, round={"deadline_s": 0.3})
    for state in ("approved", "denied"):
        folder = tmp_path / state
        grid, started = Sites(folder, NAMES, {"2": "ask"}), time.monotonic()

        def later(name: str, kind: str, folder: Path = folder, state: str = state, started: float = started) -> None:
            if name == "2" and time.monotonic() - started > 1.0 and file(folder / "2").exists():
                decide(folder / "2", state)

        grid.on_ask = later
        result = run(folder / "run", experiment, grid, strict=False)
        assert time.monotonic() - started > 0.9
        if state == "approved":
            assert result.error is None
        else:
            assert "only 4 of 5 clients came within" in str(result.error)
            assert any("was denied at the site" in line for line in result.said)


@pytest.mark.usefixtures("_quick")
def test_a_revoked_run_is_asked_no_more_and_goes_on_without_that_site(tmp_path: Path) -> None:
    """Its next message is refused; after that it is off the roll, and back on it when it is approved again."""
    grid, seen = Sites(tmp_path, NAMES, {"2": "policy"}), []

    def show(record: dict[str, Any]) -> None:
        seen.append((sorted(record["accepted"]), record["dropped"]))
        if len(seen) in (2, 5):
            decide(tmp_path / "2", "revoked" if len(seen) == 2 else "approved")
        time.sleep(0.05)  # rounds of a real run last longer than a question

    ran(tmp_path / "run", toy("fedavg", rounds=8, round={"quorum": 1}, evaluate={"clients": "none"}), grid, show=show)
    without = sorted(set(NAMES) - {"2"})
    assert seen[1] == (sorted(NAMES), {})
    assert seen[2] == (without, {"2": "takes no part: the run was denied at the site"})
    assert seen[3:5] == [(without, {})] * 2
    assert seen[-1] == (sorted(NAMES), {})
    trained = [kind for name, kind in grid.asked if name == "2" and kind == "train"]
    assert len(trained) <= 3 + 3


@pytest.mark.usefixtures("_quick")
def test_a_run_that_all_approve_has_the_bits_of_one_where_nobody_is_asked(tmp_path: Path) -> None:
    experiment = toy("scaffold", rounds=3)
    plain = ran(tmp_path / "plain", experiment, Sites(tmp_path / "a", NAMES, {}))
    asked = Sites(tmp_path / "b", NAMES, dict.fromkeys(NAMES, "ask"))
    asked.on_ask = lambda name, kind: decide(tmp_path / "b" / name) if file(tmp_path / "b" / name).exists() else None
    assert ran(tmp_path / "asked", experiment, asked).final == plain.final


@pytest.mark.processes
@pytest.mark.rest
@pytest.mark.timeout(240)
def test_a_run_over_grpc_waits_for_another_process_to_approve_it(tmp_path: Path) -> None:
    """Server, site and the person's command are three processes; nothing is started again."""
    fleet, control = held_ports(2)
    experiment = tmp_path / "first.toml"
    experiment.write_text('name = "first"\nrounds = 3\ntask.name = "digits"\npartition.clients = 1\n')
    python, log = [sys.executable, "-m"], tmp_path / "server.log"
    ports = ["--fleet-port", str(fleet), "--control-port", str(control), "--run-dir", str(tmp_path / "run")]
    join = ["client", "join", "--server", f"127.0.0.1:{fleet}", "--name", "0", "--approve", "ask"]
    server = Family([*python, "server", "run", str(experiment), *ports], environment(), log)
    client = Family([*python, *join, "--memory", str(tmp_path)], environment(), tmp_path / "client.log")
    try:
        until(lambda: "waits for approval at the site" in log.read_text(), "", 90)
        assert server.running
        words = [*python, "client", "approve", "first", "--yes", "--memory", str(tmp_path)]
        subprocess.run(words, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=60)
        assert server.process.wait(patience.limit(60)) == 0, log.read_text()
        assert client.running
    finally:
        stop([server, client], 5)
    assert "refused" not in log.read_text()


def test_an_answer_of_a_former_server_or_a_hostile_site_is_taken_as_it_is(tmp_path: Path) -> None:
    """A site that says "waiting" under a name that is none, or with a state that nobody knows."""
    here = site(tmp_path, toy())
    reply = here.roll()
    assert (reply.error, reply.names) == (f"client 2: {Undecided.WORDS[WAITING]}", ["2"])
    assert Undecided(WAITING, "\x1b[31m").client == ""
    info = NodeInfo(node_id=7)
    said: list[str] = []
    queue = waiting.Waiting(Sites(tmp_path, [], {}), lambda nodes, ttl: [], 1.0, said.append)
    for _ in range(5):
        queue.put(info, Undecided(WAITING, "a/../b"))
    assert queue.names == ["node 7"]
    assert len(said) == 1
    queue.keep({})
    assert queue.names == []


# --- who is told at the site


def test_health_says_what_is_waited_for(tmp_path: Path) -> None:
    """Well, as nothing is broken; and in words, for nothing goes on without a person."""
    metrics = ClientMetrics(names=["2"])
    metrics.connected("2", True)
    here = site(tmp_path, toy("scaffold"))

    def tell() -> None:
        content = RecordDict({HEAD: write_head(RollHead(here.settings.json(), "run"))})
        status, numbers = outline(here.ask(MessageType.QUERY, content))
        metrics.answered("2", "query", status, {}, 0, 0, numbers)

    tell()
    assert metrics.health()[0]
    assert metrics.health()[1]["waiting for approval"] == ["2"]
    assert metrics.registry.get_sample_value("fedkeel_client_waiting_for_approval", {"name": "2"}) == 1.0
    assert metrics.registry.get_sample_value(
        "fedkeel_client_messages_total", {"name": "2", "kind": "query", "status": "waiting"}
    )
    decide(tmp_path)
    tell()
    assert "waiting for approval" not in metrics.health()[1]
