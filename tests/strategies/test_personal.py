"""Personal parts: FedBN, FedPer, FedRep and fine-tuning, against plain torch; what stays with a client."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from client.app import app
from common.data.examples import ClientData, Examples
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings
from common.model import FlatModel, build, personal_names
from common.tasks.base import Task
from common.vector import State, sha256
from server import report
from server.engines.grid import grid
from server.engines.inprocess import InProcessGrid
from server.rounds.prepare import prepare
from server.rounds.records import headline
from server.watch import display
from server.watch.display import Display, cells
from server.watch.metrics import RunMetrics
from server.watch.tracking import scalars
from strategies.protocol import wire
from strategies.protocol.members import sample
from strategies.protocol.messages import BUFFERS, STATE
from strategies.registry import REGISTRY, settled
from tests.server.rounds.test_resume import alike, stopped
from tests.server.rounds.test_resume import grid as on_disk
from tests.strategies.test_flower_loop import start, weights
from tests.support.faults import FaultyGrid, Ran, asked_of, fail, lies, ran
from tests.support.helpers import Simulation

SIZES = (6, 9, 4, 7, 5)
LOCAL = {"lr": 0.1, "steps": 3, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 64}


class Residual(nn.Module):
    """BatchNorm where names do not tell it: in a sequence, and as torchvision's `downsample.1`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.downsample = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))
        self.norm = nn.LayerNorm(4)
        self.groups = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.groups(self.norm(self.layers(x) + self.downsample(x))))
        return y


