"""The ClientApp: the same one in process, under VCE, in a resident node and in a stock SuperNode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.evaluate import evaluate_client
from client.memory.versions import ContextMemory
from client.policy import Denied
from client.session import VERSIONS, Session, hosted, memory_of, policy_of, release, shares_labels
from client.train import train_client
from client.training.device import out_of_memory
from common.errors import SettingsError
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

log = logging.getLogger("client.app")

# A reason may quote what the server sent.
MOST_REASON = 2000

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer a roll call. A node that cannot take part says why. To a notice nobody waits for an answer."""
    if notice := notice_of(message):
        log.warning("the server says: %s", notice)
        heard = RollReply([], [], [], [], [], "", "", "", VERSIONS, error="heard")
        return Message(RecordDict({HEAD: write_head(heard)}), reply_to=message)
    who = context.node_config.get("name", context.node_config.get("partition-id", "?"))
    no_memory = False
    try:
        content = _roll(read_head(RollHead, message.content), context)
    except (Exception, SystemExit) as error:
        readable = isinstance(error, (SettingsError, Denied))
        reason = _short(f"client {who}: {error if readable else repr(error)}")
        content = write_head(RollReply([], [], [], [], [], "", "", "", VERSIONS, error=reason))
        no_memory = out_of_memory(error)
        log.warning("takes no part: %s", _line(reason))
    if no_memory:
        release()
    return Message(RecordDict({HEAD: content}), reply_to=message)


def _roll(head: RollHead, context: Context) -> ConfigRecord:
    session = Session.of(head.experiment, context)
    names = hosted(context, session.task)
    # Flower hands a context's memory to one message at a time.
    in_flight = 1 if isinstance(memory_of(context, session), ContextMemory) else 0
    reply = session.roll(names, str(context.node_config.get("data", "")), shares_labels(context), in_flight)
    for steps in reply.steps:
        policy_of(context).check_steps(steps)
        if steps >= 2**63:
            raise SettingsError(f"{steps} local steps a round: no message can carry such a number")
    return write_head(reply)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round: load its memory, work, save the next version, reply."""
    return train_in(Session.of, message, context)


def train_in(session_of: Callable[[str, Context], Session], message: Message, context: Context) -> Message:
    """The same in a session that the caller gives for an experiment (JSON) on a node."""
    head = read_head(TrainHead, message.content)
    reply = ReplyHead(head.run, head.client, head.generation, head.round, head.layout, "ok")
    return _guarded(message, reply, lambda stage: train_client(session_of, head, reply, message, context, stage))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model, or the client's own, on one client's own evaluation examples."""
    head = read_head(EvaluateHead, message.content)
    reply = ReplyHead(head.run, head.client, 0, head.round, head.layout, "ok")
    return _guarded(message, reply, lambda stage: evaluate_client(head, reply, message, context, stage))


def _guarded(message: Message, head: ReplyHead, work: Callable[[list[str]], RecordDict]) -> Message:
    """Run `work`; an exception becomes a reply that names client, round and stage.

    Also SystemExit: a server's word must not end this process, and some modules exit when they are imported.
    """
    stage, no_memory = ["open"], False
    try:
        content = work(stage)
    except (Exception, SystemExit) as error:
        status, kind = ("refused", "") if isinstance(error, Denied) else ("error", f"{type(error).__name__}: ")
        reason = _short(f"client {head.client}, round {head.round}, {stage[0]}: {kind}{error}")
        content = reply_content(replace(head, status=status, reason=reason))
        no_memory = out_of_memory(error)
        log.warning("%s: %s", status, _line(reason))
    if no_memory:
        release()  # Only now does no traceback hold what filled it.
    return Message(content, reply_to=message)


def _short(reason: str) -> str:
    """Without what would drive a terminal or cannot be encoded: it may quote what the server sent."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in reason[:MOST_REASON])


def _line(reason: str) -> str:
    return reason.replace("\n", "; ")
