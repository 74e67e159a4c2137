"""Milliseconds and bytes of each compressor for one vector as large as a ResNet-18 with 1000 classes.

    python -m benchmarks.compression [--device cpu] [--threads 1] [--ratio 0.01] [--repeats 7]

That is 11.7 million float32, 47 MB. The best of some repeats. Decoding includes all checks of what came over the wire;
ef14 is a client's whole call with a memory: add it, encode, decode, subtract.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import models
from common.compression.compressors import COMPRESSORS, create
from common.compression.feedback import Codec
from common.experiment import CompressionSettings
from common.vector import layout_of


def best(repeats: int, call: Callable[[], object]) -> float:
    """Milliseconds of the fastest call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times) * 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layout = layout_of(models.resnet18(1000).named_parameters())
    size = max(slot.stop for slot in layout.values())
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(options.device)
    print(f"{size} numbers in {len(layout)} tensors, {options.device}, {options.threads} threads, ms")
    print(f"{'compressor':<12}{'encode':>9}{'decode':>9}{'ef14':>9}{'bytes':>12}")
    for name in COMPRESSORS:
        compressor = create(name, options.ratio, layout)
        parts = compressor.encode(vector, 1)
        codec = Codec(CompressionSettings(up=name, ratio=options.ratio), layout)
        _, memory = codec.encode({"delta": vector}, {"delta": "vector"}, {}, len)
        encode = best(options.repeats, partial(compressor.encode, vector, 1))
        decode = best(options.repeats, partial(compressor.decode, parts, vector, 1))
        ef14 = best(options.repeats, partial(codec.encode, {"delta": vector}, {"delta": "vector"}, memory, len))
        sent = sum(part.nbytes for part in parts.values())
        print(f"{name:<12}{encode:9.1f}{decode:9.1f}{ef14:9.1f}{sent:12}", flush=True)


if __name__ == "__main__":
    main()
