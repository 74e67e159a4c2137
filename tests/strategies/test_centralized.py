"""Training on the pooled data: gradient descent in numpy, SGD in plain torch, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from client.app import app
from common import tasks
from common.data.examples import ClientData, Examples
from common.data.pooled import Joined, none_of, pooled
from common.errors import SettingsError, SiteError
from common.experiment import Experiment, PartitionSettings
from common.model import build
from common.seeds import generator
from common.tasks.base import Task
from server.__main__ import cli
from server.engines.grid import grid
from server.engines.inprocess import InProcessGrid
from server.rounds.prepare import prepare
from strategies.registry import settled
from tests.support.faults import ran
from tests.support.helpers import Simulation, experiment, problem

DATA = problem()
A, E, COUNTS, STEPS = (DATA[key] for key in ("curvatures", "centers", "examples", "steps"))


def digits(**tables: Any) -> Experiment:
    values = {
        "seed": 5,
        "rounds": 3,
        "task": {"name": "digits", "dtype": "float64", "hidden": 8},
        "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 4},
        "strategy": {"name": "centralized"},
        "local": {"lr": 0.05},
        "evaluate": {"clients": "all"},
        **tables,
    }
    return Experiment.model_validate(values)


# --- what it is


@pytest.mark.parametrize("sampled", [None, 2])
def test_centralized(sampled: int | None, tmp_path: Path) -> None:
    """Batches of all examples: K = S/N sum K_i steps of gradient descent on sum n_i F_i / n in a round, in numpy; the
    first client takes them, and the rest is the minimizer."""
    local, round = {"lr": 0.1, "batch_size": 1000}, {"sample": sampled} if sampled else {}
    run = Simulation(experiment(tmp_path, "centralized", local=local, round=round))
    share, x = (COUNTS / COUNTS.sum())[:, None], DATA["start"].copy()
    planned = round_half_even((sampled or 6) / 6 * float(STEPS.sum()))
    for _ in range(4):
        (upload,) = run.step()
        for _ in range(planned):
            x = x - 0.1 * (share * A * (x - E)).sum(0)
        assert (upload.name, upload.steps, upload.examples) == ("0", planned, COUNTS.sum())
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=3e-14)
    run.run(60)
    assert run.distance(run.task.minimizer("data")) < 1e-12  # type: ignore[attr-defined]


def round_half_even(value: float) -> int:
    return int(np.rint(value))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_plain_torch_on_the_concatenated_examples(momentum: float, tmp_path: Path) -> None:
    """Digits in float64 through messages, four clients of a Dirichlet split: torch.optim.SGD over batches of the pool,
    its momentum kept from round to round, ends at the same model; each client evaluates it on its own examples."""
    settings = digits(local={"lr": 0.05, **({"momentum": momentum} if momentum else {})})
    result = ran(tmp_path, settings, InProcessGrid(app))
    task = tasks.create(settings.task, settings.partition, settings.seed)
    clients = [task.client(name) for name in task.names()]
    inputs, targets = (torch.cat([getattr(c.train, key) for c in clients]) for key in ("inputs", "targets"))
    steps = sum(-(-len(client.train) // 32) for client in clients)
    module = build(task, settings.seed).module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
    for number in (1, 2, 3):
        order, taken = generator(settings.seed, "batches", "0", number), 0
        while taken < steps:
            for index in torch.split(torch.randperm(len(targets), generator=order), 32)[: steps - taken]:
                optimizer.zero_grad()
                functional.cross_entropy(module(task.features(inputs[index])), targets[index]).backward()  # type: ignore[attr-defined]
                optimizer.step()
                taken += 1
        record = result.history[number - 1]
        assert record["steps"] == {"0": steps}
        assert record["examples"] == {"0": len(targets)}
        assert sorted(record["each"]["loss"]) == ["0", "1", "2", "3"]
        for name, client in zip("0123", clients, strict=True):
            with torch.no_grad():
                logits = module(task.features(client.evaluate.inputs))  # type: ignore[attr-defined]
            loss = float(functional.cross_entropy(logits, client.evaluate.targets))
            assert record["each"]["loss"][name] == pytest.approx(loss, abs=1e-11)
    got = result.checkpoint.state["model"]
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_it_settles_the_cohort_and_the_moments() -> None:
    """round.sample is a number of steps here, the optimizer goes on unless it must not; what is settled stays."""
    strategy, whole = settled(digits(round={"sample": 2, "quorum": 1}, local={"optimizer": "adam", "lr": 0.001}))
    assert (strategy.cohort, whole.round.sample, whole.round.quorum) == (2, None, None)  # type: ignore[attr-defined]
    assert whole.local.moments == "keep"
    assert settled(whole)[1] == whole
    reset = digits(local={"optimizer": "adam", "moments": "reset"})
    assert settled(reset)[1].local.moments == "reset"
    assert settled(digits())[1].local.moments == "reset"


@pytest.mark.parametrize("local", [{}, {"epochs": 2}, {"steps": 3}])
@pytest.mark.parametrize("sampled", [None, 3])
def test_the_steps_are_those_of_a_federated_cohort(sampled: int | None, local: dict[str, int]) -> None:
    """As many as FedAvg's clients announce on the roll, all together, times S/N."""
    round = {"sample": sampled} if sampled else {}
    given = {"round": round, "local": {"lr": 0.05, **local}}
    apart, whole = Simulation(digits(**given, strategy={"name": "fedavg"})), Simulation(digits(**given))
    total = sum(member.steps for member in apart.members.values())
    assert whole.members["0"].steps == round_half_even(total * (sampled or 4) / 4)
    assert whole.members["0"].examples == sum(member.examples for member in apart.members.values())
    assert [whole.members[name].examples for name in "123"] == [0, 0, 0]
    kept = [(m.evaluation for m in run.members.values()) for run in (apart, whole)]
    assert [*kept[0]] == [*kept[1]]


