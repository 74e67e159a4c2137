"""Labelled examples from local files and folders of every kind, and named data sets: found, fetched, kept."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common import tasks
from common.data.arrays import SourceSettings, pool
from common.data.cache import folder, kept, path_of
from common.data.raw import Raw
from common.errors import SettingsError
from common.experiment import PartitionSettings, TaskSettings
from common.flower import ROOT
from common.tasks.images import Images

RANDOM = np.random.default_rng(0)
SMALL = RANDOM.integers(0, 256, (12, 8, 9, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3
NAMES = ("cat", "dog", "owl")


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each test has an empty cache and no data; those on the real files share a cache."""
    real = request.node.get_closest_marker("data") is not None
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path_factory.getbasetemp() / "kept" if real else tmp_path / "cache"))
    if not real:
        monkeypatch.delenv("FEDKEEL_DATA", raising=False)


def create(kind: str = "iid", clients: int | None = 2, **task: Any) -> Images:
    partition = PartitionSettings.model_validate({"clients": clients, "kind": kind, "holdout": 0.0})
    made = tasks.create(TaskSettings.model_validate({"name": "images", **task}), partition, 0)
    assert isinstance(made, Images)
    return made


def write(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def image_folder(root: Path, images: np.ndarray = SMALL, names: tuple[str, ...] = NAMES) -> Path:
    """One subfolder a class; the order of names is that of the images."""
    for number, image in enumerate(images):
        write(root / names[number % 3] / f"{number:02}.png", image)
    return root


def by_class(images: np.ndarray = SMALL) -> np.ndarray:
    """The images in the order of an image folder."""
    return np.concatenate([images[label == LABELS] for label in range(3)])


# --- image folders


def test_a_folder_of_images_has_a_class_for_each_subfolder(tmp_path: Path) -> None:
    """Lossless files give the same bytes back; what is no image is left alone."""
    image_folder(tmp_path / "own")
    (tmp_path / "own" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "own" / ".hidden").mkdir()
    task = create(file=str(tmp_path / "own"))
    assert (task.shape, task.classes, task.class_names) == ((8, 9, 3), 3, NAMES)
    assert np.array_equal(task.pool().inputs, by_class())
    assert task.pool().targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert task.central() is None


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_train_and_test_folders(tmp_path: Path, name: str) -> None:
    """A test set may lack a class."""
    image_folder(tmp_path / "train")
    write(tmp_path / name / "owl" / "a.png", SMALL[0])
    central = create(file=str(tmp_path)).central()
    assert central is not None
    assert central.targets.tolist() == [2]
    assert np.array_equal(central.inputs[0], SMALL[0])


def test_grey_images_have_no_channels_unless_one_is_coloured(tmp_path: Path) -> None:
    """As TinyImageNet, which holds both; `shape` decides for all."""
    image_folder(tmp_path / "own", SMALL[..., 0])
    assert create(file=str(tmp_path / "own")).shape == (8, 9)
    assert create(file=str(tmp_path / "own"), shape=[8, 9, 1]).pool().inputs.shape == (12, 8, 9, 1)
    assert create(file=str(tmp_path / "own"), shape=[8, 9, 3]).pool().inputs.shape == (12, 8, 9, 3)
    write(tmp_path / "own" / "cat" / "colour.png", SMALL[0])
    assert create(file=str(tmp_path / "own")).shape == (8, 9, 3)


def test_images_of_another_size_are_named_or_scaled(tmp_path: Path) -> None:
    """A black image stays black at any size."""
    image_folder(tmp_path / "own")
    write(tmp_path / "own" / "owl" / "z.png", np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(
        SettingsError, match=r"owl/z.png is 4x4 pixels and .*cat/00.png 9x8; allowed: one size, or task"
    ):
        create(file=str(tmp_path / "own"))
    with pytest.raises(SettingsError, match=r"task.resize = true needs task.shape"):
        create(file=str(tmp_path / "own"), resize=True)
    scaled = create(file=str(tmp_path / "own"), resize=True, shape=[8, 9, 3]).pool().inputs
    assert scaled.shape == (13, 8, 9, 3)
    assert scaled[-1].sum() == 0


def test_broken_and_missing_images_are_named(tmp_path: Path) -> None:
    image_folder(tmp_path / "own")
    (tmp_path / "own" / "dog" / "x.jpg").write_bytes(b"no image")
    with pytest.raises(SettingsError, match=r"dog/x.jpg cannot be read as an image"):
        create(file=str(tmp_path / "own"))
    content = (tmp_path / "own" / "cat" / "00.png").read_bytes()
    (tmp_path / "own" / "dog" / "x.jpg").write_bytes(content[: len(content) // 2])
    with pytest.raises(SettingsError, match=r"dog/x.jpg cannot be read as an image"):
        create(file=str(tmp_path / "own"))
    (tmp_path / "none").mkdir()
    with pytest.raises(SettingsError, match=r"none: no images; allowed: a subfolder for each class with .bmp"):
        create(file=str(tmp_path / "none"))


def test_folders_called_by_numbers_are_those_numbers(tmp_path: Path) -> None:
    """As text, "10" would stand before "9"."""
    image_folder(tmp_path / "own", names=("9", "10", "0"))
    task = create(file=str(tmp_path / "own"))
    assert task.class_names == ("0", "10", "9")
    assert sorted(set(task.pool().targets.tolist())) == [0, 1, 2]
    site = create(shape=[8, 9, 3], classes=11).client("site", str(tmp_path / "own"))
    assert sorted(set(site.train.targets.tolist())) == [0, 9, 10]


# --- tables


def test_columns_of_numbers_are_vectors(tmp_path: Path) -> None:
    """Label and group are found by name; floats are taken as they are, and integers are no bytes."""
    file = tmp_path / "a.csv"
    file.write_text("height,label,weight,writer\n1.5,0,10,ann\n2.5,1,20,bob\n3.5,1,30,ann\n")
    task = create("natural", None, file=str(file))
    assert task.pool().inputs.tolist() == [[1.5, 10], [2.5, 20], [3.5, 30]]
    assert task.pool().targets.tolist() == [0, 1, 1]
    assert [len(task.client(name).train) for name in task.names()] == [2, 1]


def test_lists_of_numbers_and_text_labels(tmp_path: Path) -> None:
    """The names of the classes are the sorted texts; a file of that name beside `train` is the test set."""
    rows = [{"x": [i, i + 1], "label": NAMES[i % 3]} for i in range(6)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[4:])))
    task = create(file=str(tmp_path))
    assert task.class_names == NAMES
    assert task.pool().targets.tolist() == [0, 1, 2, 0, 1, 2]
    central = task.central()
    assert central is not None
    assert (central.inputs.tolist(), central.targets.tolist()) == ([[4, 5], [5, 6]], [1, 2])


def test_paths_of_images_are_relative_to_the_table(tmp_path: Path) -> None:
    for number, image in enumerate(SMALL):
        write(tmp_path / "scans" / f"{number}.png", image)
    lines = [f"scans/{number}.png,{NAMES[label]}" for number, label in enumerate(LABELS)]
    (tmp_path / "own.tsv").write_text("\n".join(["scan\tkind", *lines]).replace(",", "\t"))
    task = create(file=str(tmp_path / "own.tsv"), inputs="scan", labels="kind")
    assert np.array_equal(task.pool().inputs, SMALL)
    assert task.pool().targets.tolist() == LABELS.tolist()
    (tmp_path / "scans" / "3.png").unlink()
    with pytest.raises(SettingsError, match=r"scans/3.png cannot be read as an image: .*No such file"):
        create(file=str(tmp_path / "own.tsv"), inputs="scan", labels="kind")


@pytest.mark.parametrize(
    ("text", "task", "words"),
    [
        ("a,b\n1,2\n", {}, r"none of its columns \(a, b\) is one of y_train, .* name it with task.labels"),
        ("a,y\n1,2\n", {"labels": "z"}, r"task.labels = 'z': .* allowed: a, y"),
        ("a,b,y\n1,x,2\n", {}, r"column 'b' is no number; .* named with task.inputs"),
        ("y\n1\n", {}, r"no column of inputs; name it with task.inputs"),
        ("a,y\nnan,0\n", {}, r"inputs hold NaN"),
        ("a,y\n1,0.5\n", {}, r"labels are float64"),
    ],
)
def test_tables_that_cannot_be_used_are_named(tmp_path: Path, text: str, task: dict[str, Any], words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(SettingsError, match=words):
        create(file=str(tmp_path / "a.csv"), clients=1, **task)


def saved_dataset(path: Path) -> Path:
    """What `datasets` saves: images and class numbers, with a test split."""
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})
    columns = {"img": [Image.fromarray(image) for image in SMALL], "label": LABELS.tolist()}
    train = datasets.Dataset.from_dict(columns, features)
    datasets.DatasetDict({"train": train, "test": train.select(range(2))}).save_to_disk(path)
    return path


def test_a_saved_hugging_face_data_set(tmp_path: Path) -> None:
    task = create(file=str(saved_dataset(tmp_path / "hf")))
    assert np.array_equal(task.pool().inputs, SMALL)
    assert task.pool().targets.tolist() == LABELS.tolist()
    central = task.central()
    assert central is not None
    assert np.array_equal(central.inputs, SMALL[:2])


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(SettingsError, match=r"a.txt cannot be read as an .npz archive: .*; allowed: .npz, .csv, "):
        create(file=str(tmp_path / "a.txt"))
    with pytest.raises(SettingsError, match=r"task.file = 'none': no such file or folder; looked for"):
        create(file="none")


# --- a site's own data


def site_files(root: Path) -> dict[str, str]:
    """The same 12 images as every kind of source, with labels as text where it can have them."""
    np.savez(root / "site.npz", x=SMALL, y=np.array(NAMES)[LABELS])
    np.savez(root / "numbers.npz", x=SMALL, y=LABELS, classes=np.array(NAMES))
    image_folder(root / "pictures")
    lines = [f"pictures/{NAMES[label]}/{number:02}.png,{NAMES[label]}" for number, label in enumerate(LABELS)]
    (root / "site.csv").write_text("\n".join(["path,label", *lines]))
    return {
        "npz": str(root / "site.npz"),
        "numbers": str(root / "numbers.npz"),
        "folder": str(root / "pictures"),
        "table": str(root / "site.csv"),
        "hugging face": str(saved_dataset(root / "hf")),
    }


def test_a_site_may_bring_any_kind_of_source(tmp_path: Path) -> None:
    """The server has no data; the run's classes stand in another order than a site's folders."""
    task = create(shape=[8, 9, 3], classes=["owl", "cat", "dog"])
    assert (task.names(), task.central(), task.plan_hash()) == ([], None, "")
    files = site_files(tmp_path)
    for kind in ("npz", "folder", "table"):
        site = task.client("site", files[kind])
        order = SMALL if kind != "folder" else by_class()
        labels = LABELS if kind != "folder" else np.sort(LABELS)
        assert np.array_equal(site.train.inputs, order), kind
        assert site.train.targets.tolist() == [(label + 1) % 3 for label in labels.tolist()], kind
    # Numbers mean what the run says they do.
    ordered = create(shape=[8, 9, 3], classes=list(NAMES))
    for kind in ("numbers", "hugging face"):
        assert ordered.client("site", files[kind]).train.targets.tolist() == LABELS.tolist(), kind


def test_what_a_site_and_a_run_do_not_agree_on_is_named(tmp_path: Path) -> None:
    files = site_files(tmp_path)
    with pytest.raises(SettingsError, match=r"its labels are text \('cat', 'dog', 'owl'\) and this run's classes have"):
        create(shape=[8, 9, 3], classes=3).client("site", files["npz"])
    with pytest.raises(SettingsError, match=r"labels 'owl' are none of this run's classes: 'cat', 'dog', 'cow'"):
        create(shape=[8, 9, 3], classes=["cat", "dog", "cow"]).client("site", files["folder"])
    with pytest.raises(SettingsError, match=r"its classes are 'cat', 'dog', 'owl'; this run's are 'owl', 'cat', 'dog'"):
        create(shape=[8, 9, 3], classes=["owl", "cat", "dog"]).client("site", files["numbers"])
    with pytest.raises(SettingsError, match=r"pictures: one input is \(8, 9, 3\); this run's are \(9, 9, 3\)"):
        create(shape=[9, 9, 3], classes=list(NAMES)).client("site", files["folder"])
    scaled = create(shape=[9, 9, 3], classes=list(NAMES), resize=True).client("site", files["folder"])
    assert scaled.train.inputs.shape == (12, 9, 9, 3)


def test_class_names_are_the_same_for_every_process(tmp_path: Path) -> None:
    """Where the experiment only counts them, a process that has read the pooled file knows no more than a site."""
    files = site_files(tmp_path)
    task = create(file=files["numbers"], shape=[8, 9, 3], classes=3)
    assert len(task.names()) == 2
    with pytest.raises(SettingsError, match=r"this run's classes have no names; .* task.classes = \[...\]"):
        task.client("site", files["folder"])
    assert len(create(file=files["numbers"]).client("site", files["folder"]).train) == 12


def test_a_named_task_takes_a_sites_own_data(tmp_path: Path) -> None:
    """CIFAR-10's names are known without its data; with pooled = false the server needs none."""
    images = RANDOM.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    image_folder(tmp_path / "pets", images, ("cat", "dog", "frog"))
    task = create(name="cifar10", pooled=False)
    assert task.names() == []
    assert task.client("site", str(tmp_path / "pets")).train.targets.tolist() == [3, 5, 6]
    image_folder(tmp_path / "wild", images, ("cat", "dog", "wolf"))
    with pytest.raises(SettingsError, match=r"labels 'wolf' are none of this run's classes: 'airplane', .* 5 more"):
        task.client("site", str(tmp_path / "wild"))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"variant": "full"}, r"task.variant = 'full' belongs to named data sets: cifar10"),
        ({"download": True}, r"task.download = True belongs to named data sets"),
        ({"file": "a.npz", "pooled": False}, r"task.pooled = false needs task.shape and task.classes"),
        ({"shape": [8], "classes": []}, r"task.classes = \[\]: allowed: names, each once"),
        ({"shape": [8], "classes": ["a", "a"]}, r"allowed: names, each once"),
        ({"shape": [8], "classes": 0}, r"\[task\]: classes"),
        ({"name": "cifar10", "shape": [8, 8]}, r"task.shape = \(8, 8\): cifar10's inputs are \(32, 32, 3\)"),
        ({"name": "cifar10", "classes": 11}, r"task.classes = 11: cifar10 has 10 classes"),
        ({"name": "cifar10", "variant": "half"}, r"task.variant: 'half' is unknown; allowed: full, jpeg, subset"),
    ],
)
def test_settings_without_meaning_are_named(task: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        create(**task)


# --- memory


def test_pooled_bytes_are_not_copied() -> None:
    """Without a limit the examples are the source's own memory."""
    raw = Raw(SMALL, LABELS)
    held = pool(raw, SourceSettings(), None, "here", 0)
    assert held.train.inputs.data_ptr() == SMALL.ctypes.data
    assert len(pool(raw, SourceSettings(limit=5), None, "here", 0).train) == 5


# --- the cache


def test_what_is_decoded_is_kept_and_mapped() -> None:
    """The second time nothing is made; text groups keep their order."""
    made: list[int] = []

    def make() -> Raw:
        made.append(1)
        return Raw(SMALL, LABELS.astype(np.uint8), np.array(["b", "a"] * 6), SMALL[:2], LABELS[:2], NAMES)

    first, again = kept("x", make), kept("x", make)
    assert made == [1]
    for held in (first, again):
        assert np.array_equal(held.inputs, SMALL)  # type: ignore[arg-type]
        assert held.groups is not None
        assert held.groups.tolist() == [1, 0] * 6
        assert (held.classes, held.labels.tolist()) == (NAMES, LABELS.tolist())  # type: ignore[union-attr]
    path_of("x").write_bytes(b"broken")
    assert kept("x", make).classes == NAMES
    assert made == [1, 1]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "file" / "inside"))
    assert kept("x", lambda: Raw(SMALL, LABELS)).inputs is SMALL
    with pytest.raises(
        SettingsError, match=r"file/inside cannot be written: .*; name another folder with FEDKEEL_CACHE"
    ):
        create(name="cifar10", download=True).names()


