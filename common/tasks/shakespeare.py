"""Shakespeare by speaking role: the next character, as in LEAF (arXiv 1812.01097) and FedProx (arXiv 1812.06127)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from common.data.examples import ClientData, Examples
from common.data.hub import Corpus, local_table, own_table, read_corpus
from common.data.speeches import LETTERS, Bytes, Indices, Role, roles, windows
from common.errors import SettingsError
from common.experiment import PartitionSettings
from common.models.texts import recurrent
from common.partition.assignment import Assignment, assignment_of
from common.partition.make import make_assignment
from common.partition.shift import check_shift
from common.settings import Opened, Section, checked
from common.tasks.classification import Classification

CORPUS = Corpus("shakespeare", "flwrlabs/shakespeare", train=("train", "roles"), test=())


class ShakespeareSettings(Section):
    """`[task] name = "shakespeare"`."""

    file: Opened | None = Field(None, description="of roles; default: shakespeare/ in FEDKEEL_DATA, else a download")
    length: int = Field(80, ge=1, description="characters that the model sees")
    predict: Literal["last", "all"] = Field(
        "last", description="the character after them (LEAF), or after each of them"
    )
    stride: int | None = Field(None, ge=1, description="characters between windows; default: 1, or `length` for all")
    min_samples: int = Field(10, ge=1, description="roles with fewer windows are left out")
    width: int = Field(256, ge=1, description="units of each LSTM layer; 64 suits two cores")
    layers: int = Field(2, ge=1, le=1000)
    embedding: int = Field(8, ge=1)


class NextCharacter(nn.Module):
    """Embedding, LSTM, linear layer: characters (b, l) -> logits of the next one (b, 80), or after each (b, l, 80)."""

    def __init__(self, settings: ShakespeareSettings) -> None:
        super().__init__()
        self.everywhere = settings.predict == "all"
        self.embedding = nn.Embedding(len(LETTERS), settings.embedding)
        self.lstm = recurrent(settings.embedding, settings.width, settings.layers)
        self.head = nn.Linear(settings.width, len(LETTERS))

    def forward(self, characters: Tensor) -> Tensor:
        """Logits."""
        states: Tensor = self.lstm(self.embedding(characters))[0]
        logits: Tensor = self.head(states if self.everywhere else states[:, -1])
        return logits


class Shakespeare(Classification):
    """What a role says next. The groups of a natural split are roles of one play: `partition.kind = "natural"`.

    The text lies in memory once, a byte a character; examples are windows into it that never leave a role. Each
    client's evaluation examples are the last `partition.holdout` of its windows in the order of the text, and no
    training window of that client shares a character with them: windows that would are used for neither, but a client
    whose training would be empty by that has no evaluation examples instead. Accuracy is over all predictions.
    """

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        self.settings = checked(ShakespeareSettings, options, "[task]")
        super().__init__(partition, seed, "float32")
        self.stride = self.settings.stride or (1 if self.settings.predict == "last" else self.settings.length)

    @cached_property
    def roles(self) -> list[Role]:
        """The roles that have enough windows, by group number; the first access may raise SettingsError."""
        if self.settings.file is not None:
            table, path = local_table(self.settings.file, "task.file")
            source = str(path)
        else:
            table, source = read_corpus(CORPUS, "train")
        kept = [role for role in roles(table, source) if self._count(role) >= self.settings.min_samples]
        if not kept:
            raise SettingsError(
                f"task.min_samples = {self.settings.min_samples}: no role in {source} has as many windows of "
                f"{self.settings.length} characters"
            )
        return kept

    def _count(self, role: Role) -> int:
        """How many windows, each with the character after it."""
        return max(0, (len(role.text) - self.settings.length - 1) // self.stride + 1)

    def _starts(self, held: Sequence[Role]) -> Indices:
        """Where each window starts in the text of these roles, one after the other (n,)."""
        begins = np.cumsum([0, *(len(role.text) for role in held)])
        parts = [begin + self.stride * np.arange(self._count(role)) for begin, role in zip(begins, held, strict=False)]
        return np.concatenate([*parts, np.zeros(0, np.int64)])

    @cached_property
    def _text(self) -> Bytes:
        return np.concatenate([role.text for role in self.roles])

    @cached_property
    def _ranges(self) -> Indices:
        """The numbers of role i's windows: from [i] to [i + 1]."""
        return np.cumsum([0, *map(self._count, self.roles)])

    @cached_property
    def _pool(self) -> Examples:
        places = self._starts(self.roles)
        targets = self._text[places + self.settings.length].astype(np.int64)
        return Examples(torch.from_numpy(places), torch.from_numpy(targets))

    def pool(self) -> Examples:
        """Where each window starts in the text of all roles (n,), and the character after it (n,)."""
        return self._pool

    def groups(self) -> NDArray[Any]:
        """The number of each window's role (n,)."""
        return np.repeat(np.arange(len(self.roles)), np.diff(self._ranges))

    @cached_property
    def assignment(self) -> Assignment:
        """The split of the windows, with holdouts at each client's end."""
        if self.partition.kind == "file":
            return super().assignment
        whole = self.partition.model_copy(update={"holdout": 0.0})
        if self.partition.kind != "natural":
            assignment = make_assignment(whole, self.pool().targets.numpy(), None, self.seed)
            parts = assignment.clients
        else:  # of roles, not of millions of windows
            numbers = np.arange(len(self.roles))
            assignment = make_assignment(whole, np.zeros_like(numbers), numbers, self.seed)
            parts = tuple(np.arange(*self._ranges[[own[0], own[0] + 1]]) for own in assignment.clients)
        check_shift(assignment, self.pool().inputs)
        starts, targets = self.pool().inputs.numpy(), self.pool().targets.numpy()
        return assignment_of([self._cut(part, starts) for part in parts], targets, self.seed)

    def _cut(self, part: Indices, starts: Indices) -> tuple[Indices, Indices]:
        """Windows for training and for evaluation that share no character, in the order of the text."""
        count = math.floor(len(part) * self.partition.holdout)
        if not count:
            return part, part[:0]
        evaluate = part[-count:]
        train = part[starts[part] + self.settings.length < starts[evaluate[0]]]
        return (train, evaluate) if len(train) else (part, part[:0])

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client's windows and the characters in them. With `file`, of everything in that site's own table, whose
        roles, if it has several, follow one another."""
        if file is not None:
            return self._site(name, file)
        number = self.number(name)
        starts = self.pool().inputs.numpy()
        return self._data(self._text, starts, self.assignment.clients[number], self.assignment.holdout[number])

    def _site(self, name: str, file: str) -> ClientData:
        table, _ = own_table(file, name)
        held = roles(table, file)
        starts = self._starts(held)
        text = np.concatenate([*(role.text for role in held), np.zeros(0, np.uint8)])
        return self._data(text, starts, *self._cut(np.arange(len(starts)), starts))

    def _data(self, text: Bytes, starts: Indices, train: Indices, evaluate: Indices) -> ClientData:
        length = self.settings.length
        return ClientData(windows(text, starts[train], length), windows(text, starts[evaluate], length))

    def model(self) -> nn.Module:
        """Logits from characters (b, length)."""
        return NextCharacter(self.settings)

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        """The linear layer."""
        return model.head if isinstance(model, NextCharacter) and not model.everywhere else None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, float | Tensor]:
        """Sums over the windows of the mean over a window's predictions: cross entropy (nats) and right answers."""
        logits, targets = self.outputs(model, batch)
        weight = len(batch[1]) / max(1, len(targets))
        judged = self.judge(logits, targets)
        return {"loss": judged["loss"] * weight, "accuracy": (logits.argmax(1) == targets).sum() * weight}

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (m, 80) and characters (m,) of all predictions."""
        held, targets = batch
        logits: Tensor = model(held[:, :-1].int())
        return (logits.flatten(0, 1), held[:, 1:].flatten().long()) if logits.ndim == 3 else (logits, targets)
