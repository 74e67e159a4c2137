"""Initial models: a function of the seed."""

from __future__ import annotations

import torch

from common.errors import SettingsError
from common.seeds import derive, torch_seeded
from common.tasks.base import Task
from common.vector import FlatModel


def build(task: Task, seed: int, device: torch.device | str = "cpu") -> FlatModel:
    """The task's model with the run's initial weights, flat, on `device`. Torch's own generator is left as it was.

    Raises SettingsError if the task's model cannot be built.
    """
    with torch_seeded(derive(seed, "model"), torch.device("cpu")):
        try:
            module = task.model()
        except SettingsError:
            raise
        except Exception as error:
            raise SettingsError(f"{type(task).__name__}.model() raised {type(error).__name__}: {error}") from error
    if not isinstance(module, torch.nn.Module):
        raise SettingsError(f"{type(task).__name__}.model() returned a {type(module).__name__}, not a torch.nn.Module")
    return FlatModel(module, device)
