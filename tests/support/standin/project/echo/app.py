"""A server app that sends each step of a plan to all nodes and writes down what came back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_utils import pull_objects

server = ServerApp()
client = ClientApp()  # Never runs: nodes use what is installed at their site.

# What common.flower.tune_flower does; the bundle has no `common`.
pull_objects.__kwdefaults__.update(initial_backoff=0.005, backoff_cap=0.1)


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    while len(nodes := sorted(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.02)
    sent = np.random.default_rng(0).standard_normal(int(config["numbers"])).astype(np.float32)
    steps = []
    for step in str(config["plan"]).split():
        start = time.perf_counter()
        replies = exchange(grid, nodes, step, sent)
        seconds = time.perf_counter() - start
        steps.append({"step": step, "seconds": seconds, "replies": [told(reply, sent) for reply in replies]})
        Path(str(config["out"])).write_text(json.dumps(steps))


def exchange(grid: Grid, nodes: list[int], step: str, numbers: np.ndarray) -> list[Message]:
    model = ArrayRecord({"w": Array("float32", numbers.shape, "raw", numbers.tobytes())})
    content = RecordDict({"model": model, "task": ConfigRecord({"do": step})})
    waiting = set(grid.push_messages([Message(content, node, "train") for node in nodes]))
    replies: list[Message] = []
    while waiting:
        arrived = list(grid.pull_messages(waiting))
        replies += arrived
        waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
        time.sleep(0.005)
    return replies


def told(reply: Message, sent: np.ndarray) -> dict[str, object]:
    if reply.has_error():
        return {"error": reply.error.reason}
    got = np.frombuffer(reply.content["model"]["w"].data, np.float32)
    same = bool(np.array_equal(got, sent + np.float32(1)))
    return {"same": same, **dict(reply.content["task"])}
