"""The ClientApp: the same one in process, under VCE, in a resident node and in a stock SuperNode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.memory.versions import ContextMemory, DiskMemory, Memory
from client.policy import Denied
from client.received import check_numbers, receive
from client.session import VERSIONS, Session, hosted, memory_of, policy_of, release, shares_labels
from client.training.device import out_of_memory
from client.training.work import LocalWork, local_steps
from common.data.examples import ClientData
from common.errors import SettingsError
from common.seeds import derive, torch_seeded
from common.tasks.base import evaluate as evaluate_model
from common.vector import State
from strategies.base import Upload
from strategies.protocol.coordinator import upload_seed
from strategies.protocol.downlink import NotHeld
from strategies.protocol.messages import (
    HEAD,
    METRICS,
    EvaluateHead,
    ReplyHead,
    RollHead,
    RollReply,
    TrainHead,
    read_head,
    reply_content,
    scalars,
    write_head,
)

log = logging.getLogger("client.app")

# A reason may quote what the server sent.
MOST_REASON = 2000

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer a roll call. A node that cannot take part says why."""
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
    return _guarded(message, reply, lambda stage: _train(session_of, head, reply, message, context, stage))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model, or the client's own, on one client's own evaluation examples."""
    head = read_head(EvaluateHead, message.content)
    reply = ReplyHead(head.run, head.client, 0, head.round, head.layout, "ok")
    return _guarded(message, reply, lambda stage: _evaluate(head, reply, message, context, stage))


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


def _open(
    head: TrainHead | EvaluateHead, context: Context, session_of: Callable[[str, Context], Session] = Session.of
) -> Session:
    session = session_of(head.experiment, context)
    if head.layout != session.model.layout_hash:
        raise ValueError(f"the server's model layout is {head.layout}, this client's {session.model.layout_hash}")
    if head.client not in hosted(context, session.task):
        raise ValueError(f"this node does not host client {head.client!r}")
    return session


def _train(
    session_of: Callable[[str, Context], Session],
    head: TrainHead,
    reply: ReplyHead,
    message: Message,
    context: Context,
    stage: list[str],
) -> RecordDict:
    session, policy = _open(head, context, session_of), policy_of(context)
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
    loaded = _memory(home, session, head) if kind != "none" else {}
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
    if strategy.survey and not head.phase and session.codec.remembers:
        # Anew what the first exchange sent, to the bit: a client keeps nothing in between.
        work = _work(session, head, data, received, memory, message, watch)
        looked = _upload(session, head, work, "survey")
        _, held = session.codec.encode(looked.vectors, strategy.survey, memory, seeds)
    work = _work(session, head, data, received, memory, message, watch)
    upload = _upload(session, head, work, head.phase)
    policy.check_upload(upload.vectors)  # Before the save: what must not leave is not remembered as sent.
    upload.metrics["seconds.train"] = time.perf_counter() - started

    kinds = strategy.survey if head.phase else strategy.expects(work.assigned)
    sent, residuals = session.codec.encode(upload.vectors, kinds, held, seeds)
    if policy.max_upload_norm is not None and session.codec.active:
        # What was left behind earlier leaves with it.
        policy.check_upload(session.codec.decode(sent, kinds, session.model.vector, held, seeds)[0])

    stage[0] = "save"
    done = replace(reply, examples=upload.examples, steps=upload.steps, lr=upload.lr)
    if head.phase:
        return _reply(session, done, replace(upload, vectors=sent, buffers={}))
    kept = work.remembered() | session.downlink.remember(received)
    # A residual may be the vector that is sent, and that the live model.
    upload, kept = replace(upload, vectors=sent), kept | {name: work.own(value) for name, value in residuals.items()}
    if kind == "none":
        return _reply(session, done, upload)
    return _save_and_reply(home, head, kept, lambda: _reply(session, done, upload))


def _memory(home: Memory, session: Session, head: TrainHead | EvaluateHead) -> State | None:
    """A client's memory as of its last accepted upload; {} before the first, None if it is gone."""
    if not head.accepted:
        return {}
    loaded = home.load(head.run, head.client, head.generation, head.accepted)
    return None if loaded is None else {name: value.to(session.device) for name, value in loaded.items()}


def _work(
    session: Session,
    head: TrainHead,
    data: ClientData,
    received: State,
    memory: State,
    message: Message,
    watch: Callable[[int], None],
) -> LocalWork:
    return LocalWork(
        task=session.task,
        model=session.model,
        data=data,
        settings=session.experiment.local,
        received=received,
        memory=memory,
        seed=session.experiment.seed,
        name=head.client,
        round=head.round,
        lr=head.lr,
        share=head.share,
        accepted_last_round=head.accepted > 0 and head.accepted == head.round - 1,
        assigned=scalars(message.content.metric_records.get(METRICS)),
        head_steps=session.experiment.personal.head_steps,
        forward=session.forward,
        epochs=head.epochs,
        most_steps=head.steps,
        watch=watch,
    )


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


def _evaluate(head: EvaluateHead, reply: ReplyHead, message: Message, context: Context, stage: list[str]) -> RecordDict:
    session = _open(head, context)
    stage[0] = "data"
    data = session.data(head.client, str(context.node_config.get("data", "")))
    if not len(data.evaluate):
        return reply_content(replace(reply, status="empty"))
    stage[0] = "memory"
    personal = session.experiment.personal
    memory: State = {}
    if personal.parts:
        memory = _memory(memory_of(context, session), session, head) or {}
    received = receive(session, message, memory, whole=True)
    if personal.finetune_steps and len(data.train):
        stage[0] = "fine-tune"
        _tune(session, head, data, received, policy_of(context).watch())
    stage[0] = "evaluate"
    module, size = session.model.module, session.experiment.evaluate.batch_size
    metrics = evaluate_model(session.task, module, data.evaluate, size)
    return reply_content(replace(reply, examples=len(data.evaluate)), metrics=metrics)


def _tune(
    session: Session, head: EvaluateHead, data: ClientData, received: State, watch: Callable[[int], None]
) -> None:
    """Train the client's own model a little before it is evaluated, with a new optimizer; the next message loads
    another one."""
    settings = session.experiment.local
    lr = session.experiment.personal.finetune_lr or settings.lr
    work = LocalWork(
        task=session.task,
        model=session.model,
        data=data,
        settings=settings,
        received=received,
        memory={},
        seed=derive(session.experiment.seed, "fine-tune"),
        name=head.client,
        round=head.round,
        lr=lr,
        share=0.0,
        accepted_last_round=False,
        assigned={},
        watch=watch,
    )
    with torch_seeded(derive(session.experiment.seed, "fine-tune", head.client, head.round), session.device):
        work.tune(session.experiment.personal.finetune_steps)
