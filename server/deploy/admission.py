"""A running SuperLink in step with the nodes file: who was added gets in, who was removed or expired is shut out."""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from common.deploy import keys
from common.errors import RunError, SettingsError
from server.deploy import nodes, waiting
from server.deploy.control import Control, Node
from server.rounds.records import Event, unheard

log = logging.getLogger("server.deploy.admission")

LOOK_S = 1.0


def reconcile(
    control: Control, wanted: Mapping[bytes, str], say: Callable[[str], None], event: Event = unheard
) -> None:
    """Make the SuperLink know exactly the wanted keys (PEM -> site): others are removed first, others added. `event`
    is told what an audit log holds."""
    known = {node.public_key: node for node in control.nodes()}
    for pem, node in known.items():
        if wanted.get(pem) != node.name:
            control.unregister(node)
            print_ = keys.fingerprint_or(pem, "a key that cannot be read")
            say(f"site {node.name or node.node_id} was removed: its key is refused from now on ({print_})")
            event("site removed", site=node.name or str(node.node_id), key=print_)
    for pem, name in wanted.items():
        if pem in known and known[pem].name == name:
            continue
        try:
            control.register(Node(0, name, pem))
            say(f"site {name} may join with key {keys.fingerprint(pem)}")
            event("site registered", site=name, key=keys.fingerprint(pem))
        except RunError as error:
            # A SuperLink keeps the keys that were removed and never takes one back.
            say(f"site {name} cannot be registered: {error}; if this key was removed before, the site needs a new one")
            event("site registered", "failed", site=name, key=keys.fingerprint(pem), why=str(error))


class Admission:
    """Keeps a SuperLink in step with the nodes file, in a thread of its own; a context manager.

    Entering reads the file and registers its sites, or raises SettingsError. Later a file that is wrong is told and
    the sites stay as they were. `knocks`: the file of keys that wait, from which those are taken whose fingerprint
    alone is in the nodes file. `event` is told what an audit log holds.
    """

    def __init__(
        self,
        path: Path,
        control: Control,
        say: Callable[[str], None],
        knocks: Path | None = None,
        today: Callable[[], datetime.date] = nodes.today,
        event: Event = unheard,
    ) -> None:
        self._event = event
        self._path, self._control, self._say, self._knocks, self._today = path, control, say, knocks, today
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nodes", daemon=True)
        self._seen: object = None
        self._warned: tuple[datetime.date, frozenset[str]] | None = None
        self._told: set[str] = set()

    def __enter__(self) -> Admission:
        self._told = set(waiting.read(self._knocks))  # of before
        self._seen = self._stamp()
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def look(self) -> None:
        """Bring the SuperLink in step now. Raises SettingsError for a wrong file, RunError without an answer."""
        wanted, day = nodes.read(self._path), self._today()
        knocked = waiting.read(self._knocks)
        admitted = nodes.admitted(wanted, {print_: key.pem for print_, key in knocked.items()}, day)
        reconcile(self._control, admitted, self._say, self._event)
        self._warn(wanted, day)
        known = {key.fingerprint for held in wanted.values() for key in held}
        for print_, key in knocked.items():
            if print_ not in self._told | known:
                self._say(
                    f"a site waits to be let in: key {print_} from {key.address}; if its site reads out the same: "
                    f"python -m server nodes add NAME --fingerprint {print_}"
                )
                self._event("site waits", "not known", key=print_, address=key.address)
        self._told = set(knocked)

    def _warn(self, wanted: nodes.Nodes, day: datetime.date) -> None:
        """Once a day, and when it changes."""
        lines = frozenset(
            f"warning: the key {key.fingerprint} of site {name} {said}"
            for name, held in wanted.items()
            for key in held
            if (said := key.ends_soon(day))
        )
        if (day, lines) != self._warned:
            for line in sorted(lines):
                self._say(line)
            self._warned = day, lines

    def _stamp(self) -> object:
        return *(_changed(path) for path in (self._path, self._knocks)), self._today()

    def _follow(self) -> None:
        while not self._end.wait(LOOK_S):
            if (stamp := self._stamp()) == self._seen:
                continue
            try:
                self.look()
            except SettingsError as error:
                self._say(f"the sites stay as they were: {error}")
            except RunError as error:
                log.warning("nodes: %s; trying again", error)
                continue
            self._seen = stamp


def _changed(path: Path | None) -> tuple[int, int] | None:
    try:
        status = path.stat() if path else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino) if status else None
