"""What `transformers` and `peft` are asked for: weights and tokenizers by name or folder, gated, and LoRA adapters."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from common.data.grant import granted
from common.data.hub import reachable
from common.errors import Sayable, SettingsError
from common.settings import shown


def located(named: str, key: str) -> str:
    """The folder or the name on the hub that the setting `key` names. Raises Denied for what the site has not
    granted."""
    folder = Path(os.path.expanduser(named))
    if granted().file(named) and folder.is_dir():
        return str(folder)
    granted().download(named, f"{key} = {shown(named)}")
    return named


@contextmanager
def transformers(named: str, what: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The library, quiet and without telemetry, with what every loading call is given: no code of others, no network
    for a folder or for nothing. `named`: what the setting names, "" if nothing is loaded; `what`: the setting. Faults
    become SettingsError."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    key = what.split(" = ", 1)[0]
    try:
        import transformers  # 0.7 s, and an extra that need not be installed
    except ImportError as error:
        raise SettingsError(f"{what} needs transformers: install the extra `text`: {error}") from None
    said: Any = transformers.logging
    level = said.get_verbosity()
    said.set_verbosity_error()
    said.disable_progress_bar()
    try:
        local = not named or Path(located(named, key)).is_dir() or not reachable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield transformers, {"trust_remote_code": False, "local_files_only": local}
    except (SettingsError, Sayable):
        raise
    except Exception as error:  # whatever network, hub, cache and file formats raise
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        if not named:
            raise SettingsError(f"{what} cannot be made: {cause}") from None
        folder = Path(located(named, key)).is_dir()
        where = "from that folder" if folder else "from the hub or its cache, and is no folder"
        raise SettingsError(f"{what} cannot be loaded {where}: {cause}") from None
    finally:
        said.set_verbosity(level)


def adapted(model: Any, rank: int, alpha: int, dropout: float, targets: list[str] | None) -> nn.Module:
    """LoRA (arXiv 2106.09685): W x + (alpha/r) B A x with trainable A (r, in) and B (out, r), all else frozen.
    `targets`: names of layers; None: those that peft knows for this kind of model."""
    try:
        import peft  # 3.8 s, and an extra that need not be installed
    except ImportError as error:
        raise SettingsError(f"task.lora_rank = {rank} needs peft: install the extra `text`: {error}") from None
    transposed = model.config.model_type == "gpt2"  # its layers hold their weights so
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, fan_in_fan_out=transposed
    )
    found: nn.Module = peft.inject_adapter_in_model(config, model)
    return found
