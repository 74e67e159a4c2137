"""A run in words, for the person who is to approve it: what is done here, what leaves the site and what stays.

Nothing that the experiment names is imported, opened or fetched for this; what is shown of it is one printable line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common import tasks
from common.data.grant import NOTHING, granting
from common.data.named_images import DATASETS
from common.deploy.checks import within
from common.experiment import Experiment, PartitionSettings, TaskSettings
from common.model import personal_names
from common.settings import printable
from common.tasks import TASKS
from strategies.protocol.algorithm import Algorithm
from strategies.registry import settled

MOST_LINE = 600
SOURCES = {"file", "test_file", "download", "pooled", "limit"}
"""Keys of `[task]` that a model does not depend on where shape and classes are given."""
LARGEST, BUILD_S = 100_000, 10.0
"""A number in `[task]` beyond which no model is built only to be counted, and how long that may take."""
PRIVACY = (
    "none. There is no secure aggregation and no differential privacy: whoever runs the server can read every upload "
    "of this site and may learn from it about single examples"
)


@dataclass(frozen=True)
class Size:
    """Of a model: parameters that are trained and shared, their bytes, and those of buffers such as BatchNorm's."""

    parameters: int
    bytes: int
    buffers: int


def described(experiment: Experiment, shares_labels: bool | None = None) -> list[tuple[str, str]]:
    """Headings and what stands under them, one line each, of a settled or unsettled experiment.

    `shares_labels`: whether class counts leave this site, None if that is not known here. Raises SettingsError for an
    algorithm that does not exist.
    """
    strategy, whole = settled(experiment)
    size = _size(whole, strategy)
    lines = {
        "experiment": f"{whole.name}, seed {whole.seed}",
        "task": _task(whole.task),
        "reads": _opens(whole),
        "model": _model(whole, size),
        "algorithm": _algorithm(whole),
        "rounds": _rounds(whole),
        "work a round": _work(whole, strategy),
        "leaves once": _once(shares_labels) + _summed(whole.task),
        "leaves a round": _upload(whole, strategy, size),
        "leaves beside": _evaluation(whole, strategy),
        "stays": _stays(whole, strategy),
        "privacy": PRIVACY,
    }
    return [(heading, plain(text)) for heading, text in lines.items()]


def plain(text: str, most: int = MOST_LINE) -> str:
    """One line that drives no terminal: a server may have written parts of it."""
    line = printable(text[:most])
    return line if len(text) <= most else f"{line}... ({len(text)} letters)"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {plain(str(value), 100)}" for key, value in options.items())


def _task(task: TaskSettings) -> str:
    own = _options(task.options)
    if task.name in TASKS:
        return f"{task.name}, of this project{f'; {own}' if own else ''}"
    return f"{task.name}: CODE OF ITS OWN, to be reviewed by this site{f'; {own}' if own else ''}"


def _opens(experiment: Experiment) -> str:
    """What is opened or fetched at this site beside --data, if the policy lets it."""
    options = experiment.task.options
    files = {key: options[key] for key in ("file", "pretrained") if options.get(key)}
    named = [f"task.{key} = {plain(str(value), 100)}" for key, value in files.items()]
    if experiment.partition.file:
        named.append(f"partition.file = {plain(experiment.partition.file, 100)}")
    if experiment.speed.file or experiment.presence.file:
        named.append("files of [speed] and [presence], at the server alone")
    if options.get("test_file"):
        named.append("a test set (task.test_file), at the server alone")
    if options.get("download"):
        named.append("a download (task.download)")
    elif experiment.task.name in DATASETS or (experiment.task.name in TASKS and experiment.task.name not in _PLAIN):
        named.append(f"the data set {experiment.task.name} of this machine, or its download, as the policy says")
    if experiment.task.name not in TASKS:
        named.append("whatever that code opens")
    return "the site's own data (--data); " + ("; ".join(named) if named else "nothing else")


_PLAIN = {"digits", "quadratic", "images", "npz", "text", "table"}
"""Tasks that name no public data set."""


def _model(experiment: Experiment, size: Size | None) -> str:
    chosen = experiment.task.options.get("model")
    kind = f"{chosen}, " if isinstance(chosen, str) else ""
    personal = experiment.personal.parts
    parts = f"; stays with each site: {_options({'parts': personal})}" if personal else ""
    if size is None:
        return f"{kind}its size shows only when it is built{parts}"
    return f"{kind}{size.parameters:,} shared parameters, {_mb(size.bytes)}{parts}"


def _algorithm(experiment: Experiment) -> str:
    options, local = _options(experiment.strategy.options), experiment.local
    name = f"{experiment.strategy.name}{f' ({options})' if options else ''}"
    return f"{name}; at the site {local.optimizer}, rate {local.lr:g}"


def _rounds(experiment: Experiment) -> str:
    sample = experiment.round.sample
    asked = f"{sample} clients drawn by the seed in each" if sample else "all clients in each"
    more = f" and {experiment.round.over_select} more" if experiment.round.over_select else ""
    return f"{experiment.rounds:,}; {asked}{more}"


