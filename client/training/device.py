"""The device that a client trains on: which one, how much of it, how exactly it computes, and how tensors get there."""

from __future__ import annotations

import gc
import logging
import os
from functools import lru_cache

import torch
from torch import Tensor

from common.errors import SiteError
from common.experiment import LocalSettings
from common.vector import State

log = logging.getLogger("client.training.device")

ALLOWED = "cpu, auto, cuda, cuda:N"


def choose(name: str, memory_fraction: float = 0.0) -> torch.device:
    """The device called `name` (cpu, auto, cuda or cuda:N; "auto" is the first GPU, or the CPU without one).

    `memory_fraction`: the part of a GPU's memory that this process may take, for several clients on one GPU;
    0: all of it. Raises SiteError for a device that is unknown or absent and for a fraction that has no meaning.
    """
    device = _choose(name)
    if not 0 <= memory_fraction <= 1:
        raise SiteError("device-unusable", f"gpu-memory-fraction = {memory_fraction}: allowed: 0 (no limit) to 1")
    if memory_fraction:
        if device.type != "cuda":
            raise SiteError(
                "device-unusable", f"gpu-memory-fraction = {memory_fraction} has no meaning with device {name!r}"
            )
        torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    return device


@lru_cache(maxsize=64)
def _choose(name: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        if count:
            # Without the cards' names: to ask for one takes memory of it.
            log.warning("training on the CPU although this machine has a GPU (%d in all); --device auto uses it", count)
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if name != "auto" and (kind != "cuda" or (":" in name and not (number.isascii() and number.isdecimal()))):
        raise SiteError("device-unusable", f"device {name!r} is unknown; allowed: {ALLOWED}")
    index = int(number or 0)
    if not count:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "this machine has no usable GPU"
        raise SiteError("device-unusable", f"device {name!r} was asked for and {why}; allowed here: cpu, auto")
    if index >= count:
        here = ", ".join(f"cuda:{each} ({torch.cuda.get_device_name(each)})" for each in range(count))
        raise SiteError("device-unusable", f"device {name!r} was asked for and this machine has {here}")
    # cuBLAS reads it when it starts; without it deterministic mode would refuse every matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device("cuda", index)


_deterministic = False


def settle(settings: LocalSettings) -> None:
    """Compute in this thread as the settings say: CPU threads and deterministic mode.

    For every message: torch keeps the number of threads by thread, and another experiment may have changed it.
    """
    global _deterministic
    torch.set_num_threads(settings.threads)
    if settings.deterministic != _deterministic:
        _deterministic = settings.deterministic
        torch.use_deterministic_algorithms(_deterministic)
        torch.backends.cudnn.deterministic = _deterministic
        if _deterministic:
            torch.backends.cudnn.benchmark = False


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's or the machine's memory is full."""
    told = ("not enough memory", "can't allocate memory", "Cannot allocate memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in told)


def free() -> None:
    """Give back what nothing refers to any more, after memory ran out."""
    gc.collect()
    torch.cuda.empty_cache()


class Staging:
    """The way between main memory and a GPU, over pinned host buffers that are kept from round to round.

    One buffer for each name; all of a state's copies run at once and are waited for once. On the CPU nothing is
    copied. One thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._active = device.type != "cpu"
        self._buffers: dict[str, Tensor] = {}

    def to_device(self, state: State) -> State:
        """A state from main memory on the device."""
        if not self._active:
            return state
        moved = {}
        for name, value in state.items():
            moved[name] = self._buffer(name, value).copy_(value).to(self._device, non_blocking=True)
        self._wait()
        return moved

    def to_host(self, state: State) -> State:
        """A state from the device in main memory. It is valid until the next call with the same names."""
        moved = {name: value.detach() for name, value in state.items()}
        if not self._active:
            return moved
        for name, value in moved.items():
            if value.device == self._device:
                moved[name] = self._buffer(name, value).copy_(value, non_blocking=True)
        self._wait()
        return moved

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Pinned memory of the shape and dtype of `like`."""
        held = self._buffers.get(name)
        if held is None or held.numel() < like.nbytes:
            self._buffers.pop(name, None)
            held = self._buffers[name] = _pinned(like.nbytes)
        return held[: like.nbytes].view(like.dtype).view(like.shape)

    def _wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
