"""Feature shift: each client's inputs look different, always the same, and the central test set as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common import tasks
from common.data.examples import ClientData, Examples
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings
from common.partition import shift
from common.partition.assignment import Assignment
from common.partition.make import make_assignment
from common.partition.shift import shifted
from server.engines.worker_grid import WorkerGrid
from tests.support.faults import ran


def plan(kind: str, strength: float = 0.1, clients: int = 4, seed: int = 0) -> Assignment:
    settings = PartitionSettings.model_validate({"clients": clients, "shift": kind, "shift_strength": strength})
    return make_assignment(settings, np.arange(400) % 10, None, seed)


def data(inputs: Tensor) -> ClientData:
    examples = Examples(inputs, torch.zeros(len(inputs), dtype=torch.long))
    return ClientData(examples, Examples(inputs.clone(), examples.targets), 7)


def grey(count: int, value: int = 128) -> Tensor:
    return torch.full((count, 8, 8), value, dtype=torch.uint8)


def test_none_is_the_same_object() -> None:
    given = data(grey(3))
    assert shifted(given, plan("none"), 2) is given


@pytest.mark.parametrize(("client", "deviation"), [(0, 0.05), (1, 0.1), (3, 0.2)])
def test_noise_of_bytes_grows_from_client_to_client(client: int, deviation: float) -> None:
    """Client i of 4 at strength 0.2: deviation 0.2 i / 4 of [0, 1], 255 times that in bytes; rounding adds 1/12 to the
    variance. 200 x 64 values: mean within 4 deviations of the mean, deviation within 4 / sqrt(2 n) = 2.5 %."""
    values = shifted(data(grey(200)), plan("noise", 0.2), client).train.inputs
    assert values.dtype == torch.uint8
    wanted, n = np.sqrt((255 * deviation) ** 2 + 1 / 12), 200 * 64
    assert float(values.double().mean()) == pytest.approx(128, abs=4 * wanted / np.sqrt(n))
    assert float(values.double().std()) == pytest.approx(wanted, rel=0.025)


def test_noisy_bytes_are_clipped_not_wrapped() -> None:
    """Black stays near black: half of the noise is below 0 and becomes 0, nothing comes out on the white side."""
    values = shifted(data(grey(100, 0)), plan("noise", 0.1), 3).train.inputs
    assert 0.45 < float((values == 0).double().mean()) < 0.55
    assert int(values.max()) < 255 * 0.1 * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_floats_is_not_clipped(dtype: torch.dtype) -> None:
    """The same noise in both precisions, half of it below zero."""
    values = shifted(data(torch.zeros(50, 6, dtype=dtype)), plan("noise"), 1).train.inputs
    assert values.dtype == dtype
    assert float(values.min()) < 0
    other = shifted(data(torch.zeros(50, 6)), plan("noise"), 1).train.inputs
    assert torch.allclose(values.float(), other)


def test_noise_is_each_clients_own_and_each_sides() -> None:
    """Function of seed, client and side: equal again, and nothing else is equal."""
    zeros = data(torch.zeros(20, 6))
    seen = [
        part.inputs / (client + 1)
        for seed in (0, 1)
        for client in (0, 1)
        for made in [shifted(zeros, plan("noise", seed=seed), client)]
        for part in (made.train, made.evaluate)
    ]
    again = shifted(zeros, plan("noise"), 0)
    assert torch.equal(again.train.inputs, seen[0])
    assert torch.equal(again.evaluate.inputs, seen[1])
    assert all(not torch.allclose(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert not zeros.train.inputs.any()


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many examples are changed some at a time, from one stream."""
    given = data(torch.zeros(10, 6))
    whole = shifted(given, plan("noise"), 2).train.inputs
    monkeypatch.setattr(shift, "BLOCK", 3)
    assert torch.equal(shifted(given, plan("noise"), 2).train.inputs, whole)


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 4, 4, 3), (2, 3, 4, 4)])
@pytest.mark.parametrize("client", range(6))
def test_rotation_turns_images_exactly(shape: tuple[int, ...], client: int) -> None:
    """Client i by i mod 4 quarter turns: numpy's, over the two equal sides; client 0 and 4 not at all."""
    images = torch.arange(np.prod(shape), dtype=torch.uint8).view(shape)
    axes = (2, 3) if shape[1] == 3 else (1, 2)
    turned = shifted(data(images), plan("rotation", clients=6), client)
    expected = np.rot90(images.numpy(), client % 4, axes)
    for part in (turned.train, turned.evaluate):
        assert np.array_equal(part.inputs.numpy(), expected)
        assert part.inputs.is_contiguous()
    assert turned.steps == 7


