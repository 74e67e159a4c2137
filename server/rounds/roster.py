"""Who is here: clients by name. Node ids come and go, names stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from common.arithmetic import describe
from common.data.moments import Census
from common.deploy.keys import fingerprint_or
from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.flower import versions
from server.rounds.agreement import by_columns, columns_of, differing, told_at_home, usual_columns
from server.rounds.exchange import Exchange, pause_after
from server.rounds.records import Event, unheard
from server.rounds.stopping import Stop, heed
from server.rounds.waiting import Waiting
from strategies.protocol.coordinator import Coordinator
from strategies.protocol.members import Member, implausible, members_of, notices, roll_messages
from strategies.protocol.messages import DENIED, Refused, Undecided, hash_of_columns

POLL_S = 0.05
SAY_S, MOST_NAMED = 3.0, 10
"""Between two lines about who is missing, and how many are named in one."""
UNANSWERED = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
ROLL_CALL_S, SILENCE_S, LATE_S = 30.0, 60.0, 60.0


class Roster:
    """The roll: called at the start and for every node that joins."""

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        coordinator: Coordinator,
        assignment: str,
        say: Callable[[str], None],
        stop: Stop = lambda: None,
        own_data: bool = False,
        event: Event = unheard,
        columns: Sequence[str] = (),
        census: Census | None = None,
    ) -> None:
        """`own_data`: sites bring examples of their own, which nobody here has counted; `columns`, where this side
        knows them: those of their tables; `census`: what is asked of each before round 1."""
        self._event = event
        self._columns = tuple(columns)
        coordinator.columns_hash = coordinator.columns_hash or hash_of_columns(coordinator.run, self._columns)
        self._census = census
        self.members: dict[str, Member] = {}
        self.in_flight: dict[int, int] = {}
        self._grid = grid
        self._experiment = experiment
        self._coordinator = coordinator
        self._assignment = assignment
        self._say = say
        self._stop = stop
        self._doubts = own_data and experiment.round.most_share is None and coordinator.strategy.weights == "data"
        self._nodes: dict[int, str] = {}
        """Node on the roll -> when it was activated: another time is another process."""
        self._refused: dict[int, str] = {}
        self._overdue: set[int] = set()
        """Nodes that have just missed a deadline: one that died may still seem to be online."""
        self._silent: dict[int, float] = {}
        """Node that did not answer its roll call -> when to call it again."""
        self.undecided = Waiting(grid, self._questions, experiment.round.deadline_s + LATE_S, say)

    @property
    def trainers(self) -> list[str]:
        """Names of the clients that hold training examples."""
        return [name for name, member in self.members.items() if member.examples]

    @property
    def evaluators(self) -> list[str]:
        """Names of the clients that hold evaluation examples, sorted."""
        return sorted(name for name, member in self.members.items() if member.evaluation)

    def wait(self, count: int, deadline_s: float, strict: bool, expected: Sequence[str] = ()) -> None:
        """Call the roll until `count` clients are here; says how many of them and who of those `expected` is missing,
        again when that has changed.

        With `strict` a refused node raises SettingsError at once: where all clients are started by one command there
        is nobody to wait for. Raises RunError after `deadline_s` seconds, with who is here and who was refused. While a
        site waits for the approval of its people the clock stands: that is no matter of seconds.
        """
        started = said = time.monotonic()
        told = ""
        while True:
            self.refresh(strict)
            if len(self.members) >= count:
                return
            heed(self._stop)
            started = time.monotonic() if self.undecided.names else started
            if time.monotonic() - started > deadline_s:
                here = ", ".join(sorted(self.members)) or "none"
                refused = "".join(f"; refused: {reason}" for reason in self._refused.values())
                raise RunError(
                    f"only {len(self.members)} of {count} clients came within {deadline_s:g} s: {here}{refused}"
                )
            if (text := self._missing(count, expected)) != told and (not told or time.monotonic() - said > SAY_S):
                told, said = text, time.monotonic()
                self._say(text)
            time.sleep(pause_after(time.monotonic() - started, POLL_S))

    def _missing(self, count: int, expected: Sequence[str]) -> str:
        away = [name for name in expected if name not in self.members]
        who = f"; missing: {', '.join(away[:MOST_NAMED])}{', ...' if len(away) > MOST_NAMED else ''}" if away else ""
        refused = f"; refused: {len(self._refused)}" if self._refused else ""
        return f"waiting for clients: {len(self.members)} of {count} are here{who}{refused}"

    def gather(self, count: int, deadline_s: float) -> bool:
        """Refresh until `count` clients with training examples are here; False after `deadline_s` seconds, those not
        counted in which a site waits for the approval of its people."""
        started = time.monotonic()
        self.refresh()
        while len(self.trainers) < count:
            if time.monotonic() - started > deadline_s:
                return False
            heed(self._stop)
            waited = time.monotonic() - started
            started = time.monotonic() if self.undecided.names else started
            time.sleep(pause_after(waited, POLL_S))
            self.refresh()
        return True

    def overdue(self, names: Iterable[str]) -> None:
        """These clients have missed the deadline of the latest round: whoever joins under such a name is let in."""
        self._overdue = {self.members[name].node for name in names if name in self.members}
        if self._overdue:
            self._refused.clear()

    def restarted(self) -> set[int]:
        """Nodes on the roll whose process has started anew since: what they were asked is lost. Asked for now and then
        while a round waits, when those that decide are looked after, too."""
        self.undecided.look()
        return {node for node, info in self._online().items() if self._nodes.get(node, _stamp(info)) != _stamp(info)}

    def _online(self) -> dict[int, NodeInfo]:
        return {info.node_id: info for info in self._grid.get_nodes()}

    def refresh(self, strict: bool = False) -> None:
        """Take out nodes that left and call the roll of new ones.

        A node that must not take part is refused: with `strict` (before round 1) as SettingsError, later with a
        line in the log.
        """
        online = self._online()
        left = {node for node, stamp in self._nodes.items() if node not in online or _stamp(online[node]) != stamp}
        if gone := left | (self._refused.keys() - online.keys()):
            for name in [name for name, m in self.members.items() if m.node in gone]:
                self._event("left", site=name, node=self.members.pop(name).node)
            for node in left:
                del self._nodes[node]
            # A client that started anew was refused for as long as its old node seemed to be alive.
            self._refused.clear()
        self.undecided.keep(online)
        self._take(self.undecided.answers(), online, strict)
        resting = {node for node, until in self._silent.items() if time.monotonic() < until}
        known = self._nodes.keys() | self._refused.keys() | self.undecided.nodes
        new = sorted(online.keys() - known - resting)
        if not new:
            return
        # A node that seems to be online and says nothing must not hold up every round.
        self._silent |= dict.fromkeys(new, time.monotonic() + ROLL_CALL_S + SILENCE_S)
        self._take(self._call(new), online, strict)

    def withdraw(self, words: Mapping[str, Undecided]) -> None:
        """Take out clients whose sites say that they take part no more, or not yet; they are asked again."""
        online = self._online() if words else {}
        for name, word in words.items():
            node = self.members[name].node if name in self.members else None
            if node in online:
                self._remove(node)
                self.undecided.put(online[node], word)

    def _remove(self, node: int) -> list[str]:
        """Take a node off the roll; returns the names of its clients."""
        gone = [name for name, member in self.members.items() if member.node == node]
        self.members = {name: member for name, member in self.members.items() if member.node != node}
        self._nodes.pop(node, None)
        return gone

    def _take(self, replies: Mapping[int, Message], online: Mapping[int, NodeInfo], strict: bool) -> None:
        for node, reply in replies.items():
            if reply.has_error() and reply.error.code in UNANSWERED:
                continue  # Flower's own word in place of an answer
            self._silent.pop(node, None)
            try:
                self._enter(online[node], reply)
                self.undecided.settle(node)
            except Undecided as word:
                if strict and word.state == DENIED:
                    raise SettingsError(f"client {word.client!r} {word}") from None
                self.undecided.put(online[node], word)
            except Refused as error:
                self.undecided.settle(node)
                if strict:
                    raise SettingsError(str(error)) from None
                self._refuse(online[node], error)

    def _refuse(self, info: NodeInfo, error: Refused, told: str = "") -> None:
        """`told`: what the site hears of it, if not all of it is for the site."""
        self._refused[info.node_id] = str(error)
        self._event("refused", error.kind, site=info.name, key=_key(info), why=str(error))
        self._say(f"refused node {info.node_id}{f' of {info.name!r}' if info.name else ''}: {error}")
        if _stamp(info):
            self._notify({info.node_id: f"refused: {told or error}"})

    def tell(self, dropped: Mapping[str, str]) -> None:
        """Let sites know why their client's upload was dropped: otherwise all that they see is silence."""
        here = {name: reason for name, reason in dropped.items() if name in self.members}  # not one that withdrew
        nodes = {self.members[name].node: f"client {name}: {reason}" for name, reason in here.items()}
        self._notify({node: reason for node, reason in nodes.items() if self._nodes.get(node)})

    def _notify(self, reasons: Mapping[int, str]) -> None:
        """Messages that nobody waits for. Not where clients are simulated: their process says it already."""
        if reasons:
            self._grid.push_messages(notices(self._coordinator.run, reasons, ROLL_CALL_S))

    def doubt(self) -> None:
        """Refuse who announced more examples than is believed beside those of the others, now that they are here."""
        online = self._online()
        for name in sorted(self.members) if self._doubts else ():
            if why := implausible(name, self._coordinator.known):
                node = self.members[name].node
                self._coordinator.dismiss(self._remove(node))
                self._refuse(online[node], Refused("examples", why))

    def agree(self, strict: bool) -> bool:
        """Whether all on the roll learn from the same columns, in the same order; the fewer ones are refused, and told.

        From then on whoever joins must have these. Raises SettingsError where nobody can say who is right and, with
        `strict`, for any that differ.
        """
        coordinator, groups = self._coordinator, by_columns(self.members.values())
        if coordinator.columns_hash or not groups:
            return True
        coordinator.columns_hash = right = usual_columns(groups)
        if len(groups) == 1:
            return True
        reference = columns_of(groups[right])
        others = [member for schema, members in groups.items() if schema != right for member in members]
        for member in others if not strict else others[:1]:
            error = Refused("columns", differing(member, reference, len(groups[right])))
            if strict:
                raise SettingsError(str(error))
            info = self._online().get(member.node)
            coordinator.dismiss(self._remove(member.node))
            if info is not None:
                self._refuse(info, error, f"columns: {told_at_home(member, reference, len(groups[right]))}")
        return False

    def settle(self) -> str:
        """What the run learned of all training data, for `Coordinator.facts`; "" if the task asks for nothing."""
        if self._census is None:
            return ""
        told = {name: member.sums for name, member in self.members.items() if member.examples}
        if silent := sorted(name for name, text in told.items() if self._census.silent(text)):
            shown = ", ".join(silent[:MOST_NAMED]) + (", ..." if len(silent) > MOST_NAMED else "")
            self._say(
                f"warning: means and deviations are without columns of {shown}: too few values for the site's policy"
            )
        return self._census.settle(told)

    def _call(self, nodes: Iterable[int]) -> dict[int, Message]:
        deadline = min(ROLL_CALL_S, self._experiment.round.deadline_s)
        messages = self._questions(nodes, deadline)
        by_name = {str(message.metadata.dst_node_id): message for message in messages}
        exchange = Exchange(self._grid, stop=self._stop)
        return {int(name): reply for name, reply in exchange.run(by_name, deadline).items()}

    def _questions(self, nodes: Iterable[int], ttl_s: float) -> list[Message]:
        run, facts = self._coordinator.run, self._coordinator.facts
        return roll_messages(self._experiment, run, nodes, ttl_s, self._columns, facts)

    def _enter(self, info: NodeInfo, reply: Message) -> None:
        node = info.node_id
        members, in_flight = members_of(node, reply, self._coordinator.layout, self._assignment)
        for member in members:
            name = member.name
            if info.name and name != info.name:
                raise Refused("name", f"a node with the key of {info.name!r} says that it is {name!r}")
            if name in self.members and self.members[name].node not in self._overdue:
                raise Refused("name", f"client {name!r} is here twice, on nodes {self.members[name].node} and {node}")
            if self._experiment.local.arithmetic == "portable" and member.arithmetic != (here := describe()):
                raise Refused(
                    "arithmetic",
                    f"client {name!r} computes with {member.arithmetic or 'a release that does not say'}, the server "
                    f"with {here}: local.arithmetic = 'portable' needs the same torch, numpy and threads",
                )
            if member.versions != (own := versions()):
                self._say(f"warning: client {name} runs {member.versions}, the server {own}: last bits may differ")
        known = self._coordinator.known | {member.name: member.examples for member in members}
        for member in members:
            self._vet(member)
        for member in members if self._doubts else ():
            if why := implausible(member.name, known):
                raise Refused("examples", why)
        self._coordinator.admit(members)
        self.members |= {member.name: member for member in members}
        for member in members:
            about = {"examples": member.examples, "versions": member.versions, "arithmetic": member.arithmetic}
            about |= {"data_schema": member.data_schema} if member.data_schema else {}
            self._event("joined", site=member.name, key=_key(info), node=node, **about)
        self.in_flight[node] = in_flight
        self._nodes[node] = _stamp(info)

    def _vet(self, member: Member) -> None:
        """Refuse other columns than the run's, and sums that cannot be."""
        right = self._coordinator.columns_hash
        if right and member.columns_hash and member.columns_hash != right:
            raise Refused("columns", differing(member, self._columns or None, 0))
        if self._census is None or self._coordinator.facts:
            return
        try:
            self._census.check(member.sums, member.examples)
        except SettingsError as error:
            raise Refused("sums", f"client {member.name!r} told {error}") from None


def _key(info: NodeInfo) -> str:
    """The fingerprint of a node's key, "" where there are no keys."""
    return fingerprint_or(info.public_key, "unreadable") if info.public_key else ""


def _stamp(info: NodeInfo) -> str:
    """When a node was activated, "" where Flower does not say (simulation)."""
    return str(info.last_activated_at)
