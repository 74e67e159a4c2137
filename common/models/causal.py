"""Causal language models: those of `transformers` by their configuration or pretrained, whole or by LoRA adapters."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from common.data.tokens import Encoder, pretrained, utf8
from common.errors import SettingsError
from common.models.transformer import adapted, located, transformers
from common.settings import Opened, Section

BYTES = "bytes"
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout")
OURS = ("vocab_size", "is_decoder", "model_type", "tie_word_embeddings")


class LanguageSettings(Section):
    """The keys of `[task]` that choose a causal language model."""

    model: str = Field("gpt2", description="a kind of transformers' causal models: gpt2, llama, gpt_neox, ...")
    length: int = Field(128, ge=1, description="tokens that the model sees")
    width: int = Field(128, ge=1, description="of embeddings and states")
    layers: int = Field(4, ge=1, le=1000)
    heads: int = Field(4, ge=1, description="of attention")
    dropout: float = Field(0.0, ge=0, lt=1)
    config: dict[str, bool | int | float] = Field({}, description="further numbers of the kind's configuration")
    pretrained: Opened = Field("", description="a name on the hub or a folder; else random weights")
    tokenizer: Opened | None = Field(
        None, description="'bytes', or a name on the hub or a folder; default: that of `pretrained`, else bytes"
    )
    lora_rank: int = Field(0, ge=0, description="> 0: train adapters of that rank alone")
    lora_alpha: int = Field(32, gt=0, description="adapters are scaled by alpha/rank")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="before the adapters")
    lora_targets: list[str] = Field(
        [], description="layers with adapters; default: those that peft knows, of gpt2 c_attn"
    )
    frozen: list[str] = Field([], description="patterns of parameters' names that are not trained: transformer.wte.*")

    @model_validator(mode="after")
    def _coherent(self) -> LanguageSettings:
        shape = self.model_fields_set & {"model", "width", "layers", "heads", "config"}
        if self.pretrained and shape:
            raise ValueError(
                f"{', '.join(sorted(shape))} beside pretrained, which has its own; allowed: one of the two"
            )
        if not self.pretrained and self.width % self.heads:
            raise ValueError(f"width = {self.width} is no multiple of heads = {self.heads}")
        if not self.lora_rank and (more := self.model_fields_set & {"lora_alpha", "lora_dropout", "lora_targets"}):
            raise ValueError(f"{', '.join(sorted(more))} without lora_rank > 0")
        if self.lora_rank and self.frozen:
            raise ValueError("frozen beside lora_rank > 0, which freezes all but the adapters; allowed: one of the two")
        if ours := sorted({*OURS, "max_position_embeddings"} & self.config.keys()):
            raise ValueError(f"config: {ours[0]} follows from the other settings; leave it out")
        return self

    @property
    def what(self) -> str:
        """The setting that names the model, for errors."""
        return f"task.pretrained = {self.pretrained!r}" if self.pretrained else f"task.model = {self.model!r}"


def language_encoder(settings: LanguageSettings) -> Encoder:
    """What turns texts into the model's tokens: their bytes, or the tokens of a tokenizer."""
    named = settings.tokenizer or settings.pretrained
    if not named or named == BYTES:
        return utf8()
    key = "task.tokenizer" if settings.tokenizer else "task.pretrained"
    with transformers(named, f"{key} = {named!r}") as (library, given):
        tokenizer = library.AutoTokenizer.from_pretrained(located(named, key), **given)
    if tokenizer.eos_token_id is None:
        raise SettingsError(f"{key} = {named!r}: its tokenizer has no end-of-text token")
    return pretrained(tokenizer, len(tokenizer), None)


