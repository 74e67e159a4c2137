"""What travels: the fields of each message, how they are written and how a reply is read. Both sides use this file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from common.data.moments import MOST_TEXT as MOST_CENSUS
from common.errors import MessageError
from common.experiment import Experiment
from common.metrics.metric import MOST_SUMS
from common.seeds import derive
from common.settings import checked, name_fault, printable
from common.vector import State
from strategies.protocol import wire
from strategies.protocol.work import Upload

HEAD, STATE, BUFFERS, METRICS, SUMS = "fedkeel", "state", "buffers", "metrics", "sums"

# Why an error reply came, as one word of the history; any other code is "failed".
_CAUSES = {
    ErrorCode.NODE_UNAVAILABLE: "offline",
    ErrorCode.CLIENT_APP_CRASHED: "crashed",
    ErrorCode.MESSAGE_UNAVAILABLE: "lost",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "lost",
}

KINDS = ("offline", "crashed", "timed out", "late", "lost", "failed", "empty", "refused", "memory-lost")
"""Causes that stand for themselves; all others, about what a reply holds, are of the kind "invalid"."""

LATER = {"later": True}
"""Of a field that came later than 0.4: a message without it is one of before, with the field's default."""

MOST_TEXT = 2000
"""Letters of a reason that a client gives."""
MOST_WORD = 200
"""Letters of any other text of a client, where its field says nothing else."""
MOST_LABELS = 1 << 16
"""Letters of a client's class counts."""
MOST_COLUMNS = 1 << 17
"""Letters of the names of a client's columns, as JSON."""
MOST_CLIENTS = 100_000
"""Entries of a list in a client's answer."""
MOST_METRICS = 1000
"""Numbers beside the vectors of a reply."""

T = TypeVar("T")


WAITING, DENIED = "waiting", "denied"
"""Of a site where a person decides which runs it takes part in: not decided yet; decided against it."""


def cleaned(text: str, most: int = MOST_TEXT) -> str:
    """What a peer wrote as one line of at most `most` letters: no line end, no escape of a terminal, nothing that turns
    the direction of what follows. It goes to consoles, logs and the history."""
    return printable(text[:most].replace("\r\n", "; ").replace("\n", "; "))


class Refused(MessageError):
    """A reply that must not touch the model; the text is the reason in the history."""

    def __init__(self, cause: str, detail: str = "") -> None:
        cause = cleaned(cause, MOST_WORD)
        super().__init__(cleaned(f"{cause}: {detail}" if detail else cause))
        self.cause = cause

    @property
    def kind(self) -> str:
        """The cause as one of a few words, for counting."""
        return self.cause if self.cause in KINDS else "invalid"


class Undecided(Refused):
    """A site's word that it takes no part in this run (`DENIED`), or not yet (`WAITING`): no fault of anybody."""

    WORDS: ClassVar[Mapping[str, str]] = {
        WAITING: "waits for approval at the site; it takes part once somebody there has approved the run",
        DENIED: "takes no part: the run was denied at the site",
    }

    def __init__(self, state: str, client: str = "") -> None:
        super().__init__("refused", self.WORDS[state])
        self.state = state
        self.client = "" if name_fault(client) else client

    def __str__(self) -> str:
        return self.WORDS[self.state]


