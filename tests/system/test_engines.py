"""The promise: one experiment, one answer. Every algorithm gives the same weights in every engine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from client.app import app as client_app
from common.experiment import Experiment
from common.flower import ROOT, environment
from server.app import run
from server.deploy.clients import start_clients
from server.deploy.processes import Family, stop
from server.deploy.superlink import SuperLink
from server.engines.grid import grid
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from server.watch.follow import failure
from strategies.registry import REGISTRY
from tests.support.children import environment as environment_of
from tests.support.helpers import ON_DIGITS
from tests.support.patience import limit, until
from tests.support.today import cells, drawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

UNEVEN = "uneven"
"""SCAFFOLD with clients of unequal speed and presence."""
CASES = [*REGISTRY, UNEVEN]

TODAY = pytest.mark.parametrize(
    "cases",
    [
        pytest.param(drawn(CASES, 12, "engines"), id="drawn"),
        pytest.param(CASES, id="all", marks=pytest.mark.rest),
    ],
)
"""A round between processes takes a second: every day twelve cases, each time others."""

NAMES = [str(number) for number in range(6)]
DEADLINE_S = 120.0


def experiment(algorithm: str) -> Experiment:
    """Digits, six clients of unequal size, three sampled a round, four rounds."""
    more = ON_DIGITS.get(algorithm, "")
    if algorithm == UNEVEN:
        algorithm = "scaffold"
        more = """
        speed = {kind = "profile", speeds = [40.0, 8.0, 2.0], jitter = 0.5, deadline_s = 2.0}
        presence = {kind = "bernoulli", probability = 0.7}
        round.quorum = 1
        """
    return Experiment.parse(
        f"""
        name = "engines-{algorithm}"
        seed = 7
        rounds = 4
        partition.kind = "dirichlet"
        partition.alpha = 0.3
        partition.clients = 6
        strategy.name = "{algorithm}"
        local.lr = 0.05
        local.epochs = 2
        round.sample = 3
        round.deadline_s = {DEADLINE_S}
        evaluate.every = 4
        {more}
        """
    )


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Algorithm -> sha256 of the final weights, in this process."""
    folder = tmp_path_factory.mktemp("inprocess")
    node = InProcessGrid(client_app)
    return {name: run(node, experiment(name), RunFolder(folder / name))["sha256"] for name in CASES}


def of(cases: list[str], in_process: dict[str, str]) -> dict[str, str]:
    """The weights of these cases in this process."""
    return {name: in_process[name] for name in cases}


def test_worker_processes(in_process: dict[str, str], tmp_path: Path) -> None:
    """Two worker processes share the clients' memory and give the same weights."""
    with grid("client.app:app", 2) as workers:
        got = {name: run(workers, experiment(name), RunFolder(tmp_path / name))["sha256"] for name in CASES}
    assert got == in_process


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    """A SuperLink and six resident client processes."""
    folder = tmp_path_factory.mktemp("grpc")
    with (
        environment_of(PYTHONPATH=str(ROOT)),  # the bundle of `many` has nothing of its own
        SuperLink(folder / "superlink.log") as link,
        start_clients(link.fleet_address, NAMES, memory_root=folder / "memory", log_dir=folder),
    ):
        yield link


@TODAY
def test_grpc_in_one_server_app(
    cases: list[str], federation: SuperLink, in_process: dict[str, str], tmp_path: Path
) -> None:
    """Over gRPC between processes: one server app, which is loaded once, runs all cases with the same clients."""
    for name in cases:
        (tmp_path / f"{name}.toml").write_text(experiment(name).toml(), "utf-8")
    run_id = federation.control.submit(ROOT / "tests" / "support" / "standin" / "many", {"folder": str(tmp_path)})
    until(lambda: federation.control.status(run_id).over, "all runs", 2 * DEADLINE_S)
    assert federation.control.status(run_id).completed, federation.control.log(run_id)[-3000:]
    assert {name: RunFolder(tmp_path / name).status()["sha256"] for name in cases} == of(cases, in_process)


@pytest.mark.parametrize("algorithm", cells(CASES, 1, 9, "grpc"))
def test_grpc(algorithm: str, federation: SuperLink, in_process: dict[str, str], tmp_path: Path) -> None:
    """The same through the real server app, one for each run."""
    folder = RunFolder(tmp_path)
    config: dict[str, str | int | float | bool] = {
        "experiment-toml": experiment(algorithm).toml(),
        "run-dir": str(tmp_path),
    }
    federation.control.submit(ROOT, config)
    until(lambda: folder.status().get("status") in ("finished", "failed"), "the run", DEADLINE_S)
    if folder.status()["status"] == "failed":
        raise failure(folder)
    assert folder.status()["sha256"] == in_process[algorithm]


@TODAY
def test_vce(cases: list[str], in_process: dict[str, str], tmp_path: Path) -> None:
    """Under Flower's simulation engine, with client memory in Flower's context."""
    from flwr.simulation import run_simulation

    got: dict[str, str] = {}
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for name in cases:
            got[name] = run(grid, experiment(name), RunFolder(tmp_path / name))["sha256"]

    logging.getLogger("flwr").setLevel(logging.ERROR)
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "log_to_driver": False}}
    with pytest.warns() as _:  # Ray and the deprecated function warn in words of their own
        run_simulation(app, client_app, len(NAMES), backend_config=resources)
    assert got == of(cases, in_process)


@pytest.mark.rest
def test_flwr_run(in_process: dict[str, str], tmp_path: Path) -> None:
    """Plain `flwr run` with Flower's default of two virtual nodes for six clients."""
    text = tmp_path / "experiment.toml"
    text.write_text(experiment("scaffold").toml(), "utf-8")
    environ = environment() | {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    config = f'experiment="{text}" run-dir="{tmp_path / "run"}"'
    command = [sys.executable, "-m", "flwr.cli.app", "run", str(ROOT), "--run-config", config, "--stream"]
    command[1:3] = ["-c", "from flwr.cli.app import app; app()"]
    family = Family(command, environ, tmp_path / "log", tmp_path)
    try:
        family.process.wait(timeout=limit(DEADLINE_S * 2))
    except subprocess.TimeoutExpired:
        pytest.fail(family.tail(40))
    finally:
        stop([family], 5)
    status = RunFolder(tmp_path / "run").status()
    assert status.get("sha256") == in_process["scaffold"], family.tail(40)
    assert "round" in family.log.read_text("utf-8")
