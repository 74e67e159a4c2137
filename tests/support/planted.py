"""A site with secrets in its environment, files, data and names, and a look whether any of them is in an answer."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import patch
from urllib.parse import quote

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from pydantic import BaseModel

from client import session
from client.app import app
from common.data import sources
from common.experiment import Experiment
from common.settings import Section, _Opened
from common.tasks import TASKS
from common.tasks.base import Task
from server.engines.inprocess import InProcessGrid, stamp
from strategies.protocol import wire
from strategies.protocol.messages import HEAD, RollHead, RollReply, TrainHead, content_of, read_head, write_head
from strategies.protocol.sums import StatisticsHead

CORE = "q7Zk{}Xw93Lp"
KINDS = ("Env", "Home", "Folder", "Header", "Cell", "Array", "Json", "Toml", "Text", "Data", "Class", "Cwd", "Own")
SECRETS = {kind: CORE.format(kind) for kind in KINDS}
"""Each is all letters and digits: what quotes or escapes text leaves it as it is."""

NUMBER = "739128471"
"""A cell that is a number."""

NEVER = [*SECRETS.values(), NUMBER, "root:x:0"]


def forms(secret: str) -> Iterator[bytes]:
    """A secret as it may look in an answer."""
    plain = secret.encode()
    yield from (plain, plain[::-1], plain.hex().encode(), plain.hex().upper().encode(), quote(secret).encode())
    yield from (
        secret.encode("utf-16-le"),
        secret.upper().encode(),
        secret.lower().encode(),
        secret.swapcase().encode(),
    )
    for shift in range(3):  # whatever stands before it: what of base64 belongs to the secret alone
        coded = base64.b64encode(b"\0" * shift + plain).rstrip(b"=")
        yield coded[-(-shift * 8 // 6) : -1]


FORMS = {form: secret for secret in NEVER for form in forms(secret)}


def found(message: Message, asked: str = "") -> list[bytes]:
    """The secrets in a message as it goes over the wire; what stands in the question may be said again."""
    content = message_to_proto(message).SerializeToString()
    return [form for form, secret in FORMS.items() if form in content and secret not in asked]


def told(options: Any, partition: Any, seed: int) -> Task:
    """A task of the site's own that says in its error what it should not."""
    raise ValueError(f"{SECRETS['Own']} {dict(os.environ)}")


@dataclass
class Planted:
    """The site's folder, and its client."""

    root: Path
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Of files that a server may want."""
        return self.root / SECRETS["Folder"]

    def files(self) -> list[Path]:
        """Those files, and the folder."""
        return [*sorted(self.folder.rglob("*.*")), self.folder]

    def names(self) -> list[str]:
        """What a server may write for them, guessing well; and what is not there."""
        return [*map(str, self.files()), *(f"{path}.none" for path in self.files())]

    def answer(self, kind: str, content: RecordDict) -> Message:
        """The client's."""
        message = Message(content, dst_node_id=1, message_type=kind)
        stamp(message)
        context = Context(run_id=1, node_id=1, node_config=self.config, state=RecordDict(), run_config={})
        return app(message, context)

    def roll(self, experiment: str) -> tuple[Message, RollReply]:
        """To a roll call."""
        reply = self.answer(MessageType.QUERY, RecordDict({HEAD: write_head(RollHead(experiment, "run"))}))
        return reply, read_head(RollReply, reply.content)

    def answers(self, experiment: str, **changes: Any) -> list[Message]:
        """To a roll call, a TRAIN and an EVALUATE message of an experiment (JSON or not), and a question of statistics,
        which no policy here allows."""
        rolled, roll = self.roll(experiment)
        held = session._sessions.get(torch.device("cpu"))
        state = {"model": held.model.vector.clone()} if held is not None else {}
        buffers = dict(held.model.buffers) if held is not None else {}
        values = {"layout": roll.layout or "0" * 16, "client": str(self.config["name"]), "run": "run", **changes}
        head = TrainHead(experiment, generation=1, round=1, accepted=0, keep=[], share=0.5, lr=0.1, **values)
        content = content_of(head, wire.to_records(state), wire.to_records(buffers), {})
        question = RecordDict({HEAD: write_head(StatisticsHead(experiment, "totals"))})
        kinds = ((MessageType.TRAIN, content), (MessageType.EVALUATE, content), ("query.statistics", question))
        return [rolled, *(self.answer(kind, given) for kind, given in kinds)]

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """What is looked at below the folder of files meanwhile: opened, listed, or asked for whether it is there."""
        seen: list[str] = []

        def look(path: Any) -> None:
            if isinstance(path, (str, bytes, Path)) and SECRETS["Folder"] in str(path):
                seen.append(str(path))

        def asked(real: Any) -> Any:
            def watched(path: Any, *more: Any, **rest: Any) -> Any:
                look(path)
                return real(path, *more, **rest)

            return watched

        _watchers.append(look)
        try:
            with patch("os.stat", asked(os.stat)), patch("os.lstat", asked(os.lstat)):
                yield seen
        finally:
            _watchers.remove(look)


_watchers: list[Any] = []


def _audit(event: str, values: tuple[Any, ...]) -> None:
    if _watchers and values and event in ("open", "os.listdir", "os.scandir", "import", "os.stat"):
        for look in _watchers:
            look(values[0])


sys.addaudithook(_audit)


