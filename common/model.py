"""Initial models: a function of the seed; and which of their parts are personal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from common.errors import SettingsError
from common.seeds import derive, torch_seeded
from common.tasks.base import Task
from common.vector import DTYPES, FlatModel, Slot, dtype_name

KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "batch-norm": (nn.modules.batchnorm._BatchNorm,),
    "layer-norm": (nn.LayerNorm,),
    "group-norm": (nn.GroupNorm,),
}

FLOATS = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}


def build(
    task: Task,
    seed: int,
    device: torch.device | str = "cpu",
    personal: Sequence[str] = (),
    check: Callable[[Task, nn.Module], None] = lambda task, module: None,
) -> FlatModel:
    """The task's model with the run's initial weights, flat, on `device`; `personal`: parts that are not shared, as in
    `[personal] parts`. Torch's own generator is left as it was.

    Raises SettingsError if the task's model cannot be built, is not one that `check` lets pass or has no such part.
    """
    with torch_seeded(derive(seed, "model"), torch.device("cpu")):
        try:
            module = task.model()
        except SettingsError:
            raise
        except Exception as error:
            raise SettingsError(f"{type(task).__name__}.model() raised {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise SettingsError(f"{type(task).__name__}.model() returned a {type(module).__name__}, not a torch.nn.Module")
    check_tensors(module, f"{type(task).__name__}.model()")
    check(task, module)
    return FlatModel(module, device, personal_names(task, module, personal))


def check_tensors(module: nn.Module, source: str) -> None:
    """Raise SettingsError, with the `source` of the module, for a parameter or buffer that no round could carry: one
    without values as yet, of a dtype that does not travel, or a trainable one that is not finite.

    Buffers may be infinite, as causal masks are. Those that are no part of the module's state may be of any dtype: each
    process has its own.
    """
    state = module.state_dict(keep_vars=True).keys()
    named = [("parameter", name, p) for name, p in module.named_parameters()]
    named += [("buffer", name, b) for name, b in module.named_buffers() if name in state]
    for kind, name, tensor in named:
        what = f"{source}: {kind} {name!r}"
        if is_lazy(tensor):
            raise SettingsError(f"{what} has no shape before a first batch: give its layer the size of its inputs")
        if tensor.is_meta:
            raise SettingsError(f"{what} is on the device 'meta' and has no values")
        dtype, allowed = dtype_name(tensor.dtype), FLOATS if kind == "parameter" else DTYPES
        if dtype not in allowed or tensor.layout != torch.strided:
            told = dtype if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.")
            raise SettingsError(f"{what} is {told}; allowed: dense tensors of {', '.join(allowed)}")
        if tensor.requires_grad and not bool(torch.isfinite(tensor).all()):
            raise SettingsError(f"{what} holds NaN or Inf at the start")


def personal_names(task: Task, module: nn.Module, parts: Sequence[str]) -> set[str]:
    """Names of the parameters and buffers that `parts` select: normalization layers and the task's output layer by
    module, everything else by patterns of names. What is frozen is alike everywhere, and no part.

    Raises SettingsError for a part that selects nothing.
    """
    trainable = (name for name, parameter in module.named_parameters() if parameter.requires_grad)
    tensors = {*trainable, *(name for name, _ in module.named_buffers())}
    selected: set[str] = set()
    for part in parts:
        found = _part(task, module, tensors, part)
        if not found:
            kinds = [kind for kind in (*KINDS, "head") if _part(task, module, tensors, kind)]
            allowed = ", ".join([*kinds, "patterns of names like " + ", ".join(sorted(tensors)[:3])])
            raise SettingsError(f"personal.parts: {part!r} is no part of this model; allowed: {allowed}")
        selected |= found
    return selected


def _part(task: Task, module: nn.Module, tensors: set[str], part: str) -> set[str]:
    """Those of `tensors` that a part selects."""
    if part not in KINDS and part != "head":
        return {name for name in tensors if fnmatchcase(name, part)}
    head = task.output_layer(module) if part == "head" else None
    chosen = [n for n, m in module.named_modules() if m is head or isinstance(m, KINDS.get(part, ()))]
    return {name for name in tensors if any(name.startswith(f"{prefix}.") for prefix in chosen)}


def matrix_slots(task: Task, model: FlatModel, part: Literal["all", "shared", "personal"]) -> list[Slot]:
    """What matrix optimizers (Muon, SOAP) treat as matrices in a part of the model, relative to its vector: tensors of
    two or more dimensions, but for embeddings and the output layer, whose rows are classes or words."""
    module = model.module
    excluded = {id(task.output_layer(module))} | {id(m) for m in module.modules() if isinstance(m, nn.Embedding)}
    rows = {
        f"{name}.{key}" for name, m in module.named_modules() if id(m) in excluded for key, _ in m.named_parameters()
    }
    shift = len(model.vector) if part == "all" else 0
    own = [(name, Slot(s.start + shift, s.stop + shift, s.shape)) for name, s in model.personal_layout.items()]
    chosen = [*(model.layout.items() if part != "personal" else ()), *(own if part != "shared" else ())]
    return [slot for name, slot in chosen if len(slot.shape) > 1 and name not in rows]
