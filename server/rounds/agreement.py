"""Do all sites learn from the same columns? Who differs, from whom, and what may be said of it, and to whom.

Of columns the server knows a hash, and their names only where a site's policy lets these out. A site is told of the
others' names nothing: only which of its own are not among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from common.data.columns import difference, listed
from common.errors import SettingsError
from strategies.protocol.members import Member, names_of

ADVICE = "task.name = 'table' finds the columns that task.inputs names wherever they stand"
MOST_NAMED = 5

Groups = Mapping[str, Sequence[Member]]
"""Hash of columns -> the clients that have these."""


def by_columns(members: Iterable[Member]) -> Groups:
    """Clients whose sites brought tables of their own, by what these hold."""
    groups: dict[str, list[Member]] = defaultdict(list)
    for member in sorted(members, key=lambda each: each.name):
        if member.columns_hash:
            groups[member.columns_hash].append(member)
    return groups


def usual_columns(groups: Groups) -> str:
    """What most have. Raises SettingsError if there is no such group."""
    largest = sorted(groups, key=lambda hash: -len(groups[hash]))
    if len(largest) > 1 and len(groups[largest[0]]) == len(groups[largest[1]]):
        one, other = groups[largest[0]], groups[largest[1]]
        told = _difference(one[0], columns_of(other))
        raise SettingsError(
            f"{_names(one)} and {_names(other)} learn from different columns, or in another order{told}, and nobody "
            f"can say which are right; {ADVICE}"
        )
    return largest[0]


def columns_of(members: Sequence[Member]) -> list[str] | None:
    """The names that one of the clients let out."""
    return next((names_of(member.columns) for member in members if member.columns), None)


def differing(member: Member, reference: Sequence[str] | None, others: int) -> str:
    """For the operator: how a client's columns differ, as far as that is known."""
    from_whom = f"those of {others} others" if others else "the run's"
    told = _difference(member, reference) or ", or in another order; their names are for the site's own log"
    return f"client {member.name!r} has other columns than {from_whom}{told}; {ADVICE}"


def told_at_home(member: Member, reference: Sequence[str] | None, others: int) -> str:
    """The same for the site itself, without a name that it has not told."""
    own = names_of(member.columns) if member.columns else None
    told = ", or in another order"
    if own is not None and reference is not None:
        more = [name for name in own if name not in reference]
        lacking = len([name for name in reference if name not in own])
        parts = [f"too many: {listed(more)}"] if more else []
        parts += [f"{lacking} of the others' are lacking"] if lacking else []
        told = f": {'; '.join(parts) or 'the same ones in another order'}"
    return (
        f"this site's table has other columns than those of {others} others{told}. This site's log has its own, in "
        f"order; {ADVICE}"
    )


def _difference(member: Member, reference: Sequence[str] | None) -> str:
    own = names_of(member.columns) if member.columns else None
    return f": {member.name} {difference(own, reference)}" if own is not None and reference is not None else ""


def _names(members: Sequence[Member]) -> str:
    more = f" and {len(members) - MOST_NAMED} more" if len(members) > MOST_NAMED else ""
    return ", ".join(member.name for member in members[:MOST_NAMED]) + more