SHARED = """
import sys, time
from pathlib import Path
import numpy as np
from common.data.arrays import Raw
from common.data.cache import kept
def make():
    Path(sys.argv[1]).open("a").write("made ")
    time.sleep(1)
    return Raw(np.full((100, 30, 30), 7, np.uint8), np.zeros(100, int))
print(int(kept("shared", make).inputs.sum()))
"""


@pytest.mark.processes
def test_processes_that_start_at_once_make_it_once(tmp_path: Path) -> None:
    """Both get 100 * 900 * 7."""
    command = [sys.executable, "-c", SHARED, str(tmp_path / "made")]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == ["630000"] * 2
    assert (tmp_path / "made").read_text() == "made "
    assert [path.name for path in folder().iterdir() if path.name.startswith(".")] == []


# --- mosaics


def mosaic(images: np.ndarray, tiles: int) -> np.ndarray:
    """The bytes of a JPEG sheet, a losslessly simple one: each tile has one grey."""
    sheet = images.reshape(tiles, tiles, 8, 8, 3).swapaxes(1, 2).reshape(8 * tiles, 8 * tiles, 3)
    content = io.BytesIO()
    Image.fromarray(sheet).save(content, "JPEG", quality=100)
    return np.frombuffer(content.getvalue(), np.uint8)


