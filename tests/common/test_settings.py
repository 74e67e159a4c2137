"""Settings are taken as written: a value of another type is an error that names key, value and what is allowed."""

from __future__ import annotations

import pytest

from common.errors import SettingsError
from common.experiment import Experiment
from strategies.registry import REGISTRY, cautions, settled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('rounds = "5"', "rounds = '5'"),
        ("rounds = 5.0", "rounds = 5.0"),
        ("rounds = true", "rounds = True"),
        ("local.lr = true", "local.lr = True"),
        ('local.lr = "0.1"', "local.lr = '0.1'"),
        ("local.nesterov = 1", "local.nesterov = 1"),
        ("local.betas = [0.9]", "local.betas"),
        ('strategy.name = "hafedho"\nstrategy.mu = "0.1"', "strategy.mu = '0.1'"),
        ('strategy.name = "hafedho"\nstrategy.upload = "psi"', "'phi', 'displacement' or 'raw'"),
    ],
)
def test_wrong_types_are_errors(text: str, message: str) -> None:
    """Neither text nor booleans become numbers silently."""
    with pytest.raises(SettingsError) as caught:
        settled(Experiment.parse(text))[0]
    assert message in str(caught.value)


def test_integers_are_numbers() -> None:
    """TOML writes 1 for 1.0."""
    settings = Experiment.parse("local.lr = 1\nlocal.betas = [0, 0.5]")
    assert (settings.local.lr, settings.local.betas) == (1.0, (0.0, 0.5))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_resolved_experiment_means_the_same(name: str) -> None:
    """Written out in full or in part, as TOML or as JSON, a resolved experiment comes back equal."""
    resolved = settled(Experiment.parse(f'strategy.name = "{name}"\nround.sample = 3'))[1]
    for text in (resolved.toml(), resolved.toml(full=True)):
        assert settled(Experiment.parse(text))[1] == resolved
    assert resolved.identity == settled(Experiment.parse(resolved.toml(full=True)))[1].identity
    assert settled(resolved)[0] == settled(Experiment.parse(f'strategy.name = "{name}"'))[0]


@pytest.mark.parametrize(("moments", "warned"), [("reset", True), ("keep", False)])
def test_soaps_lost_step_is_told(moments: str, warned: bool) -> None:
    """With moments reset each round, one of the steps moves no matrix."""
    experiment = Experiment.parse(f'local = {{optimizer = "soap", moments = "{moments}"}}')
    found = cautions(settled(experiment)[0], experiment, 7)
    assert len(found) == warned
    assert all("the first of 7 steps a round" in text for text in found)
