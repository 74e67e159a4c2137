"""Random schedules of faults over four kinds of bound state; each fault alone; and faults that must be noticed."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from common.experiment import Experiment
from tests import trackers
from tests.helpers import experiment
from tests.schedules import DEADLINE_S, KINDS, Fault, Schedule, schedules
from tests.world import World

ALGORITHMS = ["scaffold", "tracking", "hafedho", "dual"]
EXAMPLES = int(os.environ.get("FEDKEEL_SCHEDULES", "130"))  # for each algorithm


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with trackers.registered():
        yield


def settings_of(algorithm: str, schedule: Schedule, folder: Path) -> Experiment:
    """Quadratics in float64, unequal in everything."""
    n, d, rng = schedule.clients, 3, np.random.default_rng(schedule.clients)
    arrays = {
        "centers": rng.normal(0, 3, (n, d)),
        "curvatures": rng.uniform(0.5, 2.0, (n, d)),
        "steps": np.arange(n) % 3 + 1,
        "examples": rng.permutation(np.arange(1, n + 1) * 10),
        "start": np.zeros(d),
    }
    tables: dict[str, Any] = {"rounds": 4, "seed": 1, **schedule.tables}
    limits = {"deadline_s": DEADLINE_S, "wait_for": n - schedule.late, **tables.pop("round", {})}
    return experiment(
        folder,
        algorithm,
        arrays=arrays,
        weights=schedule.weights,
        local={"lr": 0.05},
        round=limits,
        evaluate={"clients": "none"},
        **tables,
    )


def survived(algorithm: str, schedule: Schedule) -> World:
    """Run a schedule to its end; every promise is checked on the way."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        return World(place, settings_of(algorithm, schedule, place), schedule).run()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_schedules(algorithm: str) -> None:
    """Whatever happens: the run ends, the state fits, and the weights are those of its accepted sets."""
    counts: Counter[str] = Counter()

    @seed(zlib.crc32(algorithm.encode()))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules())
    def check(schedule: Schedule) -> None:
        counts["schedules"] += 1
        counts.update(survived(algorithm, schedule).counts)

    check()
    print("\n" + algorithm, dict(sorted(counts.items())))
    assert counts["schedules"] >= EXAMPLES
    assert {kind: counts[kind] for kind in KINDS if counts[kind] < EXAMPLES // 26} == {}


@pytest.mark.parametrize("how", range(3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_fault(algorithm: str, kind: str, how: int) -> None:
    """Each kind alone, in the third round."""
    counts = survived(algorithm, Schedule([Fault(kind, 3, 1, how)])).counts
    assert counts[kind] == 1