@dataclass(frozen=True)
class TrainHead:
    """The settings of a TRAIN message: all that a client needs, so that it keeps no copy of the experiment."""

    experiment: str
    run: str
    client: str
    generation: int
    round: int
    accepted: int
    """The last round of this generation whose upload from this client entered an aggregate; 0: none."""
    keep: list[int]
    """All versions that the server may ever ask for again: the accepted one and those of its kept checkpoints."""
    share: float
    lr: float
    layout: str
    phase: str = ""
    """"survey" for a round's first exchange, where there is one."""
    holds: int = 0
    """The round whose broadcast this one builds upon: the client's memory of it is needed. 0: all is sent."""
    digest: str = ""
    """With `holds`: hash of the whole broadcast."""
    order: int = 0
    """Rises from try to try, over resumes too: a client works on no message that is not newer than the last one it has
    saved a version for. 0: any time."""
    epochs: int = 0
    """In place of the local work that the settings name. 0: as they say."""
    steps: int = 0
    """At most so many local steps: the client is a straggler. 0: no bound."""
    part: float = field(default=1.0, metadata=LATER)
    """The part of this client's own trackers that the server's averages hold, in units of its present share: not 1 from
    when its number of examples changed until an upload of its is accepted; see `Coordinator.admit`."""
    facts: str = field(default="", metadata=LATER)
    """What the run learned of all clients' data before round 1 (`Task.census`); "" if there is nothing."""


@dataclass(frozen=True)
class EvaluateHead:
    """The settings of an EVALUATE message; generation and accepted as of TRAIN, for clients with personal parts."""

    experiment: str
    run: str
    client: str
    round: int
    layout: str
    generation: int = 0
    accepted: int = 0
    facts: str = field(default="", metadata=LATER)
    """As of TRAIN."""


@dataclass(frozen=True)
class RollHead:
    """The settings of a roll call: "who are you, and do you hold the same task?" """

    experiment: str
    run: str
    notice: str = field(default="", metadata=LATER)
    """Not a roll call, but why this node was refused or its client's last upload dropped. No answer is needed."""
    columns: str = field(default="", metadata=LATER)
    """JSON list of the columns that a table of this run has, in order, where the server knows them: a site whose table
    has others says so, and its log says which."""
    facts: str = field(default="", metadata=LATER)
    """As of TRAIN. Where there are some, a client that joins is not asked for its own sums any more."""


class Answer:
    """What comes from a client: its texts and lists are bounded and cleaned as they are read (`read_head`)."""


@dataclass(frozen=True)
class RollReply(Answer):
    """One node's answer: parallel lists over the clients that it hosts, usually one."""

    names: list[str]
    examples: list[int]
    evaluation: list[int]
    steps: list[int]
    labels: list[str] = field(metadata={"most": MOST_LABELS})
    """JSON lists of class counts, or "" where the site does not share them."""
    layout: str
    plan: str
    device: str
    versions: str
    in_flight: int = 0
    """How many messages the node takes at once; 0: any number."""
    error: str = field(default="", metadata={"most": MOST_TEXT})
    """Why the node cannot take part."""
    arithmetic: str = field(default="", metadata={**LATER, "most": 300})
    """How it computes, as `common.arithmetic.describe` says."""
    state: str = field(default="", metadata=LATER)
    """`WAITING` or `DENIED` beside `error`: the site has not approved the run. Of such an answer `names` alone holds
    anything."""
    columns_hash: str = field(default="", metadata=LATER)
    """`hash_of_columns` the columns of the site's own table; "" if it brings none."""
    columns: str = field(default="", metadata={**LATER, "most": MOST_COLUMNS})
    """JSON list of their names, where the site's policy lets these out."""
    sums: list[str] = field(default_factory=list, metadata={"most": MOST_CENSUS})
    """What each client tells for `Task.census`; [] where nothing was asked."""
    data_schema: str = field(default="", metadata={**LATER, "most": 64})
    """A short hash of what the node's data look like, as `common.data.schema` makes it; "" where the site does not tell
    it."""


@dataclass(frozen=True)
class ReplyHead(Answer):
    """The settings of a reply to TRAIN or EVALUATE."""

    run: str
    client: str
    generation: int
    round: int
    layout: str
    status: str
    """"ok", "memory-lost", "empty" (no examples), "refused" (by the site's policy) or "error"."""
    reason: str = field(default="", metadata={"most": MOST_TEXT})
    examples: int = 0
    steps: int = 0
    lr: float = 0.0
    state: str = field(default="", metadata=LATER)
    """`WAITING` or `DENIED` beside the status "refused": the site has not approved the run, or does so no more."""
    part: float = field(default=1.0, metadata=LATER)
    """As in the message: a release that does not know it would send a wrong change of its trackers."""


