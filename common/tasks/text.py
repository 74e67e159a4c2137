"""Classification of texts and pairs of texts: one's own tables, AG News, 20 Newsgroups, SST-2, QNLI, QQP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from common.data.arrays import drawn
from common.data.arrow import Column, Table
from common.data.examples import ClientData, Examples
from common.data.hub import Corpus, local_table, own_table, read_corpus
from common.data.places import find
from common.data.tables import column, read_table, splits
from common.data.tokens import Encoder
from common.errors import SettingsError, SiteError
from common.experiment import PartitionSettings
from common.models.texts import Bag, Gpt2, Lstm, ModelSettings, encoder, text_model
from common.settings import Opened, checked
from common.tasks.classification import Classification

TEXTS = ("text", "sentence", "content")
LABELS = ("label", "labels", "target", "class")
GROUPS = ("group", "user", "client", "author", "writer")
BLOCK = 8
"""A batch is cut to its longest text, rounded up to so many tokens."""


class CorpusSettings(ModelSettings):
    """`[task]` of a named data set."""

    dtype: Literal["float32", "float64"] = "float32"
    limit: int | None = Field(None, ge=1, description="at most so many training and test examples, by the seed")


class TextSettings(CorpusSettings):
    """`[task] name = "text"`."""

    file: Opened | None = Field(None, description="table or folder of tables; as it is, else in FEDKEEL_DATA")
    test_file: Opened | None = Field(None, description="of the central test set; default: a part of `file`'s folder")
    text: str | None = Field(None, description=f"column; default: the first of {', '.join(TEXTS)}")
    pair: str | None = Field(None, description="column of a second text, read after the first")
    label: str | None = Field(None, description=f"column; default: the first of {', '.join(LABELS)}")
    group: str | None = Field(None, description=f"column of a natural split; default: the first of {', '.join(GROUPS)}")
    classes: int | list[str] | None = Field(
        None, description="how many, or their names; default: from the file. Needed where clients bring their own files"
    )


@dataclass(frozen=True)
class Labelled:
    """A table, checked: texts, second texts of pairs, labels (n,) and group ids (n,)."""

    texts: Sequence[str]
    pairs: Sequence[str] | None
    labels: NDArray[np.int64]
    groups: NDArray[Any] | None

    def at(self, rows: NDArray[np.int64]) -> Labelled:
        """Some of the rows."""
        texts = [self.texts[i] for i in rows]
        pairs = None if self.pairs is None else [self.pairs[i] for i in rows]
        return Labelled(texts, pairs, self.labels[rows], None if self.groups is None else self.groups[rows])


class Text(Classification):
    """Texts, or pairs of them, with labels. Tokens are made once, where the data are loaded, and stay on the device.

    Labels are numbers from 0, or text that `classes` names (default: the training labels, sorted). With `classes` given
    and no `file`, every client brings its own table of the same columns.
    """

    corpus: ClassVar[Corpus | None] = None
    kind: ClassVar[type[CorpusSettings]] = TextSettings

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        self.settings = checked(self.kind, options, "[task]")
        super().__init__(partition, seed, self.settings.dtype)
        _ = self.class_names  # settings errors belong to the start

    @cached_property
    def encoder(self) -> Encoder:
        """Texts -> tokens; the first access may raise SettingsError."""
        return encoder(self.settings)

    # --- where the data are

    @cached_property
    def _train_table(self) -> tuple[Table, str]:
        """The training table, and where it came from."""
        if self.corpus is not None:
            return read_corpus(self.corpus, "train")
        if self._own.file is None:
            raise SettingsError(
                "task.file is required: a table of texts and labels; without one, task.classes is, and every client "
                "brings its own file"
            )
        table, path = local_table(self._own.file, "task.file")
        return table, str(path)

    def _test_table(self) -> tuple[Table, str] | None:
        """The table of the central test set, which the server alone reads: also where clients bring their own."""
        if self.corpus is not None:
            return read_corpus(self.corpus, "test")
        if self._own.test_file is not None:
            table, other = local_table(self._own.test_file, "task.test_file", "test")
            return table, str(other)
        if self._own.file is None:
            return None
        path = find(self._own.file, "task.file", folders=True)
        part = next((name for name in ("test", "validation") if name in splits(path)), None)
        return None if part is None else (read_table(path, part), f"{path}, {part}")

    @property
    def _own(self) -> TextSettings:
        assert isinstance(self.settings, TextSettings)
        return self.settings

    def _labelled(self, table: Table, source: str) -> Labelled:
        """The columns of a table, checked."""
        corpus = self.corpus
        if corpus is not None:
            names: dict[str, Any] = {"text": corpus.text, "pair": corpus.pair, "label": corpus.label, "group": None}
        else:
            names = {key: getattr(self._own, key) for key in ("text", "pair", "label", "group")}
        texts = column(table, names["text"], TEXTS, "task.text", source)
        pairs = None if names["pair"] is None else column(table, names["pair"], (), "task.pair", source)
        labels = self._numbers(column(table, names["label"], LABELS, "task.label", source), source)
        groups = None
        if self.partition.kind == "natural" and (names["group"] or any(name in table for name in GROUPS)):
            groups = np.asarray(column(table, names["group"], GROUPS, "task.group", source))
        return Labelled(list(map(str, texts)), None if pairs is None else list(map(str, pairs)), labels, groups)

    def _numbers(self, labels: Column, source: str) -> NDArray[np.int64]:
        """Class numbers (n,)."""
        names, array = self.class_names, np.asarray(labels)
        if not len(array):
            return np.zeros(0, np.int64)
        if array.dtype.kind not in "iu":
            number = {name: i for i, name in enumerate(names)}
            if unknown := next((label for label in labels if str(label) not in number), None):
                raise SiteError("data-labels", f"{source}: label {unknown!r}; allowed: {', '.join(names)}")
            return np.array([number[str(label)] for label in labels], np.int64)
        if array.min() < 0 or array.max() >= len(names):
            raise SiteError(
                "data-labels", f"{source}: labels from {array.min()} to {array.max()}; allowed: 0 to {len(names) - 1}"
            )
        return array.astype(np.int64)

    @cached_property
    def class_names(self) -> list[str]:
        """The classes by number; those of a file without names are called by their numbers."""
        if self.corpus is not None:
            return [str(i) for i in range(self.corpus.classes)]
        if (given := self._own.classes) is not None:
            return given if isinstance(given, list) else [str(i) for i in range(given)]
        table, source = self._train_table
        labels = np.asarray(column(table, self._own.label, LABELS, "task.label", source))
        if labels.ndim != 1 or labels.dtype.kind not in "iuU" or not len(labels):
            raise SettingsError(f"{source}: labels are {labels.dtype} {labels.shape}; allowed: integers or text (n,)")
        if labels.dtype.kind == "U":
            return sorted(set(labels.tolist()))
        return [str(i) for i in range(1 + int(labels.max()))]

    # --- what they are

    @cached_property
    def _pooled(self) -> tuple[Examples, NDArray[Any] | None]:
        return self._examples(*self._train_table, "train")

    @cached_property
    def _test(self) -> Examples | None:
        test = self._test_table()
        return None if test is None else self._examples(*test, "test")[0]

    def _examples(self, table: Table, source: str, purpose: str) -> tuple[Examples, NDArray[Any] | None]:
        """Examples within the limit, and their groups."""
        held = self._labelled(table, source)
        if self.settings.limit is not None:
            held = held.at(drawn(len(held.labels), self.settings.limit, self.seed, purpose))
        tokens = self.encoder(held.texts, held.pairs, self.settings.length)
        return Examples(tokens, torch.from_numpy(held.labels)), held.groups

    def pool(self) -> Examples:
        """Tokens (n, length), int16 or int32, and classes (n,)."""
        return self._pooled[0]

    def groups(self) -> NDArray[Any] | None:
        """The group ids of one's own table, or None."""
        return self._pooled[1]

    def central(self) -> Examples | None:
        """The test set, or None."""
        return self._test

    @property
    def absent(self) -> bool:
        """Whether there is no pooled table: every client brings its own."""
        return self.corpus is None and self._own.file is None

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client of the plan or, with `file`, all rows of that site's own table (of a folder its part `train`).

        The site's holdout is `partition.holdout` of them, drawn by the seed and the name.
        """
        if file is None:
            return super().client(name)
        table, path = own_table(file, name)
        own, _ = self._examples(table, str(path), name)
        return self.site(name, own)

    # --- the model

    def features(self, inputs: Tensor) -> Tensor:
        """Tokens (b, l) as int32, filled with PADDING; of a sequence model without what no text of the batch has."""
        if self.settings.model != "bag":
            longest = int((inputs >= 0).sum(1).max())
            inputs = inputs[:, : -(-longest // BLOCK) * BLOCK]
        return inputs.int()

    def model(self) -> nn.Module:
        """Logits (b, classes) from tokens."""
        return text_model(self.settings, len(self.class_names), self.encoder.vocabulary).to(self.dtype)

    def output_layer(self, model: nn.Module) -> nn.Module | None:
        """The linear layer `score`."""
        return model.score if isinstance(model, (Bag, Lstm, Gpt2)) else None


class AgNews(Text):
    """AG News (Zhang, Zhao and LeCun 2015): 4 topics of 120,000 news, 7,600 for the central test."""

    kind = CorpusSettings
    corpus = Corpus("agnews", "fancyzhx/ag_news", classes=4)


class Newsgroups(Text):
    """20 Newsgroups, split by date: 11,314 posts, 7,532 for the central test.

    From the hub and not by scikit-learn, whose cache of it is a pickle.
    """

    kind = CorpusSettings
    corpus = Corpus("20news", "SetFit/20_newsgroups", classes=20)


class Sst2(Text):
    """SST-2 (Socher 2013, GLUE): 67,349 phrases, positive or not; GLUE's validation set of 872 is the central test.

    A local folder may hold the training part in two, `train` and `dev`: both are read.
    """

    kind = CorpusSettings
    corpus = Corpus("sst2", "nyu-mll/glue", "sst2", ("train", "dev"), ("validation",), "sentence")


class Qnli(Text):
    """QNLI (GLUE): 104,743 pairs of a question and a sentence that answers it or not; validation 5,463."""

    kind = CorpusSettings
    corpus = Corpus("qnli", "nyu-mll/glue", "qnli", test=("validation",), text="question", pair="sentence")


class Qqp(Text):
    """QQP (GLUE): 363,846 pairs of questions, the same or not; validation 40,430."""

    kind = CorpusSettings
    corpus = Corpus("qqp", "nyu-mll/glue", "qqp", test=("validation",), text="question1", pair="question2")
