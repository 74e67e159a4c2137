"""Asking the sites: three questions over any grid. Who does not answer all three is left out, with the reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from common.errors import RunError, SettingsError
from common.experiment import Experiment
from common.settings import name_fault, printable
from server.rounds.exchange import Exchange
from server.rounds.stopping import Stop, heed
from server.statistics import merge
from strategies.protocol.messages import HEAD, Refused, read_head, write_head
from strategies.protocol.sums import SiteSums, StatisticsHead, StatisticsReply, read_sums

KIND = "query.statistics"
POLL_S = 0.1


@dataclass
class Statistics:
    """The result. `refused`: site or node -> why it is not among `sites`."""

    experiment: str
    sites: dict[str, int]
    """Site -> examples; 0 where its policy keeps that back."""
    columns: dict[str, merge.ColumnFigures]
    schema: list[str]
    far: list[merge.Far]
    refused: dict[str, str] = field(default_factory=dict)

    def json(self) -> str:
        """All of it, one line."""
        return json.dumps(asdict(self), allow_nan=False)


def gather(
    grid: Grid,
    experiment: Experiment,
    sites: int,
    *,
    far: float = merge.FAR,
    say: Callable[[str], None] = lambda text: None,
    stop: Stop = lambda: None,
) -> Statistics:
    """Ask the sites that are here once at least `sites` nodes are, for at most `round.deadline_s` seconds each time.

    Raises RunError if too few came or none answered, with the reasons, and Stopped.
    """
    asking = _Asking(grid, experiment, Exchange(grid, stop=stop))
    asking.wait(sites, say, stop)
    totals = asking.ask("totals", {})
    while True:
        means = merge.means(_by_site(totals))
        off = asking.ask("deviations", means, totals)
        lost = totals.keys() - off.keys()
        if not lost:
            found = merge.figures(_by_site(totals), _by_site(off), means)
            edges = merge.edges(found)
            bins = asking.ask("bins", edges, totals)
            lost = totals.keys() - bins.keys()
        if not lost:
            break
        # Of a site all three answers count, or none.
        totals = {node: held for node, held in totals.items() if node not in lost}
        if not totals:
            raise RunError(f"no site answered all questions: {asking.why()}")
    merge.add_bins(found, _by_site(bins), edges)
    held = _by_site(totals)
    examples = {site: each.examples for site, each in sorted(held.items())}
    return Statistics(experiment.name, examples, found, merge.schema(held), merge.far(found, far), asking.refused)


Answers = dict[int, dict[str, SiteSums]]
"""Node -> site -> its sums."""


def _by_site(answers: Answers) -> dict[str, SiteSums]:
    return {site: sums for held in answers.values() for site, sums in held.items()}


@dataclass
class _Asking:
    grid: Grid
    experiment: Experiment
    exchange: Exchange
    refused: dict[str, str] = field(default_factory=dict)

    def wait(self, sites: int, say: Callable[[str], None], stop: Stop) -> None:
        deadline, said = time.monotonic() + self.experiment.round.deadline_s, -1
        while (here := len(list(self.grid.get_node_ids()))) < max(1, sites):
            heed(stop)
            if here != said:
                say(f"waiting for sites: {here} of {max(1, sites)} are here")
                said = here
            if time.monotonic() > deadline:
                raise RunError(
                    f"only {here} of {max(1, sites)} sites came within {self.experiment.round.deadline_s:g} s"
                )
            time.sleep(POLL_S)

    def ask(self, step: str, asked: Mapping[str, Sequence[float]], nodes: Answers | None = None) -> Answers:
        """One question to all nodes that are here, or to `nodes`; the answers of those that can be used."""
        names = {info.node_id: info.name for info in self.grid.get_nodes()}
        numbers = json.dumps({name: list(each) for name, each in asked.items()})
        head = StatisticsHead(self.experiment.model_dump_json(), step, numbers)
        content, ttl = RecordDict({HEAD: write_head(head)}), self.experiment.round.deadline_s
        wanted = sorted(nodes if nodes is not None else names)
        messages = {str(node): Message(content, node, KIND, ttl=ttl, group_id=step) for node in wanted}
        replies = self.exchange.run(messages, ttl)
        found: Answers = {}
        taken: set[str] = set()
        for node in wanted:
            label = names.get(node) or f"node {node}"
            try:
                held = self._read(replies.get(str(node)), names.get(node, ""), label)
                if twice := taken & held.keys():
                    raise SettingsError(f"{sorted(twice)[0]!r} is here twice")
                if nodes is not None and held.keys() != nodes[node].keys():
                    raise SettingsError("it answered for other clients than before")
            except (SettingsError, Refused) as error:
                self.refused[label] = printable(str(error)[:500], " ")
                continue
            taken |= held.keys()
            found[node] = held
        if not found:
            raise RunError(f"no site answered: {self.why()}")
        return found

    def _read(self, reply: Message | None, name: str, label: str) -> dict[str, SiteSums]:
        if reply is None:
            raise SettingsError("no answer in time")
        if reply.has_error():
            raise SettingsError(reply.error.reason or f"error {reply.error.code}")
        told = read_head(StatisticsReply, reply.content)
        if told.error:
            raise SettingsError(told.error)
        if name and not told.names:
            raise SettingsError("an answer without a client")
        if len(told.names) != len(told.sums) or len(set(told.names)) != len(told.names):
            raise SettingsError("an answer whose parts do not fit together")
        for each in told.names:
            if name_fault(each) or (name and each != name):
                raise SettingsError(f"it says that it is {each[:100]!r}")
        return {each: read_sums(text, label) for each, text in zip(told.names, told.sums, strict=True)}

    def why(self) -> str:
        return "; ".join(f"{who}: {reason}" for who, reason in self.refused.items()) or "nobody is here"


def loaded(text: str) -> dict[str, Any]:
    """A result as `Statistics.json` wrote it."""
    values: dict[str, Any] = json.loads(text)
    return values
