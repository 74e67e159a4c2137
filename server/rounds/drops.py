"""Who was left out of a round, and why, told beside the rounds: not in every round anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from strategies.protocol.messages import Undecided

KNOWN = frozenset(Undecided.WORDS.values())

OFTEN = 3
"""A client's drops for one cause are told so many times in a row; then that they go on, and again once they ended."""

NAMED = 5
"""Clients with one reason that a line names."""


class Drops:
    """Tells what happens to clients' uploads and evaluations, each kind by itself."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen: dict[str, Counter[tuple[str, str]]] = {}

    def tell(self, what: str, round: int, dropped: Mapping[str, str], causes: Mapping[str, str]) -> None:
        """The clients dropped in a round, with the whole reason; identical ones in one line."""
        # Late is planned, or the others sufficed; of a site that has not approved the run the roll tells.
        left_out = {name: why for name, why in dropped.items() if causes.get(name) != "late" and why not in KNOWN}
        before = self._seen.get(what, Counter())
        now = Counter({(name, cause): before[name, cause] + 1 for name, cause in causes.items() if name in left_out})
        self._seen[what] = now
        by_reason: dict[str, list[str]] = {}
        for name, reason in left_out.items():
            if (times := now[name, causes.get(name, "")]) <= OFTEN:
                again = "; no more is said of it while it goes on" if times == OFTEN else ""
                by_reason.setdefault(reason.replace(f"client {name}, ", "") + again, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            who = f"client{'' if len(names) == 1 else 's'} {', '.join(names[:NAMED])}{more}"
            self._say(f"round {round}: the {what} of {who} is left out: {reason}")
