"""Texts as numbers: hashed words, bytes, or a pretrained tokenizer; once for all texts, never on the hot path."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PADDING = -1
"""Fills the end of a short text."""

BYTES = 256

_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Encoder:
    """`encode`: texts -> token numbers from 0 to `vocabulary` - 1; `separator` stands between the texts of a pair, and
    alone for an empty text."""

    encode: Callable[[Sequence[str]], list[list[int]]]
    vocabulary: int
    separator: int

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None, length: int) -> Tensor:
        """Tokens (n, length), int16 or int32, filled at the end with PADDING. A long text loses its end; of a pair the
        longer one does, until both fit."""
        kind = np.int16 if self.vocabulary <= np.iinfo(np.int16).max else np.int32
        rows = np.full((len(texts), length), PADDING, kind)
        seconds = [None] * len(texts) if pairs is None else self.encode(pairs)
        for row, first, second in zip(rows, self.encode(texts), seconds, strict=True):
            tokens = self._joined(first, second, length)
            row[: len(tokens)] = tokens
        return torch.from_numpy(rows)

    def _joined(self, first: list[int], second: list[int] | None, length: int) -> list[int]:
        if second is None:
            return first[:length] or [self.separator]
        room = max(length - 1, 0)
        half = room // 2
        kept = max(room - half, room - len(second))
        first = first[:kept]
        return [*first, self.separator, *second[: room - len(first)]]


def words(buckets: int) -> Encoder:
    """Lower-cased words and signs, each hashed (CRC-32) into one of `buckets`: a vocabulary that is a function of
    nothing but the settings, so that it tells nothing of anyone's texts."""
    known: dict[str, int] = {}

    def number(word: str) -> int:
        if word not in known:
            known[word] = zlib.crc32(word.encode("utf-8", "surrogatepass")) % buckets
        return known[word]

    return Encoder(lambda texts: [list(map(number, _WORDS.findall(t.lower()))) for t in texts], buckets + 1, buckets)


def utf8() -> Encoder:
    """The bytes of a text."""
    return Encoder(lambda texts: [list(text.encode("utf-8", "replace")) for text in texts], BYTES + 1, BYTES)


def pretrained(tokenizer: Any, vocabulary: int, length: int | None) -> Encoder:
    """A tokenizer of `transformers`; the end-of-text token separates. Texts are cut after `length` tokens, or never."""
    cut = {} if length is None else {"truncation": True, "max_length": length}

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        given = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False, **cut}
        encoded: list[list[int]] = tokenizer(list(texts), **given)["input_ids"]
        return encoded

    return Encoder(encode, vocabulary, int(tokenizer.eos_token_id))
