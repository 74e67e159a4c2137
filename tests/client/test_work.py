"""Local training: what one client's round does to model, buffers, generators and to what it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client.app import app
from client.training.work import local_steps
from common.experiment import Experiment
from common.vector import sha256
from server.app import run as run_experiment
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from strategies.base import Upload
from tests.support.helpers import ALGORITHMS
from tests.support.tiny import Tiny, settings, simulate, trained


def test_steps_replace_epochs_and_a_clients_own_steps_replace_both() -> None:
    """5 examples in batches of 2 are 3 batches an epoch, 2 if BatchNorm merges the last one."""

    class Own(Tiny):
        def client(self, name: str, file: str | None = None) -> Any:
            held = super().client(name, file)
            return type(held)(held.train, held.evaluate, 4)

    for task, local, expected in (
        (Tiny(norm=False), {"epochs": 2}, 6),
        (Tiny(), {"epochs": 2}, 4),
        (Tiny(norm=False), {"epochs": 2, "steps": 7}, 7),
        (Tiny(norm=False), {"steps": 2}, 2),
        (Own(norm=False), {"epochs": 2, "steps": 7}, 4),
    ):
        work, _ = trained(task, **local)
        assert work.steps_taken == len(task.batches) == expected
        assert local_steps(task.client("0"), settings(**local).local) >= expected
        for epoch in range(2 if "steps" not in local else 1):
            size = 3 if not task.norm else 2
            seen = [number for batch in task.batches[epoch * size : (epoch + 1) * size] for number in batch]
            assert len(set(seen)) == len(seen)


def order(task: Tiny, name: str, seed: int = 0, rounds: int = 0) -> list[list[int]]:
    simulation = simulate(task, seed=seed)
    simulation.coordinator.round = rounds
    task.batches.clear()
    for _ in simulation.work(name).steps():
        pass
    return list(task.batches)


def test_the_batch_order_is_a_function_of_seed_name_and_round() -> None:
    """Torch's generator, the other clients and what ran before do not matter."""
    task = Tiny(sizes=(8, 8), norm=False)
    first = order(task, "0")
    torch.manual_seed(99)
    torch.rand(3)
    assert order(task, "0") == first
    for other in (order(task, "1"), order(task, "0", seed=1), order(task, "0", rounds=1)):
        assert other != first
        assert sorted(number for batch in other for number in batch) == list(range(8))


# --- clipping, proximal term, dropout, precision


def walk(clip: str, correction: float = 0.0, **local: Any) -> list[tuple[Tensor, Tensor]]:
    """Each yielded gradient and the step that the optimizer made of it."""
    work, pairs = simulate(Tiny(norm=False), lr=0.1, **local).work("2"), []
    before = work.vector.clone()
    for gradient in work.steps(clip=clip):
        if pairs:
            pairs[-1] = (pairs[-1][0], (work.vector - before) / -0.1)
            before = work.vector.clone()
        pairs.append((gradient.clone(), gradient))
        gradient += correction
    return [*pairs[:-1], (pairs[-1][0], (work.vector - before) / -0.1)]


def test_clipping_before_and_after() -> None:
    """before: |yielded| <= c and the correction is added whole. after: the corrected sum has norm <= c."""
    raw = [yielded for yielded, _ in walk("after")]
    assert min(float(gradient.norm()) for gradient in raw) > 0.2
    for yielded, step in walk("before", correction=1.0, clip_norm=0.2):
        assert float(yielded.norm()) == pytest.approx(0.2, rel=1e-4)
        assert torch.allclose(step, yielded + 1.0, atol=1e-5)
    for yielded, step in walk("after", correction=1.0, clip_norm=0.2):
        assert float(yielded.norm()) > 0.2
        assert torch.allclose(step, (yielded + 1.0) * (0.2 / (yielded + 1.0).norm()), atol=1e-5)
    for clip in ("before", "after"):
        for yielded, step in walk(clip, correction=1.0, clip_norm=1e6):
            assert torch.allclose(step, yielded + 1.0, atol=1e-5)


