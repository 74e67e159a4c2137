"""The ClientApp: the same one in process, under VCE, in a resident node and in a stock SuperNode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.approval.gate import NotApproved, check_approval
from client.columns import told as told_of_columns
from client.evaluate import evaluate_client
from client.memory.versions import ContextMemory
from client.policy import Denied
from client.reasons import MOST_REASON, clean, line, refusal
from client.session import VERSIONS, Session, grant_of, hosted, memory_of, policy_of, release, shares_labels, trusts
from client.train import train_client
from client.training.device import out_of_memory
from common.data.grant import granting
from common.errors import MessageError, SettingsError, located
from strategies.protocol.messages import (
    HEAD,
    EvaluateHead,
    ReplyHead,
    RollHead,
    RollReply,
    TrainHead,
    notice_of,
    read_head,
    reply_content,
    write_head,
)
from strategies.protocol.sums import StatisticsHead, StatisticsReply

log = logging.getLogger("client.app")

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer a roll call. A node that cannot take part says why. To a notice nobody waits for an answer."""
    if notice := notice_of(message):
        log.warning("the server says: %s", notice)
        heard = RollReply([], [], [], [], [], "", "", "", VERSIONS, error="heard")
        return Message(RecordDict({HEAD: write_head(heard)}), reply_to=message)
    who = context.node_config.get("name", context.node_config.get("partition-id", "?"))
    stage, no_memory = ["open"], False
    try:
        with granting(grant_of(context)):
            content = _roll(read_head(RollHead, message.content), context, stage)
    except NotApproved as word:
        reason = f"client {word.client}: {word}"
        content = write_head(
            RollReply([word.client], [], [], [], [], "", "", "", VERSIONS, 0, reason, state=word.state)
        )
    except (Exception, SystemExit) as error:
        readable = isinstance(error, (SettingsError, Denied))
        reason = _reason(
            error, context, f"client {who}", stage[0], f"client {who}: {error if readable else repr(error)}"
        )
        content = write_head(RollReply([], [], [], [], [], "", "", "", VERSIONS, error=reason))
        no_memory = out_of_memory(error)
    if no_memory:
        release()
    return Message(RecordDict({HEAD: content}), reply_to=message)


def _roll(head: RollHead, context: Context, stage: list[str]) -> ConfigRecord:
    check_approval(context, head.experiment, head.run)
    session = Session.of(head.experiment, context)
    stage[0] = "data"
    names = hosted(context, session.task)
    # Flower hands a context's memory to one message at a time.
    in_flight = 1 if isinstance(memory_of(context, session), ContextMemory) else 0
    file, policy = str(context.node_config.get("data", "")), policy_of(context)
    reply = session.roll(names, file, shares_labels(context), in_flight)
    reply = replace(reply, **told_of_columns(session, head, names, file, policy, trusts(context)))
    if policy.share_schema:
        reply = replace(reply, data_schema=session.data_schema(names, file, head.run))
    for steps in reply.steps:
        policy.check_steps(steps)
        if steps >= 2**63:
            raise MessageError(f"{steps} local steps a round: no message can carry such a number")
    return write_head(reply)


@app.query("statistics")
def statistics(message: Message, context: Context) -> Message:
    """Answer what is asked about the data, in sums; see `client.statistics`. A site says why it does not."""
    stage = ["open"]
    try:
        with granting(grant_of(context)):
            reply = _statistics(read_head(StatisticsHead, message.content), context, stage)
    except (Exception, SystemExit) as error:
        reply = StatisticsReply(error=_reason(error, context, "statistics", stage[0], f"statistics: {error}"))
        if out_of_memory(error):
            release()
    return Message(RecordDict({HEAD: write_head(reply)}), reply_to=message)


def _statistics(head: StatisticsHead, context: Context, stage: list[str]) -> StatisticsReply:
    from client.statistics import (  # readers of tables: memory that few sites ever need
        answer,
        check_allowed,
        of_examples,
        of_file,
    )

    policy, own, told = policy_of(context), trusts(context), []
    check_allowed(policy, own)  # before anything is read: what is denied says nothing of the data
    check_approval(context, head.experiment, "statistics")
    session = Session.of(head.experiment, context)
    stage[0] = "data"
    names, file = hosted(context, session.task), str(context.node_config.get("data", ""))
    for name in names:
        found = of_file(Path(file), _label(session)) if file else None
        if found is None:
            data = session.data(name, file)
            found = of_examples([data.train, data.evaluate])
        told.append(answer(head, *found, policy, own))
    return StatisticsReply(names, told)


def _tells_names(context: Context) -> bool:
    """Whether names of columns may leave this node."""
    try:
        return bool(policy_of(context).statistics)
    except SettingsError:  # of a policy that cannot be read
        return False


def _label(session: Session) -> str | None:
    """How the experiment calls the column of labels."""
    options = session.experiment.task.options
    return next((options[key] for key in ("labels", "target") if key in options), None)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round: load its memory, work, save the next version, reply."""
    return train_in(Session.of, message, context)


def train_in(session_of: Callable[[str, Context], Session], message: Message, context: Context) -> Message:
    """The same in a session that the caller gives for an experiment (JSON) on a node."""

    def work(stage: list[str], told: list[ReplyHead]) -> RecordDict:
        head = read_head(TrainHead, message.content)
        told[0] = ReplyHead(head.run, head.client, head.generation, head.round, head.layout, "ok")
        return train_client(session_of, head, told[0], message, context, stage)

    return _guarded(message, context, work)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model, or the client's own, on one client's own evaluation examples."""

    def work(stage: list[str], told: list[ReplyHead]) -> RecordDict:
        head = read_head(EvaluateHead, message.content)
        told[0] = ReplyHead(head.run, head.client, 0, head.round, head.layout, "ok")
        return evaluate_client(head, told[0], message, context, stage)

    return _guarded(message, context, work)


def _guarded(message: Message, context: Context, work: Callable[[list[str], list[ReplyHead]], RecordDict]) -> Message:
    """Run `work` under the site's grant; an exception becomes a reply that names client, round and stage.

    Also SystemExit: a server's word must not end this process, and some modules exit when they are imported.
    """
    stage, told, no_memory = ["open"], [ReplyHead("", "", 0, 0, "", "error")], False
    try:
        with granting(grant_of(context)):
            content = work(stage, told)
    except NotApproved as word:
        content = reply_content(replace(told[0], status="refused", reason=str(word), state=word.state))
    except (Exception, SystemExit) as error:
        head, denied = told[0], isinstance(error, Denied)
        where = f"client {head.client[:100]}, round {head.round}, {stage[0]}"
        # Metrics are code of the user's own more often than not.
        whole = located(error) if stage[0] == "evaluate" else f"{'' if denied else f'{type(error).__name__}: '}{error}"
        reason = _reason(error, context, where, stage[0], f"{where}: {whole}")
        content = reply_content(replace(head, status="refused" if denied else "error", reason=reason))
        no_memory = out_of_memory(error)
    if no_memory:
        release()  # Only now does no traceback hold what filled it.
    return Message(content, reply_to=message)


def _reason(error: BaseException, context: Context, where: str, stage: str, whole: str) -> str:
    """What the server is told: all of it on one's own machine, at a site what may leave it."""
    if not trusts(context):
        return refusal(error, where, stage, names=_tells_names(context))
    reason = clean(whole[:MOST_REASON])
    log.warning("%s: %s", "refused" if isinstance(error, Denied) else "error", line(reason))
    return reason
