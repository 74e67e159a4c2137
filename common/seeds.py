"""One seed per run; everything random is derived from it by name, never from order, time or engine."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for the purpose that `parts` names, e.g. `derive(seed, "batches", client, round)`."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A CPU generator seeded with `derive(seed, *parts)`."""
    return torch.Generator().manual_seed(derive(seed, *parts))
