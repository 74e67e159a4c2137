"""Tensors in files that may be damaged, by a crash or by a disk."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from common.vector import State


class Damaged(Exception):
    """A file that holds no tensors, or cannot be read; the text says why."""


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises Damaged.

    Read once into memory of its own and not mapped: what is used is what was checked, whatever happens to the file,
    and a disk that fails is an error and not the end of the process.
    """
    try:
        content = path.read_bytes()
        state: State = load(content)
        head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except FileNotFoundError:
        raise Damaged("there is no such file") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise Damaged(f"it is damaged or cannot be read: {error}") from None
    return state, dict(head.get("__metadata__", {}))


def unshared(state: State) -> State:
    """The state with copies of tensors that share storage with one before them: a file holds each as its own."""
    first: dict[int, str] = {}
    return {
        name: value if first.setdefault(value.untyped_storage().data_ptr(), name) == name else value.clone()
        for name, value in state.items()
    }
