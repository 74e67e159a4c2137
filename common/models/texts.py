"""Models of texts: a bag of words, an LSTM, GPT-2 with all its weights or with LoRA adapters."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from common.data.tokens import Encoder, pretrained, utf8, words
from common.errors import SettingsError
from common.models.transformer import adapted, located, transformers
from common.settings import Opened, Section

GPT2_ONLY = ("heads", "pretrained", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
DEFAULTS: dict[str, dict[str, int]] = {
    "bag": {"width": 32, "vocabulary": 16384},
    "lstm": {"width": 128, "layers": 1, "vocabulary": 16384},
    "gpt2": {"width": 768, "layers": 12, "heads": 12},
}
TARGETS = ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")


class ModelSettings(Section):
    """The keys of `[task]` that choose a model of texts."""

    model: Literal["bag", "lstm", "gpt2"] = Field("bag", description="gpt2 needs the extra `text`")
    length: int = Field(128, ge=1, description="tokens of a text; what is longer is cut")
    vocabulary: int | None = Field(None, ge=1, description="bag, lstm: buckets that words are hashed into")
    width: int | None = Field(None, ge=1, description="of embeddings and states; default 32 (bag), 128 (lstm), 768")
    layers: int | None = Field(None, ge=1, le=1000, description="of lstm and gpt2; default 1, 12")
    heads: int | None = Field(None, ge=1, description="of gpt2; default 12")
    dropout: float | None = Field(None, ge=0, lt=1, description="default 0, of gpt2 0.1")
    pretrained: Opened = Field(
        "", description="gpt2: a name on the hub or a folder; else random weights and bytes as tokens"
    )
    lora_rank: int = Field(0, ge=0, description="> 0: train adapters of that rank and the output layer alone")
    lora_alpha: int = Field(32, gt=0, description="adapters are scaled by alpha/rank")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="before the adapters")
    lora_targets: list[str] = Field(["c_attn"], min_length=1, description=f"layers with adapters: {', '.join(TARGETS)}")

    @model_validator(mode="after")
    def _coherent(self) -> ModelSettings:
        allowed = {"dropout", *DEFAULTS[self.model], *(GPT2_ONLY if self.model == "gpt2" else ())}
        for key in ("vocabulary", "width", "layers", "dropout", *GPT2_ONLY):
            if key in self.model_fields_set and key not in allowed:
                owners = [name for name in DEFAULTS if key in DEFAULTS[name] or (name == "gpt2" and key in GPT2_ONLY)]
                raise ValueError(f"{key} belongs to model {' and '.join(map(repr, owners))}, not to {self.model!r}")
        shape = self.model_fields_set & {"width", "layers", "heads"}
        if self.pretrained and shape:
            raise ValueError(
                f"{', '.join(sorted(shape))} beside pretrained, which has its own; allowed: one of the two"
            )
        if self.model == "gpt2" and self.size("width") % self.size("heads"):
            raise ValueError(f"width = {self.size('width')} is no multiple of heads = {self.size('heads')}")
        if not self.lora_rank and (more := self.model_fields_set & {"lora_alpha", "lora_dropout", "lora_targets"}):
            raise ValueError(f"{', '.join(sorted(more))} without lora_rank > 0")
        if unknown := [each for each in self.lora_targets if each not in TARGETS]:
            raise ValueError(f"lora_targets: {unknown[0]!r} is no layer of gpt2; allowed: {', '.join(TARGETS)}")
        return self

    def size(self, key: str) -> int:
        """`width`, `layers`, `heads` or `vocabulary`, with the model's default."""
        given: int | None = getattr(self, key)
        return DEFAULTS[self.model][key] if given is None else given


def encoder(settings: ModelSettings) -> Encoder:
    """What turns texts into the model's tokens."""
    if settings.model != "gpt2":
        return words(settings.size("vocabulary"))
    if not settings.pretrained:
        return utf8()
    with _transformers(settings) as (library, given):
        config = library.AutoConfig.from_pretrained(located(settings.pretrained, "task.pretrained"), **given)
        tokenizer = library.AutoTokenizer.from_pretrained(located(settings.pretrained, "task.pretrained"), **given)
    _check_config(settings, config)
    if tokenizer.eos_token_id is None:
        raise SettingsError(f"task.pretrained = {settings.pretrained!r}: its tokenizer has no end-of-text token")
    return pretrained(tokenizer, config.vocab_size, settings.length)


