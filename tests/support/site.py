"""One deployed client without a server: messages go straight to the ClientApp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict

from client.app import app
from common import tasks
from common.experiment import Experiment
from common.model import build
from server.engines.inprocess import InProcessGrid, stamp
from strategies.protocol import wire
from strategies.protocol.messages import (
    HEAD,
    EvaluateHead,
    Reply,
    ReplyHead,
    RollHead,
    RollReply,
    TrainHead,
    content_of,
    read_head,
    scalars,
    tensors_of,
    write_head,
)
from strategies.registry import settled

OWN_TASK = "tests.support.faults:task"


class Site:
    """Client `name` with its memory in `folder`, which has allowed the task of `tests.support.faults`; further keywords
    are node settings. `train` always sends the first server state."""

    def __init__(self, folder: Path | str, settings: Experiment, name: str = "2", **config: Any) -> None:
        InProcessGrid._identify()
        self.settings, self.name = settings, name
        node = {"name": name, "memory": str(folder), "device": "cpu", "allow-tasks": OWN_TASK, **config}
        self.context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
        strategy = settled(settings)[0]
        self.model = build(tasks.create(settings.task, settings.partition, settings.seed), settings.seed)
        self.state = strategy.broadcast(strategy.init(self.model.vector.clone()))
        self.buffers = {key: value.clone() for key, value in self.model.buffers.items()}

    def ask(self, kind: str, content: RecordDict) -> Message:
        """The app's answer to any content."""
        message = Message(content, dst_node_id=1, message_type=kind)
        stamp(message)
        return app(message, self.context)

    def roll(self) -> RollReply:
        """The answer to a roll call."""
        head = RollHead(self.settings.json(), "run")
        return read_head(RollReply, self.ask(MessageType.QUERY, RecordDict({HEAD: write_head(head)})).content)

    def train(self, round: int = 1, accepted: int = 0, keep: Sequence[int] = (), **changes: Any) -> Reply:
        """The reply of a round; `changes` replace settings of the message."""
        head = TrainHead(
            experiment=self.settings.json(),
            run="run",
            client=self.name,
            generation=1,
            round=round,
            accepted=accepted,
            keep=sorted({*keep, accepted} - {0}),
            share=0.2,
            lr=self.settings.local.lr,
            layout=self.model.layout_hash,
        )
        return self._carried(MessageType.TRAIN, replace(head, **changes))

    def evaluate(self, **changes: Any) -> Reply:
        """The reply to an evaluation."""
        head = EvaluateHead(self.settings.json(), "run", self.name, 1, self.model.layout_hash)
        return self._carried(MessageType.EVALUATE, replace(head, **changes))

    def _carried(self, kind: str, head: TrainHead | EvaluateHead) -> Reply:
        content = content_of(head, wire.to_records(self.state), wire.to_records(self.buffers), {})
        reply = self.ask(kind, content).content
        return Reply(read_head(ReplyHead, reply), *tensors_of(reply), scalars(reply.metric_records.get("metrics")))