def test_mosaics_are_cut_in_order(tmp_path: Path) -> None:
    """Two sheets of 2 x 2 tiles for training, one for the test set."""
    greys = np.arange(0, 240, 20, dtype=np.uint8)
    tiles = np.broadcast_to(greys[:, None, None, None], (12, 8, 8, 3))
    parts = {"train_jpeg_0": tiles[:4], "train_jpeg_1": tiles[4:8], "test_jpeg_0": tiles[8:]}
    sheets = {key: mosaic(images, 2) for key, images in parts.items()}
    about = {"y_train": np.arange(8) % 2, "y_test": np.arange(4) % 2, "tiles_per_side": np.array(2)}
    np.savez(tmp_path / "m.npz", classes=np.array(["even", "odd"]), **about, **sheets)
    task = create(file=str(tmp_path / "m.npz"))
    assert task.pool().inputs.shape == (8, 8, 8, 3)
    assert (task.pool().inputs.float().mean((1, 2, 3)) - torch.arange(0, 160, 20)).abs().max() < 1
    assert task.class_names == ("even", "odd")
    np.savez(tmp_path / "bad.npz", train_jpeg_0=np.zeros(9, np.uint8), test_jpeg_0=sheets["test_jpeg_0"], **about)
    with pytest.raises(SettingsError, match=r"bad.npz: mosaics without 'classes is not"):
        create(file=str(tmp_path / "bad.npz"))
    np.savez(tmp_path / "bad.npz", train_jpeg_0=np.zeros(9, np.uint8), classes=np.array(["even", "odd"]), **about)
    with pytest.raises(SettingsError, match=r"bad.npz: key 'train_jpeg_0' cannot be read as JPEG"):
        create(file=str(tmp_path / "bad.npz"))