@pytest.mark.parametrize("partition", [{"shift": "noise"}, {"kind": "quantity", "min_examples": 0}])
def test_every_split_is_pooled(partition: dict[str, Any], tmp_path: Path) -> None:
    """A client's feature shift stays in its examples; clients may be empty; two worker processes give the same bits."""
    settings = digits(partition={"kind": "dirichlet", "alpha": 0.3, "clients": 4, **partition}, rounds=2)
    here = ran(tmp_path / "here", settings, InProcessGrid(app))
    with grid("client.app:app", 2) as workers:
        assert ran(tmp_path / "workers", settings, workers).final == here.final
    task = tasks.create(settings.task, settings.partition, settings.seed)
    whole = prepare(settings).task.client("0").train
    expected = torch.cat([task.client(name).train.inputs for name in task.names()])
    assert torch.equal(whole.inputs, expected)


# --- examples that are no plain tensors


class Pairs(Examples):
    """Batches of a dict and a tuple."""

    def batch(self, index: Tensor) -> Any:
        inputs, targets = super().batch(index)
        return {"x": inputs, "double": (inputs * 2, targets)}, targets

    def to(self, device: torch.device) -> Pairs:
        return Pairs(self.inputs.to(device), self.targets.to(device))


def parts(sizes: Sequence[int], kind: type[Examples] = Pairs) -> list[Examples]:
    ends = np.cumsum(sizes)
    return [
        kind(torch.arange(end - size, end, dtype=torch.float64)[:, None], torch.arange(end - size, end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def test_any_batch_of_joined_examples_is_in_order() -> None:
    """Across parts, twice the same, empty parts among them; nested structures keep theirs."""
    whole = pooled(parts([3, 0, 5, 1]))
    assert isinstance(whole, Joined)
    assert len(whole) == 9
    assert whole.targets.tolist() == list(range(9))
    for index in ([8, 0, 4, 4, 2], [3], [], [1, 2]):
        batch, targets = whole.to(torch.device("cpu")).batch(torch.tensor(index, dtype=torch.int64))
        assert targets.tolist() == index
        assert batch["x"][:, 0].tolist() == index
        assert (batch["double"][0][:, 0] / 2).tolist() == batch["double"][1].tolist() == index
    assert len(none_of(whole)) == len(none_of(parts([4])[0])) == 0
    plain = pooled(parts([3, 2], Examples))
    assert type(plain) is Examples
    assert plain.targets.tolist() == list(range(5))


def test_what_cannot_be_in_one_batch_is_told() -> None:
    """Shapes that differ from client to client, and things that are no tensors."""
    odd = pooled([Examples(torch.zeros(2, 3), torch.zeros(2)), Examples(torch.zeros(2, 4), torch.zeros(2))])
    with pytest.raises(SettingsError, match=r"examples of shapes \[\(3,\), \(4,\)\] cannot be in one batch"):
        odd.batch(torch.tensor([0, 3]))

    class Words(Examples):
        def batch(self, index: Tensor) -> Any:
            return [str(each) for each in index.tolist()], self.targets[index]

    with pytest.raises(SettingsError, match="batches that hold a list cannot be put together"):
        pooled(parts([2, 2], Words)).batch(torch.tensor([0, 3]))


def test_windows_of_a_text_are_pooled(tmp_path: Path) -> None:
    """Shakespeare's examples are places in a text of each role: batches hold the windows themselves."""
    rows = [f'{{"play": "P", "role": "R{i}", "text": "{"abcde fghij " * (3 + i)}"}}' for i in range(3)]
    (tmp_path / "roles.jsonl").write_text("\n".join(rows), "utf-8")
    task = {"name": "shakespeare", "file": str(tmp_path / "roles.jsonl"), "length": 5, "width": 4}
    settings = digits(task=task, partition={"kind": "natural"})
    plain, whole = tasks.create(settings.task, settings.partition, 5), prepare(settings).task
    train = whole.client(whole.names()[0]).train
    clients = [plain.client(name).train for name in plain.names()]
    expected = [torch.cat(each) for each in zip(*(c.batch(torch.arange(len(c))) for c in clients), strict=True)]
    got = train.batch(torch.arange(len(train)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# --- what is refused


class Sites(Task):
    """Every site brings its data."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def names(self) -> list[str]:
        return []

    def client(self, name: str, file: str | None = None) -> ClientData:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return {}


def sites(options: dict[str, Any], partition: PartitionSettings, seed: int) -> Task:
    """`task.name = "tests.strategies.test_centralized:sites"`."""
    return Sites()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"task": {"name": "tests.strategies.test_centralized:sites"}},
            "strategy.name = 'centralized': the task has no",
        ),
        ({"strategy": {"name": "centralized", "cohort": 5}}, "strategy.cohort = 5: there are 4 clients"),
        ({"presence": {"kind": "bernoulli"}}, "presence.kind = 'bernoulli' beside strategy.name = 'centralized'"),
        ({"speed": {"kind": "stragglers"}}, "speed.kind = 'stragglers' beside strategy.name = 'centralized'"),
    ],
)
def test_refusals_before_round_1(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as error:
        prepare(digits(**tables))
    assert str(error.value).startswith(words)


COMMANDS = [
    ["run", "FILE"],
    ["runs", "queue", "FILE"],
    ["run", "FILE", "--superlink", "127.0.0.1:1"],
    ["doctor", "FILE"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_sites_are_not_asked_for_their_data(command: list[str], tmp_path: Path) -> None:
    """Before anything listens or is submitted, with a reason; a client that brings a file refuses, too."""
    file = tmp_path / "e.toml"
    file.write_text(digits().toml(), "utf-8")
    result = CliRunner().invoke(cli, [str(file) if word == "FILE" else word for word in command])
    assert result.exit_code != 0
    told = " ".join((result.stderr + result.stdout).split())
    assert "needs all clients' data in one place, and sites keep theirs" in told
    with pytest.raises(SiteError, match="a site's own stay where they are"):
        prepare(digits()).task.client("0", "some.csv")


def test_a_standardized_table_is_pooled(tmp_path: Path) -> None:
    """Mean and deviation of the pooled rows, told by the one who trains; it learns, in two processes the same."""
    draw = np.random.default_rng(0)
    rows = draw.normal(0, 1, (90, 2)) * [1000.0, 0.01] + [5000.0, 0.0]
    lines = [f"{a!r},{b!r},{int(b > 0)}" for a, b in rows.tolist()]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,ill", *lines]), "utf-8")
    task = {"name": "table", "file": str(tmp_path / "t.csv"), "target": "ill", "standardize": True}
    settings = digits(task=task, partition={"clients": 3, "holdout": 0.2}, local={"lr": 0.5}, rounds=8)
    here = ran(tmp_path / "here", settings, InProcessGrid(app))
    assert here.history[-1]["clients"]["accuracy"]["weighted"] > 0.9
    with grid("client.app:app", 2) as workers:
        assert ran(tmp_path / "workers", settings, workers).final == here.final
