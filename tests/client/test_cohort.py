"""Cohort mode: what one client after the other gives, to rounding."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from client.app import app
from client.cohort import answer_all, pool
from common.data.examples import ClientData, Examples
from common.errors import SettingsError
from common.experiment import Experiment, PartitionSettings
from common.tasks.base import Task
from server.__main__ import cli
from server.app import run
from server.engines import vce
from server.engines.grid import grid
from server.engines.inprocess import CohortGrid, InProcessGrid
from server.rounds.folder import RunFolder
from strategies.registry import REGISTRY
from tests.support.helpers import MIXED, NORMED
from tests.support.today import drawn

History = list[dict[str, Any]]
WRONG = 1000

DIGITS = """
name = "cohort"
seed = 7
rounds = 3
task.name = "digits"
task.dtype = "float64"
partition.kind = "dirichlet"
partition.alpha = 0.5
partition.clients = 4
local.lr = 0.05
local.batch_size = 64
"""


def trained(experiment: Experiment, folder: Path, most: int | None) -> tuple[dict[str, Tensor], History]:
    """Final weights and history; `most`: clients at once, None: one after the other."""
    node = InProcessGrid(app) if most is None else CohortGrid(app, answer_all, most)
    target = RunFolder(folder / f"{most}")
    run(node, experiment, target, say=lambda text: None)
    return load_file(target.path / "model.safetensors"), target.history()


def alike(experiment: Experiment, folder: Path, tolerance: float, most: int = 0) -> History:
    """Train both ways and compare weights and history; returns cohort mode's history."""
    (weights, history), (others, other) = (trained(experiment, folder, each) for each in (None, most))
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=tolerance, atol=tolerance)
    for one, two in zip(history, other, strict=True):
        for key in ("sampled", "accepted", "dropped", "void", "steps", "examples", "bytes_down", "generation"):
            assert one[key] == two[key], key
        for key in ("losses", "each", "central"):
            assert numbers(two[key]) == pytest.approx(numbers(one[key]), rel=tolerance, abs=tolerance), key
    return other


def numbers(value: Any) -> dict[str, float]:
    """All numbers of a nested mapping."""
    if not isinstance(value, Mapping):
        return {"": float(value)}
    return {f"{key}.{inner}": number for key, each in value.items() for inner, number in numbers(each).items()}


def on_digits(algorithm: str, model: str) -> Experiment:
    """Four clients of digits; FedBN needs BatchNorm, pFedAFM two extractors."""
    task = "cnn" if algorithm in NORMED else "mlp" if algorithm in MIXED else model
    other = "task.extractor = 4" if algorithm in MIXED else "task.width = 4"
    return Experiment.parse(f'{DIGITS}strategy.name = "{algorithm}"\ntask.model = "{task}"\n{other}\n')


TODAY = {"scaffold", "fedbn", "mime", *drawn(list(REGISTRY), 3, "cohort")}


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_every_algorithm(algorithm: str, tmp_path: Path) -> None:
    """In float64 nothing but the order of sums differs; three rounds of all clients go through every memory."""
    before = pool("cpu").together
    alike(on_digits(algorithm, "mlp"), tmp_path, 1e-9)
    assert pool("cpu").together > before or REGISTRY[algorithm].cls.simulated  # there one client trains


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in TODAY else pytest.mark.full) for name in REGISTRY]
)
def test_every_algorithm_with_batch_norm(algorithm: str, tmp_path: Path) -> None:
    """The same with running statistics, which are each client's own."""
    before = pool("cpu").together
    alike(on_digits(algorithm, "cnn"), tmp_path, 1e-9)
    assert pool("cpu").together > before


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_lower_precision(precision: str, tmp_path: Path) -> None:
    """float32 to 1e-4, under autocast to the digits of bfloat16. float16's scaled losses are each client's own."""
    text = DIGITS.replace("float64", "float32") + f'local.precision = "{precision}"\n'
    alike(Experiment.parse(text), tmp_path, 1e-4 if precision == "float32" else 2e-2)


def test_all_at_once_or_some(tmp_path: Path) -> None:
    """Two clients at once, one, or more than there are, give the same."""
    for most in (1, 2, 9):
        alike(on_digits("scaffold", "mlp"), tmp_path / str(most), 1e-9, most)


def test_equal_clients_are_always_together(tmp_path: Path) -> None:
    """4 clients of 100 examples in batches of 25: 4 steps x 4 clients x 3 rounds, none alone."""
    node = pool("cpu")
    together, apart = node.together, node.apart
    trained(experiment("plain"), tmp_path, 0)
    assert any(note.startswith("cohort mode: weights are") for note in RunFolder(tmp_path / "0").notes())
    assert (node.together - together, node.apart - apart) == (48, 0)


def test_clients_of_nothing_and_of_one_example(tmp_path: Path) -> None:
    """An empty client is skipped, one of a single example trains on BatchNorm's running statistics, in between others
    of unequal size."""
    history = alike(experiment("norm", sizes=[0, 1, 1, 30, 51]), tmp_path, 1e-9)
    assert history[0]["steps"] == {"1": 1, "2": 1, "3": 2, "4": 2}