@dataclass
class Reply:
    """A reply, read but not yet checked against what was asked."""

    head: ReplyHead
    state: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    sums: dict[str, list[float]] = field(default_factory=dict)
    """Of an evaluation: the sums of each metric that is no mean."""
    bytes: int = 0


def hash_of_columns(run: str, columns: Sequence[str]) -> str:
    """A hash of columns by name and order, another one in each run; "" of none. Whoever guesses all of them can see
    that the guess is right."""
    return hashlib.sha256(json.dumps([run, *columns]).encode()).hexdigest()[:16] if columns else ""


def undecided(head: ConfigRecord | None) -> str:
    """How the site of a reply stands to the run, where it takes no part in it: `WAITING`, `DENIED`, or ""."""
    state = "" if head is None else head.get("state")
    return str(state) if state in (WAITING, DENIED) else ""


def write_head(head: Any) -> ConfigRecord:
    """A head dataclass as a record; empty lists are left out, Flower cannot carry them."""
    return ConfigRecord({key: value for key, value in asdict(head).items() if value != []})


def read_head(cls: type[T], content: RecordDict) -> T:
    """The head of a message. Raises Refused if it is missing, lacks a field or has one of another type, or a list of a
    client's that is too long."""
    record = content.config_records.get(HEAD)
    if record is None:
        raise Refused("malformed", f"no record {HEAD!r}")
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        kind, _, entry = str(item.type).rstrip("]").partition("[")
        value: Any = record.get(item.name, [] if entry else None)
        if value is None and item.metadata.get("later"):
            value = item.default
        entries = value if entry and isinstance(value, list) else []
        if type(value).__name__ != kind or any(type(each).__name__ != entry for each in entries):
            raise Refused("malformed", f"{item.name} = {str(value)[:100]!r} is no {item.type}")
        values[item.name] = _bounded(item, value) if issubclass(cls, Answer) else value
    return cls(**values)


def _bounded(item: Any, value: Any) -> Any:
    """A client's value for a field, as this side may keep and show it."""
    if isinstance(value, list):
        if len(value) > MOST_CLIENTS:
            raise Refused("malformed", f"{item.name} has {len(value)} entries; allowed: {MOST_CLIENTS}")
        return [_bounded(item, each) for each in value]
    return cleaned(value, item.metadata.get("most", MOST_WORD)) if isinstance(value, str) else value


def read_experiment(text: str) -> Experiment:
    """The experiment that a message carries. Raises MessageError or ExperimentError."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the experiment in a message is no JSON: {error}") from None
    return checked(Experiment, values, "[experiment in a message]")


def content_of(
    head: TrainHead | EvaluateHead | ReplyHead,
    state: ArrayRecord | None,
    buffers: ArrayRecord | None,
    numbers: Mapping[str, float],
) -> RecordDict:
    """A message's content. Messages of a round share `state` and `buffers`, which are then hashed once.

    A record costs a call to the server even if it is empty: it is left out.
    """
    content = RecordDict({HEAD: write_head(head)})
    if state is not None:
        content[STATE] = state
    if buffers:
        content[BUFFERS] = buffers
    if numbers:
        content[METRICS] = MetricRecord({key: float(value) for key, value in numbers.items()})
    return content


def tensors_of(content: RecordDict) -> tuple[State, State]:
    """State and buffers of a message, read-only. Raises wire.WireError."""
    records = content.array_records
    return (
        wire.from_records(records.get(STATE, ArrayRecord())),
        wire.from_records(records.get(BUFFERS, ArrayRecord())),
    )


def reply_content(
    head: ReplyHead,
    upload: Upload | None = None,
    metrics: Mapping[str, float] | None = None,
    sums: Mapping[str, list[float]] | None = None,
) -> RecordDict:
    """A reply's content."""
    if upload is not None:
        return content_of(head, wire.to_records(upload.vectors), wire.to_records(upload.buffers), metrics or {})
    content = content_of(head, None, None, metrics or {})
    if sums:
        content[SUMS] = MetricRecord(dict(sums))
    return content


