"""BatchNorm, frozen layers and batches of one example."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from client.training.work import epoch_batches, local_steps
from strategies.registry import REGISTRY
from tests.support.helpers import ALGORITHMS, copies
from tests.support.tiny import Tiny, settings, simulate, trained

COUNTER, STATISTICS = "buffers.int64", "buffers.float32"

TWICE = {"fedsam", "mime", "apfl", "perfedavg", "fedspeed"}
"""Algorithms with two passes a step, the second at another point."""

FRESH = [2, 3] * 15
"""What FedALA learns its mixture from, once it has a model of its own: ten times ceil(0.8 * 3) batches."""
OTHER = {
    "ditto": ([2, 3, 2, 3], [2, 3, 2, 3]),  # the shared model, then the client's own
    "pfedme": ([2] * 5 + [3] * 5,) * 2,
    "fedala": ([2, 3], [*FRESH, 2, 3]),
    "fedsmb": ([2], [2]),
}
"""Algorithm -> the batches of a client's first and second round."""
COUNTED = {"local-only": 0, "pfedme": 10, "fedsmb": 1}
"""Algorithm -> how many batches the shared BatchNorm layers count in a round; else two."""


@pytest.mark.parametrize("strategy", ALGORITHMS)
def test_batch_norm_with_a_last_batch_of_one(strategy: str) -> None:
    """5 examples in batches of 2: the last one joins the batch before. Counters count steps and stay integers,
    buffers keep dtype and shape, the frozen layer keeps its bits and is no part of the vector."""
    simulation = simulate(Tiny(sizes=(5, 5)), strategy)
    frozen = simulation.model.module[0].weight.clone()
    before = simulation.experiment.personal.head_steps  # FedRep's, ahead of the steps that count
    kinds = {name: (value.dtype, value.shape) for name, value in simulation.coordinator.buffers.items()}
    assert kinds == {COUNTER: (torch.int64, (1,)), STATISTICS: (torch.float32, (16,))}
    for round in (1, 2):
        uploads = simulation.step()
        passes = REGISTRY[strategy].cls.passes
        assert [upload.steps for upload in uploads] == [1 if strategy == "fedsmb" else 2 * passes] * 2
        buffers = simulation.coordinator.buffers
        assert {name: (value.dtype, value.shape) for name, value in buffers.items()} == kinds
        counted = COUNTED.get(strategy, 2)
        assert buffers[COUNTER].tolist() == [(before + counted) * round]
        assert torch.equal(buffers[STATISTICS], torch.cat([torch.zeros(8), torch.ones(8)])) == (not counted)
    assert torch.equal(simulation.model.module[0].weight, frozen)
    assert simulation.model.whole.numel() == 8 + 8 + 8 * 3 + 3
    passes = 2 if strategy in TWICE else 1
    epochs = [2, 3] * (before // 2) + [2] * passes + [3] * passes
    first, second = OTHER.get(strategy, (epochs, epochs))
    assert [len(batch) for batch in simulation.task.batches] == first * 2 + second * 2


def test_a_client_of_one_example_trains_on_running_statistics() -> None:
    """BatchNorm cannot normalize over one value: such a client uses and leaves the received statistics."""
    simulation = simulate()
    received = copies(simulation.coordinator.buffers)
    upload = simulation.train("1")
    assert (upload.examples, upload.steps) == (1, 1)
    assert float(upload.vectors["delta"].abs().max()) > 0
    assert all(torch.equal(upload.buffers[name], value) for name, value in received.items())
    assert simulation.model.module[1].training


@pytest.mark.parametrize("norm", [True, False])
def test_batches_of_one_stay_batches_of_one(norm: bool) -> None:
    """batch_size = 1 is one step an example, as the roll announced; BatchNorm uses its running statistics."""
    task = Tiny(sizes=(3,), norm=norm)
    work, delta = trained(task, batch_size=1)
    assert [len(batch) for batch in task.batches] == [1, 1, 1]
    assert work.steps_taken == local_steps(task.client("0"), settings(batch_size=1).local) == 3
    assert bool(delta.isfinite().all())


class Pinned(nn.Sequential):
    """A network that keeps its BatchNorm in evaluation mode, as is usual in fine-tuning."""

    def train(self, mode: bool = True) -> Pinned:
        super().train(mode)
        self[1].eval()
        return self


def test_a_pinned_batch_norm_stays_pinned() -> None:
    """A batch of one must not wake it up for the batches after it."""

    class PinnedTiny(Tiny):
        def model(self) -> nn.Module:
            return Pinned(*super().model())

    simulation = simulate(PinnedTiny(sizes=(3,)), batch_size=1)
    uploads = simulation.step()
    assert uploads[0].buffers[COUNTER].tolist() == [0]
    assert not simulation.model.module[1].training


def test_full_gradient_leaves_batch_norm_alone() -> None:
    """The mean over all examples in evaluation mode, whatever the batch size; no statistic moves."""
    task = Tiny(dropout=0.5)
    simulation = simulate(task)
    module, data = simulation.task.model().eval(), task.client("0").train
    module.load_state_dict(simulation.model.module.state_dict())
    task.loss(module, (data.inputs, data.targets)).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    work = simulation.work("0")
    gradient = work.full_gradient()
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)
    received = simulation.coordinator.buffers
    assert all(torch.equal(value, received[name]) for name, value in simulation.model.buffers.items())
    assert task.batches == []
    assert torch.equal(work.vector, simulation.x)


def test_a_last_batch_of_one_is_merged_only_where_it_must_be() -> None:
    """n = 1 mod size, and there is a batch of more than one to join."""
    for count, size, merge, lengths in (
        (5, 2, True, [2, 3]),
        (5, 2, False, [2, 2, 1]),
        (6, 4, True, [4, 2]),
        (1, 2, True, [1]),
        (3, 1, True, [1, 1, 1]),
    ):
        batches = epoch_batches(count, size, torch.Generator(), merge)
        assert [len(batch) for batch in batches] == lengths
        assert sorted(torch.cat(batches).tolist()) == list(range(count))
