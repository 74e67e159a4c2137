"""Seconds of a simulated round on a GPU: our in-process engine against a bare PyTorch loop and against VCE.

    python -m benchmarks.gpu_simulate [--precision bfloat16] [--channels-last] [--rounds 8] [--gpus 1 0.5 0.25 0.125]
    python -m benchmarks.gpu_simulate --device cpu --tiny --skip-vce

CIFAR-10, ResNet-18 with BatchNorm, 100 clients, 10 sampled, one epoch of batches of 50, FedAvg. The images are those of
FEDKEEL_DATA, else 50,000 random ones. The bare loop is written by hand: images, model and weights stay on the GPU, one
client after the other, torch.optim.SGD, a mean; it trains the same clients on the same batches, and its final weights
are compared with ours. Engines run one after the other, ours and VCE as commands; medians of the rounds after the first
two. VCE is run with each part of a GPU for an actor, the best counts. One line of JSON, then a table. Aimed at: ours at
most 1.1 times bare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common import tasks
from common.experiment import Experiment
from common.model import build
from common.seeds import generator

WARM = 2
BATCH, CLIENTS, SAMPLED = 50, 100, 10
NAMES = {"bare": "bare PyTorch", "ours": "in process"}


def make_data(path: Path, count: int) -> Path:
    """The npz file of CIFAR-10, or one of random images."""
    real = Path(os.environ.get("FEDKEEL_DATA", "")) / "cifar10" / "cifar10.npz"
    if real.is_file():
        return real
    random = np.random.default_rng(0)
    np.savez(path, x=random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), y=random.integers(0, 10, count))
    return path


def experiment(options: argparse.Namespace, file: Path) -> Experiment:
    """What is measured."""
    model: dict[str, Any] = {"model": "cnn", "width": 4, "limit": 160} if options.tiny else {"model": "resnet18"}
    return Experiment.model_validate(
        {
            "name": "gpu-simulate",
            "rounds": options.rounds,
            "task": {"name": "npz", "file": str(file), **model},
            "partition": {"clients": 4 if options.tiny else CLIENTS, "holdout": 0.0},
            "strategy": {"name": "fedavg"},
            "local": {
                "lr": 0.01,
                "batch_size": 20 if options.tiny else BATCH,
                "precision": options.precision,
                "channels_last": options.channels_last,
            },
            "round": {"sample": 2 if options.tiny else SAMPLED},
            "evaluate": {"every": 10_000, "clients": "none"},
            "checkpoint": {"every": 10_000},
        }
    )


def engine(given: Experiment, folder: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The history of a run as a user starts it."""
    folder.mkdir()
    file = folder / "experiment.toml"
    file.write_text(given.toml(), "utf-8")
    command = [sys.executable, "-m", "server", "simulate", str(file), "--run-dir", str(folder / "run"), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text("utf-8").splitlines()]


def bare(given: Experiment, sampled: Sequence[Sequence[str]], device: torch.device) -> tuple[list[float], nn.Module]:
    """Seconds of each round of the loop written by hand, and the final model."""
    torch.set_num_threads(given.local.threads)
    task, local = tasks.create(given.task, given.partition, given.seed), given.local
    data = {name: task.client(name).train.to(device) for name in task.names()}
    model = build(task, given.seed).module.to(device).train()
    for parameter in model.parameters():  # plain ones, each with storage of its own
        parameter.data, parameter.grad = parameter.data.clone(), None
    seconds = []
    for number, names in enumerate(sampled, 1):
        wait(device)
        begin = time.perf_counter()
        start = {key: value.clone() for key, value in model.state_dict().items()}
        total = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in start.items()}
        losses = torch.zeros((), device=device)
        for name in names:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
            order = torch.randperm(len(data[name]), generator=generator(given.seed, "batches", name, number))
            for index in torch.split(order.to(device), local.batch_size):
                batch: tuple[Tensor, ...] = data[name].batch(index)
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16, enabled=local.precision == "bfloat16"):
                    loss = task.loss(model, batch)
                loss.backward()
                optimizer.step()
                losses += loss.detach()
            for key, value in model.state_dict().items():
                total[key] += value
        model.load_state_dict({key: (value / len(names)).to(start[key].dtype) for key, value in total.items()})
        wait(device)
        seconds.append(time.perf_counter() - begin)
    return seconds, model


def wait(device: torch.device) -> None:
    """Until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def difference(model: nn.Module, file: Path) -> float:
    """The largest of the weights', relative to the largest weight."""
    ours, theirs = load_file(file), model.state_dict()
    pairs = [(ours[name].double(), theirs[name].cpu().double()) for name in ours]
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--rounds", type=int, default=8, help=f"more than {WARM}")
    parser.add_argument("--gpus", type=float, nargs="+", default=[1, 0.5, 0.25, 0.125])
    parser.add_argument("--skip-vce", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small CNN, 4 clients: tries it without a GPU")
    options = parser.parse_args(arguments)
    if options.rounds <= WARM:
        parser.error(f"--rounds {options.rounds}: allowed: more than {WARM}")
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        given = experiment(options, make_data(root / "data.npz", 160 if options.tiny else 50_000))
        found: dict[str, list[float]] = {}
        history = engine(given, root / "ours", ["--device", options.device])
        found["ours"] = [record["seconds"]["total"] for record in history]
        found["bare"], model = bare(given, [record["sampled"] for record in history], device)
        apart = difference(model, root / "ours" / "run" / "model.safetensors")
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for share in [] if options.skip_vce else options.gpus if device.type == "cuda" else options.gpus[:1]:
            workers = max(round(1 / share), 1)
            extra = ["--engine", "flower", "--device", device.type, "--gpus", str(share), "--workers", str(workers)]
            records = engine(given, root / f"vce-{share}", extra)
            found[f"VCE, {share:g} GPU an actor"] = [record["seconds"]["total"] for record in records]
    report(options, {name: statistics.median(values[WARM:]) for name, values in found.items()}, apart)


def report(options: argparse.Namespace, seconds: dict[str, float], apart: float) -> None:
    """A line of JSON and a table."""
    vce = [value for name, value in seconds.items() if name not in NAMES]
    name = torch.cuda.get_device_name(torch.device(options.device)) if options.device != "cpu" else "cpu"
    result = {
        "device": name,
        "precision": options.precision,
        "channels_last": options.channels_last,
        "tiny": options.tiny,
        "seconds": seconds,
        "to_bare": seconds["ours"] / seconds["bare"],
        "to_vce": seconds["ours"] / min(vce) if vce else None,
        "weights_apart": apart,
    }
    print(json.dumps(result))
    print("| | s a round | ratio to bare |\n| --- | --- | --- |")
    for key in ["bare", "ours", *(key for key in seconds if key not in NAMES)]:
        print(f"| {NAMES.get(key, key)} | {seconds[key]:.3f} | {seconds[key] / seconds['bare']:.2f} |")


if __name__ == "__main__":
    main()
