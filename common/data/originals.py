"""Image data sets from their owners' files, read and fetched by torchvision and flwr-datasets."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.data.raw import Raw
from common.data.tables import dataset_table, library
from common.errors import SettingsError
from common.flower import prepare

Fetch = Callable[[Path, str, bool], Raw]
"""(folder, variant, download) -> the data set from its original files in the folder, fetched there if `download`."""


def torchvision(kind: str) -> Fetch:
    """CIFAR-10 and CIFAR-100: `data` (n, 32, 32, 3) uint8, `targets` a list, `classes` names."""

    def fetch(root: Path, variant: str, download: bool) -> Raw:
        from torchvision import datasets  # 1.5 s, and an extra that need not be installed

        train, test = (getattr(datasets, kind)(root, train=part, download=download) for part in (True, False))
        labels = [np.array(each.targets, np.int64) for each in (train, test)]
        return Raw(train.data, labels[0], None, test.data, labels[1], tuple(train.classes))

    return fetch


def mnist(root: Path, variant: str, download: bool) -> Raw:
    """MNIST's images with the writers that QMNIST found for them: column 2 of its targets (n, 8)."""
    from torchvision import datasets  # 1.5 s, and an extra that need not be installed

    train, test = (datasets.MNIST(root, train=part, download=download) for part in (True, False))
    known = datasets.QMNIST(root, what="train", compat=False, download=download).targets
    if not bool((known[:, 0] == train.targets).all()):
        raise SettingsError(f"mnist: QMNIST's labels in {root} are not those of MNIST's training images")
    groups, names = known[:, 2].numpy(), tuple(string.digits)
    return Raw(
        train.data.numpy(), train.targets.numpy(), groups, test.data.numpy(), test.targets.numpy(), classes=names
    )


def emnist(root: Path, variant: str, download: bool) -> Raw:
    """A split of EMNIST, upright: its files hold the images transposed. The split `letters` counts from 1."""
    from torchvision import datasets  # 1.5 s, and an extra that need not be installed

    parts = [datasets.EMNIST(root, split=variant, train=part, download=download) for part in (True, False)]
    shift = int(variant == "letters")
    images = [part.data.transpose(1, 2).numpy() for part in parts]
    labels = [part.targets.numpy() - shift for part in parts]
    return Raw(images[0], labels[0], None, images[1], labels[1], tuple(parts[0].classes[shift:]))


def hub(name: str, image: str, label: str, group: str | None, test: str | None) -> Fetch:
    """A data set of the Hugging Face hub, through flwr-datasets, by the names of its columns and test split."""

    def fetch(root: Path, variant: str, download: bool) -> Raw:
        if not download:  # its files are only known to the library
            raise FileNotFoundError(root)
        prepare()  # before flwr-datasets reads whether to report its use
        with library():
            from flwr_datasets import FederatedDataset  # 2.4 s that only downloads need

            source = FederatedDataset(dataset=name, partitioners={}, shuffle=False, cache_dir=str(root))
            parts = [source.load_split(split) for split in ("train", test) if split]
        tables = [dataset_table(part, name) for part in parts]
        return Raw(
            tables[0][image],  # type: ignore[arg-type]
            tables[0][label],  # type: ignore[arg-type]
            None if group is None else np.array(tables[0][group], dtype=str),
            tables[1][image] if test else None,  # type: ignore[arg-type]
            tables[1][label] if test else None,  # type: ignore[arg-type]
            tuple(map(str, parts[0].features[label].names)),
        )

    return fetch
