"""A site's own limits, and messages of a server that cannot be trusted: neither ends the process or is believed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client import session
from client.app import MOST_REASON
from client.policy import Denied, Policy
from common.errors import SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from common.tasks.base import Task
from strategies.protocol import wire
from strategies.protocol.messages import HEAD, METRICS, STATE, Refused, ReplyHead, RollReply, read_head
from tests.support import faults
from tests.support.faults import FaultyGrid, run, toy
from tests.support.site import OWN_TASK, Site


def policy(folder: Path, text: str) -> str:
    path = folder / "policy.toml"
    path.write_text(text)
    return str(path)


# --- the file


def test_a_policy_says_what_it_says(tmp_path: Path) -> None:
    """Every key; and the text in the module's docstring is a valid file."""
    from client import policy as module

    assert module.__doc__ is not None
    lines = [line for line in module.__doc__.splitlines() if line.startswith("    ")]
    written = Policy.load(policy(tmp_path, "\n".join(lines)))
    assert set(written.model_dump()) == {line.split("=")[0].strip() for line in lines}
    assert written.tasks == ["digits", "hospital.tasks:xray"]
    assert written.share_labels is False
    assert Policy.load("") == Policy()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_step = 3", "max_step = 3: unknown key; allowed here: experiments, tasks, files, downloads, strategies,"),
        ("max_steps = 0", "max_steps = 0: Input should be greater than or equal to 1"),
        ('max_steps = "3"', "max_steps = '3': Input should be a valid integer"),
        ('tasks = "digits"', "tasks = 'digits': Input should be a valid list"),
        ("max_seconds = -1.0", "max_seconds = -1.0: Input should be greater than 0"),
        ("share_labels = 1", "share_labels = 1: Input should be a valid boolean"),
        ("max_steps = ", "is not valid TOML"),
    ],
)
def test_a_broken_policy_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    """Naming file, key, value and what is allowed."""
    path = policy(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        Policy.load(path)
    assert str(refused.value).startswith(f"policy file {path!r}")
    assert expected in str(refused.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        Policy.load(str(tmp_path / "none.toml"))


def test_a_policy_is_read_once(tmp_path: Path) -> None:
    """What a process started with holds until it ends."""
    path = policy(tmp_path, "max_steps = 3")
    first = Policy.load(path)
    Path(path).unlink()
    assert Policy.load(path) is first


# --- what it forbids


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('experiments = ["digits-*", "Experiment"]', "does not allow experiment 'experiment'"),
        ("experiments = []", "does not allow experiment"),
        ('tasks = ["tests.support.faults:tas?", "digits"]', "the site has not allowed it"),
        ('strategies = ["fedavg"]', "does not allow strategy 'scaffold'"),
        ("max_steps = 1", "3 local steps a round; the site's policy allows max_steps = 1"),
    ],
)
def test_what_is_forbidden_is_refused_at_the_roll_and_after_it(text: str, why: str, tmp_path: Path) -> None:
    """A server may skip the roll call: then the reply says "refused" and the history shows it."""
    site = Site(tmp_path / "memory", toy("scaffold"), name="4", policy=policy(tmp_path, text))
    if "tasks" in text:
        site.context.node_config["allow-tasks"] = ""
    assert re.match("client 4: (experiment|task|strategy|steps)-denied: ", site.roll().error)
    assert why in site.roll().error
    replies = [site.train()] if "max_steps" in text else [site.train(), site.evaluate()]
    for reply in replies:
        assert (reply.head.status, reply.state) == ("refused", {})
        assert why in reply.head.reason
    assert not (tmp_path / "memory").exists()


def test_what_is_allowed_is_done(tmp_path: Path) -> None:
    """At every limit exactly, with the same bits as without a policy."""
    text = """
    experiments = ["exp*"]
    tasks = ["tests.support.faults:task"]
    strategies = ["scaffold"]
    max_steps = 3
    max_seconds = 600.0
    max_upload_norm = 1e6
    """
    free = Site(tmp_path / "a", toy("scaffold"), name="4").train()
    bound = Site(tmp_path / "b", toy("scaffold"), name="4", policy=policy(tmp_path, text))
    assert bound.roll().error == ""
    assert bound.roll().steps == [3]
    reply = bound.train()
    assert reply.head == free.head
    assert reply.state["delta"].equal(free.state["delta"])


