"""The next token of a text: `causal-lm`, from text files or a column of a table, with a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from common.data.arrays import drawn
from common.data.documents import GROUPS, TEXTS, Columns, Windows, apart, read_documents, text_files, windows
from common.data.examples import ClientData, Examples, pick
from common.data.places import find
from common.data.places import own as own_file
from common.data.tables import splits
from common.data.tokens import PADDING, Encoder
from common.errors import SettingsError, SiteError
from common.experiment import PartitionSettings
from common.metrics.metric import Metric
from common.metrics.ready import NONE
from common.models.causal import LanguageSettings, language_encoder, language_model, logits
from common.partition.assignment import Assignment, assignment_of
from common.partition.make import make_assignment
from common.settings import Opened, checked
from common.tasks.supervised import BY_CLASS, Supervised


class CausalSettings(LanguageSettings):
    """`[task] name = "causal-lm"`."""

    file: Opened | None = Field(
        None, description="text file, folder of such, or table; without one every client brings its own"
    )
    test_file: Opened | None = Field(None, description="of the central test set; default: a part of `file`'s folder")
    text: str | None = Field(None, description=f"column of a table; default: the first of {', '.join(TEXTS)}")
    group: str | None = Field(
        None, description=f"column of a natural split of a table; default: the first of {', '.join(GROUPS)}"
    )
    stride: int | None = Field(
        None, ge=1, description="tokens between the beginnings of windows; default, and at most: length + 1"
    )
    limit: int | None = Field(None, ge=1, description="at most so many training and test windows, by the seed")
    dtype: Literal["float32", "float64"] = "float32"


class CausalLM(Supervised):
    """Windows of `length` + 1 tokens: what the model sees (n, length), and the token after each (n, length).

    Tokens are the text's bytes or a tokenizer's. A client evaluates on the last `partition.holdout` of its windows, in
    the order of the text; no window that any client trains on has a token of the text in common with those. With a
    natural split a client is a group of a table's rows, a file of a folder, or a paragraph of a text file.
    Loss and accuracy are means over windows of the mean over a window's tokens; perplexity is over all tokens.
    """

    metric_kind = "tokens"
    headline = "perplexity"

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        self.settings = given = checked(CausalSettings, options, "[task]")
        super().__init__(partition, seed, given.dtype)
        self.stride = given.stride or given.length + 1
        if self.stride > given.length + 1:
            raise SettingsError(f"task.stride = {self.stride}; allowed: 1 to task.length + 1 = {given.length + 1}")
        if given.group is not None and partition.kind != "natural":
            raise SettingsError(f"task.group = {given.group!r} belongs to partition.kind = 'natural'")
        _ = self.encoder  # settings errors belong to the start
        if not self.absent:
            _ = self.assignment

    @cached_property
    def encoder(self) -> Encoder:
        """Texts -> tokens."""
        return language_encoder(self.settings)

    @property
    def absent(self) -> bool:
        """Whether every client brings its own file."""
        return self.settings.file is None

    def _windows(self, path: Path, grouped: bool, part: str = "train") -> Windows:
        given = self.settings
        documents = read_documents(path, Columns(given.text, given.group), grouped, part)
        found = windows(documents, self.encoder, given.length, self.stride)
        if not len(found.starts):
            raise SiteError("data-unreadable", f"{path}: has less than two tokens in a row, so nothing to predict")
        return found

    def _kept(self, found: Windows, purpose: str) -> Windows:
        """Within the limit."""
        rows = drawn(len(found.starts), self.settings.limit, self.seed, purpose)
        if len(rows) == len(found.starts):
            return found
        groups = None if found.groups is None else found.groups[rows]
        return Windows(found.tokens[rows], found.starts[rows], found.sizes[rows], groups)

    @cached_property
    def _pooled(self) -> Windows:
        path = find(str(self.settings.file), "task.file", folders=True)
        return self._kept(self._windows(path, self.partition.kind == "natural"), "train")

    @cached_property
    def _pool(self) -> Examples:
        return examples(self._pooled)

    def pool(self) -> Examples:
        """Tokens (n, length) and those that follow (n, length), int16 or int32, filled with PADDING."""
        return self._pool

    def groups(self) -> NDArray[Any] | None:
        """The group of each window where the split is natural."""
        return self._pooled.groups

    def central(self) -> Examples | None:
        """The windows of `task.test_file`, else of the part `test` or `validation` of a folder of tables, or None."""
        return self._test

    @cached_property
    def _test(self) -> Examples | None:
        given = self.settings
        if given.test_file is not None:
            path, part = find(given.test_file, "task.test_file", folders=True), "test"
        elif given.file is None:
            return None
        else:
            path = find(given.file, "task.file", folders=True)
            names = [] if text_files(path) is not None else splits(path)
            part = next((name for name in ("test", "validation") if name in names), "")
            if not part:
                return None
        return examples(self._kept(self._windows(path, False, part), "test"))

    @cached_property
    def assignment(self) -> Assignment:
        """The split of the windows, with holdouts at each client's end."""
        kind = self.partition.kind
        if kind in BY_CLASS or kind == "file":
            return super().assignment  # which refuses the former
        if self.partition.shift != "none":
            raise SettingsError(f"partition.shift = {self.partition.shift!r}: texts cannot be shifted; allowed: 'none'")
        held, labels = self._pooled, np.zeros(len(self._pooled.starts), np.int64)
        whole = self.partition.model_copy(update={"holdout": 0.0})
        parts = make_assignment(whole, labels, held.groups, self.seed).clients
        pairs = apart(parts, self.partition.holdout, held.starts, held.sizes)
        if pairs is None:
            raise SettingsError(
                f"partition.holdout = {self.partition.holdout}: every window of one client shares tokens with those "
                "that another is evaluated on; raise task.stride, or lower partition.clients or holdout"
            )
        return assignment_of(pairs, labels, self.seed)

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client of the plan or, with `file`, all of that site's own text: a file, or a folder's part `train`."""
        if file is None:
            return super().client(name)
        path = own_file(file, f"file of client {name!r}", folders=True)
        held = self._kept(self._windows(path, False), name)
        pairs = apart([np.arange(len(held.starts))], self.partition.holdout, held.starts, held.sizes)
        assert pairs is not None  # alone it shares with nobody
        own, (train, evaluate) = examples(held), pairs[0]
        return ClientData(pick(own, train), pick(own, evaluate))

    def model(self) -> nn.Module:
        """Tokens (b, l) -> an output of `transformers` that has logits (b, l, v); one's own may give them alone."""
        return language_model(self.settings, self.encoder).to(self.dtype)

    def output_size(self, model: nn.Module) -> int:
        """How many tokens the model knows."""
        known: int = getattr(getattr(model, "config", None), "vocab_size", self.encoder.vocabulary)
        return known

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        """Logits for tokens as they are stored. The filling stands behind all else, where a causal model does not
        look from there: it is some token."""
        return logits(model, inputs.clamp(min=0).long())

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (b, l, vocabulary) and the tokens that follow (b, l), `NONE` where there is none."""
        inputs, targets = batch
        follow = targets.long()
        return self.forward(model, inputs), follow.masked_fill(follow == PADDING, NONE)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the windows of the mean cross entropy of a window's tokens, nats."""
        return _mean(_surprise(outputs, targets), targets).mean()

    def judge(self, outputs: Tensor, targets: Tensor) -> Mapping[str, float | Tensor]:
        """The loss, and the share of a window's tokens that are told right."""
        right = (outputs.argmax(2) == targets).double()
        return {**super().judge(outputs, targets), "accuracy": _mean(right, targets).sum()}

    def scores(self) -> list[Metric]:
        """exp of the mean cross entropy over all tokens."""
        return [PERPLEXITY]


def examples(held: Windows) -> Examples:
    """Two views of the same tokens: without the last, and without the first."""
    tokens = torch.from_numpy(held.tokens)
    return Examples(tokens[:, :-1], tokens[:, 1:])


def _surprise(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each token (b, l), 0 where there is none."""
    flat = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=NONE, reduction="none")
    return flat.view(targets.shape)


def _mean(values: Tensor, targets: Tensor) -> Tensor:
    """Of each window (b,), over its tokens; each window has one at least."""
    known = targets != NONE
    return (values * known).sum(1) / known.sum(1).clamp(min=1)


def _sums(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return _surprise(outputs, targets).double().sum(), (targets != NONE).sum()


PERPLEXITY = Metric("perplexity", 2, _sums, lambda total: (total[0] / total[1]).exp(), higher=False)
