"""What the audit log costs: a line, and a round with it against the same round without.

    python -m benchmarks.audit [--lines 2000] [--rounds 30] [--clients 10]

A line that is flushed to the disk (`durable`, as a reply at a site and a round at the server) and one that is not (a
message in, a client that joins); rounds in process that train for no time, with the server's log and without, in turn
in one process, the median of each and their ratio. The disk is that of the folder for temporary files: TMPDIR.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from common import flower

flower.prepare()

from benchmarks.round import experiment  # noqa: E402
from client.app import app  # noqa: E402
from common.deploy.audit import AuditLog  # noqa: E402
from server.app import run  # noqa: E402
from server.engines.inprocess import InProcessGrid  # noqa: E402
from server.rounds.folder import RunFolder  # noqa: E402
from server.rounds.records import unheard  # noqa: E402
from server.watch.audited import audit_of, audited  # noqa: E402


def line_s(folder: Path, lines: int, durable: bool) -> float:
    """Median seconds of one line of a site."""
    book, taken = AuditLog(folder / f"{durable}.jsonl"), []
    about = {"kind": "train", "bytes": 10**6, "message": "f" * 64}
    for _ in range(lines):
        started = time.perf_counter()
        book.record("upload out", run="r", site="site-1", key="SHA256:" + "k" * 43, durable=durable, **about)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def round_s(folder: Path, rounds: int, clients: int, heard: bool) -> float:
    """Median seconds from one round of a run to the next, from the third on."""
    stamps: list[float] = []
    held = RunFolder(folder / f"run-{heard}-{time.monotonic_ns()}")
    event = audited(AuditLog(audit_of(held)), "run") if heard else unheard
    settings = experiment(0.1, rounds, clients, clients)
    shown = lambda record: stamps.append(time.perf_counter())  # noqa: E731
    run(InProcessGrid(app), settings, held, say=lambda text: None, show=shown, event=event)
    return statistics.median(b - a for a, b in itertools.pairwise(stamps[2:]))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clients", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedkeel-") as name:
        folder = Path(name)
        for durable in (True, False):
            told = "flushed" if durable else "not flushed"
            print(f"a line, {told}: {1e6 * line_s(folder, given.lines, durable):.0f} us", flush=True)
        pairs = [
            (round_s(folder, given.rounds, given.clients, True), round_s(folder, given.rounds, given.clients, False))
            for _ in range(5)
        ]
        audited_s, bare_s = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"a round of {given.clients} clients: {1e3 * audited_s:.2f} ms with, {1e3 * bare_s:.2f} ms without")
        print(f"ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
