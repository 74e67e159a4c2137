"""What may change in a run that is resumed: bounds of a round and who is waited for, recorded with the round."""

from __future__ import annotations

from typing import Any

from common.errors import SettingsError
from common.experiment import Experiment
from common.settings import dotted, shown
from server.rounds.folder import SETTINGS, RunFolder

CHANGEABLE = (
    "round.deadline_s",
    "round.quorum",
    "round.wait_for",
    "round.max_void",
    "round.max_upload_norm",
    "round.norm_factor",
    "round.most_share",
    "data.may_grow",
)
"""Which replies a round waits for and takes: no formula, no seed, nothing that a client keeps."""


def begun_as(folder: RunFolder, experiment: Experiment) -> Experiment:
    """The experiment with the changeable values that the run in the folder began with: its checkpoints keep the hash of
    those for as long as it lives."""
    # Of a key that changed more than once, the first change is the last to be undone.
    values = in_force(folder) | {change["key"]: change["from"] for change in reversed(_changes(folder))}
    return _with(experiment, {key: value for key, value in values.items() if key in CHANGEABLE})


def record_changes(folder: RunFolder, experiment: Experiment, round: int) -> list[dict[str, Any]]:
    """Keep in run.json what is other than before from the round after `round` on; returns it, each {round, key, from,
    to}. A round that was begun with a change and is run again has the change of its last try."""
    before, now = in_force(folder), _values(experiment)
    new = [
        {"round": round + 1, "key": key, "from": before[key], "to": now[key]}
        for key in CHANGEABLE
        if key in before and before[key] != now[key]
    ]
    if new:
        folder.amend_status(changes=[*_changes(folder), *new])
    return new


def in_force(folder: RunFolder) -> dict[str, Any]:
    """The changeable values of the run in a folder, by dotted key; {} if its settings cannot be read."""
    values = _kept(folder) | {change["key"]: change["to"] for change in _changes(folder)}
    return {key: values[key] for key in CHANGEABLE if key in values}


def differences(folder: RunFolder, experiment: Experiment) -> str:
    """What else is other than in the folder's settings, for an error; "" if nothing or unknown."""
    before, now = _kept(folder), _values(experiment)
    keys = sorted(key for key in before.keys() | now.keys() if before and before.get(key) != now.get(key))
    free = ("evaluate", "stop", "checkpoint", "tracking")
    told = [
        f"{key} was {shown(before.get(key))} and is {shown(now.get(key))}"
        for key in keys
        if key not in (*CHANGEABLE, "rounds") and key.split(".")[0] not in free
    ]
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    return f". What differs: {', '.join(told[:5])}{more}" if told else ""


def _changes(folder: RunFolder) -> list[dict[str, Any]]:
    found = folder.status().get("changes", [])
    return [change for change in found if change.get("key") in CHANGEABLE]


def _kept(folder: RunFolder) -> dict[str, Any]:
    try:
        return _values(Experiment.load(folder.path / SETTINGS))
    except SettingsError:
        return {}


def _values(experiment: Experiment) -> dict[str, Any]:
    return dict(dotted(experiment.model_dump(mode="json")))


def _with(experiment: Experiment, values: dict[str, Any]) -> Experiment:
    sections: dict[str, dict[str, Any]] = {}
    for dotted_key, value in values.items():
        section, key = dotted_key.split(".")
        sections.setdefault(section, {})[key] = value
    return experiment.model_copy(
        update={name: getattr(experiment, name).model_copy(update=update) for name, update in sections.items()}
    )