BATCH_NORM = {
    *(f"layers.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
    *(f"downsample.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
}
HEAD = {"fc.weight", "fc.bias"}


class Groups(Task):
    """Five clients with data of their own kind, in float64. A batch holds all of a client's examples."""

    dtype = torch.float64

    def model(self) -> nn.Module:
        return Residual().double()

    def names(self) -> list[str]:
        return [str(i) for i in range(len(SIZES))]

    def client(self, name: str, file: str | None = None) -> ClientData:
        source = torch.Generator().manual_seed(int(name))

        def drawn(count: int) -> Examples:
            inputs = torch.randn(count, 3, generator=source, dtype=torch.float64) * (1 + int(name)) + int(name)
            return Examples(inputs, torch.randint(3, (count,), generator=source))

        return ClientData(drawn(SIZES[int(name)]), drawn(3 + int(name)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        logits = model(batch[0])
        loss = functional.cross_entropy(logits, batch[1], reduction="sum").item()
        return {"loss": loss, "accuracy": float((logits.argmax(1) == batch[1]).sum())}

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        return model.get_submodule("fc")

    def central(self) -> Examples:
        return self.client("0").evaluate


def task(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`[task] name = "tests.strategies.test_personal:task"`."""
    return Groups()


def settings(strategy: str, **tables: Any) -> Experiment:
    values: dict[str, Any] = {
        "rounds": 4,
        "round": {"sample": 2},
        "task": {"name": "tests.strategies.test_personal:task"},
        "strategy": {"name": strategy, **tables.pop("options", {})},
        "local": LOCAL,
        **tables,
    }
    return Experiment.model_validate(values)


# --- the same in plain torch


def trained(
    module: nn.Module, data: Examples, names: Iterable[str], steps: int, lr: float = LOCAL["lr"], **more: float
) -> None:
    """Full-batch SGD on the parameters named; the others are frozen."""
    chosen = set(names)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in chosen)
    given = {"momentum": LOCAL["momentum"], "weight_decay": LOCAL["weight_decay"]} | more
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr, **given)
    module.train()
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(module(data.inputs), data.targets).backward()
        optimizer.step()


Change = Callable[[nn.Module, Examples], None]


class Plain:
    """A federation with personal parts, written out: `shared` is the server's part, `own` that of each client."""

    def __init__(self, experiment: Experiment, personal: set[str], head_steps: int = 0) -> None:
        self.experiment, self.personal, self.head_steps = settled(experiment)[1], personal, head_steps
        self.task = Groups()
        module = build(self.task, experiment.seed).module
        self.start = {name: value.clone() for name, value in module.state_dict().items()}
        self.shared = {name: value for name, value in self.start.items() if name not in personal}
        self.own = {name: {key: self.start[key] for key in personal} for name in self.task.names()}
        self.sampled: set[str] = set()

    def module(self, name: str) -> nn.Module:
        """The model of client `name`: the server's, with its own part."""
        module = Residual().double()
        module.load_state_dict(copy.deepcopy(self.shared | self.own[name]))
        return module

    def round(self, number: int) -> None:
        chosen = sample(self.experiment.seed, number, 0, self.task.names(), self.experiment.round.sample or 5)
        self.sampled |= set(chosen)
        states = {}
        for name in chosen:
            module, data = self.module(name), self.task.client(name).train
            parameters = [key for key, _ in module.named_parameters()]
            steps, head = LOCAL["steps"], [key for key in parameters if key in self.personal]
            if self.head_steps:
                trained(module, data, head, self.head_steps)
                parameters = [key for key in parameters if key not in self.personal]
            trained(module, data, parameters, int(steps))
            states[name] = {key: value.detach().clone() for key, value in module.state_dict().items()}
        uniform = self.experiment.strategy.options.get("weights") == "uniform"
        mass = {name: 1 if uniform else SIZES[int(name)] for name in chosen}
        for key in self.shared:
            parts = [states[name][key] * mass[name] for name in chosen]
            whole = not parts[0].is_floating_point()
            self.shared[key] = states[chosen[0]][key] if whole else sum(parts) / sum(mass.values())
        for name in chosen:
            self.own[name] = {key: states[name][key] for key in self.personal}

    def evaluated(
        self, name: str, change: Callable[[nn.Module, Examples], None] = lambda m, d: None
    ) -> dict[str, float]:
        module, data = self.module(name), self.task.client(name)
        change(module, data.train)
        module.eval()
        with torch.no_grad():
            sums = self.task.metrics(module, (data.evaluate.inputs, data.evaluate.targets))
        return {key: value / len(data.evaluate) for key, value in sums.items()}


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=0, atol=1e-10)


def own_part(model: FlatModel, memory: State) -> dict[str, Tensor]:
    """A client's personal tensors by name, from its memory."""
    named = {name: slot.view(memory["personal.parameters"]) for name, slot in model.personal_layout.items()}
    for group, layout in model.buffer_layouts.items():
        if group.startswith("personal."):
            named |= {name: slot.view(memory[group]) for name, slot in layout.items()}
    return named


COMPOSED: dict[str, tuple[set[str], int]] = {"fedbn": (BATCH_NORM, 0), "fedper": (HEAD, 0), "fedrep": (HEAD, 2)}


def composed(strategy: str, **tables: Any) -> Experiment:
    """FedRep with 2 steps on the head; all else as registered."""
    return settings(strategy, **({"personal": {"head_steps": 2}} if strategy == "fedrep" else {}), **tables)


@pytest.mark.parametrize("strategy", COMPOSED)
def test_each_is_what_plain_torch_makes(strategy: str, tmp_path: Path) -> None:
    """Shared part, every client's own part with its statistics and counters, and every client's metrics, after each of
    four rounds with 2 of 5 clients. With momentum and weight decay: in FedRep neither moves the frozen part."""
    experiment = composed(strategy, seed=1)
    plain, driver = Plain(experiment, *COMPOSED[strategy]), Simulation(experiment)
    result = ran(tmp_path, experiment, FaultyGrid())
    model = driver.model
    for number in range(1, 5):
        plain.round(number)
        driver.step()
        assert {name for name in driver.members if driver.memory(name)} == plain.sampled
        for name, slot in model.layout.items():
            assert close(slot.view(driver.x), plain.shared[name]), name
        for group, layout in model.buffer_layouts.items():
            for name, slot in layout.items() if not group.startswith("personal.") else ():
                assert close(slot.view(driver.coordinator.buffers[group]), plain.shared[name]), name
        for client in plain.sampled:
            mine = own_part(model, driver.memory(client))
            assert mine.keys() == plain.personal
            assert all(close(value, plain.own[client][name]) for name, value in mine.items())
        expected = {name: plain.evaluated(name) for name in driver.members}
        record = result.history[number - 1]
        assert record["central"] == {}
        assert "clients" not in record
        for key, summary in record["personal"].items():
            values = {name: metrics[key] for name, metrics in expected.items()}
            sizes = {name: 3 + int(name) for name in values}
            total = sum(sizes.values())
            assert summary["n"] == 5
            assert summary["mean"] == pytest.approx(sum(values.values()) / 5, abs=1e-10)
            weighted = sum(sizes[name] * value for name, value in values.items()) / total
            assert summary["weighted"] == pytest.approx(weighted, abs=1e-10)
            worst = (max if key == "loss" else min)(values.values())
            assert summary["worst"] == pytest.approx(worst, abs=1e-10)
            assert values[summary["client"]] == pytest.approx(worst, abs=1e-10)
    assert len(plain.sampled) == 3, "two were never sampled: they were evaluated with the initial part"
    assert result.history[-1]["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})


# --- which parts


def names(*parts: str) -> set[str]:
    groups = Groups()
    return personal_names(groups, groups.model(), parts)


def test_parts_by_module_type_and_by_pattern() -> None:
    """BatchNorm with parameters and buffers wherever it stands; LayerNorm and GroupNorm only if asked for."""
    assert names("batch-norm") == BATCH_NORM
    assert names("layer-norm") == {"norm.weight", "norm.bias"}
    assert names("group-norm") == {"groups.weight", "groups.bias"}
    assert names("head") == HEAD
    assert names("layers.*") == {"layers.0.weight", "layers.0.bias"} | {n for n in BATCH_NORM if "layers" in n}
    assert names("*.bias", "head") == {n for n, _ in Residual().named_parameters() if "bias" in n} | HEAD
    assert names() == set()


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("batch-norm", nn.BatchNorm1d(2)),
        ("batch-norm", nn.BatchNorm2d(2)),
        ("batch-norm", nn.BatchNorm3d(2)),
        ("batch-norm", nn.SyncBatchNorm(2)),
        ("", nn.InstanceNorm2d(2, affine=True)),
        ("group-norm", nn.GroupNorm(1, 2)),
        ("layer-norm", nn.LayerNorm(2)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_kind_of_normalization(kind: str, layer: nn.Module) -> None:
    """By its class, not by its name."""
    module = nn.ModuleDict({"bn_in_name_only": nn.Linear(2, 2), "x": layer, "fc": nn.Linear(2, 2)})
    every = {name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name.startswith("x.")}
    for part in ("batch-norm", "layer-norm", "group-norm"):
        if part == kind:
            assert personal_names(Groups(), module, [part]) == every
        else:
            with pytest.raises(SettingsError, match=f"'{part}' is no part of this model"):
                personal_names(Groups(), module, [part])


@pytest.mark.parametrize(
    ("personal", "words"),
    [
        (
            {"parts": ["convolutions.*"]},
            "personal.parts: 'convolutions.*' is no part of this model; allowed: batch-norm, layer-norm, group-norm, "
            "head, patterns of names like downsample.0.bias, downsample.0.weight, downsample.1.num_batches_tracked",
        ),
        ({"parts": ["*"]}, "all trainable parameters are personal: there is nothing to share"),
        (
            {"head_steps": 2},
            "personal.head_steps = 2 needs personal.parts, the part of the model that is personal",
        ),
        (
            {"parts": ["downsample.1.*"], "head_steps": 2},
            "personal.head_steps = 2: the personal part ['downsample.1.*'] has nothing to train",
        ),
    ],
)
def test_refusals_before_round_1(personal: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        prepare(settings("fedavg", personal=personal))
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("personal", "words"),
    [
        ({"finetune_lr": 0.1}, "finetune_lr needs finetune_steps > 0"),
        ({"parts": "head"}, "valid list"),
        ({"finetune_steps": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_without_meaning(personal: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings("fedavg", personal=personal)


def test_a_head_that_is_frozen_or_missing_is_no_part() -> None:
    """What does not train cannot be personal: it is alike everywhere as it is."""

    class Frozen(Groups):
        def model(self) -> nn.Module:
            module = Residual().double()
            module.fc.requires_grad_(False)
            return module

    class Headless(Groups):
        def output_layer(self, model: nn.Module) -> None:
            return None

    for broken in (Frozen(), Headless()):
        with pytest.raises(SettingsError, match="'head' is no part of this model"):
            build(broken, 0, personal=["head"])


def test_registered_compositions() -> None:
    """Each is FedAvg with personal parts, which a file may change."""
    expected = {
        "fedbn": (["batch-norm"], 0, "uniform"),
        "fedper": (["head"], 0, "data"),
        "fedrep": (["head"], 10, "uniform"),
    }
    for name, (parts, head_steps, weighting) in expected.items():
        experiment = settled(settings(name))[1]
        assert (experiment.personal.parts, experiment.personal.head_steps) == (parts, head_steps)
        assert settled(experiment)[0].weights == weighting
        assert settled(experiment)[0].memory_kind(experiment) == "own"
        assert REGISTRY[name].cls is REGISTRY["fedavg"].cls
    assert settled(settings("fedbn", personal={"parts": ["layer-norm"]}))[1].personal.parts == ["layer-norm"]


# --- what is sent, and what is not


def test_personal_tensors_never_leave_a_client(tmp_path: Path) -> None:
    """Vectors and buffers on the wire have the sizes of what is shared: 2 S d floats less those of the personal part;
    an evaluation sends numbers alone."""
    sizes: list[tuple[str, int, dict[str, int]]] = []

    def look(name: str, round: int, reply: Message) -> Message:
        held = {
            f"{record}/{key}": wire.from_array(array).numel()
            for record, arrays in reply.content.array_records.items()
            for key, array in arrays.items()
        }
        sizes.append((reply.metadata.message_type, round, held))
        return reply

    ran(tmp_path, settings("fedbn", rounds=2), FaultyGrid(look))
    plain = build(Groups(), 0)
    total, own = len(plain.vector), 4 + 4
    train = [held for kind, _, held in sizes if kind == "train"]
    assert len(train) == 4
    assert all(held == {f"{STATE}/delta": total - own} for held in train), "all buffers of this model are personal"
    assert all(not held for kind, _, held in sizes if kind == "evaluate")
    sizes.clear()
    ran(tmp_path / "head", settings("fedper", rounds=1), FaultyGrid(look))
    train = [held for kind, _, held in sizes if kind == "train"]
    shared = {f"{BUFFERS}/buffers.float64": 16, f"{BUFFERS}/buffers.int64": 2}
    assert all(held == {f"{STATE}/delta": total - 15, **shared} for held in train)


def test_messages_to_clients_hold_the_shared_part_alone(tmp_path: Path) -> None:
    down: list[dict[str, int]] = []

    class Watching(FaultyGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for message in messages:
                if asked_of(message)[1]:
                    records = message.content.array_records
                    down.append({key: wire.from_array(v).numel() for r in records.values() for key, v in r.items()})
            return super().push_messages(messages)

    ran(tmp_path, settings("fedbn", rounds=1), Watching())
    assert all(held == {"model": len(build(Groups(), 0).vector) - 8} for held in down)
    assert len(down) == 2 + 5


# --- memory


@pytest.mark.parametrize("strategy", COMPOSED)
def test_a_reply_that_is_lost_leaves_the_own_part(strategy: str, tmp_path: Path) -> None:
    """What was trained with it is not accepted: such a client trains and evaluates with its last accepted part."""
    everyone = composed(strategy, round={"sample": 5})
    result = ran(tmp_path, everyone, FaultyGrid(lies("3", fail), memory=str(tmp_path / "memory")))
    driver = Simulation(everyone)
    driver.step()
    driver.step(lost="3")
    before = own_part(driver.model, driver.memory("3"))
    assert result.history[1]["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})
    module = driver.model.module
    driver.model.load(driver.x, driver.coordinator.buffers)
    driver.model.load_personal(driver.memory("3"))
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    driver.step()
    driver.step()
    assert result.history[-1]["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})


def test_a_wiped_disk_starts_the_own_part_anew(tmp_path: Path) -> None:
    """Of that client alone, and the run goes on: from then on it is as one that was never sampled."""
    memory = tmp_path / "memory"

    def wipe(name: str, round: int, reply: Message) -> Message:
        if (name, round, reply.metadata.message_type) == ("4", 2, "evaluate"):
            shutil.rmtree(next(memory.glob("*/3")))
        return reply

    experiment = settings("fedper", round={"sample": 5}, rounds=3)
    result = ran(tmp_path / "run", experiment, FaultyGrid(wipe, memory=str(memory)))
    assert [line["generation"] for line in result.history] == [1, 1, 1]
    assert [line["dropped"] for line in result.history] == [{}, {}, {}]
    plain = Plain(experiment, HEAD)
    plain.round(1)
    plain.round(2)
    plain.own["3"] = {key: plain.start[key] for key in HEAD}
    plain.round(3)
    losses = [plain.evaluated(name)["loss"] for name in plain.task.names()]
    assert result.history[-1]["personal"]["loss"]["mean"] == pytest.approx(sum(losses) / 5, abs=1e-10)


def test_a_bound_algorithm_starts_all_of_them_anew(tmp_path: Path) -> None:
    """SCAFFOLD's trackers are lost with the disk, so every client's memory begins again, its personal part too."""
    memory = tmp_path / "memory"

    def wipe(name: str, round: int, reply: Message) -> Message:
        if (name, round, reply.metadata.message_type) == ("4", 2, "evaluate"):
            shutil.rmtree(next(memory.glob("*/3")))
        return reply

    experiment = settings("scaffold", round={"sample": 5}, rounds=3, personal={"parts": ["head"]})
    result = ran(tmp_path / "run", experiment, FaultyGrid(wipe, memory=str(memory)))
    assert [line["generation"] for line in result.history] == [1, 1, 2]
    assert result.history[2]["void"][0]["cause"] == "client memory of 3 is lost: new generation 2"


# --- with everything else


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "scaffold"},
        {"strategy": "scaffold", "personal": {"head_steps": 2}},
        {"strategy": "mime"},
        {"strategy": "fedavg", "compression": {"up": "top-k", "ratio": 0.3}},
        {"strategy": "fedavg", "compression": {"up": "sign", "feedback": "ef21", "down": "top-k", "ratio": 0.3}},
        {"strategy": "fedavg", "local": {"optimizer": "adam", "moments": "keep"}},
        {"strategy": "fedavg", "local": {"optimizer": "adam", "moments": "keep"}, "personal": {"head_steps": 2}},
        {"strategy": "fedavg", "local": {"optimizer": "muon", "moments": "keep"}},
        {"strategy": "fedavg", "personal": {"head_steps": 1, "finetune_steps": 2, "finetune_lr": 0.05}},
        {"strategy": "fedprox"},
        {"strategy": "fednova", "personal": {"head_steps": 2}},
    ],
    ids=str,
)
def test_composes_and_resumes(given: dict[str, Any], tmp_path: Path) -> None:
    """Through messages as without them; stopped and resumed is straight, the clients' own metrics too."""
    given = dict(given)
    personal = {"parts": ["head", "batch-norm"], **given.pop("personal", {})}
    local = {"lr": 0.05, "batch_size": 4, **given.pop("local", {})}
    experiment = settings(given.pop("strategy"), rounds=4, local=local, personal=personal, **given)
    straight = ran(tmp_path / "straight", experiment, on_disk(tmp_path / "straight"))
    assert not any(line["dropped"] for line in straight.history)
    assert all(math.isfinite(line["personal"]["loss"]["mean"]) for line in straight.history)
    stopped(tmp_path / "run", experiment, 2)
    alike(ran(tmp_path / "run", experiment, on_disk(tmp_path / "run"), resume=True), straight)
    driver = Simulation(experiment)
    driver.run(4)
    assert straight.history[-1]["sha256"] == sha256({"model": driver.x, **driver.coordinator.buffers})
    assert weights(start(experiment, rounds=4)) == straight.history[-1]["sha256"]
    for name in driver.members:
        for key, value in driver.memory(name).items():
            if not key.startswith(("personal.", "optimizer.")):
                assert value.shape in ((), driver.x.shape), key


def test_kept_moments_cover_both_parts() -> None:
    """One Adam over shared and personal parameters, or one for each phase of FedRep; counters go on."""
    local = {"lr": 0.01, "steps": 3, "optimizer": "adam", "moments": "keep"}
    one = Simulation(settings("fedper", local=local, round={"sample": 5}))
    one.run(2)
    memory = one.memory("0")
    assert memory["optimizer.all.vector.0.step"].item() == 6
    assert len(memory["optimizer.all.vector.0.exp_avg"]) == len(one.x) + 15
    two = Simulation(settings("fedrep", local=local, round={"sample": 5}, personal={"head_steps": 2}))
    two.run(2)
    memory = two.memory("0")
    assert memory["optimizer.personal.vector.0.step"].item() == 4
    assert memory["optimizer.shared.vector.0.step"].item() == 6
    assert len(memory["optimizer.personal.vector.0.exp_avg"]) == 15


# --- fine-tuning


def tuned(steps: int, lr: float | None = None, **tables: Any) -> Experiment:
    personal = {"finetune_steps": steps} | ({"finetune_lr": lr} if lr else {}) | tables.pop("personal", {})
    return settings("fedavg", personal=personal, **tables)


@pytest.mark.parametrize("parts", [[], ["head"]], ids=["whole", "head"])
@pytest.mark.parametrize("lr", [None, 0.03])
def test_fine_tuning_is_what_plain_torch_makes(parts: list[str], lr: float | None, tmp_path: Path) -> None:
    """Two plain steps on a client's own training examples before it evaluates, all of them, at its own rate."""
    experiment = tuned(2, lr, personal={"parts": parts} if parts else {}, rounds=2)
    result = ran(tmp_path, experiment)
    plain = Plain(experiment, HEAD if parts else set())

    def tune(module: nn.Module, data: Examples) -> None:
        trained(module, data, [name for name, _ in module.named_parameters()], 2, lr or float(LOCAL["lr"]))

    for number in (1, 2):
        plain.round(number)
        expected = [plain.evaluated(name, tune)["loss"] for name in plain.task.names()]
        found = result.history[number - 1]["personal"]["loss"]
        assert found["mean"] == pytest.approx(sum(expected) / 5, abs=1e-10)
        assert found["worst"] == pytest.approx(max(expected), abs=1e-10)


def test_fine_tuning_is_forgotten(tmp_path: Path) -> None:
    """Weights, memories and the global model's own evaluation are those of a run without it; the clients' numbers are
    under another name, and the same again in a second run."""
    kept = {"local": {**LOCAL, "optimizer": "adam", "momentum": 0.0, "moments": "keep"}}
    result, again = (ran(tmp_path / name, tuned(3, **kept)) for name in "ab")
    plain = ran(tmp_path / "plain", settings("fedavg", evaluate={"clients": "all"}, **kept))
    assert result.final == plain.final
    for ours, second, theirs in zip(result.history, again.history, plain.history, strict=True):
        assert ours["central"] == theirs["central"] != {}
        assert "clients" not in ours
        assert "personal" not in theirs
        assert ours["personal"] == second["personal"]
        assert ours["personal"]["loss"]["mean"] != theirs["clients"]["loss"]["mean"]


def test_a_client_without_training_examples_is_evaluated_untuned(tmp_path: Path) -> None:
    """It has nothing to tune on."""
    untuned = Groups.client

    class Watcher(Groups):
        def client(self, name: str, file: str | None = None) -> ClientData:
            data = untuned(self, name)
            nothing = Examples(data.train.inputs[:0], data.train.targets[:0])
            return ClientData(nothing, data.evaluate) if name == "4" else data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.strategies.test_personal.Groups", Watcher)
        result = ran(tmp_path, tuned(2, rounds=1))
    assert result.history[0]["personal"]["loss"]["n"] == 5


# --- evaluation


@pytest.mark.parametrize("clients", ["auto", "all", "sampled", "none"])
def test_whose_models_are_evaluated(clients: str, tmp_path: Path) -> None:
    """auto is all: no global model can stand for them."""
    result = ran(tmp_path, settings("fedper", rounds=2, evaluate={"clients": clients}))
    counts = [(line["personal"].get("loss") or {"n": 0})["n"] for line in result.history]
    assert counts == {"auto": [5, 5], "all": [5, 5], "sampled": [2, 2], "none": [0, 0]}[clients]


def test_evaluation_is_the_same_in_every_engine(tmp_path: Path) -> None:
    """In this process from RAM and from disk, and under Flower's loop."""
    experiment = settings("fedrep", personal={"finetune_steps": 1})
    ram = ran(tmp_path / "ram", experiment, InProcessGrid(app))
    disk = ran(tmp_path / "disk", experiment, on_disk(tmp_path))
    assert [line["personal"] for line in ram.history] == [line["personal"] for line in disk.history]
    flower = start(experiment, rounds=4)
    for number, line in enumerate(ram.history, start=1):
        for key in ("loss", "accuracy"):
            got = flower.evaluate_metrics_clientapp[number][key]
            assert got == pytest.approx(line["personal"][key]["weighted"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", COMPOSED)
def test_two_workers(strategy: str, tmp_path: Path) -> None:
    """A client trains in one process and is evaluated in another; a run that is resumed by workers goes on alike."""
    experiment = composed(strategy)
    straight = ran(tmp_path / "one", experiment, on_disk(tmp_path / "one"))
    with grid("client.app:app", 2) as workers:
        alike(ran(tmp_path / "two", experiment, workers), straight)
    stopped(tmp_path / "run", experiment, 2)
    with grid("client.app:app", 2, memory=tmp_path / "run" / "memory") as workers:
        alike(ran(tmp_path / "run", experiment, workers, resume=True), straight)


# --- what a run leaves


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(tmp_path_factory.mktemp("done"), settings("fedbn"))


def test_the_saved_model_loads_and_holds_the_initial_personal_part(done: Ran) -> None:
    """It is nobody's: the shared part as trained, the rest as at the start."""
    saved = load_file(done.folder.path / "model.safetensors")
    module = Residual().double()
    module.load_state_dict(saved)
    initial = build(Groups(), 0)
    for name, value in initial.module.state_dict().items():
        assert torch.equal(value, saved[name]) == (name in BATCH_NORM), name
    model = build(Groups(), 0, personal=["batch-norm"])
    shared = torch.cat([saved[name].reshape(-1) for name in model.layout])
    assert sha256({"model": shared}) == done.history[-1]["sha256"]


def test_display_metrics_report_and_events_show_personal_numbers(done: Ran, tmp_path: Path) -> None:
    """As the run's headline, under their own name."""
    last = done.history[-1]
    assert headline(last).value == last["personal"]["accuracy"]["weighted"]
    assert cells(last)[1] == f"{last['personal']['accuracy']['weighted']:.4f}"
    Display("title", 4).show(last)
    tags = dict(scalars(last))
    assert tags["personal/loss/worst"] == last["personal"]["loss"]["worst"]
    assert not any(tag.startswith(("clients/", "central/")) for tag in tags)
    metrics = RunMetrics()
    metrics.record(last)
    for kind in ("weighted", "mean", "worst"):
        found = metrics.registry.get_sample_value(
            "fedkeel_metric", {"metric": "accuracy", "data": "personal", "summary": kind}
        )
        assert found == last["personal"]["accuracy"][kind]
    table = report.write([done.folder.path], [0.0], tmp_path / "report.html", window=1)
    assert f"| {last['personal']['accuracy']['weighted']:.4f} own |" in table
    assert "of the clients' own models after round" in display.summary(done.history, tmp_path, None)
