"""Who is asked in a round (`round.select`): a function of the run's settings and history, the same in every engine and
after a resume. It runs on the server alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from common.errors import SettingsError, located
from common.experiment import Experiment
from common.own import load
from common.seeds import derive
from common.settings import shown
from common.vector import State
from strategies.protocol.members import Member, sample

Select = Callable[[State, Sequence[Member], Sequence[Mapping[str, Any]], int, int, int], Sequence[str]]
"""(state, members, history, seed, round, count) -> the names of `count` of the members.

`state`: the server's, not to be changed; `members`: who is there and holds training examples, by name; `history`: the
lines of the rounds before, without what depends on a clock; `seed`: of this try at this round.
"""

OF_THE_CLOCK = frozenset({"seconds", "time", "late", "waiting"})


class Selection:
    """`round.select` of an experiment, and the history it looks at. Raises SettingsError for what means nothing."""

    def __init__(self, experiment: Experiment) -> None:
        settings = experiment.round
        self._seed, self._name = experiment.seed, settings.select
        self._history: list[Mapping[str, Any]] = []
        if settings.candidates is not None and self._name != "power-of-choice":
            raise SettingsError(f"round.candidates belongs to round.select = 'power-of-choice', not to {self._name!r}")
        self._select = self._chosen(settings.candidates)

    def _chosen(self, candidates: int | None) -> Select | None:
        """None: uniform, which needs no history."""
        if self._name == "uniform":
            return None
        if ":" in self._name:
            found = load(self._name, "round.select", "function")
            if not callable(found):
                raise SettingsError(f"round.select = {self._name!r} is a {type(found).__name__}; allowed: a function")
            return found  # type: ignore[no-any-return]
        if self._name not in READY:
            raise SettingsError(
                f"round.select = {shown(self._name)}; allowed: uniform, {', '.join(READY)} or package.module:function"
            )
        if self._name == "power-of-choice":
            return partial(power_of_choice, candidates=candidates)
        return READY[self._name]

    def note(self, record: Mapping[str, Any]) -> None:
        """One more line of the history, as a file holds it."""
        if self._select is not None:
            self._history.append({key: value for key, value in record.items() if key not in OF_THE_CLOCK})

    def choose(self, state: State, members: Sequence[Member], round: int, attempt: int, count: int) -> list[str]:
        """The names of those asked, sorted. Raises SettingsError for a selection that is none."""
        if self._select is None or count >= len(members):
            return sample(self._seed, round, attempt, [member.name for member in members], count)
        ordered = sorted(members, key=attrgetter("name"))
        seed = derive(self._seed, "select", round, attempt)
        try:
            found = self._select(state, ordered, self._history, seed, round, count)
            names = list(found)
        except SettingsError:
            raise
        except Exception as error:
            raise SettingsError(f"round.select = {self._name!r} failed in round {round}: {located(error)}") from error
        self._check(names, {member.name for member in members}, round, count)
        return sorted(names)

    def _check(self, names: list[Any], known: set[str], round: int, count: int) -> None:
        what = f"round.select = {self._name!r} in round {round}"
        if odd := [name for name in names if not isinstance(name, str) or name not in known]:
            some = ", ".join(sorted(known)[:10])
            raise SettingsError(f"{what}: {shown(odd[0])} is no client that is there; allowed: {some}")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SettingsError(f"{what}: {twice[0]!r} comes twice")
        if len(names) != count:
            raise SettingsError(f"{what} gave {len(names)} clients; needed: {count}")


def last_losses(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Name -> the mean training loss of a client in the last round that took its upload."""
    found: dict[str, float] = {}
    for record in history:
        found |= {name: loss for name, loss in (record.get("losses") or {}).items() if loss is not None}
    return found


def weighted(weights: Mapping[str, float], seed: int, count: int) -> list[str]:
    """`count` names drawn one after the other without replacement, each by its weight (above 0) among those left.

    By exponential keys (Efraimidis and Spirakis 2006): the smallest of E_i / w_i.
    """
    draw = random.Random(seed)
    keys = {name: -math.log(1.0 - draw.random()) / weights[name] for name in sorted(weights)}
    return sorted(keys, key=lambda name: (keys[name], name))[:count]


def by_size(
    state: State, members: Sequence[Member], history: Sequence[Mapping[str, Any]], seed: int, round: int, count: int
) -> list[str]:
    """By training examples. Averages by data count them again: `strategy.weights = "uniform"` does not."""
    return weighted({member.name: float(member.examples) for member in members}, seed, count)


def by_loss(
    state: State, members: Sequence[Member], history: Sequence[Mapping[str, Any]], seed: int, round: int, count: int
) -> list[str]:
    """By the training loss last told; who never told one has the largest that is known."""
    losses = last_losses(history)
    most = max(losses.values(), default=1.0)
    tiny = max(most, 1.0) * 1e-12
    return weighted({m.name: max(losses.get(m.name, most), tiny) for m in members}, seed, count)


def power_of_choice(
    state: State,
    members: Sequence[Member],
    history: Sequence[Mapping[str, Any]],
    seed: int,
    round: int,
    count: int,
    candidates: int | None = None,
) -> list[str]:
    """Of `candidates` drawn by size (default: twice `count`) those with the largest loss: Cho et al., arXiv 2010.01243,
    in the form rpow-d, whose loss is that of a client's last local training. Who never told one comes first."""
    drawn = by_size(state, members, history, seed, round, max(count, candidates or 2 * count))
    losses = last_losses(history)
    return sorted(drawn, key=lambda name: -losses.get(name, math.inf))[:count]


def round_robin(
    state: State, members: Sequence[Member], history: Sequence[Mapping[str, Any]], seed: int, round: int, count: int
) -> list[str]:
    """Those asked longest ago, among equals those asked the fewest times, then by name."""
    last: dict[str, int] = {}
    times: Counter[str] = Counter()
    for record in history:
        asked = record.get("sampled") or ()
        last |= dict.fromkeys(asked, record["round"])
        times.update(asked)
    return sorted((m.name for m in members), key=lambda name: (last.get(name, 0), times[name], name))[:count]


READY: dict[str, Select] = {
    "size": by_size,
    "loss": by_loss,
    "power-of-choice": power_of_choice,
    "round-robin": round_robin,
}
