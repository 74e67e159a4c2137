"""Tasks of any shape, and parts of a named task that are the user's own: model, loss, weights of classes, algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from common import tasks
from common.data.examples import Examples, Records, pick
from common.data.grant import Grant, granting
from common.errors import Denied, SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.tasks.base import Task
from common.tasks.digits import _table
from common.tasks.supervised import Supervised
from server.rounds.prepare import prepare
from strategies.base import FederatedStrategy, hyperparameters
from tests.support.faults import ran, run
from tests.support.site_grid import SiteGrid

# --- what an experiment of these tests names


class Net(nn.Module):
    def __init__(self, hidden: int = 8, inputs: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def smooth_of_five(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets.repeat(1, 5)[:, :5])


@hyperparameters
class Part(FederatedStrategy):
    """A part of each client's change."""

    part: float = 1.0

    def local(self, work: Any) -> Any:
        for _ in work.steps():
            pass
        return work.upload(delta=work.delta() * self.part)


class Boxes(Supervised):
    """Pairs of inputs in a dict, and lists of boxes of unequal number: nothing here is a single tensor."""

    def pool(self) -> Records:
        source = torch.Generator().manual_seed(0)
        inputs = {"left": torch.randn(60, 3, generator=source), "right": torch.randn(60, 2, generator=source)}
        boxes = [torch.randn(1 + i % 3, 4, generator=source) for i in range(60)]
        return Records(inputs, boxes)

    def labels(self) -> Any:
        return np.array([len(each) - 1 for each in self.pool().targets])

    def model(self) -> nn.Module:
        return nn.Linear(5, 4)

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(torch.cat([inputs["left"], inputs["right"]], 1))

    def error(self, outputs: Tensor, targets: list[Tensor]) -> Tensor:
        return torch.stack([(own - boxes).pow(2).mean() for own, boxes in zip(outputs, targets, strict=True)]).mean()


