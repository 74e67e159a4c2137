"""How this machine computes: described in a line, proved by known answers, and square roots that are the same anywhere.

Of all that training calls only torch's square root is not the same on every processor in portable mode (common/
portable.py): for float32 and float64 it is MKL's vector math, which heeds none of the variables and rounds as it likes.
Everything here that takes one goes through `sqrt`, and torch's Adam through its fused kernel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common import portable
from common.errors import Unfit

PINNED: Mapping[str, Mapping[str, str]] = {
    "torch 2.14.1+cu130": {
        "matmul": "6975a166894d",
        "convolution": "51fb3f78d41d",
        "lstm": "d21b50a9d6f8",
        "exp": "921c7a465fc5",
        "sqrt": "91d7b367d854",
    },
    "numpy 2.4.6": {"numpy": "cd05b75e7daa"},
}
"""Library and version -> kernel -> its known answer in portable mode. Of versions that are not here only the roll can
tell whether they agree: it compares the answers of all machines."""

CURE = (
    "start it with --portable, or with FEDKEEL_PORTABLE=1 in its environment (in Python: before torch and numpy are "
    "imported; for Flower's own programs: python -m common.portable); docs/arithmetic.md"
)


def sqrt(x: Tensor) -> Tensor:
    """Square roots of any shape: torch's, in portable mode the correctly rounded ones of `exact_sqrt`."""
    return exact_sqrt(x) if portable.active() else x.sqrt()


def sqrt_(x: Tensor) -> Tensor:
    """`sqrt` in place."""
    return x.copy_(exact_sqrt(x)) if portable.active() else x.sqrt_()


def exact_sqrt(x: Tensor) -> Tensor:
    """The float32 or float64 numbers nearest to the roots, on the CPU: numpy calls the processor's own instruction.

    Other types are rounded from those of float64. NaN below 0.
    """
    if x.dtype not in (torch.float32, torch.float64):
        return exact_sqrt(x.double()).to(x.dtype)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(x.detach().numpy())))


class ExactRoots(TorchFunctionMode):
    """Within it torch.sqrt is `sqrt`, also in a library's code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.sqrt, Tensor.sqrt) and not kwargs:
            return exact_sqrt(args[0])
        if func in (torch.sqrt_, Tensor.sqrt_):
            return args[0].copy_(exact_sqrt(args[0]))
        return func(*args, **(kwargs or {}))


def describe(device: torch.device | str = "cpu") -> str:
    """What decides the bits of this process, as a line: two machines with one line compute the same.

    Versions of torch and its libraries, the kernels that the processor gets, threads, device, and a hash of the
    `answers` of the processor, in which also differ processors that have the same kernels.
    """
    shown = torch.__config__.show()
    mkl = re.search(r"Math Kernel Library Version (\S+)", shown)
    dnn = re.search(r"MKL-DNN (v\S+)", shown)
    threads = torch.get_num_threads()
    parts = [
        f"torch {torch.__version__}",
        f"MKL {mkl[1].split('-')[0]}" if mkl else "no MKL",
        f"oneDNN {dnn[1]}" if dnn else "no oneDNN",
        torch.backends.cpu.get_cpu_capability() + (" portable" if portable.active() else ""),
        f"{threads} thread" + ("s" if threads > 1 else ""),
        f"answers {_digest(*answers().values())}",
    ]
    return f"{', '.join(parts)} on {_named(torch.device(device))}"


def host(description: str) -> str:
    """The part of a description that is the processor's."""
    return description.rpartition(" on ")[0]


def _named(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    # Without the number: which of a machine's cards makes no difference.
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN {cudnn}"


def require(arithmetic: str, device: torch.device | str = "cpu") -> None:
    """Raise Unfit, with what to do, unless this process computes as `local.arithmetic` says."""
    if arithmetic != "portable":
        return
    asked = "local.arithmetic = 'portable'"
    if torch.device(device).type != "cpu":
        raise Unfit(f"{asked} is a matter of processors and this process trains on {device}; allowed: cpu")
    if not portable.active():
        raise Unfit(f"{asked} and this process computes natively: {CURE}")
    if late := portable.late():
        raise Unfit(f"{asked} and {' and '.join(late)} had been loaded before the variables were set: {CURE}")
    if wrong := differing():
        raise Unfit(
            f"{asked} and this machine's {torch.backends.cpu.get_cpu_capability()} kernels give other answers than the "
            f"pinned ones in {', '.join(wrong)}: it needs an x86-64 processor with AVX2 and variables that are set "
            f"before the first operation; {CURE}"
        )


@cache
def differing() -> tuple[str, ...]:
    """The kernels whose answers are not those of portable mode, as far as they are known for the installed versions."""
    found = answers()
    known = {**PINNED.get(f"torch {torch.__version__}", {}), **PINNED.get(f"numpy {np.__version__}", {})}
    wrong = [name for name, answer in known.items() if found[name] != answer]
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        wrong.append("the choice of kernels")
    return tuple(wrong)


@cache
def answers() -> dict[str, str]:
    """Kernel -> hash of what this process makes of fixed numbers, on one thread. Takes some ms; no random number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            return {name: _digest(*compute()) for name, compute in _KERNELS.items()}
    finally:
        torch.set_num_threads(threads)


def _numbers(*shape: int, seed: int = 1) -> Tensor:
    """Numbers in [-2, 2) made of integers alone, float32."""
    count = int(np.prod(shape))
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed * 7919)) * np.uint64(2654435761) % np.uint64(2**24)
    return torch.from_numpy(mixed.astype(np.float64) / 2**22 - 2).float().reshape(shape)


def _trained(module: nn.Module, batch: Tensor) -> list[Tensor]:
    """Output and gradients with parameters that depend on nothing."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(_numbers(*parameter.shape, seed=seed + 10) / 5)
    out = module(batch)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad((out * _numbers(*out.shape, seed=2)).sum(), list(module.parameters()))]


def _matmul() -> list[Tensor]:
    return [_numbers(33, 300) @ _numbers(300, 50, seed=3), _numbers(500) @ _numbers(500, seed=4)]


def _blank(module: Callable[[], nn.Module]) -> nn.Module:
    """A module without the random numbers of its start: nothing here may move the generator."""
    with torch.random.fork_rng([]):
        return module()


def _numpy() -> list[Tensor]:
    x = _numbers(1003).double().numpy()
    return [torch.from_numpy(np.exp(x)), torch.from_numpy(np.outer(x[:40], x[:300]) @ x[:300])]


_KERNELS: dict[str, Callable[[], list[Tensor]]] = {
    "matmul": _matmul,
    "convolution": lambda: _trained(_blank(lambda: nn.Conv2d(3, 16, 3)), _numbers(8, 3, 12, 12)),
    "lstm": lambda: [
        *_trained(_blank(lambda: nn.GRU(8, 16, batch_first=True)), _numbers(4, 9, 8)),
        # Not in float32: oneDNN's code for it kills qemu 7.2 (signal 11), and with it the check of emulated processors.
        *_trained(_blank(lambda: nn.LSTM(8, 16, batch_first=True).double()), _numbers(4, 9, 8).double()),
    ],
    "exp": lambda: [_numbers(1003).exp(), _numbers(1003).tanh(), _numbers(1003).double().sigmoid()],
    "sqrt": lambda: [exact_sqrt(_numbers(1003).abs()), exact_sqrt(_numbers(1003).abs().double())],
    "numpy": _numpy,
}


def _digest(*parts: Tensor | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
