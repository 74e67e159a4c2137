"""The rate of a round: schedules of both optimizers, exact, resumed, and as before where nothing is new."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import SettingsError
from common.experiment import Experiment, LocalSettings, ServerSettings
from strategies.protocol.rates import rate, scheduled
from strategies.registry import settled
from tests.support.faults import ran, toy
from tests.support.helpers import Simulation, experiment


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({}, [0.4] * 8),
        ({"schedule": "step", "drop_every": 3, "drop_factor": 0.5}, [0.4, 0.4, 0.4, 0.2, 0.2, 0.2, 0.1, 0.1]),
        ({"schedule": "step", "drop_every": 4}, [0.4] * 4 + [0.4 * 0.1] * 4),
        ({"schedule": "list", "factors": [[3, 0.5], [4, 2.0], [7, 0.25]]}, [0.4, 0.4, 0.2, 0.8, 0.8, 0.8, 0.1, 0.1]),
        ({"schedule": "list", "factors": [[1, 0.5]]}, [0.2] * 8),
        ({"warm_up": 4}, [0.1, 0.2, 0.4 * 0.75, 0.4, 0.4, 0.4, 0.4, 0.4]),
        ({"warm_up": 1}, [0.4] * 8),
        (
            {"schedule": "step", "drop_every": 1, "drop_factor": 0.5, "warm_up": 2},
            [0.2, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125],
        ),
        ({"schedule": "exponential", "decay": 0.9}, [0.4 * 0.9**t for t in range(8)]),
        ({"schedule": "cosine"}, [0.4 * (1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]),
    ],
)
@pytest.mark.parametrize("kind", [LocalSettings, ServerSettings])
def test_rates(kind: Any, given: dict[str, Any], rates: list[float]) -> None:
    """To the bit: the old schedules by the expressions that they always had."""
    settings = kind.model_validate({"lr": 0.4, **given})
    assert [rate(settings, round, 8) for round in range(1, 9)] == rates
    assert scheduled(settings) == (len(set(rates)) > 1 or settings.schedule != "constant")


@pytest.mark.parametrize("table", ["local", "server"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('schedule = "step"', "schedule = 'step' and drop_every = N belong together"),
        ("drop_every = 3", "schedule = 'step' and drop_every = N belong together"),
        ("drop_factor = 0.5", "drop_factor belongs to schedule 'step', not to 'constant'"),
        ('schedule = "list"', r"schedule = 'list' and factors = \[\[ROUND, FACTOR\], ...\] belong together"),
        ("factors = [[1, 0.5]]", "belong together"),
        ('schedule = "list"\nfactors = [[5, 0.5], [3, 0.1]]', r"factors begin in rounds \[5, 3\]; allowed: each later"),
        ('schedule = "list"\nfactors = [[3, 0.5], [3, 0.1]]', "each later than the one before"),
        ('schedule = "list"\nfactors = [[0, 0.5]]', "greater than or equal to 1"),
        ('schedule = "list"\nfactors = [[1, 0]]', "greater than 0"),
        ('schedule = "list"\nfactors = [[1.5, 0.5]]', "factors"),
        ('schedule = "linear"', "'constant', 'exponential', 'cosine', 'step' or 'list'"),
        ("warm_up = -1", "greater than or equal to 0"),
    ],
)
def test_wrong_settings(table: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Experiment.parse(f"[{table}]\n{text}")


def test_old_runs_keep_their_identity() -> None:
    assert Experiment().identity == "4e9424213bc56d5c"
    old = Experiment.parse('rounds = 7\nlocal.schedule = "exponential"\n[server]\noptimizer = "adam"\nlr = 0.01')
    assert old.identity == "2d8e3ebb671c4ba3"
    assert toy(server={"warm_up": 3}).identity != toy().identity
    for table in ("local", "server"):
        short, long = (toy(rounds=rounds, **{table: {"schedule": "cosine"}}) for rounds in (3, 4))
        assert short.identity != long.identity


def test_a_server_step_is_that_of_the_round(tmp_path: Path) -> None:
    """Each round moves by the factor times what one with a constant rate would."""
    given = {"schedule": "list", "factors": [[2, 0.5], [3, 0.25]], "lr": 1.0}
    run, plain = (Simulation(experiment(tmp_path, rounds=3, server=server)) for server in (given, {"lr": 1.0}))
    for factor in (1.0, 0.5, 0.25):
        start = run.x.clone()
        plain.coordinator.state = dict(run.coordinator.state)
        run.step()
        plain.step()
        expected = start + factor * (plain.x - start)
        assert torch.allclose(run.x, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedadam", "fednova"])
def test_a_resumed_run_goes_on_with_the_rates(algorithm: str, tmp_path: Path) -> None:
    server = {"schedule": "step", "drop_every": 2, "drop_factor": 0.5, "warm_up": 3}
    local = {"schedule": "list", "factors": [[2, 0.5], [4, 0.1]], "lr": 0.2, "batch_size": 4, "warm_up": 2}
    tables: dict[str, Any] = {"server": server, "local": local}
    straight = ran(tmp_path / "straight", toy(algorithm, rounds=5, **tables))
    ran(tmp_path / "run", toy(algorithm, rounds=2, **tables))
    resumed = ran(tmp_path / "run", toy(algorithm, rounds=5, **tables), resume=True)
    assert resumed.final == straight.final
    lr = 0.01 if algorithm == "fedadam" else 1.0
    assert [line["server_lr"] for line in resumed.history] == [
        lr * (1 / 3), lr * (2 / 3), lr * 0.5, lr * 0.5, lr * 0.25
    ]  # fmt: skip
    assert [line["lr"] for line in resumed.history] == [0.1, 0.1, 0.1, 0.2 * 0.1, 0.2 * 0.1]
    constant = ran(tmp_path / "constant", toy(algorithm, rounds=5, local=local))
    assert constant.final != straight.final
    assert "server_lr" not in constant.history[0]


@pytest.mark.parametrize("name", ["fedexp", "local-only", "fedsplit"])
def test_what_is_refused_as_a_rate_is_refused_as_a_schedule(name: str) -> None:
    given = {"task": {"name": "digits"}, "strategy": {"name": name}, "server": {"warm_up": 4}}
    with pytest.raises(SettingsError, match=r"server\.schedule comes to the rate 0\.25 in round 1: "):
        settled(Experiment.model_validate(given))


def test_a_step_that_clients_take_too_has_one_rate() -> None:
    given = {"strategy": {"name": "hafedho", "downlink": "gradient"}, "server": {"schedule": "cosine"}}
    with pytest.raises(SettingsError, match=r"server\.schedule = 'cosine' .* whose clients take the server's step"):
        settled(Experiment.model_validate(given))