def boxes(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    return Boxes(partition, seed)


HERE = __name__


def experiment(**tables: Any) -> Experiment:
    values = {"rounds": 2, "local": {"lr": 0.1}, "partition": {"clients": 3}, "tracking": {"use": []}, **tables}
    return Experiment.model_validate(values)


# --- tasks of any shape


def test_records_give_batches_of_their_own_make() -> None:
    held = Records({"a": torch.arange(6.0), "b": (torch.arange(12.0).view(6, 2),)}, [torch.ones(i) for i in range(6)])
    inputs, targets = held.batch(torch.tensor([4, 1]))
    assert inputs["a"].tolist() == [4.0, 1.0]
    assert inputs["b"][0].tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert [len(each) for each in targets] == [4, 1]
    part = pick(held, np.array([0, 5]))
    assert (len(part), len(part.targets[1])) == (2, 5)
    assert len(held.to(torch.device("cpu"))) == 6
    padded = Records(held.inputs, held.targets, lambda x, y: (x["a"], nn.utils.rnn.pad_sequence(y)))
    assert pick(padded, np.array([2, 3])).batch(torch.tensor([0, 1]))[1].shape == (3, 2)


@pytest.mark.parametrize("given", [(torch.ones(3), torch.ones(4)), (torch.ones(3), "abc"), ((torch.ones(2), [1]), [1])])
def test_records_that_do_not_fit_are_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(SettingsError, match="Records: "):
        Records(*given)


@pytest.mark.parametrize("kind", ["iid", "quantity", "size", "dirichlet", "shards"])
def test_a_task_without_a_single_tensor_is_split_and_learns(kind: str, tmp_path: Path) -> None:
    given = experiment(
        task={"name": f"{HERE}:boxes"}, partition={"kind": kind, "clients": 3, "min_examples": 2}, rounds=6
    )
    history = ran(tmp_path, given).history
    losses = [record["clients"]["loss"]["weighted"] for record in history]
    assert losses[-1] < losses[0]
    assert history[-1]["headline"] == {"metric": "loss", "higher": False}


def test_a_split_by_classes_needs_classes() -> None:
    class Plain(Boxes):
        def labels(self) -> None:
            return None

    with pytest.raises(SettingsError, match="'dirichlet' splits by classes, and Plain has none"):
        Plain(PartitionSettings(kind="dirichlet"), 0).assignment.hash  # noqa: B018
    with pytest.raises(SettingsError, match="an input of Boxes is no single tensor"):
        Boxes(PartitionSettings(shift="noise"), 0).assignment.hash  # noqa: B018


def test_a_task_that_shifts_nothing_says_so() -> None:
    settings = experiment(task={"name": "tests.support.measured:task"}, partition={"shift": "noise"})
    with pytest.raises(SettingsError, match="Measured shifts no data"):
        prepare(settings)


# --- ready ones


def write_ink(folder: Path, table: Any) -> None:
    """Digits (n, 65), twice as large, and masks of their ink: class 1 of digits up to 4, class 2 of the others."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for place, row in enumerate(table):
        large = np.kron(row[:-1].reshape(8, 8), np.ones((2, 2)))
        mask = ((large > 8) * (1 + (row[-1] > 4))).astype(np.uint8)
        Image.fromarray((large * 15).astype(np.uint8)).save(folder / "images" / f"{place}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{place}.png")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as numbers, as four labels (the bits of the digit), and as images with masks of ink."""
    folder = tmp_path_factory.mktemp("digits")
    table = _table()
    images, labels = table[:, :-1], table[:, -1].astype(int)
    parts = {"x_train": images[:1400] / 16, "x_test": images[1400:] / 16}
    numbers = {"y_train": labels[:1400].astype(float), "y_test": labels[1400:].astype(float)}
    np.savez(folder / "numbers.npz", **parts, **numbers)
    bits = np.stack([labels >> bit & 1 for bit in range(4)], 1)
    np.savez(folder / "labels.npz", **parts, y_train=bits[:1400], y_test=bits[1400:])
    write_ink(folder / "ink" / "train", table[:80])
    write_ink(folder / "ink" / "test", table[80:110])
    return folder


READY = {
    "regression": ({"file": "numbers.npz"}, ["r2"], {"loss", "mae", "rmse", "r2"}, 0.02),
    "multilabel": ({"file": "labels.npz"}, ["f1", "auroc"], {"loss", "accuracy", "f1", "auroc"}, 0.3),
    "segmentation": ({"file": "ink", "classes": 3, "width": 4}, ["dice"], {"iou", "iou.2", "dice", "accuracy"}, 0.3),
}


def ready(name: str, folder: Path, **tables: Any) -> Experiment:
    options, metrics, _, lr = READY[name]
    task = {"name": name, **options, "file": str(folder / options["file"])}
    return experiment(task=task, local={"lr": lr}, evaluate={"metrics": metrics, "clients": "all"}, **tables)


@pytest.mark.parametrize("name", READY)
def test_ready_tasks_learn_from_files(name: str, digits: Path, tmp_path: Path) -> None:
    """What they are judged by is there, at the server and over clients alike, and becomes better."""
    history = ran(tmp_path, ready(name, digits, rounds=8)).history
    first, last = history[0], history[-1]
    assert READY[name][2] <= set(last["central"])
    assert set(last["central"]) == set(last["clients"]) == set(last["each"])
    assert last["central"]["loss"] < first["central"]["loss"]
    head = last["headline"]
    assert (last["central"][head["metric"]] > first["central"][head["metric"]]) == head["higher"]


@pytest.mark.parametrize("name", READY)
def test_a_site_brings_a_file_of_its_own(name: str, digits: Path) -> None:
    task = tasks.create(ready(name, digits).task, PartitionSettings(clients=3), 0)
    whole = task.client("site-1", str(digits / READY[name][0]["file"]))
    assert len(whole.train) + len(whole.evaluate) == len(task.pool())  # type: ignore[attr-defined]
    other = digits / ("numbers.npz" if name == "multilabel" else "labels.npz" if name == "regression" else "none")
    with pytest.raises(SettingsError):
        task.client("site-1", str(other))


def test_the_server_may_hold_the_only_test_set(digits: Path) -> None:
    """Where sites bring their data: all of a file, or its test part; of another shape it is refused."""
    options = {"shape": [64], "outputs": 4, "test_file": str(digits / "labels.npz")}
    task = tasks.create(TaskSettings(name="multilabel", **options), PartitionSettings(), 0)
    assert (task.names(), len(task.central() or ())) == ([], 397)
    other = tasks.create(TaskSettings(name="multilabel", **options | {"outputs": 3}), PartitionSettings(), 0)
    with pytest.raises(SettingsError, match=r"one example is \(64,\) -> 4; this run's are \(64,\) -> 3"):
        other.central()


def test_masks_that_do_not_fit_are_named(digits: Path, tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "images" / "a.png")
    settings = TaskSettings(name="segmentation", file=str(tmp_path), classes=2)
    with pytest.raises(SettingsError, match=r"a\.png has no mask of its name"):
        tasks.create(settings, PartitionSettings(clients=1), 0)
    Image.fromarray(np.zeros((4, 8), np.uint8)).save(tmp_path / "masks" / "a.png")
    with pytest.raises(SettingsError, match=r"a\.png is \(8, 4\) pixels and its image \(8, 8\)"):
        tasks.create(settings, PartitionSettings(clients=1), 0)
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "masks" / "a.png")
    with pytest.raises(SettingsError, match="masks hold class 7; allowed: 0 to 1, 255"):
        tasks.create(settings, PartitionSettings(clients=1), 0)


