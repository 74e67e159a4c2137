"""The registry of tasks. Modules load when they are named, so that importing this one is cheap."""

from __future__ import annotations

from pkgutil import resolve_name

from common.errors import Sayable, SettingsError, not_one_of
from common.experiment import PartitionSettings, TaskSettings
from common.own import cause, load
from common.tasks.base import Task

# name in `[task]` -> "module:class or function"; each is called as (options, partition, seed).
TASKS = {
    "digits": "common.tasks.digits:Digits",
    "quadratic": "common.tasks.quadratic:Quadratic",
    "table": "common.tasks.table:Table",
    "images": "common.tasks.images:images",
    "npz": "common.tasks.images:npz",
    "cifar10": "common.tasks.images:cifar10",
    "cifar100": "common.tasks.images:cifar100",
    "tinyimagenet": "common.tasks.images:tinyimagenet",
    "femnist": "common.tasks.images:femnist",
    "emnist": "common.tasks.images:emnist",
    "mnist": "common.tasks.images:mnist",
    "regression": "common.tasks.targets:Regression",
    "multilabel": "common.tasks.targets:Multilabel",
    "segmentation": "common.tasks.segmentation:Segmentation",
    "causal-lm": "common.tasks.causal:CausalLM",
    "shakespeare": "common.tasks.shakespeare:Shakespeare",
    "text": "common.tasks.text:Text",
    "agnews": "common.tasks.text:AgNews",
    "20news": "common.tasks.text:Newsgroups",
    "sst2": "common.tasks.text:Sst2",
    "qnli": "common.tasks.text:Qnli",
    "qqp": "common.tasks.text:Qqp",
}


def create(settings: TaskSettings, partition: PartitionSettings, seed: int) -> Task:
    """The task that `settings` names: one of `TASKS`, or one's own as "package.module:function".

    A function of one's own is called as `function(options, partition, seed)`, where `options` (dict) are the
    keys of `[task]` beside `name`, and returns a `Task`.

    Raises SettingsError for an unknown name or key, for data that cannot be used, and for whatever goes wrong
    in a function of one's own; Denied, before it is imported, for one that the site has not allowed.
    """
    if settings.name in TASKS:
        from common.tasks.parts import fitted, taken  # partitions and models, which a list of names does without

        options, parts = taken(settings.options)
        task = resolve_name(TASKS[settings.name])(options, partition, seed)
        assert isinstance(task, Task)
        return fitted(task, parts)
    if ":" not in settings.name:
        raise not_one_of("task.name", settings.name, [*TASKS, "package.module:function"])
    return _custom(settings, partition, seed)


def _custom(settings: TaskSettings, partition: PartitionSettings, seed: int) -> Task:
    function, what = load(settings.name, "task.name", "function"), f"task.name = {settings.name!r}"
    if not callable(function):
        raise SettingsError(f"{what} is not a function but {type(function).__name__}: {function!r}")
    try:
        task = function(settings.options, partition, seed)
    except Sayable:
        raise
    except Exception as error:
        raise SettingsError(f"{what} with {settings.options} failed: {cause(error)}") from error
    if not isinstance(task, Task):
        raise SettingsError(f"{what} must return a common.tasks.base.Task; it returned {type(task).__name__}: {task!r}")
    if partition.shift != "none" and not task.shifts:
        raise SettingsError(
            f"partition.shift = {partition.shift!r}: {type(task).__name__} shifts no data; allowed: 'none', or a task "
            "made of common.tasks.supervised.Supervised"
        )
    return task
