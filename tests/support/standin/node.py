"""A resident node with a tiny ClientApp: `python node.py HOST:PORT NAME`. It adds one to each number."""

from __future__ import annotations

import logging
import sys
import time

from common import flower

flower.prepare()

import numpy as np  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from client.__main__ import stop_on_signal  # noqa: E402
from client.node.access import Access  # noqa: E402
from client.node.resident import NodeOptions, run_nodes  # noqa: E402

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    step = str(message.content["task"]["do"])
    print("doing", step, flush=True)
    if step == "fail":
        raise ValueError("a fault of the app")
    if step.startswith("sleep"):
        time.sleep(float(step.removeprefix("sleep")))
    seen = int(context.state.config_records["seen"]["count"]) + 1 if "seen" in context.state else 1
    context.state["seen"] = ConfigRecord({"count": seen})
    array = message.content["model"]["w"]
    numbers = np.frombuffer(array.data, np.float32) + np.float32(1)
    model = ArrayRecord({"w": Array("float32", array.shape, "raw", numbers.tobytes())})
    task = ConfigRecord({"seen": seen, "name": str(context.node_config["name"])})
    return Message(RecordDict({"model": model, "task": task}), reply_to=message)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    run_nodes([NodeOptions(Access(sys.argv[1]), sys.argv[2])], app, stop_on_signal())