def plant(root: Path, patcher: pytest.MonkeyPatch) -> Planted:
    """Make the site: environment, folders, files, and the data that it named itself."""
    InProcessGrid._identify()
    site = Planted(root)
    folder = site.folder
    images = folder / "images" / SECRETS["Class"]
    for each in (images, root / SECRETS["Home"], root / SECRETS["Cwd"], root / SECRETS["Data"] / "femnist"):
        each.mkdir(parents=True)
    table = f"{SECRETS['Header']},label\n{SECRETS['Cell']},1\n{NUMBER},0\n"
    (folder / "table.csv").write_text(table)
    (folder / "broken.csv").write_text(f"{SECRETS['Header']},b\n1,2,3\n")
    (folder / "lines.jsonl").write_text(json.dumps({SECRETS["Header"]: SECRETS["Cell"], "label": 1}) + "\n{")
    (folder / "plan.json").write_text(json.dumps({"format": SECRETS["Json"], SECRETS["Json"]: 1}))
    (folder / "settings.toml").write_text(f'password = "{SECRETS["Toml"]}"\n')
    (folder / "note.txt").write_text(f"{SECRETS['Text']}\n")
    (folder / "key.parquet").write_bytes(f"PAR1{SECRETS['Text']}".encode())
    np.savez(folder / "arrays.npz", **{SECRETS["Array"]: np.array([SECRETS["Array"]]), "centers": np.zeros(3)})
    (images / f"{SECRETS['Text']}.png").write_text(SECRETS["Text"])
    (folder / "link.csv").symlink_to(folder / "table.csv")
    (root / SECRETS["Data"] / "femnist" / "femnist.npz").write_text(SECRETS["Text"])
    own, labels = root / SECRETS["Data"] / "own.npz", np.array([0, 1, 0, 1])
    np.savez(own, x=np.array([[0.5], [1.5], [float(NUMBER)], [2.5]]), y=labels, **{SECRETS["Header"]: labels})
    table = own.with_name("own.csv")
    table.write_text(f"{SECRETS['Header']},x,label\n{SECRETS['Cell']},0.5,0\nb,1.5,1\nc,{NUMBER},0\nd,2.5,1\n")
    patcher.chdir(root / SECRETS["Cwd"])
    patcher.setenv("PLANTED", SECRETS["Env"])
    patcher.setenv("HOME", str(root / SECRETS["Home"]))
    patcher.setenv("FEDKEEL_DATA", str(root / SECRETS["Data"]))
    patcher.setenv("FEDKEEL_CACHE", str(root / SECRETS["Home"] / "cache"))
    patcher.setattr(sources, "_last", None)
    patcher.setattr(session, "_sessions", {})
    site.config |= {"name": "a", "data": str(own), "memory": str(root / SECRETS["Home"] / "memory")}
    return site


# --- what an experiment can say


def texts(kind: Any) -> tuple[bool, bool]:
    """Whether a field's type takes any text, and whether that text is marked as opened."""
    if get_origin(kind) is Annotated:
        base, *marks = get_args(kind)
        takes, opened = texts(base)
        return takes, opened or any(isinstance(mark, _Opened) for mark in marks)
    if get_origin(kind) is Literal:
        return False, False
    if get_origin(kind) in (Union, UnionType, list, tuple, dict):
        inner = [texts(each) for each in get_args(kind)]
        return any(each[0] for each in inner), any(each[1] for each in inner)
    return kind in (str, Any), False


def settings_of(task: str) -> type[Section]:
    """The settings of a task of this project."""
    made = resolve_name(TASKS[task])
    module = sys.modules[getattr(made, "func", made).__module__]
    kinds = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Section) and v is not Section]
    own = [each for each in kinds if each.__module__ == module.__name__ and each.__name__.endswith("Settings")]
    named = getattr(made, "kind", None)
    return named if named is not None else own[0]


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of every field of an experiment's tables."""
    hints = {name: info.rebuild_annotation() for name, info in model.model_fields.items()}
    for name, kind in hints.items():
        inner = kind if isinstance(kind, type) else None
        if inner is not None and issubclass(inner, BaseModel):
            yield from fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def every_field() -> dict[str, tuple[str, Any]]:
    """All fields of all experiments: "task:field" or the dotted name -> task that has it, and the type."""
    all_fields = {name: ("npz", kind) for name, kind in fields(Experiment)}
    for task in TASKS:
        all_fields |= {f"{task}: task.{name}": (task, kind) for name, kind in fields(settings_of(task))}
    return all_fields


BASES: Mapping[str, dict[str, Any]] = {
    "npz": {"shape": [1], "classes": 2},
    "images": {"shape": [1], "classes": 2},
    "text": {"classes": 2},
    "quadratic": {"file": "none.npz"},
}


def experiment_with(name: str, task: str, value: Any) -> dict[str, Any]:
    """A whole experiment with one field set, and what that field needs beside it to be looked at."""
    tables: dict[str, Any] = {"name": "fuzz", "rounds": 1, "task": {"name": task, **BASES.get(task, {})}}
    tables["local"] = {"batch_size": 2, "steps": 1}
    field = name.split(": ")[-1]
    small = {"width": 8, "layers": 1, "heads": 1}
    if task == "causal-lm":
        tables["task"] |= {} if field.endswith("pretrained") else small
        if "lora_" in field:
            tables["task"]["lora_rank"] = 1
    elif field.endswith("pretrained"):
        tables["task"] |= {"model": "gpt2", **({} if value else small)}
    elif "lora_" in field:
        tables["task"] |= {"model": "gpt2", "lora_rank": 1, **small}
    for key, more in {
        "partition.file": {"partition": {"kind": "file"}},
        "speed.file": {"speed": {"kind": "profile"}},
        "presence.file": {"presence": {"kind": "trace"}},
    }.items():
        if field == key:
            tables |= more
    if field == "partition.file":
        tables["task"] = {"name": "digits"}
    place = tables
    *parents, last = field.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return tables