def test_pixels_of_no_class_change_nothing(digits: Path) -> None:
    """Loss and metrics of an image whose half is 255 are those of the other half."""
    task = tasks.create(TaskSettings(name="segmentation", file=str(digits / "ink"), classes=3), PartitionSettings(), 0)
    logits = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2], [-100] * 4, [-100] * 4])[None]
    half = task.error(logits[:, :, :2], targets[:, :2])  # type: ignore[attr-defined]
    assert torch.equal(task.error(logits, targets), half)  # type: ignore[attr-defined]


def test_a_site_whose_data_the_model_cannot_learn_from_is_told_before_round_1(digits: Path, tmp_path: Path) -> None:
    """Once, at that site: its log names the line; the server hears a code."""
    files = {"site-0": digits / "labels.npz", "site-1": digits / "labels.npz"}
    task = {"name": "multilabel", "shape": [64], "outputs": 4, "loss": f"{HERE}:smooth_of_five"}
    grid = SiteGrid(files, "", **{"allow-tasks": f"{HERE}:smooth_of_five"})
    given = experiment(task=task, round={"wait_for": 2, "deadline_s": 3.0})
    found = run(tmp_path, given, grid, strict=True)
    assert "data-unfit: this experiment's model cannot take one step on the site's data" in str(found.error)
    assert found.history == []


# --- parts of one's own

PARTS = {"model": f"{HERE}:Net", "model_args": {"hidden": 12}, "loss": f"{HERE}:smooth"}


def test_model_loss_and_algorithm_of_ones_own(tmp_path: Path) -> None:
    """The whole of a change is FedAvg's; the run folder's settings mean the same as the file."""
    own = experiment(task={"name": "digits", **PARTS}, strategy={"name": f"{HERE}:Part"})
    usual = experiment(task={"name": "digits", **PARTS})
    first, second = ran(tmp_path / "own", own), ran(tmp_path / "usual", usual)
    assert first.history[-1]["sha256"] == second.history[-1]["sha256"]
    assert first.history[-1]["central"]["loss"] > 0
    half = ran(
        tmp_path / "half", experiment(task=own.task.model_dump(), strategy={"name": f"{HERE}:Part", "part": 0.5})
    )
    assert half.history[-1]["sha256"] != first.history[-1]["sha256"]
    kept = Experiment.load(tmp_path / "half" / "experiment.toml")
    assert kept.strategy.options["part"] == 0.5
    assert prepare(kept).model.layout == prepare(own).model.layout


