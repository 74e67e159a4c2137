"""What each algorithm costs, measured: memory, time, payload. What it reaches: `benchmarks/accuracy.py`.

    python -m benchmarks.algorithms [--only fagc scaffold] [--repeat 5] [--no-time]

Columns, in model-sized vectors wherever it says so:

    server     what the server's state holds beside the model
    memory     what a client keeps from round to round
    working    the most alive in a client at a step: model, gradient, what it received and remembers, moments,
               what the algorithm adds up; without activations
    down, up   what really crosses the wire in a round of 10 clients, the whole cohort: bytes of arrays in messages,
               divided by the model's; the mean of rounds 3 to 5, in which every client is known
    paper      the count of the paper's table for 10 clients, where it gives one
    step       CPU time of a local step of a ResNet-18, relative to FedAvg's with SGD, the two in turn

"down", "up" and "memory" are of a multilayer perceptron with one hidden layer (its buffers: none).
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from benchmarks import models
from benchmarks.accuracy import task_of
from benchmarks.local_step import Synthetic
from client.app import app
from client.training.work import LocalWork
from common import flower
from common.experiment import Experiment
from common.models.images import cnn
from common.models.mixture import Mixture
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from server.rounds.loop import Rounds
from server.rounds.prepare import prepare
from strategies.protocol.messages import STATE
from strategies.registry import REGISTRY
from tests.support.helpers import MIXED, Simulation

COHORT = 10
PAPER = {"fagc": 35, "fant": 35, "scaffold": 40, "scaffoldm": 40, "padamfed": 60, "localadam": 20, "fedcm": 30}


def experiment(algorithm: str, **tables: Any) -> Experiment:
    """The shared experiment: five rounds."""
    values: dict[str, Any] = {
        "name": f"cost-{algorithm}",
        "rounds": 5,
        "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 20},
        "task": {"name": "digits", **task_of(algorithm)},
        "strategy": {"name": algorithm},
        "local": {"lr": 0.01, "batch_size": 32},
        "round": {"sample": COHORT},
        **tables,
    }
    return Experiment.model_validate(values)


class Counting(InProcessGrid):
    """Counts the bytes of arrays in messages and replies, by round."""

    def __init__(self) -> None:
        super().__init__(self._count)  # type: ignore[arg-type]
        self.down: dict[int, int] = {}
        self.up: dict[int, int] = {}

    def _count(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == "train":
            round = int(message.metadata.group_id)
            for counter, content in ((self.down, message.content), (self.up, reply.content)):
                record = content.array_records.get(STATE)
                size = sum(len(array.data) for array in record.values()) if record else 0
                counter[round] = counter.get(round, 0) + size
        return reply


def run(settings: Experiment) -> tuple[Counting, Rounds]:
    """A run in this process, and what crossed the wire."""
    grid = Counting()
    with tempfile.TemporaryDirectory() as folder:
        place = RunFolder(folder)
        with place.open(False):
            rounds = Rounds(grid, prepare(settings), place, say=lambda text: None)
            rounds.run()
        return grid, rounds


def payload(algorithm: str) -> tuple[float, float]:
    """Vectors down and up in a round of ten clients."""
    grid, rounds = run(experiment(algorithm))
    size = rounds._model.whole.nbytes  # with personal parts, which travel in no direction
    return tuple(sum(c[r] for r in (3, 4, 5)) / 3 / size for c in (grid.down, grid.up))  # type: ignore[return-value]


def kept(algorithm: str) -> tuple[float, float]:
    """Vectors of server state beside the model, and of one client's memory, after three rounds."""
    simulation = Simulation(experiment(algorithm))
    simulation.run(3)
    size = simulation.model.whole.nbytes
    state = sum(value.nbytes for name, value in simulation.coordinator.state.items() if name != "model")
    memories = [sum(v.nbytes for v in simulation.memory(name).values()) for name in simulation.members]
    return state / size, max(memories) / size


