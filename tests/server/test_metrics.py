"""Metrics of server and client, read as Prometheus reads them."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from client.node.metrics import ClientMetrics
from common.experiment import Experiment
from common.flower import ROOT
from server.engines.grid import grid
from server.watch.metrics import CAUSES, RunMetrics
from server.watch.names import MOST_SITES


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Everything that is served: name{label="value",...} -> number."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def record(round: int, **more: Any) -> dict[str, Any]:
    """A line of a history."""
    return {
        "round": round,
        "generation": 1,
        "sampled": ["a", "b", "c"],
        "accepted": ["a", "b"],
        "dropped": {"c": "timed out"},
        "causes": {"c": "timed out"},
        "void": [],
        "late": 0,
        "lr": 0.1,
        "bytes_down": 300,
        "bytes_up": 200,
        "drift": 0.25,
        "seconds": {"collect": 2.0, "aggregate": 0.5, "total": 3.0},
        "train": {"loss": {"weighted": 1.0, "mean": 2.0, "worst": 3.0, "client": "b", "n": 2}},
        "sha256": "0",
        **more,
    }


def test_a_record_is_counted_and_measured() -> None:
    metrics = RunMetrics()
    metrics.record(record(1))
    metrics.record(record(2, central={"loss": 0.5, "accuracy": 0.75}, drift=None, generation=2))
    got = values(metrics.registry)
    assert got["fedkeel_rounds_total"] == 2
    assert got["fedkeel_round"] == 2
    assert got["fedkeel_generation"] == 2
    assert got["fedkeel_uploads_accepted_total"] == 4
    assert got['fedkeel_uploads_dropped_total{cause="timed out"}'] == 2
    assert (got['fedkeel_bytes_total{direction="down"}'], got['fedkeel_bytes_total{direction="up"}']) == (600, 400)
    assert got['fedkeel_phase_seconds_total{phase="collect"}'] == 4
    assert 'fedkeel_phase_seconds_total{phase="total"}' not in got
    assert got["fedkeel_round_seconds"] == 3
    assert got['fedkeel_round_clients{state="sampled"}'] == 3
    assert got['fedkeel_round_clients{state="accepted"}'] == 2
    assert math.isnan(got["fedkeel_drift"])
    assert got['fedkeel_metric{data="train",metric="loss",summary="worst"}'] == 3
    assert got['fedkeel_metric{data="central",metric="loss",summary=""}'] == 0.5
    assert got['fedkeel_metric{data="central",metric="accuracy",summary=""}'] == 0.75
    assert abs(got["fedkeel_last_round_timestamp_seconds"] - time.time()) < 5
    assert got["process_resident_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("offline: no heartbeat", "offline"),
        ("late", "late"),
        ("timed out", "timed out"),
        ("memory-lost", "memory-lost"),
        ("failed: client c, round 3, train: late: x", "failed"),
        ("mismatch: expected run", "invalid"),
        ("a wholly new reason", "invalid"),
    ],
)
def test_without_causes_the_reason_tells(reason: str, cause: str) -> None:
    metrics = RunMetrics()
    metrics.record(record(1, dropped={"c": reason}, causes={}))
    got = values(metrics.registry)
    assert {c: got[f'fedkeel_uploads_dropped_total{{cause="{c}"}}'] for c in CAUSES} == {
        c: float(c == cause) for c in CAUSES
    }


def test_void_tries_and_their_drops_count_once_whether_noted_or_recorded_first() -> None:
    void = {"sampled": ["a", "b"], "dropped": {"a": "late"}, "causes": {"a": "late"}, "cause": "1 valid upload"}
    for order in ("note first", "record first", "no note", "no record"):
        metrics = RunMetrics()
        if order in ("note first", "no record"):
            metrics.note("round 3 is void: 1 valid upload")
            metrics.note("round 3 is void: 1 valid upload")
        if order != "no record":
            metrics.record(record(3, void=[void, void]))
        if order == "record first":
            metrics.note("round 3 is void: 1 valid upload")
            metrics.note("round 3 is void: 1 valid upload")
        metrics.note("round 4 is void: 1 valid upload")
        got = values(metrics.registry)
        assert got["fedkeel_void_tries_total"] == 3, order
        assert got['fedkeel_uploads_dropped_total{cause="late"}'] == (0 if order == "no record" else 2)


def test_notes_are_counted_by_kind() -> None:
    metrics = RunMetrics()
    for text in (
        "refused node 7: client 'a' is here twice",
        "warning: x",
        "waiting for clients",
        "resuming after round 3",
    ):
        metrics.note(text)
    got = values(metrics.registry)
    kinds = {kind: got[f'fedkeel_notes_total{{kind="{kind}"}}'] for kind in ("void", "refused", "warning", "other")}
    assert kinds == {"void": 0, "refused": 1, "warning": 1, "other": 2}


def test_late_replies_add_up_over_a_resume() -> None:
    """`late` of a record grows within one server app and starts anew with the next one."""
    metrics = RunMetrics()
    for round, late in ((1, 0), (2, 2), (3, 2), (2, 3), (3, 4), (4, 4)):
        metrics.record(record(round, late=late))
    assert values(metrics.registry)["fedkeel_late_replies_total"] == 2 + 4
    assert values(metrics.registry)["fedkeel_rounds_total"] == 6
    metrics.status("starting")
    metrics.record(record(5, late=6))
    assert values(metrics.registry)["fedkeel_late_replies_total"] == 2 + 4 + 6


def test_status_is_one_of_a_few_words() -> None:
    metrics = RunMetrics()
    for text in ("starting", "running", "something new", "failed"):
        metrics.status(text)
        expected = text if text != "something new" else "unknown"
        got = values(metrics.registry)
        assert [k for k, v in got.items() if "run_status" in k and v] == [
            f'fedkeel_run_status{{fedkeel_run_status="{expected}"}}'
        ]


def test_no_label_holds_what_a_client_sent() -> None:
    """Reasons and metrics of clients, thousands of them: as many series as before. Names have a bounded number of their
    own."""
    metrics = RunMetrics()
    metrics.record(record(1))
    before = set(values(metrics.registry))
    names = [f"client-{i}" for i in range(2000)]
    metrics.record(
        record(
            2,
            sampled=names,
            dropped={name: f"evil {name}: {name}" for name in names},
            causes={name: f"evil {name}" for name in names},
            train={f"metric-{name}": {"weighted": 1.0} for name in names} | {"loss": dict.fromkeys(names, 1.0)},
        )
    )
    new = set(values(metrics.registry)) - before
    assert all("fedkeel_site_" in each for each in new)
    assert not [each for each in new if "evil" in each]
    assert len(new) <= 3 * (MOST_SITES + 1)


def test_a_record_costs_less_than_a_millisecond() -> None:
    metrics = RunMetrics()
    names = [f"client-{i}" for i in range(100)]
    line = record(1, sampled=names, accepted=names[:90], dropped=dict.fromkeys(names[90:], "late"))
    best = math.inf
    for _ in range(20):
        started = time.process_time()
        for _ in range(20):
            metrics.record(line)
        best = min(best, (time.process_time() - started) / 20)
    assert best < 1e-3


def test_records_of_a_real_run_are_understood(tmp_path: Path) -> None:
    from server.app import run
    from server.rounds.folder import RunFolder

    experiment = Experiment.parse(
        'rounds = 2\ntask.hidden = 4\npartition.clients = 3\nlocal.batch_size = 128\n[evaluate]\nclients = "all"'
    )
    metrics = RunMetrics()
    with grid("client.app:app", 1, "cpu", tmp_path / "memory") as clients:
        run(clients, experiment, RunFolder(tmp_path / "run"), say=metrics.note, show=metrics.record)
    history = RunFolder(tmp_path / "run").history()
    got = values(metrics.registry)
    assert got["fedkeel_rounds_total"] == 2
    assert got["fedkeel_uploads_accepted_total"] == 6
    assert got['fedkeel_bytes_total{direction="up"}'] == sum(line["bytes_up"] for line in history)
    assert got['fedkeel_metric{data="central",metric="accuracy",summary=""}'] == history[-1]["central"]["accuracy"]
    for data in ("train", "clients"):
        assert got[f'fedkeel_metric{{data="{data}",metric="loss",summary="mean"}}'] == history[-1][data]["loss"]["mean"]


def answered(told: ClientMetrics, name: str = "a", kind: str = "train", status: str = "ok", **more: Any) -> None:
    given: dict[str, Any] = {
        "seconds": {"receive": 0.5, "work": 2.0, "send": 0.25},
        "bytes_down": 100,
        "bytes_up": 50,
        "metrics": {"loss": 1.5, "examples": 32, "norm.delta": 9.0},
    }
    told.answered(name, kind, status, **(given | more))


def test_messages_of_a_client_are_counted_and_measured() -> None:
    metrics = ClientMetrics(names=["a", "b"])
    metrics.connected("a", True)
    answered(metrics)
    answered(metrics, metrics={"loss": 0.5})
    answered(metrics, kind="evaluate", status="empty", metrics={})
    got = values(metrics.registry)
    assert (got['fedkeel_client_connected{name="a"}'], got['fedkeel_client_connected{name="b"}']) == (1, 0)
    assert got['fedkeel_client_messages_total{kind="train",name="a",status="ok"}'] == 2
    assert got['fedkeel_client_messages_total{kind="evaluate",name="a",status="empty"}'] == 1
    assert got['fedkeel_client_phase_seconds_total{kind="train",name="a",phase="work"}'] == 4
    assert got['fedkeel_client_bytes_total{direction="down",name="a"}'] == 300
    assert got['fedkeel_client_bytes_total{direction="up",name="a"}'] == 150
    assert got['fedkeel_client_metric{kind="train",metric="loss",name="a"}'] == 0.5
    assert got['fedkeel_client_examples{kind="train",name="a"}'] == 32
    assert abs(got['fedkeel_client_last_message_timestamp_seconds{name="a"}'] - time.time()) < 5
    assert got["process_cpu_seconds_total"] > 0


def test_names_and_words_of_a_server_make_no_new_series() -> None:
    metrics = ClientMetrics(names=["a"])
    answered(metrics, "x", "y", "z")
    before = set(values(metrics.registry))
    for i in range(500):
        answered(metrics, f"evil-{i}", f"evil-{i}", f"evil-{i}", metrics={f"evil-{i}": 1.0, "loss": 1.0})
    assert set(values(metrics.registry)) == before
    assert values(metrics.registry)['fedkeel_client_messages_total{kind="other",name="other",status="other"}'] == 501


def test_messages_from_several_threads_all_count() -> None:
    metrics = ClientMetrics()
    threads = [
        threading.Thread(target=lambda name=name: [answered(metrics, name) for _ in range(300)])
        for name in ("a", "b") * 4
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        generate_latest(metrics.registry)
    got = values(metrics.registry)
    for name in ("a", "b"):
        assert got[f'fedkeel_client_messages_total{{kind="train",name="{name}",status="ok"}}'] == 1200


def test_two_of_them_in_one_process_do_not_meet() -> None:
    answered(first := ClientMetrics())
    second = ClientMetrics()
    assert 'fedkeel_client_messages_total{kind="train",name="a",status="ok"}' in values(first.registry)
    assert 'fedkeel_client_messages_total{kind="train",name="a",status="ok"}' not in values(second.registry)


def test_the_gpu_is_read_only_if_this_process_uses_one() -> None:
    """Scraping neither imports torch nor makes a CUDA context."""
    code = (
        "import sys; from prometheus_client import generate_latest; from client.node.metrics import ClientMetrics;"
        "text = generate_latest(ClientMetrics().registry).decode();"
        "assert 'gpu' not in text and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    metrics = ClientMetrics()
    if not torch.cuda.is_initialized():
        assert not any("gpu" in key for key in values(metrics.registry))
        assert not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_gpu_memory_is_what_torch_says() -> None:
    held = torch.zeros(1_000_000, device="cuda:0")
    got = values(ClientMetrics().registry)
    assert got['fedkeel_client_gpu_memory_allocated_bytes{device="cuda:0"}'] == torch.cuda.memory_allocated(0)
    assert got['fedkeel_client_gpu_memory_reserved_bytes{device="cuda:0"}'] == torch.cuda.memory_reserved(0)
    assert got['fedkeel_client_gpu_memory_max_allocated_bytes{device="cuda:0"}'] >= held.nbytes