def test_random_changes_of_batches_are_each_clients_own(tmp_path: Path) -> None:
    """Noise from torch's generator: the streams do not mix, and the caller's is left as it was."""
    before = torch.get_rng_state()
    alike(experiment("noise"), tmp_path, 1e-9)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["dropout", "branch", "strings"])
def test_what_cannot_be_batched_is_trained_one_by_one(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dropout's masks, branches on values, batches of more than tensors: bit for bit as always; said once."""
    with caplog.at_level(logging.WARNING, "client.cohort"):
        weights, _ = trained(experiment(kind), tmp_path, 0)
    expected, _ = trained(experiment(kind), tmp_path, None)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    told = [record.message for record in caplog.records if record.name == "client.cohort"]
    assert len(told) == (kind != "strings")
    assert all(text.startswith("cohort mode: clients train one after the other: ") for text in told)


def test_an_error_is_that_clients_alone(tmp_path: Path) -> None:
    """The loss raises for client 1: the others are aggregated."""
    history = alike(experiment("faulty", quorum=3), tmp_path, 1e-9)
    assert history[0]["accepted"] == ["0", "2", "3"]
    assert "client 1, round 1, train: ValueError: no such label" in history[0]["dropped"]["1"]


def test_a_round_that_has_enough_takes_no_more(tmp_path: Path) -> None:
    """Two of three asked clients close the round, as when one runs after the other."""
    history = alike(experiment("plain", sample=2, over_select=1), tmp_path, 1e-9)
    assert [len(record["accepted"]) for record in history] == [2, 2, 2]


def test_one_process_after_another_experiment(tmp_path: Path) -> None:
    """Lanes forget the last experiment's model."""
    for number, kind in enumerate(("plain", "norm", "plain")):
        alike(experiment(kind), tmp_path / str(number), 1e-9)


def test_refusals(tmp_path: Path) -> None:
    """Workers, Flower's engine and no clients at all; devices that Ray does not hand out."""
    with pytest.raises(SettingsError, match="workers = 2: allowed: 1"), grid("client.app:app", 2, cohort=0):
        pass
    file = tmp_path / "e.toml"
    file.write_text(DIGITS, "utf-8")
    for arguments, told in (
        (["--cohort", "all", "--engine", "flower"], "--cohort with --engine flower: allowed: --engine inprocess"),
        (["--engine", "flower", "--device", "cuda:1"], "allowed: cpu, auto, cuda; Ray chooses the GPU"),
        (["--cohort", "0"], "'0'; allowed: all, or a number of clients"),
    ):
        result = CliRunner().invoke(cli, ["simulate", str(file), "--run-dir", str(tmp_path / "run"), *arguments])
        assert result.exit_code == 2
        assert told.split()[0] in result.stderr
    if not torch.cuda.is_available():
        with pytest.raises(SettingsError, match="device 'cuda' was asked for and this machine has no usable GPU"):
            vce._uses_gpu("cuda")
        assert not vce._uses_gpu("auto")


class Labelled(Examples):
    """Batches with a word beside their tensors."""

    def batch(self, index: Tensor) -> Any:
        return (*super().batch(index), "word")

    def to(self, device: torch.device) -> Labelled:
        return self


class Odd(Task):
    """A linear model of three inputs in float64 whose loss, layers or batches are of one `kind`."""

    dtype = torch.float64

    def __init__(self, kind: str, sizes: list[int]) -> None:
        self.kind, self.sizes = kind, sizes

    def model(self) -> nn.Module:
        layer = {"norm": nn.BatchNorm1d(4), "dropout": nn.Dropout(0.5)}.get(self.kind, nn.Identity())
        return nn.Sequential(nn.Linear(3, 4), layer, nn.ReLU(), nn.Linear(4, 1)).double()

    def names(self) -> list[str]:
        return [str(number) for number in range(len(self.sizes))]

    def client(self, name: str, file: str | None = None) -> ClientData:
        source = torch.Generator().manual_seed(int(name))
        inputs = torch.randn(self.sizes[int(name)], 3, generator=source, dtype=torch.float64)
        kind = Labelled if self.kind == "strings" else Examples
        data = kind(inputs, inputs.sum(1) + (WRONG if self.kind == "faulty" and name == "1" else int(name)))
        return ClientData(data, Examples(inputs[:0], inputs[:0, 0]))

    def augment(self, batch: Any) -> Any:
        return (batch[0] + torch.randn_like(batch[0]), batch[1]) if self.kind == "noise" else batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch[:2]
        if self.kind == "faulty" and targets.max() > WRONG / 2:
            raise ValueError("no such label")
        loss = functional.mse_loss(model(inputs).squeeze(1), targets)
        return loss * 2 if self.kind == "branch" and loss > 0 else loss

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float]:
        return {}


def odd(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`task.name = "tests.client.test_cohort:odd"`."""
    return Odd(options["kind"], options["sizes"])


def experiment(kind: str, sizes: list[int] | None = None, **round: Any) -> Experiment:
    """Three rounds of that task; 100 examples a client in batches of 25."""
    return Experiment.model_validate(
        {
            "name": "cohort",
            "rounds": 3,
            "task": {"name": "tests.client.test_cohort:odd", "kind": kind, "sizes": sizes or [100] * 4},
            "local": {"lr": 0.05, "batch_size": 25},
            "evaluate": {"clients": "none"},
            "round": round,
        }
    )
