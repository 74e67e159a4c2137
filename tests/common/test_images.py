"""Image tasks: networks, augmentation and normalization, exact; and one round of each model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from client.app import app
from common import tasks
from common.data.named_images import DATASETS
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.flower import ROOT
from common.model import build
from common.models.augment import PADDING, crop_flip, cut
from common.models.mixture import Mixture
from common.tasks.base import evaluate
from common.tasks.images import Images
from server.app import run
from server.deploy.clients import start_clients
from server.deploy.superlink import SuperLink
from server.engines.grid import grid
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from server.rounds.prepare import prepare
from server.watch.follow import failure


def create(seed: int = 0, clients: int | None = None, kind: str = "iid", **task: object) -> Images:
    partition = PartitionSettings.model_validate({"clients": clients, "kind": kind})
    made = tasks.create(TaskSettings.model_validate(task), partition, seed)
    assert isinstance(made, Images)
    return made


def blank(shape: list[int], **task: object) -> Images:
    """A task without data."""
    return create(name="images", shape=shape, classes=4, **task)


def test_the_document_lists_every_data_set() -> None:
    """Names, numbers of classes, variants and what is fetched, as the table has them."""
    text = (ROOT / "docs" / "images.md").read_text("utf-8")
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for name, row in DATASETS.items():
        cells = [cell.strip() for cell in rows[name].strip("|").split("|")]
        assert cells[2] == str(create(name=name, pooled=False).classes)
        assert cells[4] == ", ".join(f"`{variant}`" for variant in row.places)
        assert cells[5].split(",")[0] in row.about
        for paths in row.places.values():
            assert any(path in text or path.startswith(("emnist/", "tinyimagenet")) for path in paths)


# --- augmentation


def reference(image: np.ndarray, top: int, left: int, mirrored: bool) -> np.ndarray:
    """One image, pixel by pixel."""
    result = np.zeros_like(image)
    height, breadth = image.shape[:2]
    for row in range(height):
        for column in range(breadth):
            y = row + top - PADDING
            x = (breadth - 1 - column if mirrored else column) + left - PADDING
            if 0 <= y < height and 0 <= x < breadth:
                result[row, column] = image[y, x]
    return result


@pytest.mark.parametrize("shape", [(12, 10, 3), (12, 10), (9, 9, 1)])
def test_crops_and_mirror_images_are_those_of_a_slow_reference(shape: tuple[int, ...]) -> None:
    """The same draws: one number below 2 * 9 * 9 for each image, from torch's global generator."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, *shape), dtype=np.uint8))
    torch.manual_seed(5)
    got = crop_flip(images)
    torch.manual_seed(5)
    chance = torch.randint(162, (40,)).tolist()
    expected = [reference(i.numpy(), c // 18, c // 2 % 9, c % 2 == 1) for i, c in zip(images, chance, strict=True)]
    assert got.dtype == torch.uint8
    assert np.array_equal(got.numpy(), np.stack(expected))


def test_the_middle_is_the_image_and_the_corner_is_black() -> None:
    """Row and column 4 of 0 to 8: nothing moves. Row and column 0: four black rows and columns above and left."""
    images = torch.arange(1, 82, dtype=torch.uint8).view(1, 9, 9)
    four, zero = torch.tensor([4]), torch.tensor([0])
    assert torch.equal(cut(images, four, four, torch.tensor([False])), images)
    assert torch.equal(cut(images, four, four, torch.tensor([True])), images.flip(2))
    corner = cut(images, zero, zero, torch.tensor([False]))
    assert torch.equal(corner[0, 4:, 4:], images[0, :5, :5])
    assert corner[0, :4].sum() == corner[0, :, :4].sum() == 0


def test_every_window_is_as_likely() -> None:
    """10,000 images of one bright pixel in the middle: its place, and so the window, is uniform within 5 deviations."""
    images = torch.zeros(16200, 9, 9, dtype=torch.uint8)
    images[:, 4, 4] = 1
    torch.manual_seed(0)
    places = crop_flip(images).flatten(1).argmax(1)
    counts = torch.bincount(places, minlength=81)
    assert (counts - 200).abs().max() < 5 * 200**0.5


def test_a_task_augments_only_when_told_and_only_images() -> None:
    """The same seed gives the same batch; targets stay."""
    batch = torch.randint(0, 256, (8, 9, 9), dtype=torch.uint8), torch.arange(8) % 4
    assert blank([9, 9]).augment(batch)[0] is batch[0]
    task = blank([9, 9], augment="crop-flip")
    torch.manual_seed(1)
    images, targets = task.augment(batch)
    torch.manual_seed(1)
    assert torch.equal(crop_flip(batch[0]), images)
    assert targets is batch[1]
    with pytest.raises(SettingsError, match=r"task.augment = 'crop-flip': one input is \(9,\); allowed: for images"):
        blank([9], augment="crop-flip")


# --- normalization


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_features_are_normalized_by_channel(dtype: str) -> None:
    """(x/255 - mean)/std, channels first; in memory channels last."""
    task = create(name="cifar10", dtype=dtype)
    inputs = torch.randint(0, 256, (5, 32, 32, 3), dtype=torch.uint8)
    row = DATASETS["cifar10"]
    mean, std = (torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in (row.mean, row.std))
    expected = (inputs.permute(0, 3, 1, 2).double() / 255 - mean) / std
    got = task.features(inputs)
    assert got.dtype == getattr(torch, dtype)
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 if dtype == "float32" else 1e-12)


def test_statistics_may_be_given() -> None:
    """Vectors have one channel: x = 255 becomes (1 - 0.5)/0.25 = 2, x = 0 becomes -2."""
    inputs = torch.tensor([[0, 255]], dtype=torch.uint8)
    assert blank([2], mean=[0.5], std=[0.25]).features(inputs).tolist()[0] == pytest.approx([-2, 2])
    assert blank([2]).features(inputs).tolist() == [[0, 1]]
    with pytest.raises(SettingsError, match=r"task.mean and task.std: allowed: both or none"):
        blank([2], mean=[0.5])
    with pytest.raises(SettingsError, match=r"task.std = \[0.0\]: allowed: 1 numbers each, deviations > 0"):
        blank([2], mean=[0.5], std=[0.0])
    with pytest.raises(SettingsError, match=r"allowed: 3 numbers each"):
        blank([8, 8, 3], mean=[0.5], std=[1.0])


def test_features_first_used_in_an_evaluation_serve_training() -> None:
    """Kept constants made under inference mode could not be used by autograd."""
    task = create(name="mnist")
    model = task.model()
    batch = torch.zeros(4, 28, 28, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    with torch.inference_mode():
        task.metrics(model, batch)
    task.loss(model, batch).backward()


# --- networks

SIZES = {
    ("resnet18", (32, 32, 3), 10): 11_173_962,
    ("resnet18", (32, 32, 3), 100): 11_220_132,
    ("resnet18", (64, 64, 3), 200): 11_271_432,
    ("vgg11", (32, 32, 3), 10): 9_750_922,
}


@pytest.mark.parametrize(("model", "shape", "classes"), SIZES)
def test_sizes_of_the_large_models(model: str, shape: tuple[int, ...], classes: int) -> None:
    """ResNet-18: torchvision's 11,689,512 - 513,000 (1,000 outputs) - 9,408 (7x7 stem) + 1,728 (3x3) + 513 a class.
    VGG-11: 9,220,480 of convolutions, 2 * 262,656 hidden, 5,130 out."""
    task = create(name="images", shape=list(shape), classes=classes, model=model)
    with torch.device("meta"):  # no numbers
        net = task.model()
    assert sum(p.numel() for p in net.parameters()) == SIZES[model, shape, classes]
    layer = task.output_layer(net)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (512, classes)


def test_resnet_is_torchvisions_but_for_the_stem() -> None:
    """Up to 64 pixels no resolution is lost before the first block; beyond it is the model for ImageNet itself."""
    from torchvision.models import resnet18

    with torch.device("meta"):
        small, large = (blank([size, size, 3], model="resnet18").model() for size in (64, 65))
        shapes = {name: p.shape for name, p in resnet18(num_classes=4).named_parameters()}
    assert small.get_submodule("conv1").stride == (1, 1)  # type: ignore[comparison-overlap]
    assert isinstance(small.get_submodule("maxpool"), nn.Identity)
    assert {name: p.shape for name, p in large.named_parameters()} == shapes
    assert blank([70, 70], model="resnet18").model().eval()(torch.zeros(1, 1, 70, 70)).shape == (1, 4)


MODELS: list[dict[str, Any]] = [
    {"model": "resnet18"},
    {"model": "vgg11", "width": 4},
    {"model": "cnn", "width": 4},
    {"model": "mlp", "width": 8},
]


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("task", MODELS, ids=lambda task: str(task["model"]))
def test_every_model_with_every_normalization(task: dict[str, Any], norm: str) -> None:
    """As many layers of the kind as asked for and none of another; every parameter has a gradient, a view of one."""
    if task["model"] == "resnet18" and norm == "none":
        with pytest.raises(SettingsError, match=r"task.norm = 'none' with .*'resnet18'; allowed: batch, group"):
            blank([32, 32, 3], **task, norm=norm)
        return
    made = blank([32, 32, 3], **task, norm=norm)
    flat = build(made, 0)
    kinds = {"batch": nn.modules.batchnorm._BatchNorm, "group": nn.GroupNorm}
    layers = {name: sum(isinstance(m, kind) for m in flat.module.modules()) for name, kind in kinds.items()}
    expected = {"resnet18": 20, "vgg11": 8, "cnn": 2, "mlp": 1}[task["model"]]
    assert layers == {name: expected if name == norm else 0 for name in kinds}
    batch = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8), torch.tensor([0, 1, 3])
    made.loss(flat.module, batch).backward()
    flat.check_views()
    assert all(bool(slot.view(flat.gradient).any()) for slot in flat.layout.values())


@pytest.mark.parametrize("task", MODELS, ids=lambda task: str(task["model"]))
def test_projection_heads_and_mixtures_of_every_model(task: dict[str, Any]) -> None:
    """MOON's head: the output layer reads `projection` numbers. pFedAFM: representation and head as they were."""
    inputs = torch.rand(2, 3, 32, 32) if task["model"] != "mlp" else torch.rand(2, 3072)
    moon = blank([32, 32, 3], **task, projection=6)
    net = moon.model()
    layer = moon.output_layer(net)
    assert isinstance(layer, nn.Linear)
    assert layer.in_features == 6
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    assert net.eval()(inputs).shape == (2, 4)
    assert seen[0].shape == (2, 6)
    mixed = blank([32, 32, 3], **task, extractor=2).model()
    assert isinstance(mixed, Mixture)
    assert mixed.eval()(inputs).shape == (2, 4)
    assert mixed.private(inputs).shape == mixed.shared(inputs).shape == (2, mixed.head.in_features)
    assert not any(p is mixed.head.weight for p in mixed.private.parameters())


@pytest.mark.parametrize(
    ("shape", "task", "words"),
    [
        ([28, 28], {"model": "vgg11"}, r"'vgg11' needs images of at least 32x32; .*allowed: resnet18, cnn, mlp"),
        ([9], {"model": "resnet18"}, r"'resnet18' needs images of at least 8x8; one input is \(9,\); allowed: mlp"),
        ([32, 32], {"model": "resnet18", "width": 8}, r"task.width = 8 with task.model = 'resnet18'"),
        ([32, 32], {"model": "cnn", "dropout": 0.1}, r"task.dropout = 0.1 with task.model = 'cnn'; allowed: with 'vg"),
        ([8, 8], {"norm": "group", "width": 9}, r"task.norm_groups = 2: 9 channels are no multiple of it"),
        ([8, 8], {"norm": "layer"}, r"\[task\]: norm = 'layer': .*'batch', 'group' or 'none'"),
        ([8, 8], {"model": "vit"}, r"\[task\]: model = 'vit': .*'resnet18'"),
        ([8, 8], {"projection": 3, "extractor": 2}, r"allowed: one of them"),
    ],
)
def test_models_that_cannot_be_are_named(shape: list[int], task: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        blank(shape, **task)


def test_personal_parts_of_the_large_models() -> None:
    """FedPer keeps torchvision's `fc`; FedBN its BatchNorm, which a model with GroupNorm does not have."""
    text = (
        "task = {{name = 'images', shape = [8, 8, 3], classes = 4, model = 'resnet18', norm = '{}'}}\nstrategy.name = "
    )
    personal = prepare(Experiment.parse(text.format("batch") + "'fedper'")).model.personal_layout
    assert set(personal) == {"fc.weight", "fc.bias"}
    assert len(prepare(Experiment.parse(text.format("batch") + "'fedbn'")).model.personal_layout) == 40
    with pytest.raises(SettingsError, match=r"'batch-norm' is no part of this model; allowed: group-norm, head"):
        prepare(Experiment.parse(text.format("group") + "'fedbn'"))


@pytest.mark.slow
@pytest.mark.parametrize("task", MODELS, ids=lambda task: str(task["model"]))
def test_rounds_of_every_model(task: dict[str, Any], tmp_path: Path) -> None:
    """Two clients of dark images with vertical stripes and bright ones with horizontal stripes: the loss falls below
    that of the first weights. (VGG-11 stands still for longer at so small a width: there it is finite.)"""
    size = 32 if task["model"] == "vgg11" else 16
    images = np.zeros((24, size, size, 3), np.uint8)
    images[:12, :, ::2], images[12:, ::2] = 60, 220
    file = tmp_path / "two.npz"
    np.savez(file, x=images, y=np.arange(24) // 12, x_test=images[::6], y_test=np.arange(24)[::6] // 12)
    norm = {"norm": "group"} if task["model"] in ("resnet18", "cnn") else {}
    values = {
        "rounds": 2,
        "task": {"name": "images", "file": str(file), **task, "augment": "crop-flip", **norm},
        "partition": {"clients": 2, "holdout": 0.0},
        "local": {"lr": 0.002 if task["model"] == "resnet18" else 0.02, "steps": 4, "batch_size": 6},
    }
    settings = Experiment.model_validate(values)
    first = prepare(settings)
    central = first.task.central()
    assert central is not None
    before = evaluate(first.task, first.model.module, central, 8)["loss"]
    result = run(InProcessGrid(app), settings, RunFolder(tmp_path / "run"))
    assert result["dropped"] == {}
    assert 0 < result["central"]["loss"] < (1 if task["model"] == "vgg11" else before)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.rest
def test_engines_agree_on_augmented_real_images(tmp_path: Path) -> None:
    """CIFAR-10's subset, a small cnn with BatchNorm, crops and mirror images, three clients: the same weights in this
    process, in two workers and over gRPC; another seed gives others."""
    values = {
        "name": "engines-images",
        "rounds": 2,
        "task": {"name": "cifar10", "variant": "subset", "width": 4, "limit": 300, "augment": "crop-flip"},
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5},
        "strategy": {"name": "scaffold"},
        "local": {"steps": 3, "batch_size": 20, "lr": 0.05},
        "round": {"sample": 2, "deadline_s": 300.0},
    }
    settings = Experiment.model_validate(values)
    here = run(InProcessGrid(app), settings, RunFolder(tmp_path / "here"))
    assert here["dropped"] == {}
    with grid("client.app:app", 2) as workers:
        assert run(workers, settings, RunFolder(tmp_path / "there"))["sha256"] == here["sha256"]
    other = Experiment.model_validate(values | {"seed": 1})
    assert run(InProcessGrid(app), other, RunFolder(tmp_path / "other"))["sha256"] != here["sha256"]
    folder = RunFolder(tmp_path / "grpc")
    with (
        SuperLink(tmp_path / "superlink.log") as link,
        start_clients(link.fleet_address, ["0", "1", "2"], memory_root=tmp_path / "memory", log_dir=tmp_path),
    ):
        link.control.submit(ROOT, {"experiment-toml": settings.toml(), "run-dir": str(tmp_path / "grpc")})
        end = time.monotonic() + 300
        while (status := folder.status().get("status")) not in ("finished", "failed") and time.monotonic() < end:
            time.sleep(0.1)
        if status == "failed":
            raise failure(folder)
    assert folder.status()["sha256"] == here["sha256"]