# --- named data sets: found, fetched, absent


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of data."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


CIFAR = RANDOM.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)


def cifar_originals(root: Path) -> None:
    """CIFAR-10's own files, with two images a batch: rows of 3,072 bytes, channel by channel."""
    own = root / "cifar-10-batches-py"
    own.mkdir(parents=True)
    rows = CIFAR.transpose(0, 3, 1, 2).reshape(20, -1)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = slice(2 * number, 2 * number + 2)
        batch = {"data": rows[part], "labels": [2 * number % 10, (2 * number + 1) % 10]}
        (own / name).write_bytes(pickle.dumps(batch))
    from common.data.named_images import CIFAR10

    (own / "batches.meta").write_bytes(pickle.dumps({"label_names": list(CIFAR10)}))


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torchvision's own classes, without the checksums of the real files, and an internet of one file. Returns what was
    fetched."""
    from torchvision.datasets import CIFAR10, cifar

    for name in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, name, [[file, None] for file, _ in getattr(CIFAR10, name)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})
    fetched: list[str] = []

    def download(url: str, root: str, filename: str, md5: str) -> None:
        fetched.append(url)
        cifar_originals(Path(root))

    monkeypatch.setattr(cifar, "download_and_extract_archive", download)
    return fetched


def check_cifar(task: Images) -> None:
    assert np.array_equal(task.pool().inputs, CIFAR[:10])
    assert task.pool().targets.tolist() == list(range(10))
    central = task.central()
    assert central is not None
    assert np.array_equal(central.inputs, CIFAR[10:12])


def test_cifar_is_fetched_once_and_only_when_asked(
    lenient: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is fetched, how large it is and where it goes is said before; later runs and other processes need neither
    the network nor `download`."""
    with pytest.raises(SettingsError, match=r"not on this machine; .*cifar10-full.safetensors; allowed: task.download"):
        create(name="cifar10").names()
    assert lenient == []
    check_cifar(create(name="cifar10", download=True))
    assert len(lenient) == 1
    assert f"cifar10 is being fetched: 170 MB by torchvision, into {tmp_path / 'cache'}" in caplog.text
    check_cifar(create(name="cifar10"))
    assert len(lenient) == 1


