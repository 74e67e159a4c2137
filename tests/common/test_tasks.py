"""Tasks: the registry, and the exact contents of digits, npz files and quadratics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from common import tasks
from common.data.examples import Examples
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.flower import ROOT
from common.tasks.base import Task, evaluate
from common.tasks.digits import Digits
from common.tasks.images import Images
from common.tasks.quadratic import Quadratic, write
from server.rounds.prepare import prepare


def create(seed: int = 0, clients: int | None = None, kind: str = "iid", **task: object) -> Task:
    partition = PartitionSettings.model_validate({"clients": clients, "kind": kind})
    return tasks.create(TaskSettings.model_validate(task), partition, seed)


def rows(*parts: Examples) -> list[tuple[float, ...]]:
    """All examples as tuples, sorted: equal lists hold the same examples."""
    stacked = [torch.cat([part.inputs.flatten(1).double(), part.targets[:, None].double()], 1) for part in parts]
    return sorted(map(tuple, torch.cat(stacked).tolist()))


# --- the registry


def test_the_registry_creates_what_it_names(tmp_path: Path) -> None:
    save(tmp_path / "a.npz")
    quadratic(tmp_path / "q.npz")
    assert isinstance(create(), Digits)
    assert isinstance(create(name="npz", file=str(tmp_path / "a.npz")), Images)
    assert isinstance(create(name="quadratic", file=str(tmp_path / "q.npz")), Quadratic)
    assert isinstance(create(name="images", file=str(tmp_path / "a.npz")), Images)
    named = {"cifar10", "cifar100", "tinyimagenet", "femnist", "emnist", "mnist"}
    assert {"digits", "npz", "images", "quadratic", *named} <= set(tasks.TASKS)


def test_importing_the_registry_loads_no_data_library() -> None:
    """scikit-learn, datasets and flwr-datasets take seconds to import."""
    slow = {"sklearn", "datasets", "flwr_datasets"}
    code = f"import sys, common.tasks; print(sorted({slow!r} & set(sys.modules)))"
    root = ROOT
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_task_names_the_allowed() -> None:
    with pytest.raises(SettingsError, match=r"task.name: 'digit' is unknown; allowed: .*cifar10, .*npz, package"):
        create(name="digit")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"name": "digits", "hiden": 3}, r"\[task\]: hiden = 3: unknown key; allowed here: dtype, model, hidden"),
        ({"name": "digits", "dtype": "float16"}, r"\[task\]: dtype = 'float16': .*'float32' or 'float64'"),
        ({"name": "npz", "fil": "a"}, r"\[task\]: fil = 'a': unknown key; allowed here: file, test_file, inputs"),
        ({"name": "npz"}, "task.file is required"),
        ({"name": "quadratic", "file": "a", "rows": 1}, r"rows = 1: unknown key; allowed here: file, dtype"),
        ({"name": "quadratic"}, r"\[task\]: file = .*Field required"),
    ],
)
def test_wrong_keys_are_named(task: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        create(**task)


MODULE = """
from common.errors import SettingsError
from common.tasks.digits import Digits

number = 7

def good(options, partition, seed):
    return Digits({"hidden": options["units"]}, partition, seed)

def wrong(options, partition, seed):
    return {"no": "task"}

def broken(options, partition, seed):
    return 1 / 0

