"""The table of named image data sets: where they lie, what they are, and how they are fetched."""

from __future__ import annotations

import logging
import os
import socket
import string
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from common.data.arrays import SourceSettings
from common.data.cache import FOLDER, folder, kept, path_of, stamp
from common.data.grant import granted
from common.data.labels import numbered
from common.data.originals import Fetch, emnist, hub, mnist, torchvision
from common.data.raw import Raw
from common.data.sources import read_pooled
from common.errors import SettingsError, SiteError

log = logging.getLogger("common.tasks")

SILENCE_S = 30.0
"""Seconds without a byte that end a download."""


@dataclass(frozen=True)
class Dataset:
    """A row. `places`: variant -> paths under FEDKEEL_DATA, the first variant being the default; `classes`: their
    names, or number where the names come with the data; `mean` and `std` of inputs in [0, 1] by channel; `originals`:
    the folder that `fetch` reads, by its owner's name; `fetched`: the variants that it knows."""

    shape: tuple[int, ...]
    classes: tuple[str, ...] | int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    places: Mapping[str, tuple[str, ...]]
    fetch: Fetch
    fetched: tuple[str, ...]
    about: str
    originals: str | None = None
    of_variant: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Variant -> class names, where they are other than `classes`."""

    def names(self, variant: str) -> tuple[str, ...] | int:
        """The classes of a variant."""
        return self.of_variant.get(variant, self.classes)


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
LETTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
MERGED = tuple(each for each in LETTERS if each not in "cijklmopsuvwxyz")
SPLITS = ("balanced", "byclass", "bymerge", "letters", "digits", "mnist")

DATASETS = {
    "cifar10": Dataset(
        shape=(32, 32, 3),
        classes=CIFAR10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        places={
            "full": ("cifar10/cifar10_full.npz",),
            "jpeg": ("cifar10/cifar10_full_jpeg.npz",),
            "subset": ("cifar10/cifar10.npz",),
        },
        fetch=torchvision("CIFAR10"),
        fetched=("full",),
        about="170 MB by torchvision",
        originals="cifar-10-batches-py",
    ),
    "cifar100": Dataset(
        shape=(32, 32, 3),
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        places={"full": ("cifar100/cifar100_full.npz",), "jpeg": ("cifar100/cifar100_full_jpeg.npz",)},
        fetch=torchvision("CIFAR100"),
        fetched=("full",),
        about="170 MB by torchvision",
        originals="cifar-100-python",
    ),
    "tinyimagenet": Dataset(
        shape=(64, 64, 3),
        classes=200,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        places={"full": ("tinyimagenet/tinyimagenet.npz", "tiny-imagenet-200", "tinyimagenet")},
        fetch=hub("zh-plus/tiny-imagenet", "image", "label", None, "valid"),
        fetched=("full",),
        about="zh-plus/tiny-imagenet, 150 MB by flwr-datasets",
    ),
    # x/255 alone: paper is white in some copies of it and black in others.
    "femnist": Dataset(
        shape=(28, 28),
        classes=LETTERS,
        mean=None,
        std=None,
        places={"full": ("femnist/femnist.npz", "femnist")},
        fetch=hub("flwrlabs/femnist", "image", "character", "writer_id", None),
        fetched=("full",),
        about="flwrlabs/femnist, 200 MB by flwr-datasets",
    ),
    "emnist": Dataset(
        shape=(28, 28),
        classes=MERGED,
        mean=(0.1751,),
        std=(0.3332,),
        places={split: (f"emnist/emnist_{split}.npz",) for split in SPLITS},
        fetch=emnist,
        fetched=SPLITS,
        about="560 MB by torchvision",
        originals="EMNIST",
        of_variant={
            "byclass": LETTERS,
            "letters": tuple(string.ascii_lowercase),
            "digits": tuple(string.digits),
            "mnist": tuple(string.digits),
        },
    ),
    "mnist": Dataset(
        shape=(28, 28),
        classes=tuple(string.digits),
        mean=(0.1307,),
        std=(0.3081,),
        places={"full": ("mnist_writers/mnist_writers.npz",)},
        fetch=mnist,
        fetched=("full",),
        about="25 MB by torchvision (MNIST, and QMNIST for its writers)",
        originals="QMNIST",
    ),
}


def load(name: str, variant: str, settings: SourceSettings) -> tuple[Raw, str]:
    """A named data set and where it was found: in the folder that FEDKEEL_DATA names, in the cache, as its owner's
    files, or fetched where `task.download` says so.

    Raises SettingsError that names all places looked at and the ways to get it.
    """
    row, key = DATASETS[name], f"{name}-{variant}"
    data = _data()
    places = [data / place for place in row.places[variant]] if data else []
    for place in places:
        if place.exists():
            decode = partial(_read, place, settings, row.shape)
            return (kept(f"{key}-{stamp(place)}", decode) if place.is_dir() else decode()), str(place)
    fetchable, held = variant in row.fetched, path_of(key)
    roots = [data, data / name] if data and row.originals and fetchable else []
    places += [root / str(row.originals) for root in roots]
    root = next((root for root in roots if (root / str(row.originals)).is_dir()), None)

    def make() -> Raw:
        if root is not None:
            return _fetch(name, variant, root, False)
        if fetchable and settings.download:
            granted().download(name, f"task.download = true of {name!r}", own=True)
            return _download(name, variant)
        raise SiteError("data-absent", _absent(name, variant, [*map(str, places), str(held)], data))

    if not held.is_file() and (root is None and not (fetchable and settings.download)):
        make()  # what nobody can give needs no lock
    try:
        return kept(key, make, required=settings.download and root is None), str(held)
    except OSError as error:
        raise SettingsError(
            f"task.name = {name!r}: {folder()} cannot be written: {error}; name another folder with {FOLDER}"
        ) from None


def _read(place: Path, settings: SourceSettings, shape: tuple[int, ...]) -> Raw:
    raw = read_pooled(place, settings, shape)
    names = raw.classes if isinstance(raw.classes, tuple) else None
    labels = [numbered(each, names, str(place)) for each in (raw.labels, raw.test_labels)]
    return replace(raw, labels=labels[0], test_labels=labels[1])


def _absent(name: str, variant: str, places: list[str], data: Path | None) -> str:
    """What was looked for, and the ways to get it."""
    ways = _ways(name, variant, data)
    if variant in DATASETS[name].fetched:
        ways.insert(0, f"task.download = true ({DATASETS[name].about}, into {folder()}, which {FOLDER} moves)")
    return (
        f"task.name = {name!r} (variant {variant!r}) is not on this machine; looked for {', '.join(places)}; "
        f"allowed: {'; '.join(ways)}"
    )


def _ways(name: str, variant: str, data: Path | None) -> list[str]:
    """How to have a data set without a network."""
    row = DATASETS[name]
    here = [other for other, paths in row.places.items() if data and any((data / path).exists() for path in paths)]
    return [
        *(f"task.variant = {other!r}, which is here" for other in here),
        "task.file = your own copy (.npz, folder of images, table)",
        f"{row.places[variant][0]} in {data or 'a folder that FEDKEEL_DATA names'}",
    ]


def _download(name: str, variant: str) -> Raw:
    root = folder() / "downloads" / name
    log.warning("%s is being fetched: %s, into %s", name, DATASETS[name].about, root)
    root.mkdir(parents=True, exist_ok=True)
    return _fetch(name, variant, root, True)


def _fetch(name: str, variant: str, root: Path, download: bool) -> Raw:
    """The row's `fetch`, every fault of a library a SettingsError."""
    doing = "task.download = true failed" if download else "cannot be read"
    try:
        with _impatient(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries' own old habits
            return DATASETS[name].fetch(root, variant, download)
    except SettingsError:
        raise
    except ImportError as error:
        raise SettingsError(f"task.name = {name!r} needs a library that is not installed: {error}") from None
    except Exception as error:  # they raise whatever their parts do
        raise SettingsError(
            f"task.name = {name!r}: {doing} in {root}: {type(error).__name__}: {error}; allowed without a network: "
            + "; ".join(_ways(name, variant, _data()))
        ) from None


def _data() -> Path | None:
    return Path(os.environ["FEDKEEL_DATA"]) if "FEDKEEL_DATA" in os.environ else None


@contextmanager
def _impatient() -> Iterator[None]:
    """urllib waits for a silent server for ever, unless sockets are told not to."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
