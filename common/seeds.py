"""One seed per run; everything random is derived from it by name, never from order, time or engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for the purpose that `parts` names, e.g. `derive(seed, "batches", client, round)`."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A CPU generator seeded with `derive(seed, *parts)`."""
    return torch.Generator().manual_seed(derive(seed, *parts))


@contextmanager
def torch_seeded(value: int, device: torch.device) -> Iterator[None]:
    """Torch's global generators of the CPU and of `device` start from `value` inside and are restored after.

    Not `torch.manual_seed`: without a GPU in use it notes every call, with its stack, for the day one will be.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(value)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(value)
        yield