def text_model(settings: ModelSettings, classes: int, vocabulary: int) -> nn.Module:
    """Tokens (b, l), filled with PADDING, -> logits (b, classes). Random weights come from torch's global generator."""
    if settings.model == "gpt2":
        return _gpt2(settings, classes, vocabulary)
    width, dropout = settings.size("width"), settings.dropout or 0.0
    if settings.model == "bag":
        return Bag(vocabulary, width, classes, dropout)
    return Lstm(vocabulary, width, settings.size("layers"), classes, dropout)


class Bag(nn.Module):
    """The mean of the words' vectors, and a linear layer: fastText's classifier (arXiv 1607.01759) without n-grams."""

    def __init__(self, vocabulary: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.uniform_(self.embedding.weight, -1 / width, 1 / width)  # fastText's: rare words stay near nothing
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        known = tokens >= 0
        vectors = self.embedding(tokens.clamp(min=0)) * known.unsqueeze(-1)
        mean = vectors.sum(1) / known.sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.score(self.dropout(mean))
        return logits


class Lstm(nn.Module):
    """LSTM over the words' vectors; its state after the last word, and a linear layer."""

    def __init__(self, vocabulary: int, width: int, layers: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = recurrent(width, width, layers)
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        states = self.lstm(self.embedding(tokens.clamp(min=0)))[0]
        logits: Tensor = self.score(self.dropout(_last(states, tokens)))
        return logits


class Gpt2(nn.Module):
    """As `GPT2ForSequenceClassification`, with its names of parameters: the output layer reads the last token that is
    no padding. It reads that one alone, so that its input is the representation (b, width)."""

    def __init__(self, transformer: nn.Module, score: nn.Linear) -> None:
        super().__init__()
        self.transformer = transformer
        self.score = score

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        known = (tokens >= 0).long()
        given = {"input_ids": tokens.clamp(min=0), "attention_mask": known, "use_cache": False}
        states = self.transformer(**given).last_hidden_state
        logits: Tensor = self.score(_last(states, tokens))
        return logits


def recurrent(inputs: int, width: int, layers: int) -> nn.LSTM:
    """(b, l, inputs) -> states (b, l, width). In one flat vector its weights do not lie as cuDNN wants them: it copies
    them once a call, little beside the steps, and would warn."""
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)
    return nn.LSTM(inputs, width, layers, batch_first=True)


def _last(states: Tensor, tokens: Tensor) -> Tensor:
    """The state (b, width) at each text's last token."""
    places = (tokens >= 0).sum(1).sub(1).clamp(min=0)
    return states[torch.arange(len(tokens), device=tokens.device), places]


def _gpt2(settings: ModelSettings, classes: int, vocabulary: int) -> nn.Module:
    with _transformers(settings) as (library, given):
        rate = 0.1 if settings.dropout is None else settings.dropout
        rates = {"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate}
        if settings.pretrained:
            given |= {"use_safetensors": True, "num_labels": classes, **rates}
            whole = library.GPT2ForSequenceClassification.from_pretrained(
                located(settings.pretrained, "task.pretrained"), **given
            )
        else:
            config = library.GPT2Config(
                vocab_size=vocabulary,
                n_positions=settings.length,
                n_embd=settings.size("width"),
                n_layer=settings.size("layers"),
                n_head=settings.size("heads"),
                num_labels=classes,
                bos_token_id=vocabulary - 1,
                eos_token_id=vocabulary - 1,
                **rates,
            )
            whole = library.GPT2ForSequenceClassification(config)
    transformer: nn.Module = whole.transformer
    if settings.lora_rank:
        transformer = adapted(
            transformer, settings.lora_rank, settings.lora_alpha, settings.lora_dropout, list(settings.lora_targets)
        )
    return Gpt2(transformer, whole.score)


def _check_config(settings: ModelSettings, config: Any) -> None:
    what = f"task.pretrained = {settings.pretrained!r}"
    if config.model_type != "gpt2":
        raise SettingsError(f"{what}: a model of type {config.model_type!r}; allowed: 'gpt2'")
    if config.n_positions < settings.length:
        raise SettingsError(f"{what}: it reads {config.n_positions} tokens, task.length = {settings.length} is more")


def _transformers(settings: ModelSettings) -> AbstractContextManager[tuple[Any, dict[str, Any]]]:
    what = f"task.pretrained = {settings.pretrained!r}" if settings.pretrained else f"task.model = {settings.model!r}"
    return transformers(settings.pretrained, what)
