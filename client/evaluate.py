"""One client's evaluation of the global model, or of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flwr.app import Context, Message, RecordDict

from client.received import receive
from client.session import Session, memory_of, policy_of
from client.train import accepted_memory, open_session
from client.training.work import LocalWork
from common.data.examples import ClientData
from common.seeds import derive, torch_seeded
from common.vector import State
from strategies.protocol.messages import (
    EvaluateHead,
    ReplyHead,
    TrainHead,
    reply_content,
)


def evaluate_client(
    head: EvaluateHead, reply: ReplyHead, message: Message, context: Context, stage: list[str]
) -> RecordDict:
    session = open_session(head, context)
    stage[0] = "data"
    data = session.data(head.client, str(context.node_config.get("data", "")))
    if not len(data.evaluate):
        return reply_content(replace(reply, status="empty"))
    stage[0] = "memory"
    personal, strategy = session.experiment.personal, session.strategy
    memory: State = {}
    if personal.parts or (strategy.personal and strategy.memory_kind(session.experiment) != "none"):
        memory = accepted_memory(memory_of(context, session), session, head) or {}
    received = receive(session, message, memory, whole=True)
    if (personal.finetune_steps or strategy.personal) and len(data.train):
        stage[0] = "fine-tune"
        _tune(session, head, data, received, memory, policy_of(context).watch())
    stage[0] = "evaluate"
    module, size = session.model.module, session.experiment.evaluate.batch_size
    measured = session.scoring.measure(module, data.evaluate, size)
    sums = {name: total.tolist() for name, total in measured.sums.items()}
    return reply_content(replace(reply, examples=len(data.evaluate)), metrics=measured.means, sums=sums)


def _tune(
    session: Session,
    head: EvaluateHead,
    data: ClientData,
    received: State,
    memory: State,
    watch: Callable[[int], None],
) -> None:
    """Make the client's own model, or train it a little before it is evaluated, with a new optimizer; the next message
    loads another one."""
    experiment = session.experiment
    seed = derive(experiment.seed, "fine-tune")
    bench = replace(session, experiment=experiment.model_copy(update={"seed": seed}))
    asked = TrainHead(
        head.experiment,
        head.run,
        head.client,
        head.generation,
        head.round,
        accepted=0,
        keep=[],
        share=0.0,
        lr=experiment.personal.finetune_lr or experiment.local.lr,
        layout=head.layout,
    )
    own = session.strategy.personal
    work = LocalWork(bench, asked, data, received, memory if own else {}, watch=watch)
    with torch_seeded(derive(experiment.seed, "fine-tune", head.client, head.round), session.device):
        if own:
            session.strategy.personalize(work)
        else:
            work.tune(experiment.personal.finetune_steps)