def scalars(record: MetricRecord | None) -> dict[str, float]:
    """The numbers of a metric record. Raises Refused for lists, as no part of this system sends any, for more than
    `MOST_METRICS` numbers, and for a name that is long or could not be shown."""
    values: dict[str, float] = {}
    if record is not None and len(record) > MOST_METRICS:
        raise Refused("malformed", f"{len(record)} metrics; allowed: {MOST_METRICS}")
    for key, value in (record or {}).items():
        _check_name(key)
        if isinstance(value, list):
            raise Refused("malformed", f"metric {key} is a list")
        values[key] = float(value)
    return values


def _check_name(metric: str) -> None:
    if metric != cleaned(metric, MOST_WORD):
        raise Refused("malformed", f"a metric is called {metric[:40]!r}: allowed are {MOST_WORD} printable letters")


def sums_of(record: MetricRecord | None) -> dict[str, list[float]]:
    """The sums of metrics in a record. Raises Refused for what is no list of numbers, for too many, and for a name that
    is long or could not be shown."""
    found: dict[str, list[float]] = {}
    for key, value in (record or {}).items():
        _check_name(key)
        if not isinstance(value, list):
            raise Refused("malformed", f"the sums of metric {key} are no list")
        found[key] = [float(each) for each in value]
    if (count := sum(map(len, found.values()))) > MOST_SUMS:
        raise Refused("malformed", f"{count} sums of metrics; allowed: {MOST_SUMS}")
    return found


def head_of(message: Message) -> ConfigRecord | None:
    """The record that `read_head` reads, as it came; None where there is none."""
    return message.content.config_records.get(HEAD) if message.has_content() else None


def usable(message: Message) -> bool:
    """Whether a reply holds an upload, as far as its head tells."""
    head = head_of(message)
    return head is not None and head.get("status") == "ok"


def notice_of(message: Message) -> str:
    """What a server lets a site know (`RollHead.notice`), "" for any other message."""
    head = head_of(message)
    said = head.get("notice") if head is not None else None
    return cleaned(said) if isinstance(said, str) else ""


def outline(reply: Message) -> tuple[str, dict[str, float]]:
    """Status and numbers of a reply that this process made, for counting."""
    head = head_of(reply)
    if head is None:
        return "error", {}
    if "error" in head and "status" not in head:  # a roll call
        return undecided(head) or ("refused" if head["error"] else "ok"), {}
    numbers = scalars(reply.content.metric_records.get(METRICS))
    return undecided(head) or str(head.get("status")), {**numbers, "examples": float(str(head.get("examples", 0)))}


def read_reply(message: Message) -> Reply:
    """Read a reply. Raises Refused, with the cause, for errors and for anything that cannot be read."""
    if message.has_error():
        cause = _CAUSES.get(message.error.code, "failed")
        raise Refused(cause, (message.error.reason or f"code {message.error.code}")[:MOST_TEXT])
    content = message.content
    head = read_head(ReplyHead, content)
    if head.status == "error":
        raise Refused("failed", head.reason)
    try:
        state, buffers = tensors_of(content)
    except wire.WireError as error:
        raise Refused("malformed", str(error)) from None
    metrics = scalars(content.metric_records.get(METRICS))
    return Reply(head, state, buffers, metrics, sums_of(content.metric_records.get(SUMS)), wire.size(content))


def upload_seed(seed: int, name: str, round: int, group: str) -> int:
    """Of what a client sends in one round, the same on both sides."""
    return derive(seed, "upload", name, round, group)