def _work(experiment: Experiment, strategy: Algorithm) -> str:
    local = experiment.local
    passes = f"{local.epochs:,} pass{'es' if local.epochs > 1 else ''} over this site's training examples"
    amount = f"{local.steps:,} step{'s' if local.steps > 1 else ''}" if local.steps else passes
    amount += f", {strategy.passes} times over" if strategy.passes > 1 else ""
    return f"{amount}, batches of {local.batch_size:,}, {local.threads} CPU thread{'s' if local.threads > 1 else ''}"


def _once(shares_labels: bool | None) -> str:
    labels = {
        True: "class counts",
        False: "no class counts",
        None: "class counts only if the policy says share_labels = true",
    }[shares_labels]
    return (
        "when it joins: its name, numbers of training and evaluation examples and of local steps, device, versions and "
        "kind of processor; a short hash of what its data look like (names and kinds of columns, shapes), unless the "
        f"policy says share_schema = false; {labels}; sums over its data where the policy says statistics = true"
    )


def _summed(task: TaskSettings) -> str:
    """The sums over the site's training data that a run cannot do without."""
    options = task.options
    if task.name != "table" or (options.get("standardize") is not True and options.get("missing") != "mean"):
        return ""
    return "; this run asks for such sums before round 1: count, mean and deviation of its columns of numbers"


def _upload(experiment: Experiment, strategy: Algorithm, size: Size | None) -> str:
    kinds = {**strategy.survey, **strategy.payload, **strategy.expects({})}
    vectors = [name for name, kind in kinds.items() if kind != "scalar"]
    scalars = [name for name, kind in kinds.items() if kind == "scalar"]
    count = f"{len(vectors)} vector{'s' if len(vectors) > 1 else ''} as long as the shared model ({', '.join(vectors)})"
    if size is not None:
        count += f", {_mb(len(vectors) * size.bytes)}"
        count += f"; buffers such as BatchNorm's statistics, {_mb(size.buffers)}" if size.buffers else ""
    if not vectors:
        count = "nothing of its model: neither weights nor their changes, nor statistics of their layers"
    sent = experiment.compression
    if vectors and sent.up not in ("none", "identity"):
        ratio = f", {sent.ratio:g} of the entries" if sent.up in ("top-k", "random-k") else ""
        count += f", before compression ({sent.up}{ratio})"
    numbers = ["number of examples", "number of steps", "mean training loss", "seconds of training", *scalars]
    return f"{count}; numbers: {', '.join(numbers)}"


def _evaluation(experiment: Experiment, strategy: Algorithm) -> str:
    given = experiment.evaluate
    if given.clients == "none":
        return "nothing: no evaluation at sites"
    who = {"auto": "where the server has no test set", "sampled": "if it was drawn", "all": "always"}[given.clients]
    when = "every round" if given.every == 1 else f"every {given.every:,} rounds"
    model = "its own model" if strategy.own_models(experiment) else "the global model"
    return (
        f"{when}, {who}: means of {model}'s metrics (loss, accuracy) over this site's evaluation examples, their number"
        + (f"; sums for {', '.join(given.metrics)}" if given.metrics else "")
    )


def _stays(experiment: Experiment, strategy: Algorithm) -> str:
    kind = strategy.memory_kind(experiment)
    memory = {"none": "", "bound": "; what it remembers between rounds", "own": "; what it remembers between rounds"}[
        kind
    ]
    own = "; a whole model of its own" if strategy.personal and kind != "none" else ""
    return f"examples, labels, names of files and columns, single predictions{own}{memory}"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f} MB" if size >= 5000 else f"{size:,} bytes"


def _size(experiment: Experiment, strategy: Algorithm) -> Size | None:
    """The model's size where that is known without any data: shapes alone are made, under a grant of nothing."""
    task = experiment.task
    if task.name not in TASKS or any(_large(value) for value in task.options.values()):
        return None
    try:
        return within(BUILD_S, lambda: _counted(experiment))
    except Exception:  # whatever a task makes of settings that somebody else wrote
        return None


def _counted(experiment: Experiment) -> Size:
    options = experiment.task.options
    if options.get("shape") is not None and options.get("classes") is not None:
        options = {key: value for key, value in options.items() if key not in SOURCES} | {"pooled": False}
    elif experiment.task.name in (*DATASETS, "table"):
        options = {key: value for key, value in options.items() if key not in SOURCES}
    with granting(NOTHING):
        task = tasks.create(TaskSettings(name=experiment.task.name, **options), PartitionSettings(), experiment.seed)
        with torch.device("meta"):
            module = task.model()
        personal = personal_names(task, module, experiment.personal.parts)
    shared = [p for name, p in module.named_parameters() if p.requires_grad and name not in personal]
    kept = module.state_dict(keep_vars=True).keys()
    buffers = [b for name, b in module.named_buffers() if name in kept and name not in personal]
    return Size(
        sum(p.numel() for p in shared),
        sum(p.numel() * p.element_size() for p in shared),
        sum(b.numel() * b.element_size() for b in buffers),
    )


def _large(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > LARGEST or any(map(_large, value))
    return isinstance(value, int | float) and not abs(value) <= LARGEST
