"""Simulation speed: the in-process engine against a bare PyTorch loop and against VCE, on the same work.

    python -m benchmarks.simulate [--rounds 12] [--workers 2] [--repeat 1] [--skip-vce]
    python -m benchmarks.simulate --pipeline [--rounds 12] [--repeat 3]

100 clients, 10 sampled a round, CIFAR-10-shaped images, small CNN, 10 local steps of 20 images. The bare loop is what
one would write by hand: two processes that hold model and data, a list of clients each, a mean. It prints seconds a
round (median after the first) and from the start of the command to the end of round 1, each with its ratio to bare.
Engines run one after the other as commands of their own; start-up counts. With --repeat all of them run so many times,
in turn, and medians are shown.

With --pipeline: which part of a round goes into the data, that is into gathering batches, changing them at random and
making numbers of bytes, in one process with one thread, without and with crops and mirror images. CIFAR-10 from the
folder that FEDKEEL_DATA names, or random images of its shape.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

EXPERIMENT = """
name = "bench"
rounds = {rounds}
task.name = "npz"
task.file = "{file}"
partition.clients = 100
partition.holdout = 0.0
strategy.name = "fedavg"
local.lr = 0.05
local.steps = 10
local.batch_size = 20
round.sample = 10
evaluate.every = 1000
evaluate.clients = "none"
checkpoint.every = 1000
"""


def make_data(path: Path) -> None:
    """10,000 random uint8 images of CIFAR-10's shape, without a test set."""
    import numpy as np

    random = np.random.default_rng(0)
    images = random.integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8)
    np.savez(path, x=images, y=random.integers(0, 10, 10_000))


def bare_worker(pipe: Connection, file: str) -> None:
    """Model and data stay; trains the clients that it is told to, from the weights that it is sent."""
    import numpy as np
    import torch
    from torch.nn import functional

    from common.models.images import cnn

    torch.set_num_threads(1)
    data = np.load(file)
    images, labels = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    torch.manual_seed(0)
    model = cnn((32, 32, 3), 32, 10).train()
    while (task := pipe.recv()) is not None:
        weights, clients, seed = task
        total = None
        for client in clients:
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            own = torch.arange(client * 100, client * 100 + 100)
            order = torch.randperm(100, generator=torch.Generator().manual_seed(seed + client))
            for step in range(10):
                chosen = own[order[(step * 20) % 100 :][:20]]
                x = images[chosen].permute(0, 3, 1, 2).float() / 255
                optimizer.zero_grad()
                functional.cross_entropy(model(x), labels[chosen]).backward()
                optimizer.step()
            state = model.state_dict()
            total = {k: v.clone() if total is None else total[k] + v for k, v in state.items()}
        pipe.send(total)


def bare(file: str, rounds: int, workers: int, started: float) -> None:
    """The bare loop; prints its times as JSON."""
    import random

    import torch

    from common.models.images import cnn

    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=bare_worker, args=(theirs, file), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    weights = cnn((32, 32, 3), 32, 10).state_dict()
    seconds, first = [], 0.0
    for number in range(rounds):
        begin = time.time()
        chosen = random.Random(number).sample(range(100), 10)
        for index, pipe in enumerate(pipes):
            pipe.send((weights, chosen[index::workers], number))
        totals = [pipe.recv() for pipe in pipes]
        summed = {key: torch.stack([t[key].double() for t in totals]).sum(0) / 10 for key in weights}
        weights = {key: value.to(weights[key].dtype) for key, value in summed.items()}
        seconds.append(time.time() - begin)
        first = first or time.time() - started
    for pipe in pipes:
        pipe.send(None)
    print(json.dumps({"round": statistics.median(seconds[1:]), "first": first}))