def working(algorithm: str) -> float:
    """The most vectors alive in a client at a step of its third round."""
    simulation = Simulation(experiment(algorithm, round={}))
    simulation.run(2)
    name = max(simulation.data, key=lambda each: len(simulation.data[each].train))
    size = simulation.model.whole.nbytes
    informed(simulation, name)
    before = alive(size)
    peaks: list[float] = []
    with watched(lambda: peaks.append(alive(size) - before)):
        simulation.train(name)
    remembered = sum(value.nbytes for value in simulation.memory(name).values())
    return 2 + (max(peaks) + remembered) / size  # model and gradient were there before, the memory as well


def informed(simulation: Simulation, name: str) -> None:
    """The next round's state for one client: its assigned scalars, and a first exchange if there is one."""
    coordinator = simulation.coordinator
    coordinator.assigned = simulation.strategy.assign(
        coordinator.state, [name], coordinator.round + 1, simulation.experiment.seed
    )
    if simulation.strategy.survey:
        simulation.informed = coordinator.inform(coordinator.round + 1, [simulation.train(name, "survey")])


@contextmanager
def watched(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` when the algorithm has seen a gradient and the step is taken."""
    steps = LocalWork.steps

    def seen(work: LocalWork, **given: Any) -> Iterator[Tensor]:
        for gradient in steps(work, **given):
            yield gradient
            look()

    LocalWork.steps = seen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        LocalWork.steps = steps  # type: ignore[method-assign]


def alive(least: int) -> float:
    """Bytes of all tensors of at least half a model, each storage once."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return float(sum(size for size in sizes.values() if size >= least / 2))


# --- time


class Images(Synthetic):
    """One client with random images of 32x32; ResNet-18, with a small shared extractor beside it for pFedAFM."""

    def __init__(self, batch: int, mixture: bool) -> None:
        super().__init__(models.resnet18, batch)
        self._mixture = mixture

    def model(self) -> nn.Module:
        if not self._mixture:
            return models.resnet18()
        body = models.resnet18()
        small = cnn((32, 32, 3), 16, 512)
        assert isinstance(body, nn.Sequential)
        return Mixture(body[:-1], small, body[-1], 512, torch.float32)

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        last = model.head if isinstance(model, Mixture) else model[-1]  # type: ignore[index]
        assert isinstance(last, nn.Module)
        return last


def trainer(algorithm: str, steps: int, batch: int) -> Callable[[], float]:
    """CPU seconds of one step of a client's third round, each time it is called."""
    settings = experiment(algorithm, local={"lr": 1e-3, "batch_size": batch, "steps": steps}, round={}, partition={})
    simulation = Simulation(settings, task=Images(batch, algorithm in MIXED))
    simulation.run(2)
    informed(simulation, "0")

    def timed() -> float:
        work = simulation.work("0")
        started = time.process_time()
        simulation.strategy.local(work)
        return (time.process_time() - started) / steps

    return timed


def ratios(algorithms: list[str], steps: int, batch: int, repeat: int) -> dict[str, float]:
    """CPU time of a step against FedAvg's: the least of the repetitions of each, the two in turn."""
    plain = trainer("fedavg", steps, batch)
    found = {}
    for algorithm in algorithms:
        own = trainer(algorithm, steps, batch)
        pairs = [(plain(), own()) for _ in range(repeat)]
        found[algorithm] = min(own for _, own in pairs) / min(base for base, _ in pairs)
        gc.collect()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=REGISTRY, default=list(REGISTRY))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--no-time", action="store_true", help="leave out the steps of a ResNet-18")
    options = parser.parse_args()
    flower.prepare()
    logging.getLogger("client").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    times = {} if options.no_time else ratios(options.only, options.steps, options.batch, options.repeat)
    print("| algorithm | server | memory | working | down | up | sum | paper | step |")
    print("| --- " * 9 + "|")
    for name in options.only:
        down, up = payload(name)
        state, memory = kept(name)
        cells: list[Any] = [f"`{name}`", *(f"{value:.2f}" for value in (state, memory, working(name), down, up))]
        cells += [f"{down + up:.1f}", PAPER.get(name, ""), f"{times[name]:.2f}" if name in times else ""]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