def test_the_proximal_term_pulls_to_the_received_model() -> None:
    """Each step is g + mu (y - x), added after the yield and inside the clipping bound."""
    simulation = simulate(Tiny(norm=False), lr=0.1, proximal_mu=2.0)
    work = simulation.work("2")
    position = work.vector.clone()
    expected = torch.zeros_like(position)
    for gradient in work.steps():
        assert torch.allclose((position - work.vector) / 0.1, expected, atol=1e-5)
        position = work.vector.clone()
        expected = gradient + 2.0 * (position - simulation.x)
    assert float((position - simulation.x).norm()) > 0.01
    assert all(float(step.norm()) <= 0.0501 for _, step in walk("after", proximal_mu=2.0, clip_norm=0.05))


def test_dropout_is_reproducible() -> None:
    """The same client in the same round draws the same masks, whatever torch's generator held."""
    simulation = simulate(Tiny(sizes=(8, 8), dropout=0.5))
    first = simulation.train("0")
    torch.manual_seed(5)
    again, plain = simulation.train("0"), simulate(Tiny(sizes=(8, 8))).train("0")
    assert sha256(again.vectors) == sha256(first.vectors) != sha256(plain.vectors)
    simulation.coordinator.round = 1
    assert sha256(simulation.train("0").vectors) != sha256(first.vectors)


def test_bfloat16_autocast_runs() -> None:
    """Weights and gradients stay float32; the result is near float32's, not equal."""
    uploads = [simulate(precision=precision, epochs=3).train("2") for precision in ("float32", "bfloat16")]
    exact, rounded = (upload.vectors["delta"] for upload in uploads)
    assert rounded.dtype == torch.float32
    assert 0 < float((rounded - exact).norm()) < 0.2 * float(exact.norm())


# --- what must not change


class Replacing(Tiny):
    """Its model breaks views in forward: `zero_grad(set_to_none=True)`, or new storage for a parameter."""

    def __init__(self, what: str) -> None:
        super().__init__(norm=False)
        self.what = what

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.what == "gradient":
            model.zero_grad(set_to_none=True)
        else:
            model[-1].weight.data = model[-1].weight.data.clone()
        return super().loss(model, batch)


@pytest.mark.parametrize("what", ["gradient", "storage"])
def test_a_model_that_replaces_its_storage_is_refused(what: str) -> None:
    """Else it would train a copy, unseen."""
    with pytest.raises(RuntimeError, match="replaced a parameter's storage or gradient"):
        simulate(Replacing(what)).train("2")


@pytest.mark.parametrize("strategy", ALGORITHMS)
def test_what_a_client_was_given_stays_as_it_is(strategy: str) -> None:
    """Received vectors lie in the message, memory in its store: `local` changes no bit of them, and what it
    keeps and sends is apart from the live model that the next client overwrites."""
    simulation = simulate(Tiny(sizes=(5, 8)), strategy)
    simulation.run(2)
    work = simulation.work("0")
    given = sha256(work.received), sha256(work.memory)
    upload: Upload = simulation.strategy.local(work)
    assert (sha256(work.received), sha256(work.memory)) == given
    left = sha256(upload.vectors), sha256(work.kept)
    simulation.model.vector.fill_(7.0)
    simulation.model.gradient.fill_(7.0)
    assert (sha256(upload.vectors), sha256(work.kept)) == left


def test_a_client_may_keep_its_live_model() -> None:
    """`keep` copies what lies in the storage that the next client overwrites, also a part of it; no more."""
    work, other = simulate().work("0"), torch.ones(3)
    work.keep(whole=work.vector, part=work.vector[2:4], other=other)
    before = sha256(work.kept)
    work.vector.fill_(7.0)
    assert sha256(work.kept) == before
    assert work.kept["other"].data_ptr() == other.data_ptr()


def test_a_run_leaves_torchs_generator_as_it_was(tmp_path: Path) -> None:
    """Through real messages, with dropout; and the state before decides nothing."""
    values = settings().model_dump(exclude_unset=True) | {"rounds": 2}
    values["task"]["dropout"] = 0.5
    hashes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        folder = RunFolder(tmp_path / str(seed))
        experiment = Experiment.model_validate(values)
        record = run_experiment(InProcessGrid(app), experiment, folder, say=lambda text: None)
        assert torch.equal(torch.get_rng_state(), before)
        hashes.append(record["sha256"])
    assert hashes[0] == hashes[1]