def test_the_history_says_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client of five has a bound that its uploads break."""
    path = policy(tmp_path, "max_upload_norm = 1e-9")

    class OneStrict(FaultyGrid):
        def _client(self, message: Message, context: Any) -> Message:
            name, _ = faults.asked_of(message)
            context.node_config["policy"] = path if name == "3" else ""
            return super()._client(message, context)

    result = run(tmp_path / "run", toy("scaffold", rounds=2), OneStrict(memory=str(tmp_path / "memory")))
    assert result.error is None
    for line in result.history:
        assert line["accepted"] == ["0", "1", "2", "4"]
        assert line["dropped"]["3"].startswith(
            f"refused: client 3, round {line['round']}, train: delta is longer than "
        )
    assert not list((tmp_path / "memory").glob("*/3")), "what was not sent is not remembered as sent"


@pytest.mark.parametrize(("feedback", "factor"), [("none", 7.0), ("ef14", 1.0), ("ef21", 1.0)])
def test_the_bound_is_that_of_what_leaves(feedback: str, factor: float, tmp_path: Path) -> None:
    """Compressed: random-k without feedback sends 2 of 14 entries times 7; with it nothing that is longer at first."""
    compression = {"up": "random-k", "ratio": 0.1, "feedback": feedback}
    site = Site(tmp_path / "a", toy("fedavg", compression=compression), name="4")
    delta = Site(tmp_path / "b", toy("fedavg"), name="4").train().state["delta"]
    values = site.train().state["delta/values"]
    arrives = float(values.norm())
    whole = float(delta.norm())
    assert len(values) == (14 if feedback == "ef21" else 2)
    assert set((values / factor).tolist()) <= set(delta.tolist())
    for bound in (0.999 * max(arrives, whole), 1.001 * max(arrives, whole)):
        (place := tmp_path / str(bound)).mkdir()  # a policy is read once for each path
        path = policy(place, f"max_upload_norm = {bound!r}")
        reply = Site(place / "memory", toy("fedavg", compression=compression), name="4", policy=path).train()
        assert (reply.head.status == "ok") == (bound > max(arrives, whole))


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.0])
def test_the_bound_of_uploads_is_no_way_around(value: float) -> None:
    """Not finite is over every bound; scalars have none."""
    bound = Policy(max_upload_norm=1.0)
    with pytest.raises(Denied, match="delta is longer than"):
        bound.check_upload({"delta": torch.tensor([0.0, value])})
    bound.check_upload({"delta": torch.tensor([0.6, 0.79]), "loss": torch.tensor(value)})
    Policy().check_upload({"delta": torch.tensor([value])})


def test_training_stops_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the step in hand; nothing is saved."""
    now = [0.0]
    monkeypatch.setattr("client.policy.time.monotonic", lambda: now[0])

    def slow(self: Any, model: Any, batch: Any) -> Any:
        now[0] += 10
        return faults.nn.functional.cross_entropy(model(batch[0]), batch[1].abs())

    monkeypatch.setattr(faults.Toy, "loss", slow)
    path = policy(tmp_path, "max_seconds = 15.0")
    site = Site(tmp_path / "memory", toy("scaffold"), name="4", policy=path)
    reply = site.train()
    assert reply.head.status == "refused"
    expected = "step 3 of training comes too late; the site's policy allows max_seconds = 15"
    assert re.fullmatch(f"client 4, round 1, train: time-denied: {expected} .event [0-9a-f]{{6}}.", reply.head.reason)
    assert not (tmp_path / "memory").exists()


