"""What computes a run: the arithmetic of the server and of its clients, in run.json, and one note where it is mixed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from common.arithmetic import describe, host
from server.rounds.folder import RunFolder
from strategies.protocol.members import Member

UNTOLD = "a release that does not say"
NAMED = 3


class Machines:
    """The lines of `common.arithmetic.describe` of all that have computed for a run, over resumes too."""

    def __init__(self, folder: RunFolder, say: Callable[[str], None], resume: bool) -> None:
        held = folder.status().get("arithmetic") if resume else None
        held = held if isinstance(held, dict) else {}
        self._server: list[str] = list(held.get("server", []))
        self._clients: list[str] = list(held.get("clients", []))
        self._folder, self._say = folder, say
        self._told = self._mixed
        if (own := describe()) not in self._server:
            self._server.append(own)

    def note(self) -> dict[str, list[str]]:
        """What run.json says: the lines of the server's processes, and of clients, each once."""
        return {"server": self._server, "clients": self._clients}

    def heed(self, members: Mapping[str, Member]) -> None:
        """Look at who is on the roll; tells once that not all compute alike."""
        lines: dict[str, list[str]] = defaultdict(list)
        for name, member in sorted(members.items()):
            lines[member.arithmetic or UNTOLD].append(name)
        if new := [line for line in lines if line not in self._clients]:
            self._clients.extend(new)
            self._folder.amend_status(arithmetic=self.note())
        if self._mixed and not self._told:
            self._told = True
            lines[self._server[-1]].insert(0, "the server")
            who = "; ".join(f"{_some(lines.get(line, ['earlier']))}: {line}" for line in {**lines, **self._all})
            self._say(
                "note: not all compute alike, so this run can be repeated with these machines and not on one; "
                f"local.arithmetic = 'portable' makes processors alike (docs/arithmetic.md). {who}"
            )

    @property
    def _all(self) -> dict[str, None]:
        return dict.fromkeys([*self._server, *self._clients])

    @property
    def _mixed(self) -> bool:
        """A server on the processor beside clients on cards is one machine's affair, if the processors are alike."""
        return len(self._clients) > 1 or len({host(line) for line in self._all}) > 1


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
