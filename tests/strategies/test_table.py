"""One table over all: every algorithm x model x local optimizer x participation.

Each case learns, resumes bit for bit and gives the same weights in every engine, or is refused before round 1 where it
has no meaning. One case of every algorithm is drawn for a day (FEDKEEL_DAY); `--suite=full` runs all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from client.app import app as client_app
from common.errors import SettingsError
from common.experiment import Experiment
from common.flower import ROOT
from server.app import run
from server.deploy.clients import start_clients
from server.deploy.superlink import SuperLink
from server.engines.inprocess import InProcessGrid
from server.rounds.folder import RunFolder
from server.watch.follow import failure
from strategies.registry import REGISTRY, settled
from tests.server.rounds.test_resume import alike, stopped
from tests.server.rounds.test_resume import grid as on_disk
from tests.support.faults import ran
from tests.support.helpers import MIXED, NORMED
from tests.support.patience import until
from tests.support.today import cells, drawn

CLIENTS, ROUNDS = 4, 8
MODELS = {"digits": {"hidden": 32}, "cnn": {"model": "cnn", "width": 4}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "momentum": {"optimizer": "sgd", "lr": 0.03, "momentum": 0.9},
    "adam": {"optimizer": "adam", "lr": 0.005},
    "own": {"lr": 0.005},
}
SAMPLES = {"full": None, "partial": 2}

FIXED = {
    "localadam": {"sgd", "momentum"},
    "diloco": {"sgd", "momentum", "adam"},
    "muloco": {"sgd", "momentum", "adam"},
}
"""Compositions that name another optimizer."""

LINEAR = {
    "fednova": {"adam"},
    "fednovavr": {"adam"},
    "hafedho": {"adam"},
    "fedcm": {"momentum", "adam"},
    "scaffoldm": {"momentum", "adam"},
    "padamfed": {"momentum", "adam"},
    "mime": {"momentum", "adam"},
    "mimelite": {"momentum", "adam"},
    "pfedafm": {"adam"},
}
"""Algorithms whose formulas need gradients in units of displacement, or steps that are theirs alone."""

REFUSED = FIXED | LINEAR
SERVER_RATES = {"fedams": 0.03, "fedadam": 0.03, "fedyogi": 0.03, "fedcams": 0.03}
LOCAL_RATES = {"hafedho": 0.1, "fedcm": 0.5, "scaffoldm": 0.5, "mime": 0.5, "mimelite": 0.5, "fedsmb": 0.5}
STEADY = {"mime": 0.1, "mimelite": 0.1}
"""Adaptive servers and damped momentum take small first steps: larger rates show in eight rounds that they learn, where
the model allows them."""
SLOW = {"fedsmb": 30}
"""Rounds of those that take one step a round."""


class Case(NamedTuple):
    """A cell of the table."""

    algorithm: str
    model: str
    optimizer: str
    sample: str

    @property
    def id(self) -> str:
        return "-".join(self)


ALL = [Case(a, m, o, s) for a in REGISTRY for m in MODELS for o in ("sgd", "momentum", "adam") for s in SAMPLES]
ALLOWED = [case for case in ALL if case.optimizer not in REFUSED.get(case.algorithm, ())]
OWN = [Case(name, "digits", "own", "partial") for name in FIXED]


def suited(case: Case, **tables: Any) -> Experiment:
    """The experiment of a case: four clients of unequal size and labels."""
    task: dict[str, Any] = {"name": "digits", **MODELS[case.model]}
    values: dict[str, Any] = {
        "name": f"table-{case.id}",
        "seed": 3,
        "rounds": SLOW.get(case.algorithm, ROUNDS),
        "partition": {"kind": "dirichlet", "alpha": 1.0, "clients": CLIENTS},
        "strategy": {"name": case.algorithm},
        "local": {"batch_size": 32, **OPTIMIZERS[case.optimizer]},
        "round": {} if SAMPLES[case.sample] is None else {"sample": SAMPLES[case.sample]},
        **tables,
    }
    if case.algorithm in NORMED and case.model == "digits":
        values["personal"] = {"parts": ["0.*"]}  # a model without BatchNorm
    if case.algorithm in MIXED:
        task = {"name": "digits", "hidden": 32, "extractor": 16}
    if case.algorithm in SERVER_RATES:
        values["server"] = {"lr": SERVER_RATES[case.algorithm]}
    if case.algorithm == "fedcams":
        values["compression"] = {"ratio": 0.25}  # a small model in few rounds
    if case.algorithm in LOCAL_RATES and case.optimizer != "adam":
        rates = LOCAL_RATES | (STEADY if case.model == "cnn" else {})
        values["local"]["lr"] = rates[case.algorithm]
    return Experiment.model_validate(values | {"task": task})


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_what_has_no_meaning_is_refused(algorithm: str) -> None:
    """And nothing else: the error names algorithm and optimizer, or is about the composition's own."""
    refused = {}
    for optimizer in ("sgd", "momentum", "adam"):
        try:
            settled(suited(Case(algorithm, "digits", optimizer, "full")))[0]
        except SettingsError as error:
            refused[optimizer] = str(error)
    file = REGISTRY[algorithm].cls.__module__.rpartition(".")[2]
    for text in refused.values():
        assert "local." in text
        assert algorithm in text or file in text
    assert refused.keys() == REFUSED.get(algorithm, set())