def language_model(settings: LanguageSettings, encoder: Encoder) -> nn.Module:
    """Tokens (b, l) -> what has logits (b, l, v). Random weights come from torch's global generator.

    Raises SettingsError for what transformers cannot make, and for a model whose outputs depend on later tokens.
    """
    with transformers(settings.pretrained, settings.what) as (library, given):
        config = _config(settings, encoder, library, given)
        make: Any = library.AutoModelForCausalLM
        if settings.pretrained:
            place = located(settings.pretrained, "task.pretrained")
            model: nn.Module = make.from_pretrained(place, config=config, use_safetensors=True, **given)
        else:
            model = make.from_config(config, trust_remote_code=False)
        if settings.lora_rank:
            targets = settings.lora_targets or (["c_attn"] if config.model_type == "gpt2" else None)
            model = adapted(model, settings.lora_rank, settings.lora_alpha, settings.lora_dropout, targets)
    _freeze(model, settings.frozen)
    _require_causal(model, settings.what)
    return model


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Those of a model of `transformers`, or of one that gives nothing else."""
    given = model(tokens)
    found: Tensor = getattr(given, "logits", given)
    return found


def _config(settings: LanguageSettings, encoder: Encoder, library: Any, given: dict[str, Any]) -> Any:
    if settings.pretrained:
        config = library.AutoConfig.from_pretrained(located(settings.pretrained, "task.pretrained"), **given)
        seen = getattr(config, "max_position_embeddings", None)
        if seen is not None and seen < settings.length:
            raise SettingsError(f"{settings.what}: it reads {seen} tokens, task.length = {settings.length} is more")
        if config.vocab_size < encoder.vocabulary:
            raise SettingsError(
                f"{settings.what}: it knows {config.vocab_size} tokens, the tokenizer has {encoder.vocabulary}"
            )
    else:
        config = _made(settings, encoder, library)
    rates = [name for name in DROPOUTS if hasattr(config, name)]
    if settings.dropout and not rates:
        raise SettingsError(f"task.dropout = {settings.dropout}: {settings.what} has none; allowed: 0")
    for name in rates:
        setattr(config, name, settings.dropout)
    config.use_cache = False
    return config


def _made(settings: LanguageSettings, encoder: Encoder, library: Any) -> Any:
    """A configuration by the settings' numbers."""
    if settings.model not in library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise SettingsError(
            f"task.model = {settings.model!r} is no causal model of transformers {library.__version__}; allowed: gpt2, "
            "llama, gpt_neox, opt, qwen2 and the like, or package.module:Net"
        )
    plain = library.AutoConfig.for_model(settings.model)
    if odd := [name for name in settings.config if not hasattr(plain, name)]:
        raise SettingsError(f"task.config: {odd[0]!r} is no number of {settings.model!r}'s configuration")
    numbers: dict[str, Any] = {
        "hidden_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "intermediate_size": 4 * settings.width,
        "max_position_embeddings": settings.length,
        "is_decoder": True,
    }
    fitting = {name: value for name, value in numbers.items() if hasattr(plain, name)}
    if settings.model == "gpt2":
        fitting.pop("is_decoder", None)
    ends = {"bos_token_id": encoder.separator, "eos_token_id": encoder.separator, "pad_token_id": None}
    return library.AutoConfig.for_model(
        settings.model, **{"vocab_size": encoder.vocabulary, **ends, **fitting, **settings.config}
    )


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    named = dict(model.named_parameters())
    for pattern in patterns:
        chosen = [name for name in named if fnmatchcase(name, pattern)]
        if not chosen:
            raise SettingsError(
                f"task.frozen: {pattern!r} is no parameter of this model; it has {', '.join(list(named)[:3])}, ..."
            )
        for name in chosen:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise SettingsError(f"task.frozen = {patterns!r} leaves nothing to train")


def _require_causal(model: nn.Module, what: str) -> None:
    """What is said of a token may not change with the next one: else the model reads what it has to tell."""
    training = model.training
    model.eval()
    with torch.no_grad():
        first = logits(model, torch.tensor([[0, 1], [0, 2]]))[:, 0].float()
    model.train(training)
    if not torch.allclose(first[0], first[1], rtol=1e-3, atol=1e-4):
        raise SettingsError(f"{what} looks at later tokens: it is no causal model")