def test_full_gradients_count_for_the_time_and_not_for_the_steps() -> None:
    """`watch` sees them with the number of the step before."""
    from tests.support.tiny import Tiny, simulate

    work = simulate(Tiny(sizes=(8, 8), norm=False)).work("0")
    seen: list[int] = []
    work._watch = seen.append
    for _ in work.steps():
        pass
    work.full_gradient()
    assert seen == [1, 2, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("with_policy", [False, True])
def test_a_forbidden_task_is_not_even_imported(
    with_policy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor constructed: a module's code runs when it is imported."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = policy(tmp_path, 'tasks = ["tests.support.faults:task"]') if with_policy else ""
    site = Site(tmp_path / "memory", toy("scaffold"), policy=path)
    experiment = toy("scaffold", task={"name": "planted:task"}).json()
    for reply in (site.train(experiment=experiment), site.evaluate(experiment=experiment)):
        assert reply.head.status == "refused"
    site.settings = Experiment.model_validate(json.loads(experiment))
    assert "task-denied: task.name = 'planted:task' is none of this project's" in site.roll().error
    assert "planted" not in sys.modules
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "config", "shared"),
    [
        ("", {}, False),
        ("", {"share-labels": True}, True),
        ("share_labels = false", {"share-labels": True}, False),
        ("share_labels = true", {}, True),
    ],
)
def test_labels_leave_only_with_leave(text: str, config: dict[str, Any], shared: bool, tmp_path: Path) -> None:
    """The policy has the last word."""
    reply = Site(tmp_path, toy(), policy=policy(tmp_path, text), **config).roll()
    assert reply.labels == ["[4]" if shared else ""]


# --- a server that cannot be trusted


def heads() -> st.SearchStrategy[dict[str, Any]]:
    """Settings of all kinds in place of some of a TRAIN message's."""
    whole = st.integers(-(2**63), 2**63 - 1)
    texts = st.text(max_size=30) | st.sampled_from(
        ["", "..", "a/b", "{}", "[]", "null", '{"name": 3}', "1e999", "[" * 10**5]
    )
    anything = st.one_of(whole, st.floats(), texts, st.booleans(), st.binary(max_size=9), st.lists(whole, max_size=4))
    right = {
        "experiment": texts | experiments(),
        "run": texts,
        "client": texts,
        "generation": whole,
        "round": whole,
        "accepted": whole,
        "keep": st.lists(whole, max_size=5),
        "share": st.floats(),
        "lr": st.floats(),
        "layout": texts,
    }
    kinds = {key: anything | kind for key, kind in right.items()}
    return st.fixed_dictionaries({}, optional=kinds) | st.fixed_dictionaries({}, optional=right)


def experiments() -> st.SearchStrategy[str]:
    """Valid experiments with one absurd setting, or none."""
    tables = [
        {"task": {"name": "benchmarks.flat:task", "size": 10**12}},
        {"task": {"name": "digits", "hidden": 10**13}},
        {"task": {"name": "unittest.__main__:x"}},
        {"task": {"name": "tests.client.test_policy:leaves"}},
        {"task": {"name": "sys:exit"}},
        {"local": {"batch_size": 10**30}},
        {"local": {"epochs": 10**30}},
        {"local": {"threads": 10**6}},
        {"local": {"lr": 1e300}},
        {"seed": 10**400},
        {"partition": {"clients": 10**12}},
        {"strategy": {"name": "hafedho", "mu": -1}},
        {"strategy": {"name": "\ud800"}},
        {"name": "x" * 10**5},
        {"x": "\ud800" * 5000},
        {},
    ]
    plain = json.loads(toy("scaffold", local={"lr": 0.2, "batch_size": 4, "steps": 1}).json())
    return st.sampled_from(tables).map(lambda table: json.dumps(plain | table))


def leaves(options: Any, partition: Any, seed: int) -> Task:
    """A task whose code ends the process."""
    raise SystemExit(3)


