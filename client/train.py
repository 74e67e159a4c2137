"""One client's round: its memory loaded, its work done, the next version saved before the reply."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from flwr.app import Context, Message, RecordDict

from client.approval.gate import check_approval
from client.memory.versions import DiskMemory, Memory
from client.received import check_numbers, receive
from client.session import Session, hosted, memory_of, policy_of
from client.training.work import LocalWork, local_steps
from common.errors import MessageError
from common.seeds import derive, torch_seeded
from common.vector import State
from strategies.base import Upload
from strategies.protocol.downlink import NotHeld
from strategies.protocol.messages import (
    METRICS,
    EvaluateHead,
    ReplyHead,
    TrainHead,
    reply_content,
    scalars,
    upload_seed,
)


def open_session(
    head: TrainHead | EvaluateHead, context: Context, session_of: Callable[[str, Context], Session] = Session.of
) -> Session:
    check_approval(context, head.experiment, head.run, head.round)
    session = session_of(head.experiment, context)
    if head.layout != session.model.layout_hash:
        raise MessageError(f"the server's model layout is {head.layout}, this client's {session.model.layout_hash}")
    if session.task.census is not None:
        session.task.census.adopt(head.facts)
    if head.client not in hosted(context, session.task):
        raise MessageError(f"this node does not host client {head.client!r}")
    return session


def train_client(
    session_of: Callable[[str, Context], Session],
    head: TrainHead,
    reply: ReplyHead,
    message: Message,
    context: Context,
    stage: list[str],
) -> RecordDict:
    """The reply to a TRAIN message. `stage[0]` says where it is, for the error that may come.

    Raises Denied for what the node's policy forbids, and whatever data, model and algorithm raise.
    """
    session, policy = open_session(head, context, session_of), policy_of(context)
    strategy = session.strategy
    check_numbers(head)

    stage[0] = "data"
    data = session.data(head.client, str(context.node_config.get("data", "")))
    if not len(data.train):
        return reply_content(replace(reply, status="empty"))
    policy.check_steps(local_steps(data, session.experiment.local, head.epochs, head.steps))

    stage[0] = "memory"
    home, kind = memory_of(context, session), strategy.memory_kind(session.experiment)
    if kind != "none" and 0 < head.order <= home.newest(head.run, head.client):
        # Its version may be the accepted one by now, and what it says of versions to keep is of old.
        return reply_content(replace(reply, status="late", reason="this message or a newer one has been worked on"))
    loaded = accepted_memory(home, session, head) if kind != "none" else {}
    if loaded is None and kind == "bound":
        return reply_content(replace(reply, status="memory-lost"))
    memory = held = loaded or {}

    stage[0] = "train"
    started = time.perf_counter()
    try:
        received = receive(session, message, memory, head.round, head.digest)
    except NotHeld as error:
        return reply_content(replace(reply, status="memory-lost", reason=str(error)))
    watch, seeds = policy.watch(), _seeds(session, head)
    assigned = scalars(message.content.metric_records.get(METRICS))
    if strategy.survey and not head.phase and session.codec.remembers:
        # Anew what the first exchange sent, to the bit: a client keeps nothing in between.
        work = LocalWork(session, head, data, received, memory, assigned, watch)
        looked = _upload(session, head, work, "survey")
        _, held = session.codec.encode(looked.vectors, strategy.survey, memory, seeds)
    work = LocalWork(session, head, data, received, memory, assigned, watch)
    upload = _upload(session, head, work, head.phase)
    policy.check_upload(upload.vectors)  # Before the save: what must not leave is not remembered as sent.
    upload.metrics["seconds.train"] = time.perf_counter() - started

    kinds = strategy.survey if head.phase else strategy.expects(work.assigned)
    sent, residuals = session.codec.encode(upload.vectors, kinds, held, seeds)
    if policy.max_upload_norm is not None and session.codec.active:
        # What was left behind earlier leaves with it.
        policy.check_upload(session.codec.decode(sent, kinds, session.model.vector, held, seeds)[0])

    stage[0] = "save"
    done = replace(reply, examples=upload.examples, steps=upload.steps, lr=upload.lr, part=head.part)
    if head.phase:
        return _reply(session, done, replace(upload, vectors=sent, buffers={}))
    kept = work.remembered() | session.downlink.remember(received)
    # A residual may be the vector that is sent, and that the live model.
    upload, kept = replace(upload, vectors=sent), kept | {name: work.own(value) for name, value in residuals.items()}
    if kind == "none":
        return _reply(session, done, upload)
    return _save_and_reply(home, head, kept, lambda: _reply(session, done, upload))


def accepted_memory(home: Memory, session: Session, head: TrainHead | EvaluateHead) -> State | None:
    """A client's memory as of its last accepted upload; {} before the first, None if it is gone."""
    if not head.accepted:
        return {}
    loaded = home.load(head.run, head.client, head.generation, head.accepted)
    return None if loaded is None else {name: value.to(session.device) for name, value in loaded.items()}


def _upload(session: Session, head: TrainHead, work: LocalWork, phase: str) -> Upload:
    """What the algorithm sends in one exchange, a function of what the client was given."""
    seed = derive(session.experiment.seed, "torch", head.client, head.round)
    with torch_seeded(seed, session.device):
        return session.strategy.look(work) if phase else session.strategy.local(work)


def _seeds(session: Session, head: TrainHead) -> Callable[[str], int]:
    """Group -> seed of its compression in this round."""
    return lambda group: upload_seed(session.experiment.seed, head.client, head.round, group)


def _save_and_reply(home: Memory, head: TrainHead, kept: State, build: Callable[[], RecordDict]) -> RecordDict:
    """Save the next version; a disk writes while the reply is built, and is done before the reply leaves."""

    def save() -> None:
        home.save(head.run, head.client, head.generation, head.round, kept, head.keep, head.order)

    if not isinstance(home, DiskMemory):
        save()
        return build()
    with ThreadPoolExecutor(1) as thread:
        saved = thread.submit(save)
        content = build()
    saved.result()
    return content


def _reply(session: Session, head: ReplyHead, upload: Upload) -> RecordDict:
    staged = session.wire.to_host(upload.vectors | upload.buffers)
    vectors = {name: staged[name] for name in upload.vectors}
    buffers = {name: staged[name] for name in upload.buffers}
    return reply_content(head, replace(upload, vectors=vectors, buffers=buffers), upload.metrics)
