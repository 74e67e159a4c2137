"""Defaults of a composition outlive the choice of a like optimizer."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from common.errors import SettingsError
from common.experiment import Experiment, LocalSettings
from strategies.registry import ADAMS, REGISTRY, settled

OPTIMIZERS = get_args(LocalSettings.model_fields["optimizer"].annotation)


@pytest.mark.parametrize("name", sorted(name for name, entry in REGISTRY.items() if "optimizer" in entry.local))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_adam_keeps_the_defaults_of_its_table(name: str, optimizer: str) -> None:
    """Refused by name where the optimizer is the algorithm's; where it may be chosen, every Adam has the table's rate
    and bias correction, what the file says goes before, and any other optimizer has its own defaults."""
    entry, given = REGISTRY[name], {"strategy": {"name": name}}
    own = entry.local["optimizer"]

    def found(**local: Any) -> LocalSettings:
        return settled(Experiment.model_validate(given | {"local": {"optimizer": optimizer, **local}}))[1].local

    if "local" in entry.fixed and optimizer != own:
        with pytest.raises(SettingsError, match=f"{optimizer!r} contradicts strategy.name = {name!r}"):
            found()
        return
    kept = entry.local if optimizer == own or {optimizer, own} <= ADAMS else {}
    assert found() == LocalSettings(**{**kept, "optimizer": optimizer})
    if optimizer in ADAMS and name in ("fagc", "fant"):
        assert (found().lr, found().bias_correction) == (1e-3, False)
        chosen = found(lr=0.5, bias_correction=True)
        assert (chosen.lr, chosen.bias_correction) == (0.5, True)