def picky(options, partition, seed):
    raise SettingsError("units must be even")
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sites_of_mine.py").write_text(MODULE)
    (tmp_path / "sites_broken.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("custom")
def test_a_task_of_ones_own_gets_its_options() -> None:
    task = create(name="sites_of_mine:good", units=5)
    assert isinstance(task, Digits)
    assert task.settings.hidden == 5


@pytest.mark.usefixtures("custom")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sites_of_mine:wrong", "must return a common.tasks.base.Task; it returned dict: {'no': 'task'}"),
        ("sites_of_mine:broken", "with {'units': 5} failed: ZeroDivisionError: division by zero"),
        ("sites_of_mine:picky", "failed: units must be even"),
        (
            "sites_of_mine:absent",
            "cannot be imported: AttributeError: module 'sites_of_mine' has no attribute",
        ),
        ("sites_of_mine:number", "is not a function but int: 7"),
        ("sites_of_mine:", "allowed: package.module:function"),
        (":good", "allowed: package.module:function"),
        ("no_such_sites:good", "cannot be imported: ModuleNotFoundError: No module named 'no_such_sites'"),
        ("sites_broken:good", "cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
    ],
)
def test_a_faulty_task_of_ones_own_is_named_with_its_cause(name: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        create(name=name, units=5)
    assert f"task.name = {name!r}" in str(caught.value)
    assert words in str(caught.value)


# --- digits


def test_digits_are_split_without_loss() -> None:
    """1797 digits: floor(1797 / 5) = 359 central, the rest at clients; together all 1797, none twice."""
    task = create(clients=4)
    clients = [task.client(name) for name in task.names()]
    central = task.central()
    assert central is not None
    assert len(central) == 359
    assert task.names() == ["0", "1", "2", "3"]
    assert sum(len(client.train) + len(client.evaluate) for client in clients) == 1438
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pool = Examples(torch.from_numpy(images / 16).float(), torch.from_numpy(labels))
    assert rows(central, *(part for c in clients for part in (c.train, c.evaluate))) == rows(pool)


def test_digits_are_the_same_for_the_same_seed() -> None:
    first, again, other = (create(seed, clients=4) for seed in (1, 1, 2))
    assert first.plan_hash() == again.plan_hash() != other.plan_hash()
    assert torch.equal(first.client("2").train.inputs, again.client("2").train.inputs)
    assert torch.equal(first.central().inputs, again.central().inputs)
    assert not torch.equal(first.central().inputs, other.central().inputs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_digits_inputs_and_model(dtype: str) -> None:
    """Inputs in [0, 1]; 64*16+16 + 16*10+10 = 1210 parameters, all of the dtype."""
    task = create(dtype=dtype, hidden=16)
    data, model = task.client("0").train, task.model()
    assert task.dtype == data.inputs.dtype == getattr(torch, dtype)
    assert (data.inputs.min(), data.inputs.max()) == (0, 1)
    assert data.targets.dtype == torch.int64
    assert sum(p.numel() for p in model.parameters()) == 1210
    assert {p.dtype for p in model.parameters()} == {task.dtype}


def test_digits_metrics_are_sums_of_the_loss() -> None:
    """Zero weights give ten equal logits: loss ln 10 for each example, and class 0 as the answer."""
    task = create()
    model, data = task.model(), task.client("0").train
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    batch = data.batch(torch.arange(50))
    sums = task.metrics(model, batch)
    assert task.loss(model, batch).item() == pytest.approx(np.log(10))
    assert sums["loss"] == pytest.approx(50 * np.log(10))
    assert sums["accuracy"] == int((batch[1] == 0).sum())
    means = evaluate(task, model, data, batch_size=7)
    assert means["accuracy"] == pytest.approx(float((data.targets == 0).float().mean()))


@pytest.mark.parametrize("name", ["10", "-1", "01", "site-3", ""])
def test_an_unknown_client_names_the_allowed(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"client '{name}': no such client; allowed: '0' to '9'"):
        create().client(name)


def test_digits_read_no_site_file_and_have_no_groups() -> None:
    with pytest.raises(SettingsError, match=r"reads no file of a site \('a.npz'\)"):
        create().client("0", "a.npz")
    with pytest.raises(SettingsError, match=r"partition.kind = 'natural' needs a group"):
        create(kind="natural")


# --- npz files


def arrays(n: int = 40, shape: tuple[int, ...] = (8, 9), dtype: type = np.uint8) -> dict[str, np.ndarray]:
    """n inputs that all differ, labels 0 to 3 in turn."""
    inputs = np.arange(n * int(np.prod(shape))).reshape(n, *shape) % 251
    return {"x_train": inputs.astype(dtype), "y_train": np.arange(n) % 4}


def save(path: Path, **changes: object) -> str:
    """A valid file with some arrays replaced, or left out where None."""
    kept = {key: value for key, value in (arrays() | changes).items() if value is not None}
    np.savez(path, **kept)
    return str(path)


def test_images_stay_bytes_in_memory_and_are_scaled_by_batch(tmp_path: Path) -> None:
    """uint8 x becomes the float x/255, one channel first; the clients share the 40 examples out."""
    task = create(name="npz", file=save(tmp_path / "a.npz"), clients=3)
    assert isinstance(task, Images)
    clients = [task.client(name) for name in task.names()]
    data = clients[0].train
    assert data.inputs.dtype == torch.uint8
    assert data.targets.dtype == torch.int64
    features = task.features(data.inputs)
    assert features.dtype == torch.float32
    assert torch.equal(features[:, 0], data.inputs / 255)
    parts = [part for client in clients for part in (client.train, client.evaluate)]
    expected = arrays()
    pool = Examples(torch.from_numpy(expected["x_train"]), torch.from_numpy(expected["y_train"]))
    assert rows(*parts) == rows(pool)


@pytest.mark.parametrize("shape", [(8, 8), (28, 28), (32, 32, 3), (9, 11, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_cnn_has_batchnorm_and_takes_any_size_from_eight(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    """One training step on images of each size; the loss has a gradient everywhere."""
    file = save(tmp_path / "a.npz", **arrays(20, shape))
    task = create(name="npz", file=file, dtype=dtype, width=4, clients=2)
    torch.manual_seed(0)
    model = task.model()
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 2
    loss = task.loss(model, task.client("0").train.batch(torch.arange(4)))
    loss.backward()
    assert loss.dtype == task.dtype == getattr(torch, dtype)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_channels_go_first() -> None:
    """(b, h, w, c) becomes (b, c, h, w)."""
    task = create(name="npz", shape=[8, 9, 3], classes=2)
    assert isinstance(task, Images)
    inputs = torch.rand(2, 8, 9, 3)
    assert torch.equal(task.features(inputs)[1, 2, 3, 4], inputs[1, 3, 4, 2])


def test_vectors_get_an_mlp_and_floats_are_not_scaled(tmp_path: Path) -> None:
    """5*6+6 + 6*4+4 = 64 parameters, and float64 inputs in the task's float32."""
    file = save(tmp_path / "a.npz", **arrays(40, (5,), np.float64))
    task = create(name="npz", file=file, width=6)
    assert isinstance(task, Images)
    assert sum(p.numel() for p in task.model().parameters()) == 64
    inputs = task.client("0").train.inputs
    assert inputs.dtype == torch.float32
    assert torch.equal(task.features(inputs), inputs)


def test_an_mlp_flattens_images(tmp_path: Path) -> None:
    task = create(name="npz", file=save(tmp_path / "a.npz"), model="mlp")
    batch = task.client("0").train.batch(torch.arange(2))
    assert set(task.metrics(task.model(), batch)) == {"loss", "accuracy"}


def test_a_file_with_test_arrays_has_a_central_test_set(tmp_path: Path) -> None:
    """Only labels up to 3 in training, up to 5 in the test set: six classes."""
    path = tmp_path / "a.npz"
    assert create(name="npz", file=save(path)).central() is None
    task = create(name="npz", file=save(path, x_test=np.ones((3, 8, 9), np.uint8), y_test=np.array([0, 5, 1])))
    assert isinstance(task, Images)
    assert task.classes == 6
    assert task.central() is not None
    assert task.central().targets.tolist() == [0, 5, 1]


@pytest.mark.parametrize("declared", [np.array(list("abcdefg")), np.array(7)])
def test_the_file_may_declare_its_classes(tmp_path: Path, declared: np.ndarray) -> None:
    """Seven names or the number seven; an option replaces it."""
    file = save(tmp_path / "a.npz", classes=declared)
    counts = [create(name="npz", file=file, **more).classes for more in ({}, {"classes": 9})]
    assert counts == [7, 9]


def test_keys_may_be_named(tmp_path: Path) -> None:
    """`pixels` and `digit` are in no list of known keys."""
    kept = arrays()
    file = save(tmp_path / "a.npz", x_train=None, y_train=None, pixels=kept["x_train"], digit=kept["y_train"])
    task = create(name="npz", file=file, inputs="pixels", labels="digit")
    assert len(task.names()) == 10
    with pytest.raises(SettingsError, match=r"none of its keys \(pixels, digit\) is known for the inputs"):
        create(name="npz", file=file)
    with pytest.raises(SettingsError, match=r"task.labels = 'digits': .* allowed: pixels, digit"):
        create(name="npz", file=file, inputs="pixels", labels="digits")


def test_groups_of_the_file_make_a_natural_split(tmp_path: Path) -> None:
    """Writers 5 and 9 in turn: client 0 has the even examples, whose labels are 0 and 2."""
    file = save(tmp_path / "a.npz", writer_train=np.array([5, 9])[np.arange(40) % 2])
    task = create(name="npz", file=file, kind="natural")
    assert task.names() == ["0", "1"]
    assert task.client("0").train.targets.unique().tolist() == [0, 2]


def test_a_limit_draws_the_same_examples_for_the_same_seed(tmp_path: Path) -> None:
    """12 of 40, not simply the first; groups stay with their examples (label parity is the group)."""
    file = save(tmp_path / "a.npz", group=np.arange(40) % 2)
    first, again, other = (create(seed, name="npz", file=file, limit=12, kind="natural") for seed in (0, 0, 1))
    assert torch.equal(first.pool().inputs, again.pool().inputs)
    assert not torch.equal(first.pool().inputs, other.pool().inputs)
    assert len(first.pool()) == 12
    assert torch.equal(first.client("1").train.targets % 2, torch.ones(len(first.client("1").train)))


def test_relative_files_are_found_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the working directory, then FEDKEEL_DATA; a missing file is looked for in both."""
    for folder in ("here", "data"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path / "data"))
    save(tmp_path / "data" / "a.npz", classes=np.array(8))
    assert create(name="npz", file="a.npz").classes == 8
    save(tmp_path / "here" / "a.npz", classes=np.array(9))
    assert create(name="npz", file="a.npz").classes == 9
    with pytest.raises(
        SettingsError, match=r"task.file = 'b.npz': no such file or folder; .*here/b.npz and .*data/b.npz"
    ):
        create(name="npz", file="b.npz")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_train": None}, "known for the labels"),
        ({"y_train": np.arange(39) % 4}, "40 inputs and 39 labels"),
        ({"y_train": np.arange(40) / 2}, r"labels are float64 \(40,\); allowed: integers"),
        ({"y_train": np.zeros((40, 1), int)}, r"labels are int64 \(40, 1\)"),
        ({"y_train": np.arange(40) - 1}, "labels from -1 to 38; allowed: 0 to 38"),
        ({"classes": np.array(3)}, "labels from 0 to 3; allowed: 0 to 2"),
        ({"classes": np.array(2.5)}, "key 'classes' must be names"),
        ({"x_train": np.full((40, 5), np.nan)}, "inputs hold NaN or infinite"),
        ({"x_train": np.full((40, 5), "a")}, "inputs are <U1"),
        ({"x_train": np.zeros(40)}, r"inputs are float64 \(40,\)"),
        ({"x_train": np.array([None] * 40)}, "key 'x_train' cannot be read: Object arrays"),
        ({"x_train": np.zeros((40, 7, 8), np.uint8)}, r"at least 8x8; one input is \(7, 8\); allowed: mlp"),
        ({"x_test": np.zeros((2, 8, 9), np.uint8)}, "test data: has inputs only"),
        (
            {"x_test": np.zeros((2, 8, 8), np.uint8), "y_test": np.zeros(2, int)},
            r"test data: one input is \(8, 8\); this run's are \(8, 9\)",
        ),
        ({"group": np.zeros(39, int)}, "39 group ids for 40 training examples"),
        ({"x_train": np.zeros((0, 8, 9)), "y_train": np.zeros(0, int)}, "only 0 examples"),
    ],
)
def test_unusable_arrays_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        create(name="npz", file=save(tmp_path / "a.npz", **changes))


def test_files_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    """Text, a single array, and an archive cut short."""
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "one.npy", np.zeros(3))
    save(tmp_path / "a.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:500])
    for name, words in (
        ("text.npz", "cannot be read"),
        ("one.npy", "is not an"),
        ("cut.npz", "cannot be read"),
    ):
        with pytest.raises(SettingsError, match=rf"{name} {words}"):
            create(name="npz", file=str(tmp_path / name))


# --- a site's own file


def test_a_site_has_all_of_its_own_file(tmp_path: Path) -> None:
    """20 examples, holdout 0.1: 18 to train, 2 to evaluate, together the file; test arrays are ignored."""
    task = create(name="npz", file=save(tmp_path / "a.npz"))
    own = arrays(20) | {"x_test": np.zeros((1, 8, 9)), "y_test": np.zeros(1, int)}
    site = task.client("site-3", save(tmp_path / "site.npz", **own))
    assert (len(site.train), len(site.evaluate)) == (18, 2)
    everything = Examples(torch.from_numpy(own["x_train"]), torch.from_numpy(own["y_train"]))
    assert rows(site.train, site.evaluate) == rows(everything)


def test_a_site_needs_no_pooled_file_if_shape_and_classes_are_given(tmp_path: Path) -> None:
    """The pooled file named by the server does not exist here."""
    task = create(name="npz", file="not/here.npz", shape=[8, 9], classes=4)
    assert len(task.client("site", save(tmp_path / "site.npz")).train) == 36
    assert task.model() is not None
    with pytest.raises(SettingsError, match="no such file"):
        task.names()
    server = create(name="npz", shape=[8, 9], classes=4)
    assert server.names() == []
    assert server.central() is None
    assert server.plan_hash() == ""
    # And so does a whole experiment: the server prepares it without any data.
    text = "strategy.name = 'scaffold'\ntask.name = 'npz'\ntask.shape = [8, 9]\ntask.classes = 4\n"
    assert prepare(Experiment.parse(text)).model.vector.numel() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (arrays(20, (8, 8)), r"one input is \(8, 8\); this run's are \(8, 9\)"),
        ({"y_train": np.arange(40) % 5}, "labels from 0 to 4; allowed: 0 to 3"),
    ],
)
def test_a_site_must_fit_the_run(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    task = create(name="npz", file=save(tmp_path / "a.npz"))
    with pytest.raises(SettingsError, match=rf"site.npz: {words}"):
        task.client("site", save(tmp_path / "site.npz", **changes))
    with pytest.raises(SettingsError, match=r"file of client 'site' = 'none.npz': no such file or folder"):
        task.client("site", "none.npz")


def test_a_site_may_be_empty_or_have_one_example(tmp_path: Path) -> None:
    """No examples: two empty sets. One: it is trained on."""
    task = create(name="npz", file=save(tmp_path / "a.npz"))
    for count in (0, 1):
        site = task.client("site", save(tmp_path / "site.npz", **arrays(count)))
        assert (len(site.train), len(site.evaluate)) == (count, 0)


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "kind", "clients", "shape", "test"),
    [
        ("mnist_writers/mnist_writers.npz", "natural", 539, (28, 28), 10000),
        ("cifar10/cifar10.npz", "dirichlet", 10, (32, 32, 3), 2000),
        ("digits/digits.npz", "iid", 10, (8, 8), None),
    ],
)
def test_real_files(file: str, kind: str, clients: int, shape: tuple[int, ...], test: int | None) -> None:
    """The published numbers of the data sets, and a finite loss on a batch."""
    if "FEDKEEL_DATA" not in os.environ:
        pytest.skip("FEDKEEL_DATA is not set: no folder with real data")
    task = create(name="npz", file=file, kind=kind)
    assert isinstance(task, Images)
    assert (len(task.names()), task.shape, task.classes) == (clients, shape, 10)
    central = task.central()
    assert (None if central is None else len(central)) == test
    assert task.loss(task.model(), task.client("0").train.batch(torch.arange(8))).isfinite()


# --- quadratics

QUADRATIC = {
    "centers": [[0.0, 1.0], [4.0, 1.0]],
    "curvatures": [[1.0, 2.0], [3.0, 2.0]],
    "steps": [1, 5],
    "examples": [3, 1],
    "start": [1.0, 2.0],
}


def quadratic(path: Path, **changes: object) -> str:
    write(path, **{**QUADRATIC, **changes})
    return str(path)


def test_a_quadratic_client_has_its_examples_and_steps(tmp_path: Path) -> None:
    task = create(name="quadratic", file=quadratic(tmp_path / "q.npz"))
    assert task.names() == ["0", "1"]
    assert [(len(task.client(name).train), task.client(name).steps) for name in "01"] == [(3, 1), (1, 5)]
    assert task.central() is None


def test_the_quadratic_loss_is_the_whole_function_for_any_batch(tmp_path: Path) -> None:
    """F_0(1, 2) = (1*1 + 2*1)/2 = 1.5 with gradient (1, 2); F_1 = (3*9 + 2*1)/2 = 14.5 with (-9, 2)."""
    task = create(name="quadratic", file=quadratic(tmp_path / "q.npz"), dtype="float64")
    for name, value, gradient in (("0", 1.5, [1.0, 2.0]), ("1", 14.5, [-9.0, 2.0])):
        data = task.client(name).train
        for size in {1, len(data)}:
            model = task.model()
            loss = task.loss(model, data.batch(torch.arange(size)))
            loss.backward()
            assert loss.item() == value
            assert model.w.grad.tolist() == gradient
        assert evaluate(task, task.model(), data, batch_size=2) == {"loss": value}


def test_the_quadratic_model_is_one_tensor_at_the_start(tmp_path: Path) -> None:
    for dtype in ("float32", "float64"):
        task = create(name="quadratic", file=quadratic(tmp_path / "q.npz"), dtype=dtype)
        ((name, w),) = task.model().named_parameters()
        assert (name, w.tolist(), w.dtype) == ("w", [1.0, 2.0], getattr(torch, dtype))


def test_the_distance_is_zero_at_each_minimizer(tmp_path: Path) -> None:
    """w_0: uniform (1*0 + 3*4)/(1 + 3) = 3; by data 3:1, (3*1*0 + 1*3*4)/(3 + 3) = 2. w_1 = 1."""
    task = create(name="quadratic", file=quadratic(tmp_path / "q.npz"))
    assert task.describe(torch.tensor([3.0, 1.0])) == {"distance_uniform": 0, "distance_data": 1}
    assert task.describe(torch.tensor([2.0, 1.0])) == {"distance_uniform": 1, "distance_data": 0}
    assert task.describe(torch.tensor([3.0, 5.0]))["distance_uniform"] == 4


def test_the_minimizer_has_no_mean_gradient(tmp_path: Path) -> None:
    """At the uniform minimizer the clients' gradients cancel."""
    task = create(name="quadratic", file=quadratic(tmp_path / "q.npz"), dtype="float64")
    model = task.model()
    model.w.data = torch.tensor([3.0, 1.0], dtype=torch.float64)
    for name in task.names():
        task.loss(model, task.client(name).train.batch(torch.arange(1))).backward()
    assert model.w.grad.tolist() == [0, 0]


def test_the_quadratic_hash_is_of_the_file(tmp_path: Path) -> None:
    hashes = [
        create(name="quadratic", file=quadratic(tmp_path / "q.npz", examples=examples)).plan_hash()
        for examples in ([3, 1], [3, 1], [1, 3])
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_quadratic_has_as_many_clients_as_rows(tmp_path: Path) -> None:
    file = quadratic(tmp_path / "q.npz")
    assert len(create(name="quadratic", file=file, clients=2).names()) == 2
    with pytest.raises(SettingsError, match=r"partition.clients = 3: .*q.npz has 2 clients"):
        create(name="quadratic", file=file, clients=3)
    with pytest.raises(SettingsError, match="client '2': no such client; allowed: '0' to '1'"):
        create(name="quadratic", file=file).client("2")
    with pytest.raises(SettingsError, match="reads no file of a site"):
        create(name="quadratic", file=file).client("0", file)


@pytest.mark.parametrize("key", [{"kind": "dirichlet"}, {"shift": "noise"}])
def test_a_quadratic_is_not_split(tmp_path: Path, key: dict[str, str]) -> None:
    """Its file says who holds what."""
    settings = TaskSettings.model_validate({"name": "quadratic", "file": quadratic(tmp_path / "q.npz")})
    with pytest.raises(SettingsError, match="task 'quadratic' has a client in each row of its file"):
        tasks.create(settings, PartitionSettings.model_validate(key), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"centers": [1.0, 2.0]}, r"centers has shape \(2,\); allowed: \(n, d\)"),
        ({"curvatures": [[1.0], [1.0]]}, r"curvatures has shape \(2, 1\); .* must be \(2, 2\)"),
        (
            {"curvatures": [[1.0, 0.0], [1.0, 1.0]]},
            "curvatures has 0.0 among its values; allowed: .* above 0",
        ),
        ({"steps": [1, 0]}, "steps has 0 among its values"),
        ({"steps": [1.0, 2.0]}, "steps is float64; allowed: integers"),
        ({"examples": [3, -1]}, "examples has -1 among its values"),
        ({"start": [1.0, np.nan]}, "start has nan among its values; allowed: finite"),
        ({"start": ["a", "b"]}, "start is <U1; allowed: numbers"),
    ],
)
def test_a_quadratic_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """In writing and in reading alike."""
    with pytest.raises(SettingsError, match=words):
        quadratic(tmp_path / "q.npz", **changes)
    np.savez(tmp_path / "q.npz", **{**QUADRATIC, **changes})
    with pytest.raises(SettingsError, match=words):
        create(name="quadratic", file=str(tmp_path / "q.npz"))


def test_a_quadratic_file_needs_all_keys(tmp_path: Path) -> None:
    np.savez(tmp_path / "q.npz", centers=np.zeros((1, 1)))
    with pytest.raises(SettingsError, match="has no curvatures, steps, examples, start; needed: centers"):
        create(name="quadratic", file=str(tmp_path / "q.npz"))
