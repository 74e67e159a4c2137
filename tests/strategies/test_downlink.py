"""What a round sends down: whole, without what a client can rebuild, or compressed; and to the bit on both sides."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from client.app import app
from common.experiment import Experiment
from server.engines.inprocess import InProcessGrid
from strategies.protocol import wire
from strategies.protocol.messages import HEAD, STATE, TrainHead, read_head
from tests.support.faults import FaultyGrid as Lying
from tests.support.faults import Ran, fail, lies, ran, toy
from tests.support.helpers import Simulation, experiment

SPARSE, DENSE = ("top-k", "random-k", "sign"), ("identity", "int8", "bfloat16", "float16")


class Listening(Lying):
    """Remembers what each TRAIN message held: (client, round) -> head and groups."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sent: dict[tuple[str, int], tuple[TrainHead, set[str]]] = {}
        self.bytes: dict[tuple[str, int], int] = {}

    def _client(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            head = read_head(TrainHead, message.content)
            arrays = message.content.array_records[STATE]
            self.sent[head.client, head.round] = head, set(arrays)
            self.bytes[head.client, head.round] = sum(len(array.data) for array in arrays.values())
        return super()._client(message, context)


def listened(folder: Path, settings: Experiment, grid: Listening | None = None) -> tuple[Ran, Listening]:
    grid = grid or Listening(memory=str(folder / "memory"))
    return ran(folder / "run", settings, grid), grid


def hafedho(rounds: int = 5, **given: Any) -> Experiment:
    """HaFedHo on the toy task; `strategy` adds to its hyperparameters."""
    strategy = {"name": "hafedho", "mu": 0.05} | given.pop("strategy", {})
    return toy(rounds=rounds, **given).model_copy(update={"strategy": type(toy().strategy).model_validate(strategy)})


# --- HaFedHo's one vector


@pytest.mark.parametrize("upload", ["phi", "displacement", "raw"])
@pytest.mark.parametrize("schedule", ["constant", "exponential"])
def test_hafedho_needs_one_vector(tmp_path: Path, upload: str, schedule: str) -> None:
    """From round 2 on everyone holds w^{t-1}: g alone, and the same bits as with both. The eta is that of round t-1."""
    local = {"lr": 0.2, "batch_size": 4, "schedule": schedule, "decay": 0.7}
    both, one = (
        hafedho(local=local, server={"lr": 0.9}, strategy={"upload": upload, "downlink": way})
        for way in ("model", "gradient")
    )
    full, _ = listened(tmp_path / "both", both)
    lean, grid = listened(tmp_path / "one", one)
    assert [line["sha256"] for line in lean.history] == [line["sha256"] for line in full.history]
    rest = {"gradient", "loss", "cohort", "rate"}
    assert [grid.sent["0", round][1] for round in range(1, 6)] == [rest | {"model"}, rest, rest, rest, rest]
    assert [grid.bytes["0", round] for round in (1, 2, 5)] == [2 * 56 + 24, 56 + 24, 56 + 24]  # 14 float32, 3 float64


def test_only_who_was_accepted_holds_the_last_model(tmp_path: Path) -> None:
    """Three of five a round: a client absent from round t-1, or whose reply was lost, is sent w^t as well."""
    settings = hafedho(8, round={"sample": 3, "quorum": 1})
    run, grid = listened(tmp_path, settings, Listening(lies("1", fail, 4), memory=str(tmp_path / "memory")))
    accepted = {line["round"]: set(line["accepted"]) for line in run.history}
    assert "1" not in accepted[4]
    held = {key for key, (head, groups) in grid.sent.items() if "model" not in groups}
    assert held == {key for key in grid.sent if key[0] in accepted.get(key[1] - 1, ())}
    assert held
    full, _ = listened(
        tmp_path / "both",
        hafedho(8, round={"sample": 3, "quorum": 1}, strategy={"downlink": "model"}),
        Listening(lies("1", fail, 4)),
    )
    assert run.history[-1]["sha256"] == full.history[-1]["sha256"]


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov", "adam"])
def test_a_server_optimizer_with_moments_sends_the_model(tmp_path: Path, optimizer: str) -> None:
    """Clients do not know the moments."""
    _, grid = listened(tmp_path, hafedho(2, server={"optimizer": optimizer}))
    assert all("model" in groups for _, groups in grid.sent.values())


def test_a_client_that_lost_its_memory_is_sent_everything(tmp_path: Path) -> None:
    """It is left out of the round in which this shows, and starts from nothing in the next; no new generation."""

    def lie(name: str, round: int, reply: Message) -> Message:
        if (name, round) == ("4", 2):
            shutil.rmtree(next((tmp_path / "memory").glob("*/4")))
        return reply

    run, grid = listened(tmp_path, hafedho(4), Listening(lie, memory=str(tmp_path / "memory")))
    assert [line["generation"] for line in run.history] == [1] * 4
    assert run.dropped(3) == {"4": "memory-lost: no model of the last round in this client's memory"}
    assert not run.dropped(4)
    head, groups = grid.sent["4", 4]
    assert (head.accepted, head.holds, "model" in groups) == (0, 0, True)


def test_what_is_rebuilt_wrongly_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose arithmetic differs by one bit is sent the model from then on."""
    from strategies.hafedho import HaFedHo

    restore = HaFedHo.restore

    def off(self: HaFedHo, held: Any, received: Any) -> Any:
        model = restore(self, held, received)["model"]
        return {"model": torch.nextafter(model, torch.full_like(model, 9.0))}

    monkeypatch.setattr(HaFedHo, "restore", off)
    run, _ = listened(tmp_path, hafedho(2, round={"quorum": 1, "sample": 2}, seed=3))
    monkeypatch.undo()
    both, _ = listened(
        tmp_path / "both", hafedho(2, round={"quorum": 1, "sample": 2}, seed=3, strategy={"downlink": "model"})
    )
    asked = set(run.history[0]["accepted"]) & set(run.history[1]["sampled"])
    assert asked
    assert run.dropped(2) == dict.fromkeys(asked, "memory-lost: what was rebuilt is not what the server holds")
    assert run.history[0]["sha256"] == both.history[0]["sha256"]


# --- compression down


@pytest.mark.parametrize("down", DENSE)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_levels_are_compressed_for_every_client(tmp_path: Path, algorithm: str, down: str) -> None:
    """Each vector of the broadcast, its bytes fewer; buffers and scalars whole; identity changes no bit."""
    plain, _ = listened(tmp_path / "plain", toy(algorithm))
    run, grid = listened(tmp_path / "run", toy(algorithm, compression={"down": down}))
    same = run.history[-1]["sha256"] == plain.history[-1]["sha256"]
    assert same == (down == "identity")
    groups = {name.partition("/")[0] for name in grid.sent["0", 2][1]}
    assert groups == ({"model", "control"} if algorithm == "scaffold" else {"model"})
    assert all("/" in name for name in grid.sent["0", 2][1])
    # 14 numbers in four tensors, and the scale of each.
    assert grid.bytes["0", 2] == len(groups) * {"identity": 56, "int8": 14 + 16, "bfloat16": 28, "float16": 28}[down]


@pytest.mark.parametrize("down", SPARSE)
def test_differences_follow_the_model(tmp_path: Path, down: str) -> None:
    """v' <- v' + C(v - v'): what clients hold is the server's copy, and comes as near as the compressor lets it."""
    given: dict[str, Any] = {"compression": {"down": down, "ratio": 0.4}, "local": {"lr": 0.05}}
    run = Simulation(experiment(tmp_path, "fedavg", weights="uniform", **given))
    for _ in range(12):
        run.step()
        held = run.coordinator.downlink["model"]
        assert torch.equal(run.received("0")["model"], held)
        assert not torch.equal(held, run.x)
    run.run(300)
    assert float((run.coordinator.downlink["model"] - run.x).norm()) < 1e-3


@pytest.mark.parametrize("down", SPARSE)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "hafedho", "fedcm"])
def test_absent_clients_get_the_same_model(tmp_path: Path, algorithm: str, down: str) -> None:
    """Parts for those who hold the last one, the whole copy for the others; every client trains from the same bits."""
    settings = toy(algorithm, rounds=7, round={"sample": 3}, compression={"down": down, "ratio": 0.3})
    run, grid = listened(tmp_path, settings)
    accepted = {line["round"]: set(line["accepted"]) for line in run.history}
    for (name, round), (head, groups) in grid.sent.items():
        holds = name in accepted.get(round - 1, ())
        assert (head.holds == round - 1 > 0) == holds
        assert any("/" in group for group in groups) == holds
    again, _ = listened(tmp_path / "ram", settings, Listening())
    assert [line["sha256"] for line in again.history] == [line["sha256"] for line in run.history]


@pytest.mark.parametrize("down", ["int8", "top-k"])
@pytest.mark.parametrize("algorithm", ["scaffold", "hafedho"])
def test_a_resumed_run_sends_the_same(tmp_path: Path, algorithm: str, down: str) -> None:
    """The copies stand in the checkpoint."""
    from tests.server.rounds.test_resume import alike, digits, stopped
    from tests.server.rounds.test_resume import grid as on_disk

    settings = digits(algorithm, 6, compression={"down": down, "ratio": 0.05, "up": "top-k"})
    straight = ran(tmp_path / "straight", settings, on_disk(tmp_path / "straight"))
    stopped(tmp_path / "run", settings, 3)
    alike(ran(tmp_path / "run", settings, on_disk(tmp_path / "run"), resume=True), straight)


def test_parts_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    """A message of a server that compresses, to a client whose experiment does not."""
    reasons: list[str] = []

    class Odd(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            chosen = list(messages)
            for message in chosen:
                if message.metadata.message_type == "train":
                    record = message.content.array_records[STATE]
                    record["model/values"] = wire.to_array(torch.ones(3))
            return super().push_messages(chosen)

        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            reasons.extend(str(r.content.config_records[HEAD].get("reason", "")) for r in replies if r.has_content())
            return replies

    from tests.support.faults import run

    assert run(tmp_path, toy(round={"max_void": 1}), Odd(app)).error is not None
    assert any("received model in parts ['values'], but compression.down is 'none'" in reason for reason in reasons)
