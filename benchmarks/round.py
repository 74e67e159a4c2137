"""Seconds of a round whose clients train for no time: what the system itself costs.

    python -m benchmarks.round [--megabytes 4 47] [--rounds 12] [--engines inprocess grpc secure stock vce]

Engines: in process; resident nodes over gRPC on loopback; the same with TLS and node keys; stock `flower-supernode` (a
process per message, polls of 3 s); VCE on Ray. One run after the other; the median over rounds 3 and later, and its
ratio to the first engine. The history's phases say where the time goes. `--registered 100 3400` shows that the
in-process round does not grow with the number of clients that are registered.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import flower

flower.prepare()

from client.app import app as client_app  # noqa: E402
from common.deploy import keys  # noqa: E402
from common.experiment import Experiment  # noqa: E402
from common.flower import ROOT  # noqa: E402
from server.app import run  # noqa: E402
from server.deploy import certs, nodes  # noqa: E402
from server.deploy.clients import start_clients  # noqa: E402
from server.deploy.processes import Family, stop  # noqa: E402
from server.deploy.superlink import LinkOptions, SuperLink  # noqa: E402
from server.engines import vce  # noqa: E402
from server.engines.inprocess import InProcessGrid  # noqa: E402
from server.rounds.folder import RunFolder  # noqa: E402
from server.watch.follow import failure  # noqa: E402

ENGINES = ("inprocess", "grpc", "secure", "stock", "vce")
Record = dict[str, Any]


def experiment(megabytes: float, rounds: int, clients: int, sample: int) -> Experiment:
    """FedAvg on one float32 vector."""
    return Experiment.parse(
        f"""
        name = "round"
        rounds = {rounds}
        task.name = "benchmarks.flat:task"
        task.size = {int(megabytes * 1e6 / 4)}
        partition.clients = {clients}
        local.steps = 1
        round.sample = {sample}
        evaluate.clients = "none"
        checkpoint.every = 1000
        """
    )


def quiet(_: object) -> None:
    """Say nothing."""


def in_process(settings: Experiment, folder: Path, names: Sequence[str]) -> list[Record]:
    """All in this process; a run before it loads what loads on first use."""
    run(InProcessGrid(client_app), settings.model_copy(update={"rounds": 3}), RunFolder(folder / "first"), say=quiet)
    run(InProcessGrid(client_app), settings, RunFolder(folder / "run"), say=quiet)
    return RunFolder(folder / "run").history()


def simulated(settings: Experiment, folder: Path, names: Sequence[str]) -> list[Record]:
    """Flower's simulation engine."""
    workers = os.cpu_count() or 1
    vce.simulate(settings, RunFolder(folder), client_app, resume=False, workers=workers, say=quiet, show=quiet)
    return RunFolder(folder).history()


def resident(settings: Experiment, folder: Path, names: Sequence[str], device: str = "cpu") -> list[Record]:
    """Resident nodes over gRPC."""
    with (
        SuperLink(folder / "superlink.log") as link,
        start_clients(link.fleet_address, names, memory_root=folder / "memory", log_dir=folder, device=device),
    ):
        return _submitted(settings, folder / "run", link)


def secure(settings: Experiment, folder: Path, names: Sequence[str]) -> list[Record]:
    """Resident nodes over gRPC with TLS on both legs and a key for each node."""
    made, known = certs.write(folder / "certs", [], [], 10), folder / "nodes.toml"
    for name in names:
        nodes.add(known, name, keys.generate(folder / f"{name}.key"))
    link = SuperLink(folder / "superlink.log", options=LinkOptions(certificates=made.folder, nodes=known))
    options = ["--ca", str(made.ca), "--key", str(folder / "{name}.key")]
    with (
        link,
        nodes.Follower(known, link.control, quiet),
        start_clients(link.fleet_address, names, memory_root=folder / "memory", log_dir=folder, options=options),
    ):
        return _submitted(settings, folder / "run", link)


def stock(settings: Experiment, folder: Path, names: Sequence[str], device: str = "cpu") -> list[Record]:
    """Flower's own SuperNodes."""
    with SuperLink(folder / "superlink.log") as link, _supernodes(link, names, folder, device):
        return _submitted(settings, folder / "run", link)


@contextmanager
def _supernodes(link: SuperLink, names: Sequence[str], folder: Path, device: str) -> Iterator[None]:
    environ = flower.environment() | {
        "FLWR_HOME": str(folder / "home"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    start = "from flwr.supernode.cli.flower_supernode import flower_supernode as run; run()"
    families = []
    with ExitStack() as stack:
        stack.callback(lambda: stop(families, 5.0))
        for number, name in enumerate(names):
            command = [sys.executable, "-c", start, "--insecure", "--superlink", link.fleet_address]
            command += ["--node-config", f'name="{name}" device="{device}" trusted=true']
            command += ["--host", "127.0.0.1", "--port", str(_port())]
            families.append(Family(command, environ, folder / f"supernode-{number}.log", ROOT))
        yield


def _port() -> int:
    from server.deploy.processes import held_ports

    return held_ports(1)[0]


def _submitted(settings: Experiment, path: Path, link: SuperLink, limit_s: float = 900.0) -> list[Record]:
    link.control.submit(ROOT, {"experiment-toml": settings.toml(), "run-dir": str(path)})
    folder, end = RunFolder(path), time.monotonic() + limit_s
    while (status := folder.status().get("status")) not in ("finished", "failed"):
        if time.monotonic() > end or not link.running:
            raise RuntimeError(f"no end of the run; log: {link.log}")
        time.sleep(0.2)
    if status == "failed":
        raise failure(folder)
    return folder.history()


RUNNERS = {"inprocess": in_process, "grpc": resident, "secure": secure, "stock": stock, "vce": simulated}


def median(records: Sequence[Record], phase: str) -> float:
    """Of a phase, in seconds, without the first two rounds."""
    return statistics.median(record["seconds"].get(phase, 0.0) for record in records[2:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[4, 47])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--registered", type=int, nargs="*", default=[])
    options = parser.parse_args()
    # The server app runs from the bundle, which has no benchmarks: it finds this task by the path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    print(f"{'MB':>6} {'engine':10} {'s a round':>10} {'ratio':>7}   broadcast  collect  aggregate")
    with tempfile.TemporaryDirectory() as temporary:
        for megabytes in options.megabytes:
            base = None
            for engine in options.engines:
                folder = Path(temporary) / f"{megabytes}-{engine}"
                folder.mkdir()
                rounds = min(options.rounds, 6) if engine == "stock" else options.rounds
                names = [str(number) for number in range(options.clients)]
                settings = experiment(megabytes, rounds, options.clients, options.clients)
                records = RUNNERS[engine](settings, folder, names)
                total = median(records, "total")
                base = base or total
                phases = "  ".join(f"{median(records, p):8.3f}" for p in ("broadcast", "collect", "aggregate"))
                print(f"{megabytes:6g} {engine:10} {total:10.3f} {total / base:7.1f}   {phases}", flush=True)
        for registered in options.registered:
            folder = Path(temporary) / f"registered-{registered}"
            records = in_process(experiment(4, options.rounds, registered, 2), folder, [])
            print(f"{registered:5} registered, 2 sampled, 4 MB, in process: {median(records, 'total'):.4f} s a round")


if __name__ == "__main__":
    main()
