"""Portable arithmetic: the environment in which any x86-64 processor with AVX2 computes the same bits.

torch, MKL, oneDNN, OpenBLAS and numpy choose their kernels by the processor, and each reads a variable of its own when
it is loaded or first used; later ones do nothing, silently. So this module imports nothing, is called before anything
else, and remembers what came too late. `python -m common.portable` prints the variables for a shell, where a program
that is not ours starts first (flower-supernode). What the mode promises: docs/arithmetic.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

OPTION, SWITCH = "--portable", "FEDKEEL_PORTABLE"

ENVIRONMENT = {
    SWITCH: "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    # AVX2 is not honoured on AMD. COMPATIBLE means SSE2 without fused multiply-add, on every processor.
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    # Names of numpy before 2.4 and since; it passes over those that it does not know.
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
}
"""Variable -> value. Child processes inherit them."""

COMMAND = "server.__main__"
"""The program that `ensure` may start anew."""

_READERS = ("torch", "numpy")
_late: list[str] = []
_entered: list[bool] = []


def start(words: Sequence[str] | None = None) -> None:
    """Set the variables if the command line (`words`) has --portable or the environment says FEDKEEL_PORTABLE=1."""
    if OPTION in (sys.argv[1:] if words is None else words) or os.environ.get(SWITCH) == "1":
        enter()


def enter() -> None:
    """Set the variables for what is loaded from now on."""
    if not complete():
        _late[:] = [name for name in _READERS if name in sys.modules]
        os.environ.update(ENVIRONMENT)


def complete() -> bool:
    """Whether the environment has all the variables."""
    return all(os.environ.get(key) == value for key, value in ENVIRONMENT.items())


def late() -> list[str]:
    """What was loaded before the variables were set."""
    return list(_late)


def active() -> bool:
    """Whether this process computes portably, as of the first call: nothing changes it afterwards."""
    if not _entered:
        _entered.append(complete())
    return _entered[0]


def ensure() -> None:
    """Go on in portable arithmetic: the command starts anew, under the same process id, if it did not begin so.

    Does nothing in a process that is not the command line's: there what computes refuses by itself.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if complete() or spec is None or spec.name != COMMAND:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ENVIRONMENT})


if __name__ == "__main__":
    print("\n".join(f"export {key}={value!r}" for key, value in ENVIRONMENT.items()))