WRONG = {
    "no such module": ({"model": "absent_module:Net"}, "cannot be imported"),
    "wrong arguments": (
        {"model": f"{HERE}:Net", "model_args": {"hidden": "x"}},
        "'x'} failed: TypeError",
    ),
    "no module": ({"model": f"{HERE}:smooth", "model_args": {"outputs": 1, "targets": 2}}, "failed: "),
    "arguments alone": ({"model_args": {"hidden": 3}}, "task.model_args belongs to task.model"),
    "another shape": ({"model": f"{HERE}:Net", "model_args": {"inputs": 65}}, "test_own_parts.py:"),
    "weights beside a loss": ({"loss": f"{HERE}:smooth", "class_weights": "balanced"}, "allowed: one of them"),
    "unknown weights": ({"class_weights": "even"}, "allowed: 'balanced', or a number a class"),
    "too few weights": ({"class_weights": [1.0, 2.0]}, "2 weights for 10 classes"),
    "unknown key": ({"modell": "x"}, "unknown key"),
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_wrong_is_told_before_round_1(given: str) -> None:
    """Key, value and cause; of code of one's own its file and line."""
    options, message = WRONG[given]
    with pytest.raises(SettingsError) as caught:
        prepare(experiment(task={"name": "digits", **options}))
    assert message in str(caught.value)


def test_an_algorithm_that_is_none_is_told() -> None:
    with pytest.raises(SettingsError, match="is no class of an algorithm"):
        prepare(experiment(strategy={"name": f"{HERE}:Net"}))
    with pytest.raises(SettingsError, match=r"'fedavgg' is unknown; allowed: .*package.module:Class"):
        prepare(experiment(strategy={"name": "fedavgg"}))


NAMED: list[dict[str, Any]] = [
    {"task": {"name": "digits", "model": f"{HERE}:Net"}},
    {"task": {"name": "digits", "loss": f"{HERE}:smooth"}},
    {"strategy": {"name": f"{HERE}:Part"}},
    {"evaluate": {"metrics": [f"{HERE}:smooth"]}},
]


@pytest.mark.parametrize("tables", NAMED)
def test_code_of_ones_own_is_asked_for_at_the_gate(tables: dict[str, Any]) -> None:
    """A server's word imports nothing at a site that has not allowed it."""
    with granting(Grant((), (), ())), pytest.raises(Denied) as caught:
        prepare(experiment(**tables))
    assert caught.value.code == "task-denied"


@pytest.mark.parametrize("part", [{"loss": f"{HERE}:smooth"}, {"class_weights": [1.0]}])
def test_a_loss_that_would_be_passed_over_is_refused(part: dict[str, Any], tmp_path: Path) -> None:
    """Of a task whose loss is more than a function of outputs and targets."""
    (tmp_path / "t.csv").write_text("a,y\n" + "\n".join(f"{i},{i / 2}" for i in range(20)))
    given = {"name": "table", "file": str(tmp_path / "t.csv"), "target": "y", "predict": "number", **part}
    with pytest.raises(SettingsError, match="the loss of this Table is its own"):
        prepare(experiment(task=given))


def test_balanced_weights_are_those_of_the_pooled_counts() -> None:
    task: Any = tasks.create(TaskSettings(name="digits", class_weights="balanced"), PartitionSettings(clients=3), 0)
    counts = torch.bincount(task.pool().targets).double()
    weights = counts.sum() / (10 * counts)
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 1, 2, 3, 4, 9])
    plain = nn.functional.cross_entropy(logits, targets, reduction="none")
    assert torch.allclose(task.error(logits, targets), (weights.float()[targets] * plain).mean())


def test_a_run_begins_from_the_weights_of_another(tmp_path: Path) -> None:
    """To the bit where all fits; what does not fit is told by name, and nothing that fits is an error."""
    first = ran(tmp_path / "first", experiment())
    file = str(tmp_path / "first" / "model.safetensors")
    second = ran(tmp_path / "second", experiment(task={"name": "digits", "start": file}))
    assert second.folder.status()["initial"] == first.history[-1]["sha256"]
    assert second.said[0] == "task.start: 4 of 4 tensors are those of model.safetensors"
    part = prepare(experiment(task={"name": "digits", "projection": 16, "start": file}))
    assert part.notes[0] == "task.start: 2 of 8 tensors are those of model.safetensors"
    assert "4 begin anew, the file has none of that name" in part.notes[1]
    assert "2 begin anew, the file's have another shape: 2.bias, 2.weight" in part.notes[2]
    with pytest.raises(SettingsError, match="none of its 4 tensors"):
        prepare(experiment(task={"name": "digits", "hidden": 7, "model": f"{HERE}:Net", "start": file}))
    (tmp_path / "damaged").write_bytes(b"abc")
    with pytest.raises(SettingsError, match="damaged or cannot be read"):
        prepare(experiment(task={"name": "digits", "start": str(tmp_path / "damaged")}))
    with pytest.raises(SettingsError, match="no such file"):
        prepare(experiment(task={"name": "digits", "start": "nowhere"}))


def test_a_rehearsal_leaves_the_model_as_it_was() -> None:
    """Weights, buffers, gradient and random numbers."""
    before = torch.random.get_rng_state()
    first = prepare(experiment(task={"name": "digits", "model": "cnn"}))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not first.model.whole_gradient.any()
    assert all(int(value) == 0 for name, value in first.model.module.named_buffers() if name.endswith("tracked"))
    assert isinstance(first.task.pool(), Examples)  # type: ignore[attr-defined]