def test_the_owners_files_are_read_where_they_lie(lenient: list[str], data: Path) -> None:
    """As torchvision leaves them, in the data folder or one of the set's name."""
    cifar_originals(data / "cifar10")
    check_cifar(create(name="cifar10"))
    assert lenient == []
    np.savez(data / "cifar10" / "cifar10_full.npz", x=CIFAR[:3], y=np.arange(3))
    assert len(create(name="cifar10").pool()) == 3  # somebody put it there


def idx(path: Path, array: np.ndarray, kind: int) -> None:
    """A file of MNIST's format: a magic number, the dimensions, the values, big end first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    path.write_bytes(head + array.astype(">u1" if kind == 8 else ">i4").tobytes())


GREY = RANDOM.integers(0, 256, (6, 28, 28), dtype=np.uint8)


def test_mnist_gets_its_writers_from_qmnist(data: Path) -> None:
    """Three writers; an archive of other labels is refused."""
    writers, labels = np.array([7, 5, 7, 9]), np.arange(4)
    about = np.zeros((4, 8), int)
    about[:, 0], about[:, 2] = labels, writers
    for name, part in (("train", slice(0, 4)), ("t10k", slice(4, 6))):
        idx(data / "MNIST" / "raw" / f"{name}-images-idx3-ubyte", GREY[part], 8)
        idx(data / "MNIST" / "raw" / f"{name}-labels-idx1-ubyte", np.arange(6)[part], 8)
    idx(data / "QMNIST" / "raw" / "qmnist-train-images-idx3-ubyte", GREY[:4], 8)
    idx(data / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int", about, 12)
    task = create("natural", None, name="mnist")
    assert [task.client(name).train.targets.tolist() for name in task.names()] == [[1], [0, 2], [3]]
    assert np.array_equal(task.pool().inputs, GREY[:4])
    path_of("mnist-full").unlink()
    about[0, 0] = 3
    idx(data / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int", about, 12)
    with pytest.raises(SettingsError, match=r"mnist: QMNIST's labels in .* are not those of MNIST's"):
        create(name="mnist").names()


def test_emnist_is_upright_and_letters_count_from_zero(data: Path) -> None:
    """Its files hold images transposed, and letters from 1."""
    for split, first in (("letters", 1), ("digits", 0)):
        for part, images in (("train", GREY[:4]), ("test", GREY[4:])):
            name = f"emnist-{split}-{part}"
            idx(data / "EMNIST" / "raw" / f"{name}-images-idx3-ubyte", images, 8)
            idx(data / "EMNIST" / "raw" / f"{name}-labels-idx1-ubyte", np.arange(len(images)) + first, 8)
    task = create(name="emnist", variant="letters")
    assert (task.classes, task.class_names[:2] if task.class_names else None) == (26, ("a", "b"))
    assert np.array_equal(task.pool().inputs, GREY[:4].transpose(0, 2, 1))
    assert task.pool().targets.tolist() == [0, 1, 2, 3]
    assert create(name="emnist", variant="digits").classes == 10
    with pytest.raises(
        SettingsError, match=r"EMNIST's files do not say who wrote what; allowed: task.name = 'femnist'"
    ):
        create("natural", None, name="emnist", variant="digits").names()


def hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, Any]) -> list[str]:
    """A hub that holds one data set; flwr-datasets itself is the real one. Returns what was asked for."""
    import datasets

    asked: list[str] = []

    def load_dataset(path: str, name: str | None, cache_dir: str) -> Any:
        asked.append(f"{path} {Path(cache_dir).name}")
        return datasets.DatasetDict(splits)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_femnist_comes_with_its_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """62 classes, digits first; writers in the order of their names; no test set."""
    import datasets

    from common.data.named_images import LETTERS

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "writer_id": datasets.Value("string"),
            "hsf_id": datasets.Value("int64"),
            "character": datasets.ClassLabel(names=list(LETTERS)),
        }
    )
    columns = {
        "image": [Image.fromarray(image) for image in GREY],
        "writer_id": ["f2", "f1", "f2", "f3", "f1", "f2"],
        "hsf_id": [0] * 6,
        "character": [0, 10, 36, 61, 1, 2],
    }
    asked = hub(monkeypatch, {"train": datasets.Dataset.from_dict(columns, features)})
    task = create("natural", None, name="femnist", download=True)
    assert [task.client(name).train.targets.tolist() for name in task.names()] == [[10, 1], [0, 36, 2], [61]]
    assert np.array_equal(task.pool().inputs, GREY)
    assert (task.classes, task.central()) == (62, None)
    assert task.class_names is not None
    assert (task.class_names[10], task.class_names[36]) == ("A", "a")
    assert create("natural", None, name="femnist").names() == ["0", "1", "2"]
    assert asked == ["flwrlabs/femnist femnist"]


def test_tinyimagenet_from_the_hub_and_from_its_archive(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """Grey images become RGB; the archive's validation labels stand in a file of their own."""
    import datasets

    wide = RANDOM.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    names = [f"n{number:08}" for number in range(200)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    images = [Image.fromarray(wide[0]), Image.fromarray(wide[1, ..., 0])]
    train = datasets.Dataset.from_dict({"image": images, "label": [0, 199]}, features)
    hub(monkeypatch, {"train": train, "valid": train.select([0])})
    task = create(name="tinyimagenet", download=True)
    assert np.array_equal(task.pool().inputs[1], np.repeat(wide[1, ..., :1], 3, -1))
    assert (task.shape, task.classes, task.pooled.names) == ((64, 64, 3), 200, tuple(names))
    assert task.central() is not None
    root = data / "tiny-imagenet-200"
    for number in range(200):
        write(root / "train" / names[number] / "images" / "a.png", wide[number % 4])
    write(root / "val" / "images" / "v.png", wide[3])
    write(root / "test" / "images" / "t.png", wide[0])  # without labels
    (root / "val" / "val_annotations.txt").write_text(f"v.png\t{names[7]}\t0\t0\t62\t62\n")
    local = create(name="tinyimagenet")
    assert local.pool().targets.tolist() == list(range(200))
    central = local.central()
    assert central is not None
    assert central.targets.tolist() == [7]
    assert np.array_equal(central.inputs[0], wide[3])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "library"), [("cifar10", "URLError"), ("femnist", "ConnectionError")])