def test_brightness_and_contrast_by_hand() -> None:
    """Client 2 of 4 at strength 0.8: factor 1 - 0.8 * 2/4 = 0.6. Values 10 and 20: times 0.6, 6 and 12; about their
    mean 15: 12 and 18. Bytes 255 and 0: 153 and 0; about 127.5: 204 and 51."""
    pair, bytes_ = torch.tensor([[10.0, 20.0]]), torch.tensor([[255, 0]], dtype=torch.uint8)

    def made(kind: str, inputs: Tensor) -> list[Any]:
        return shifted(data(inputs), plan(kind, 0.8), 1).train.inputs.tolist()[0]

    assert made("brightness", pair) == pytest.approx([6, 12])
    assert made("contrast", pair) == pytest.approx([12, 18])
    assert made("brightness", bytes_) == [153, 0]
    assert made("contrast", bytes_) == [204, 51]


@pytest.mark.parametrize("kind", ["noise", "rotation", "brightness", "contrast"])
def test_no_examples_and_targets_stay(kind: str) -> None:
    """An empty side stays empty; targets and their order are nobody's to change."""
    given = ClientData(Examples(grey(3), torch.tensor([2, 0, 1])), Examples(grey(0), torch.zeros(0, dtype=torch.long)))
    made = shifted(given, plan(kind), 1)
    assert made.train.targets.tolist() == [2, 0, 1]
    assert made.evaluate.inputs.shape == (0, 8, 8)
    assert made.evaluate.inputs.dtype == torch.uint8


def test_the_plans_hash_covers_the_shift() -> None:
    """Kind, strength and seed; rotation has no strength."""
    base = plan("none")
    made = [plan("noise"), plan("noise", 0.2), plan("rotation"), plan("contrast")]
    assert len({base.hash, *(each.hash for each in made)}) == 5
    assert plan("rotation", 0.2).hash == plan("rotation", 0.9).hash
    assert plan("none", 0.2).hash == base.hash


@pytest.mark.parametrize(
    ("kind", "inputs", "words"),
    [
        ("noise", torch.zeros(400, 5, dtype=torch.long), ["shift = 'noise'", "torch.int64 (5,)", "uint8 and floats"]),
        ("rotation", torch.zeros(400, 64), ["shift = 'rotation'", "(64,)", "square images"]),
        ("rotation", torch.zeros(400, 8, 6), ["(8, 6)", "square images"]),
        ("rotation", torch.zeros(400, 8, 6, 3), ["(8, 6, 3)", "square images"]),
    ],
)
def test_what_cannot_be_shifted_is_refused(kind: str, inputs: Tensor, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        shifted(data(inputs), plan(kind), 1)
    for word in words:
        assert word in str(caught.value)


# --- in a task and a run


def experiment(folder: Path, **partition: Any) -> Experiment:
    """Twelve 8x8 images of bytes in three classes for each of four clients, and a central test set."""
    rng, file = np.random.default_rng(0), folder / "images.npz"
    if not file.exists():
        images = {f"x_{part}": rng.integers(0, 256, (48, 8, 8), np.uint8) for part in ("train", "test")}
        np.savez(file, **images, y_train=np.arange(48) % 3, y_test=np.arange(48) % 3)
    values = {"task": {"name": "npz", "file": str(file), "model": "mlp", "width": 4}, "rounds": 2, "seed": 5}
    return Experiment.model_validate(values | {"partition": {"clients": 4, "holdout": 0.25, **partition}})


def task(settings: Experiment) -> Any:
    return tasks.create(settings.task, settings.partition, settings.seed)


def test_a_task_shifts_its_clients_and_no_test_set(tmp_path: Path) -> None:
    """Turned back, a client's images are those of the plain split; the central set is the file's."""
    plain, turned = task(experiment(tmp_path)), task(experiment(tmp_path, shift="rotation"))
    for number in range(4):
        before, after = plain.client(str(number)), turned.client(str(number))
        for a, b in ((before.train, after.train), (before.evaluate, after.evaluate)):
            assert torch.equal(torch.rot90(b.inputs, -number, (1, 2)), a.inputs)
            assert torch.equal(a.targets, b.targets)
    assert torch.equal(plain.central().inputs, turned.central().inputs)
    assert plain.plan_hash() != turned.plan_hash()


def test_a_task_that_cannot_be_shifted_ends_at_the_start() -> None:
    with pytest.raises(SettingsError, match=r"shift = 'rotation': one input of this task is \(64,\)"):
        task(Experiment.parse('partition.shift = "rotation"'))


@pytest.mark.slow
def test_shifted_runs_are_the_same_in_worker_processes(tmp_path: Path) -> None:
    """And other than plain ones."""
    noisy = experiment(tmp_path, shift="noise", shift_strength=0.3)
    here = ran(tmp_path / "here", noisy)
    with WorkerGrid("client.app:app", 2, "cpu", tmp_path / "memory") as grid:
        there = ran(tmp_path / "there", noisy, grid)
    plain = ran(tmp_path / "plain", experiment(tmp_path))
    assert there.history[-1]["sha256"] == here.history[-1]["sha256"] != plain.history[-1]["sha256"]
