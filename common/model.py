"""Initial models: a function of the seed; and which of their parts are personal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from common.errors import Sayable, SettingsError
from common.seeds import derive, torch_seeded
from common.tasks.base import Task
from common.vector import BUFFERS, DTYPES, PERSONAL, Layout, Slot, State, dtype_name, layout_of, raw_bytes

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
        except (SettingsError, Sayable):
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
    named: list[tuple[str, str, Tensor]] = [("parameter", name, p) for name, p in module.named_parameters()]
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


def _adopt(tensors: Sequence[tuple[str, Tensor]], layout: Layout, device: torch.device) -> Tensor:
    """One vector that holds all the tensors; each tensor's storage becomes a view into it."""
    vector = torch.cat([tensor.detach().to(device).reshape(-1) for _, tensor in tensors])
    for name, tensor in tensors:
        tensor.data = layout[name].view(vector)
    return vector


class FlatModel:
    """A module whose trainable parameters, gradients and buffers are views into flat vectors.

    What `personal` names (parameters and buffers) stays with each client: those parameters lie behind the shared ones.

    Attributes: `module`; `whole` (d + k,) all trainable parameters and `whole_gradient`; `vector` (d,) and `gradient`
    (d,) their shared part; `layout` name -> slot in it; `personal_layout` name -> slot in the part behind it;
    `buffers` "buffers.<dtype>" -> vector of the shared ones; `layout_hash` over names, shapes and dtypes of what is
    shared and the values of frozen tensors.

    Raises SettingsError if nothing trainable is shared or the trainable parameters have more than one dtype.
    """

    def __init__(
        self, module: nn.Module, device: torch.device | str = "cpu", personal: Collection[str] = frozenset()
    ) -> None:
        device = torch.device(device)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
        # One of 0 elements has nothing to train: it is as if frozen.
        frozen = [(name, p) for name, p in module.named_parameters() if not (p.requires_grad and p.numel())]
        if not trainable:
            raise SettingsError("the model has no trainable parameters: there is nothing to train")
        dtypes = sorted({dtype_name(p.dtype) for _, p in trainable})
        if len(dtypes) != 1:
            raise SettingsError(f"the trainable parameters must share one dtype, this model has: {dtypes}")
        shared = [(name, p) for name, p in trainable if name not in personal]
        own = [(name, p) for name, p in trainable if name in personal]
        if not shared:
            raise SettingsError("all trainable parameters are personal: there is nothing to share")
        self.module = module
        self.layout, self.personal_layout = layout_of(shared), layout_of(own)
        # Recomputed buffers (`persistent=False`) are no part of a model's state.
        persistent = module.state_dict().keys()
        named = [(name, b) for name, b in module.named_buffers() if name in persistent]
        common = [(name, b) for name, b in module.named_buffers() if name not in personal]
        self.layout_hash = _layout_hash(shared, frozen, common)
        module.to(device)
        self.whole = _adopt([*shared, *own], layout_of([*shared, *own]), device)
        self.whole_gradient = torch.zeros_like(self.whole)
        size = sum(p.numel() for _, p in shared)
        self.vector, self.gradient = self.whole[:size], self.whole_gradient[:size]
        self._parameters = [(p, slot) for (_, p), slot in zip([*shared, *own], self._slots(), strict=True)]
        for parameter, slot in self._parameters:
            parameter.grad = slot.view(self.whole_gradient)
        self.buffer_layouts: dict[str, Layout] = {}
        self.buffers = self._adopt_buffers([each for each in named if each[0] not in personal], BUFFERS, device)
        own_buffers = self._adopt_buffers([each for each in named if each[0] in personal], PERSONAL + BUFFERS, device)
        self.personal: State = {**({PERSONAL + "parameters": self.whole[size:]} if own else {}), **own_buffers}
        self._initial = {name: value.clone() for name, value in self.personal.items()}

    def _slots(self) -> list[Slot]:
        """Where all trainable parameters lie in `whole`."""
        size = max(slot.stop for slot in self.layout.values())
        own = self.personal_layout.values()
        return [*self.layout.values(), *(Slot(slot.start + size, slot.stop + size, slot.shape) for slot in own)]

    def _adopt_buffers(self, named: Sequence[tuple[str, Tensor]], prefix: str, device: torch.device) -> State:
        """One vector for each dtype."""
        state: State = {}
        for dtype in sorted({dtype_name(b.dtype) for _, b in named}):
            group = [(name, b) for name, b in named if dtype_name(b.dtype) == dtype]
            layout = self.buffer_layouts[prefix + dtype] = layout_of(group)
            state[prefix + dtype] = _adopt(group, layout, device)
        return state

    def load(self, vector: Tensor, buffers: State) -> None:
        """Copy the shared parameters (d,) and buffers in; never keeps a reference."""
        self.vector.copy_(vector)
        for name, own in self.buffers.items():
            own.copy_(buffers[name])

    def load_personal(self, state: State) -> None:
        """Copy one client's personal part in; what `state` does not hold is as at the run's start."""
        for name, own in self.personal.items():
            own.copy_(state.get(name, self._initial[name]))

    @contextmanager
    def trial(self) -> Iterator[nn.Module]:
        """The module in training mode, for a pass that counts for nothing: buffers and random numbers are afterwards as
        before."""
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            with torch_seeded(0, self.vector.device):
                self.module.train()
                yield self.module
        finally:
            for buffer, before in buffers:
                buffer.data.copy_(before)

    def check_views(self) -> None:
        """Raise if the module replaced a parameter's storage or gradient, which would train a copy unseen."""
        size = self.whole.element_size()
        for parameter, slot in self._parameters:
            offset = slot.start * size
            grad = parameter.grad
            if parameter.data_ptr() != self.whole.data_ptr() + offset or (
                grad is None or grad.data_ptr() != self.whole_gradient.data_ptr() + offset
            ):
                raise RuntimeError(
                    "the model replaced a parameter's storage or gradient during training (a call of .to(), .half() "
                    "or zero_grad(set_to_none=True) inside forward?): train it in place"
                )

    def named_tensors(self) -> dict[str, Tensor]:
        """Copies of all tensors of `module.state_dict()` on the CPU: they load into the plain torch model."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}


def _layout_hash(trainable: Sequence[Any], frozen: Sequence[Any], buffers: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for kind, named in (("trainable", trainable), ("frozen", frozen), ("buffer", buffers)):
        for name, tensor in named:
            digest.update(f"{kind} {name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)}\n".encode())
    for _, tensor in frozen:
        digest.update(raw_bytes(tensor.detach()))
    return digest.hexdigest()[:16]