def test_without_a_network_a_download_ends_with_what_to_do(
    name: str, library: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real: no name is resolved. The message names the folder, the fault and other ways."""
    import socket

    def unknown(*args: object, **more: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    before = socket.getdefaulttimeout()
    with pytest.raises(SettingsError) as caught:
        create(name=name, download=True).names()
    for words in (f"downloads/{name}: {library}", "allowed without a network", f"{name}/{name}", "task.file"):
        assert words in str(caught.value)
    assert socket.getdefaulttimeout() == before


# --- real files


@pytest.mark.data
@pytest.mark.parametrize(
    ("task", "counts", "shape", "classes"),
    [
        ({"name": "cifar10", "variant": "subset"}, (10_000, 2_000), (32, 32, 3), 10),
        ({"name": "cifar10", "variant": "jpeg"}, (50_000, 10_000), (32, 32, 3), 10),
        ({"name": "cifar100", "variant": "jpeg"}, (50_000, 10_000), (32, 32, 3), 100),
    ],
)
def test_real_cifar(task: dict[str, Any], counts: tuple[int, int], shape: tuple[int, ...], classes: int) -> None:
    """Published counts, as many of each class, bytes; normalized to mean 0 and deviation 1."""
    made = create(clients=10, **task)
    central = made.central()
    assert central is not None
    assert (len(made.pool()), len(central), made.shape, made.classes) == (*counts, shape, classes)
    for part, count in zip((made.pool(), central), counts, strict=True):
        assert part.inputs.dtype == torch.uint8
        assert torch.bincount(part.targets).tolist() == [count // classes] * classes
    features = made.features(made.pool().inputs[:5000])
    assert features.mean((0, 2, 3)).abs().max() < 0.05
    assert (features.std((0, 2, 3)) - 1).abs().max() < 0.05


@pytest.mark.data
def test_the_mosaics_are_the_lossless_images() -> None:
    """Each image of the subset lies among those of the mosaics: the nearest one is off by JPEG's error (38 dB: a mean
    square of 10), the next by a hundred times that, and its label is the same."""
    subset, whole = (create(name="cifar10", variant=variant).pool() for variant in ("subset", "jpeg"))
    few, many = subset.inputs[:40].flatten(1).float(), whole.inputs[:1000].flatten(1).float()
    nearest = (torch.cdist(few, many) ** 2 / 3072).topk(2, largest=False)
    found = nearest.values[:, 0] < 60
    assert found.sum() >= 20  # those among the first thousand
    assert (nearest.values[found, 1] > 10 * nearest.values[found, 0]).all()
    assert torch.equal(whole.targets[nearest.indices[found, 0]], subset.targets[:40][found])
    assert nearest.values[found, 0].mean() < 25


@pytest.mark.data
def test_mnist_by_writer() -> None:
    """539 writers of 60,000 digits; the 10,000 of the test set are by others."""
    task = create("natural", None, name="mnist")
    central = task.central()
    assert central is not None
    sizes = [len(task.client(name).train) for name in task.names()]
    assert (len(sizes), sum(sizes), len(central)) == (539, 60_000, 10_000)
    assert task.shape == (28, 28)


@pytest.mark.parametrize("options", [{"name": "images", "shape": [28, 28]}, {"name": "text"}])
def test_a_site_without_data_where_all_bring_their_own(options: dict[str, Any]) -> None:
    """There is no pooled set that it could have a part of."""
    settings = TaskSettings.model_validate({**options, "classes": 2})
    with pytest.raises(SettingsError, match=r"'s1' brings no data: in this experiment every site does \(--data\)"):
        tasks.create(settings, PartitionSettings(), 0).client("s1")