def engine(arguments: list[str], file: Path, folder: Path, rounds: int) -> dict[str, float]:
    """One of our engines as a user runs it; the end of round 1 is when its line of the history was written."""
    experiment = folder / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(rounds=rounds, file=file), "utf-8")
    command = [sys.executable, "-m", "server", "simulate", str(experiment), "--run-dir", str(folder / "run")]
    command += arguments
    history = folder / "run" / "history.jsonl"
    started = time.time()
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        while not (history.exists() and history.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
        first = time.time() - started
        if process.wait() != 0:
            raise RuntimeError((folder / "log").read_text("utf-8"))
    records = [json.loads(line) for line in history.read_text("utf-8").splitlines()]
    return {"round": statistics.median(r["seconds"]["total"] for r in records[1:]), "first": first}


def pipeline(rounds: int, augment: str, file: Path) -> tuple[float, float]:
    """Median seconds of a round, and of what the data takes of it."""
    from client.app import app
    from common import flower
    from common.data.examples import Examples
    from common.experiment import Experiment
    from common.tasks.images import Images
    from server.app import run
    from server.engines.inprocess import InProcessGrid
    from server.rounds.folder import RunFolder

    flower.prepare()
    text = EXPERIMENT.format(rounds=rounds, file=file) + f'task.augment = "{augment}"\ntask.model = "cnn"\n'
    spent, marks = [0.0], [0.0]
    with ExitStack() as stack:
        for owner, name in ((Examples, "batch"), (Images, "augment"), (Images, "features")):
            stack.enter_context(timed(owner, name, spent))
        folder = RunFolder(stack.enter_context(tempfile.TemporaryDirectory()))
        run(
            InProcessGrid(app),
            Experiment.parse(text),
            folder,
            say=lambda text: None,
            show=lambda record: marks.append(spent[0]),
        )
        total = statistics.median(record["seconds"]["total"] for record in folder.history()[1:])
    return total, statistics.median(after - before for before, after in pairwise(marks[1:]))


@contextmanager
def timed(owner: type, name: str, spent: list[float]) -> Iterator[None]:
    """Inside, the seconds of a method are added to `spent`."""
    method = getattr(owner, name)

    def call(*given: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*given)
        finally:
            spent[0] += time.perf_counter() - begin

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


def show_pipeline(options: argparse.Namespace, random: Path) -> None:
    """Measure and print the data's part."""
    real = Path(os.environ.get("FEDKEEL_DATA", "")) / "cifar10" / "cifar10.npz"
    file = real if real.is_file() else random
    print("CIFAR-10" if file == real else "random images")
    print(f"{'augment':10} {'s a round':>10} {'data, s':>8} {'share':>7}")
    for augment in ("none", "crop-flip"):
        found = [pipeline(options.rounds, augment, file) for _ in range(options.repeat)]
        total, data = (statistics.median(values) for values in zip(*found, strict=True))
        share = statistics.median(data / total for total, data in found)
        print(f"{augment:10} {total:10.3f} {data:8.4f} {share:7.1%}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--skip-vce", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.bare:
        bare(options.bare[0], options.rounds, options.workers, float(options.bare[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        file = root / "data.npz"
        make_data(file)
        if options.pipeline:
            show_pipeline(options, file)
            return
        found = [compare(options, file, root / str(number)) for number in range(options.repeat)]
    print(f"{'':22} {'s a round':>10} {'ratio':>6} {'s to round 1':>13} {'ratio':>6}")
    for name in found[0]:
        seconds = {key: statistics.median(each[name][key] for each in found) for key in ("round", "first")}
        ratios = {
            key: statistics.median(each[name][key] / each["bare PyTorch"][key] for each in found) for key in seconds
        }
        told = f"{seconds['round']:10.3f} {ratios['round']:6.2f} {seconds['first']:13.1f} {ratios['first']:6.2f}"
        print(f"{name:22} {told}")


def compare(options: argparse.Namespace, file: Path, root: Path) -> dict[str, dict[str, float]]:
    """Every engine once."""
    common = ["--rounds", str(options.rounds), "--workers", str(options.workers)]
    command = [sys.executable, "-m", "benchmarks.simulate", "--bare", str(file), str(time.time()), *common]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    results = {"bare PyTorch": json.loads(output)}
    for name, extra in (
        (f"in-process, {options.workers} workers", ["--workers", str(options.workers)]),
        ("in-process, 1 process", []),
        ("VCE", ["--engine", "flower"]),
    ):
        if name != "VCE" or not options.skip_vce:
            folder = root / name.split(",")[0].replace("-", "") / str(len(extra))
            folder.mkdir(parents=True)
            results[name] = engine(extra, file, folder, options.rounds)
    return results


if __name__ == "__main__":
    main()
