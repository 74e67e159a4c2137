"""The ClientApp: the same one in process, under VCE, in a resident node and in a stock SuperNode."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.memory import ContextMemory
from client.session import VERSIONS, Session, hosted, memory_of
from client.work import LocalWork
from common.errors import SettingsError
from common.seeds import derive, torch_seeded
from common.tasks.base import evaluate as evaluate_model
from common.vector import State
from strategies.messages import (
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
    tensors_of,
    write_head,
)

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer a roll call. A node that cannot take part says why."""
    try:
        head = read_head(RollHead, message.content)
        config = context.node_config
        session = Session.of(head.experiment, str(config.get("device", "cpu")))
        names = hosted(context, session.task)
        share_labels = bool(config.get("share-labels", "name" not in config))
        # Flower hands a context's memory to one message at a time.
        in_flight = 1 if isinstance(memory_of(context), ContextMemory) else 0
        reply = session.roll(names, str(config.get("data", "")), share_labels, in_flight)
    except Exception as error:
        who = context.node_config.get("name", context.node_config.get("partition-id", "?"))
        reason = f"client {who}: {error if isinstance(error, SettingsError) else repr(error)}"
        reply = RollReply([], [], [], [], [], "", "", "", VERSIONS, error=reason)
    return Message(RecordDict({HEAD: write_head(reply)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round: load its memory, work, save the next version, reply."""
    head = read_head(TrainHead, message.content)
    reply = ReplyHead(head.run, head.client, head.generation, head.round, head.layout, "ok")
    return _guarded(message, reply, lambda stage: _train(head, reply, message, context, stage))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model on one client's own evaluation examples."""
    head = read_head(EvaluateHead, message.content)
    reply = ReplyHead(head.run, head.client, 0, head.round, head.layout, "ok")
    return _guarded(message, reply, lambda stage: _evaluate(head, reply, message, context, stage))


def _guarded(message: Message, head: ReplyHead, work: Callable[[list[str]], RecordDict]) -> Message:
    """Run `work`; an exception becomes a reply that names client, round and stage."""
    stage = ["open"]
    try:
        content = work(stage)
    except Exception as error:
        reason = f"client {head.client}, round {head.round}, {stage[0]}: {type(error).__name__}: {error}"
        content = reply_content(replace(head, status="error", reason=reason))
    return Message(content, reply_to=message)


def _open(head: TrainHead | EvaluateHead, context: Context) -> Session:
    session = Session.of(head.experiment, str(context.node_config.get("device", "cpu")))
    if head.layout != session.model.layout_hash:
        raise ValueError(f"the server's model layout is {head.layout}, this client's {session.model.layout_hash}")
    if head.client not in hosted(context, session.task):
        raise ValueError(f"this node does not host client {head.client!r}")
    return session


def _train(head: TrainHead, reply: ReplyHead, message: Message, context: Context, stage: list[str]) -> RecordDict:
    session = _open(head, context)
    strategy = session.strategy

    stage[0] = "data"
    data = session.data(head.client, str(context.node_config.get("data", "")))
    if not len(data.train):
        return reply_content(replace(reply, status="empty"))

    stage[0] = "memory"
    home = memory_of(context)
    memory: State = {}
    if strategy.memory != "none" and head.accepted:
        loaded = home.load(head.run, head.client, head.generation, head.accepted)
        if loaded is None and strategy.memory == "bound":
            return reply_content(replace(reply, status="memory-lost"))
        memory = _to(loaded or {}, session.device)

    stage[0] = "train"
    started = time.perf_counter()
    state, buffers = tensors_of(message.content)
    received = _to(state, session.device)
    session.model.load(received["model"], buffers)
    work = LocalWork(
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
    )
    seed = derive(session.experiment.seed, "torch", head.client, head.round)
    with torch_seeded(seed, session.device):
        upload = strategy.local(work)
    upload.metrics["seconds.train"] = time.perf_counter() - started

    stage[0] = "save"
    if strategy.memory != "none":
        home.save(head.run, head.client, head.generation, head.round, work.kept, head.keep)
    done = replace(reply, examples=upload.examples, steps=upload.steps, lr=upload.lr)
    return reply_content(done, upload, upload.metrics)


def _evaluate(head: EvaluateHead, reply: ReplyHead, message: Message, context: Context, stage: list[str]) -> RecordDict:
    session = _open(head, context)
    stage[0] = "data"
    data = session.data(head.client, str(context.node_config.get("data", ""))).evaluate
    if not len(data):
        return reply_content(replace(reply, status="empty"))
    stage[0] = "evaluate"
    model = session.model
    state, buffers = tensors_of(message.content)
    model.load(state["model"], buffers)
    metrics = evaluate_model(session.task, model.module, data, session.experiment.evaluate.batch_size)
    return reply_content(replace(reply, examples=len(data)), metrics=metrics)


def _to(state: State, device: torch.device) -> State:
    """On the device. On the CPU the message's bytes are used as they are: read-only, without a copy."""
    return {name: value.to(device) for name, value in state.items()}