def arrays() -> st.SearchStrategy[dict[str, Array]]:
    """Vectors of any shape, dtype and number of bytes, also none that fit together."""
    shapes = st.lists(st.sampled_from([-1, 0, 1, 2, 14, 2**31, 2**62]), max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "float64", "bfloat16", "int64", "bool", "object", "", "float32\0"])
    stypes = st.sampled_from([wire.RAW, "numpy.ndarray", "pickle", ""])
    array = st.builds(Array, dtypes, shapes, stypes, st.binary(max_size=120))
    fitting = st.sampled_from([1, 14]).map(lambda d: wire.to_array(torch.full((d,), math.nan)))
    return st.dictionaries(st.sampled_from(["model", "control", "x", "buffers.float32"]), array | fitting, max_size=3)


SITES: dict[str, Site] = {}


@pytest.fixture(scope="module")
def _sites(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    strict = policy(folder, "max_steps = 50")
    local = {"lr": 0.2, "batch_size": 4, "steps": 1}
    SITES["site"] = Site(folder / "memory", toy("scaffold", local=local), policy=strict)


@pytest.mark.usefixtures("_sites")
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY]),
    heads(),
    st.none() | arrays(),
    st.dictionaries(st.text(max_size=5), st.floats() | st.lists(st.floats(), max_size=2), max_size=2),
    st.booleans(),
)
def test_no_message_ends_a_client(
    kind: str, changes: dict[str, Any], state: dict[str, Array] | None, numbers: dict[str, Any], whole: bool
) -> None:
    """Garbage in settings, vectors and numbers: an answer that can be sent, or an error for the node to send; and the
    next honest message gets the answer that it always gets."""
    site = SITES["site"]
    content = RecordDict()
    if whole:
        honest = {
            "experiment": site.settings.json(),
            "run": "run",
            "client": "2",
            "generation": 1,
            "round": 1,
            "accepted": 0,
            "share": 0.2,
            "lr": 0.2,
            "layout": site.model.layout_hash,
        }
        content[HEAD] = ConfigRecord(honest | changes)
        content[STATE] = wire.to_records(site.state)
        content["buffers"] = wire.to_records(site.buffers)
    else:
        content[HEAD] = ConfigRecord(changes)
    if state is not None:
        content[STATE] = ArrayRecord({**content.array_records.get(STATE, {}), **state})
    content[METRICS] = MetricRecord({key: value for key, value in numbers.items() if value != []})
    with suppress(Refused):
        sendable(site.ask(kind, content))
    assert site.train(7).state["delta"].equal(honest_delta(site))


HONEST: list[torch.Tensor] = []


def honest_delta(site: Site) -> torch.Tensor:
    if not HONEST:
        HONEST.append(Site("ram", site.settings).train(7).state["delta"])
    return HONEST[0]


def sendable(reply: Message) -> None:
    """It survives Flower's serialization and is of moderate length."""
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage

    content = message_from_proto(ProtoMessage.FromString(message_to_proto(reply).SerializeToString())).content
    if reply.metadata.message_type == MessageType.QUERY:
        assert len(read_head(RollReply, content).error) <= MOST_REASON
    else:
        head = read_head(ReplyHead, content)
        assert head.status in ("ok", "error", "refused", "empty", "memory-lost")
        assert len(head.reason) <= MOST_REASON