def loss(record: dict[str, Any]) -> float:
    """The evaluation loss that stands for a round: of the global model, or of the clients' own ones."""
    return float(record["central"]["loss"] if record["central"] else record["personal"]["loss"]["weighted"])


def check(case: Case, folder: Path) -> None:
    """It learns, and 8 rounds are 3, a stop, a resume and 5 more, bit for bit."""
    settings = suited(case)
    straight = ran(folder / "straight", settings, on_disk(folder / "straight"))
    losses = [loss(record) for record in straight.history]
    assert losses[-1] < 0.9 * 2.3, losses
    assert not any(record["dropped"] or record["void"] for record in straight.history)
    stopped(folder / "run", settings, 3)
    resumed = ran(folder / "run", settings, on_disk(folder / "run"), resume=True)
    assert resumed.said == ["resuming after round 3", *straight.said]  # what is warned of is warned of again
    alike(resumed, straight)


def test_every_algorithm_has_a_case() -> None:
    assert {case.algorithm for case in ALLOWED + OWN} == set(REGISTRY)


@pytest.mark.parametrize(
    "case", cells(ALLOWED + OWN, 1, 2, "in process", name=lambda case: case.id, key=lambda case: case.algorithm)
)
def test_cases(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


# --- the three engines


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    """A SuperLink and resident client processes."""
    folder = tmp_path_factory.mktemp("grpc")
    names = [str(number) for number in range(CLIENTS)]
    with (
        SuperLink(folder / "superlink.log") as link,
        start_clients(link.fleet_address, names, memory_root=folder / "memory", log_dir=folder),
    ):
        yield link


def engines(cases: list[Case], federation: SuperLink, folder: Path) -> None:
    """The final weights of each case, in process, over gRPC and under VCE."""
    few = {case: suited(case, rounds=3) for case in cases}
    node = InProcessGrid(client_app)
    here = {case.id: run(node, few[case], RunFolder(folder / "here" / case.id))["sha256"] for case in cases}
    assert {case.id: over_grpc(few[case], federation, folder / "grpc" / case.id) for case in cases} == here
    assert under_vce(few, folder / "vce") == here


def over_grpc(settings: Experiment, federation: SuperLink, place: Path) -> str:
    """The final weights of a run between processes."""
    folder = RunFolder(place)
    federation.control.submit(ROOT, {"experiment-toml": settings.toml(), "run-dir": str(place)})
    until(lambda: folder.status().get("status") in ("finished", "failed"), "the run", 120)
    if folder.status()["status"] == "failed":
        raise failure(folder)
    return str(folder.status()["sha256"])


def under_vce(few: dict[Case, Experiment], place: Path) -> dict[str, str]:
    """The same under Flower's simulation engine."""
    from flwr.simulation import run_simulation

    got: dict[str, str] = {}
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for case, settings in few.items():
            got[case.id] = run(grid, settings, RunFolder(place / case.id))["sha256"]

    logging.getLogger("flwr").setLevel(logging.ERROR)
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "log_to_driver": False}}
    with pytest.warns() as _:  # Ray and the deprecated function warn in words of their own
        run_simulation(app, client_app, CLIENTS, backend_config=resources)
    return got


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.rest
def test_todays_engines(federation: SuperLink, tmp_path: Path) -> None:
    engines(drawn(ALLOWED, 4, "engines"), federation, tmp_path)


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("first", range(0, len(ALLOWED), 4))
def test_all_engines(first: int, federation: SuperLink, tmp_path: Path) -> None:
    engines(ALLOWED[first : first + 4], federation, tmp_path)