def test_what_a_server_says_drives_no_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Escape sequences, line breaks and half characters in names: one plain line in the log, text in the reply."""
    caplog.set_level("WARNING", "client.app")
    name = "\x1b[31m\u202eroot\r\nforged: line\ud800"
    site = Site(tmp_path, toy())
    reply = site.train(client=name)
    assert "this node does not host client" in reply.head.reason
    site.settings = toy(strategy=name)
    assert "strategy.name" in site.roll().error
    assert len(caplog.records) == 2
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert reply.head.reason.replace("\n", "").isprintable()


@pytest.mark.parametrize("task", ["tests.client.test_policy:leaves", "unittest.__main__:x"])
def test_a_task_cannot_exit(task: str, tmp_path: Path) -> None:
    """`sys.exit` in a task that the site allowed, or in a module that exits when it is imported."""
    site = Site(tmp_path, toy(), **{"allow-tasks": f"{OWN_TASK} {task}"})
    experiment = toy(task={"name": task}).json()
    assert site.train(experiment=experiment).head.status == "error"
    site.settings = Experiment.model_validate(json.loads(experiment))
    assert "task-failed" in site.roll().error


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda site: site.state.pop("model"), "nothing as model"),
        (lambda site: site.state.update(model=torch.zeros(1)), r"torch.float32 \(1,\) as model"),
        (lambda site: site.state.update(model=torch.tensor(0.0)), r"torch.float32 \(\) as model"),
        (lambda site: site.state.update(model=site.state["model"].double()), r"torch.float64 \(14,\) as model"),
        (lambda site: site.state.update(control=torch.zeros(1)), r"shape \(1,\) as control"),
        (lambda site: site.state.update(x=torch.zeros(99)), r"shape \(99,\) as x"),
        (lambda site: site.buffers.pop("buffers.bool"), "nothing as buffers.bool"),
    ],
)
def test_a_vector_of_another_shape_is_not_stretched(spoil: Any, what: str, tmp_path: Path) -> None:
    """Torch would broadcast a model of one number over all weights."""
    site = Site(tmp_path, toy("scaffold"))
    spoil(site)
    reply = site.train()
    assert reply.head.status == "error"
    assert re.search(f"client 2, round 1, train: message-invalid: received {what}", reply.head.reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 0},
        {"round": -1},
        {"generation": 0},
        {"accepted": 1},
        {"accepted": -1},
        {"lr": math.nan},
        {"lr": -0.1},
        {"lr": math.inf},
        {"share": math.nan},
        {"share": 1.5},
    ],
)
def test_numbers_without_meaning_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Before any work; nothing is saved."""
    reply = Site(tmp_path / "memory", toy("scaffold")).train(**changes)
    assert (reply.head.status, reply.state) == ("error", {})
    assert not (tmp_path / "memory").exists()


HUNGRY = """
import json, sys, torch
from tests.support.site import OWN_TASK, Site
from tests.support.faults import toy
from client.policy import Policy
Policy.load(sys.argv[1]).bound_memory()
site = Site(sys.argv[2], toy("scaffold"), policy=sys.argv[1], trusted=True)
first = site.train()
reply = site.train(experiment=toy("scaffold", task={"name": "benchmarks.flat:task", "size": 10**9}).json())
print(reply.head.status, "allocate memory" in reply.head.reason)
again = site.train()
print(again.head.status, again.state["delta"].equal(first.state["delta"]))
"""


@pytest.mark.timeout(120)
def test_a_task_cannot_take_more_memory_than_the_site_allows(tmp_path: Path) -> None:
    """4 GB a vector where the process may have 3: an error of that message, and the next one is answered."""
    path = policy(tmp_path, "max_memory_mb = 3000.0")
    command = [sys.executable, "-c", HUNGRY, path, str(tmp_path / "memory")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == ["error True", "ok True"], done.stderr


# --- one process, many clients


def test_threads_of_one_process_compute_alike(tmp_path: Path) -> None:
    """Torch keeps the number of CPU threads by thread: each message sets it, whatever the thread did before."""
    site, seen = Site(tmp_path, toy("scaffold")), []
    site.train()

    def other() -> None:
        torch.set_num_threads(2)
        site.train(2)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [1]


def test_a_process_keeps_one_session_for_all_its_clients(tmp_path: Path) -> None:
    """Two clients of one experiment share task and model; each has its own policy."""
    sites = [Site(tmp_path / name, toy("scaffold"), name=name) for name in "23"]
    started = time.monotonic()
    assert [site.train().head.status for site in sites] == ["ok", "ok"]
    held = list(session._sessions.values())
    sites.append(
        Site(tmp_path / "4", toy("scaffold"), name="4", policy=policy(tmp_path, "tasks = []"), **{"allow-tasks": ""})
    )
    assert [site.train(2).head.status for site in sites] == ["ok", "ok", "refused"]
    assert list(session._sessions.values()) == held
    assert time.monotonic() - started < 60
