"""Tables by the names of their columns: classes or numbers from numbers and categories, standardized or as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from common.data.arrays import drawn
from common.data.columns import Columns, class_names, class_numbers, listed, numbers, part_of, read_columns, text_of
from common.data.examples import ClientData, Examples
from common.data.moments import Census, factors
from common.data.places import find
from common.data.places import own as own_file
from common.data.rows import GROUPS, LABELS
from common.data.tables import header
from common.errors import ExperimentError, MessageError, SettingsError, SiteError
from common.experiment import PartitionSettings
from common.models.images import check_network, network
from common.settings import Opened, Section, checked
from common.tasks.classification import Classification

Declared = list[str | int | bool]


class TableSettings(Section):
    """`[task] name = "table"`."""

    file: Opened | None = Field(None, description="table, or folder of tables; without one every client brings its own")
    test_file: Opened | None = Field(None, description="the server's test set, read there alone")
    inputs: list[str] | None = Field(None, description="columns, in the model's order; default: all others of `file`")
    target: str | None = Field(None, description="column to predict; default: the first known one, as label")
    predict: Literal["class", "number"] = "class"
    classes: Annotated[int, Field(ge=1)] | Declared | None = Field(
        None, description="how many (0, 1, ...), or their names; default: from `file`. Needed where clients bring data"
    )
    drop: list[str] = Field([], description="columns that are no inputs, where `inputs` does not say which are")
    group: str | None = Field(None, description="column of a natural split; default: the first known one, as client")
    categories: dict[str, Declared] = Field({}, description="column -> its values; each becomes an input of 0 or 1")
    standardize: bool | dict[str, list[float]] = Field(
        False, description="true: by mean and deviation over all training parts; or column -> [mean, deviation]"
    )
    missing: Literal["mean"] | float | None = Field(
        None, description="stands for a cell without a value: the mean of all training parts, or a number"
    )
    model: Literal["mlp", "linear"] = "mlp"
    width: int = Field(64, ge=1, description="hidden units of the mlp")
    norm: Literal["none", "batch", "group"] = Field("none", description="of the mlp's hidden layer")
    projection: int | None = Field(None, ge=1, description="moon: width of a projection head before the output layer")
    extractor: int | None = Field(None, ge=1, description="pfedafm: width of a shared extractor beside the mlp")
    dtype: Literal["float32", "float64"] = "float32"
    limit: int | None = Field(None, ge=1, description="at most so many training and test examples, by the seed")


class Table(Classification):
    """Rows of tables, (n, d) in float64 as they are read; what the model gets of a batch is standardized in float64 and
    then in `dtype`, so that a column far from 0 loses nothing.

    Columns are found by name, wherever they stand in a site's file. `predict` = "number": mean squared error, of a
    standardized target in units of its deviation; what is measured is in its own units.
    """

    def __init__(self, options: dict[str, Any], partition: PartitionSettings, seed: int) -> None:
        self.settings = given = checked(TableSettings, options, "[task]")
        super().__init__(partition, seed, given.dtype)
        self._check_words()
        if self.numeric:
            self.metric_kind, self.headline, self.takes_loss = "numbers", "mse", False
        scaled = self.how.numbers
        if self.numeric and given.standardize is True:
            scaled = (*scaled, self.how.target)
        known = given.standardize if isinstance(given.standardize, dict) else {}
        self._check_given(known)
        if (given.standardize is True and scaled) or (given.missing == "mean" and set(self.how.numbers) - known.keys()):
            self.census = Census(scaled, self._values)
        norm, model = given.norm, "mlp" if given.model == "linear" else given.model
        check_network(model, (self.size,), norm, 2, given.width, given.projection, given.extractor, None)
        if given.model == "linear" and (norm != "none" or given.projection or given.extractor):
            raise ExperimentError("task.norm, task.projection and task.extractor belong to task.model = 'mlp'")
        self._held: dict[torch.device, tuple[str, Tensor, Tensor, Tensor]] = {}
        _ = self.classes  # settings errors belong to the start

    def _check_words(self) -> None:
        given = self.settings
        if given.file is None and given.inputs is None:
            raise ExperimentError(
                "task.inputs is required where every client brings its own table: the names of the columns, in order"
            )
        if given.file is None and given.target is None:
            raise ExperimentError("task.target is required where every client brings its own table")
        if given.file is None and given.predict == "class" and given.classes is None:
            raise ExperimentError(
                "task.classes is required where every client brings its own table: how many, or their names in order"
            )
        if given.predict == "number" and given.classes is not None:
            raise ExperimentError("task.classes beside task.predict = 'number'; allowed: one of them")
        if given.inputs is not None and (not given.inputs or len(set(given.inputs)) < len(given.inputs)):
            raise ExperimentError(f"task.inputs = {given.inputs}: allowed: at least one column, each once")
        if given.inputs is not None and given.target in given.inputs:
            raise ExperimentError(f"task.target = {given.target!r} is one of task.inputs: it would predict itself")
        if given.inputs is not None and (both := sorted(set(given.inputs) & set(given.drop))):
            raise ExperimentError(f"task.drop = {given.drop}: {listed(both)} is one of task.inputs")
        for name, values in given.categories.items():
            texts = [text_of(each) for each in values]
            if not texts or len(set(texts)) < len(texts):
                raise ExperimentError(f"task.categories.{name} = {values}: allowed: at least one value, each once")
        if isinstance(given.classes, list) and (not given.classes or len(set(self._named)) < len(given.classes)):
            raise ExperimentError(f"task.classes = {given.classes}: allowed: names, each once")

    def _check_given(self, known: Mapping[str, list[float]]) -> None:
        inputs, allowed = self.how.inputs, [*self.how.numbers, *([self.how.target] if self.numeric else [])]
        for name in self.settings.categories:
            if name not in inputs:
                raise SettingsError(f"task.categories.{name}: no column of the inputs; allowed: {listed(inputs)}")
        for name, pair in known.items():
            if name not in allowed:
                raise SettingsError(f"task.standardize.{name}: no column of numbers; allowed: {listed(allowed)}")
            if len(pair) != 2 or pair[1] < 0:
                raise SettingsError(f"task.standardize.{name} = {pair}; allowed: [mean, deviation], deviation from 0")

    # --- which columns

    @property
    def absent(self) -> bool:
        """Whether there is no pooled table: every client brings its own."""
        return self.settings.file is None

    @property
    def numeric(self) -> bool:
        """Whether a number is predicted, and no class."""
        return self.settings.predict == "number"

    @property
    def _named(self) -> list[str]:
        given = self.settings.classes
        return [text_of(each) for each in given] if isinstance(given, list) else list(map(str, range(given or 0)))

    @cached_property
    def _path(self) -> Path:
        assert self.settings.file is not None
        return find(self.settings.file, "task.file", folders=True)

    @cached_property
    def how(self) -> Columns:
        """Which columns are learnt from. From the settings alone, or from the pooled table's first line."""
        given = self.settings
        categories = {name: tuple(map(text_of, values)) for name, values in given.categories.items()}
        inputs, target = given.inputs, given.target
        if inputs is None or target is None:
            held = header(self._path, part_of(self._path))
            target = target or next((name for name in LABELS if name in held), None)
            if target is None or target not in held:
                raise SettingsError(f"task.target = {given.target!r}: {self._path} has the columns {listed(held)}")
            if unknown := [name for name in given.drop if name not in held]:
                raise SettingsError(f"task.drop: {self._path} has no column {listed(unknown)}; it has {listed(held)}")
            out = {target, *given.drop, *([self._group] if self._group else [])}
            inputs = inputs or [name for name in held if name not in out]
            if not inputs:
                raise SettingsError(f"{self._path} has no column of inputs beside {listed(sorted(out))}")
        return Columns(tuple(inputs), target, categories, given.missing)

    @cached_property
    def _group(self) -> str | None:
        """The column of a natural split in the pooled table."""
        if self.settings.group is not None:
            return self.settings.group
        held = header(self._path, part_of(self._path))
        named = self.settings.inputs or ()
        return next((name for name in GROUPS if name in held and name not in named), None)

    def columns(self) -> tuple[str, ...]:
        """The model's inputs: columns of numbers, and column=value of categories."""
        return self.how.names

    @property
    def size(self) -> int:
        """The numbers of one input, d."""
        return len(self.how.names)

    @cached_property
    def class_names(self) -> list[str]:
        """The classes, in order; [] where a number is predicted."""
        if self.numeric:
            return []
        return self._named if self.settings.classes is not None else class_names(self._table[self.how.target])

    @property
    def classes(self) -> int | None:
        """The number of classes; None where a number is predicted."""
        return None if self.numeric else len(self.class_names)

    # --- what they hold

    @cached_property
    def _table(self) -> dict[str, Any]:
        wanted = [*self.how.inputs, self.how.target]
        if self.partition.kind == "natural" and self._group:
            wanted.append(self._group)
        return dict(read_columns(self._path, wanted, part_of(self._path)))

    def _examples(self, table: Mapping[str, Any], path: Path, purpose: str) -> tuple[Examples, NDArray[np.int64]]:
        """Inputs (n, d) in float64 and targets (n,), within the limit, and which rows they are."""
        inputs, values = self.how.encode(dict(table), path), table[self.how.target]
        if self.numeric:
            targets: NDArray[Any] = numbers(values, None, self.how.target, path)
        else:
            targets = class_numbers(values, self.class_names, self.how.target, path)
        kept = drawn(len(targets), self.settings.limit, self.seed, purpose)
        return Examples(torch.from_numpy(inputs[kept]), torch.from_numpy(targets[kept])), kept

    @cached_property
    def _pooled(self) -> tuple[Examples, NDArray[Any] | None]:
        examples, kept = self._examples(self._table, self._path, "train")
        if self.partition.kind != "natural" or not self._group:
            return examples, None
        return examples, np.array(list(map(text_of, self._table[self._group])), dtype=str)[kept]

    def pool(self) -> Examples:
        """All rows of the pooled table."""
        return self._pooled[0]

    def groups(self) -> NDArray[Any] | None:
        """The groups of the pooled table's rows, as text."""
        return self._pooled[1]

    def labels(self) -> NDArray[Any] | None:
        """The classes; of numbers there are none to split by."""
        return None if self.numeric else super().labels()

    @cached_property
    def _test(self) -> Examples | None:
        wanted = [*self.how.inputs, self.how.target]
        if self.settings.test_file is not None:
            path = find(self.settings.test_file, "task.test_file", folders=True)
            return self._examples(read_columns(path, wanted, part_of(path, test=True)), path, "test")[0]
        if self.absent or part_of(self._path) is None or (part := _test_part(self._path)) is None:
            return None
        return self._examples(read_columns(self._path, wanted, part), self._path, "test")[0]

    def central(self) -> Examples | None:
        """The rows of `task.test_file`, or of the table `test` beside `train` in the folder `task.file`."""
        return self._test

    def client(self, name: str, file: str | None = None) -> ClientData:
        """A client of the plan or, with `file`, all rows of that site's own table.

        The site's holdout is `partition.holdout` of them, drawn by the seed and the name. Raises SiteError naming
        columns that it lacks, or the line and column of a cell that cannot be used.
        """
        if file is None:
            return super().client(name)
        path = own_file(file, f"file of client {name!r}", folders=True)
        table = read_columns(path, [*self.how.inputs, self.how.target], part_of(path))
        own, _ = self._examples(table, path, name)
        if not len(own):
            raise SiteError("data-unreadable", f"{path} has no row")
        return replace(self.site(name, own), columns=self.how.names)

    def inputs(self, path: Path) -> Tensor:
        """The rows of any table with the columns of the inputs, as the model wants them: (n, d) in `dtype`."""
        table = read_columns(path, self.how.inputs, part_of(path))
        return self.features(torch.from_numpy(self.how.encode(table, path)))

    # --- what the model makes of them

    def _values(self, examples: Examples) -> NDArray[np.float64]:
        """The columns of the census, (n, k)."""
        held = examples.inputs.cpu().numpy()[:, self.how.scaled]
        assert self.census is not None
        if len(self.census.names) == held.shape[1]:
            return np.asarray(held, np.float64)
        return np.column_stack([held, examples.targets.cpu().numpy()]).astype(np.float64)

    @property
    def scale(self) -> dict[str, tuple[float, float]]:
        """Column -> mean and deviation by which it is standardized."""
        given = self.settings.standardize
        if isinstance(given, dict):
            return {name: (pair[0], pair[1]) for name, pair in given.items()}
        if not given or self.census is None:
            return {}
        held = self._known()
        return {name: (held.mean[name], held.deviation[name]) for name in held.mean}

    def _known(self) -> Any:
        if self.census is None or self.census.scale is None:
            raise MessageError("a message without the means and deviations of this experiment's columns")
        return self.census.scale

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of each input: mean, divisor, and what stands for a missing value; float64 (d,)."""
        text = self.census.text if self.census else ""
        if device not in self._held or self._held[device][0] != text:
            names = [name for name in self.how.inputs for _ in range(len(self.how.categories.get(name, "1")))]
            mean, divisor = factors(self.scale, names)
            fill = dict.fromkeys(names, 0.0)
            if self.settings.missing == "mean" and self.census is not None:
                fill |= self._known().mean
            fill |= {name: pair[0] for name, pair in self.scale.items()}
            with torch.inference_mode(False):  # kept beyond an evaluation
                filled = [fill[name] for name in names]
                first, second, third = (
                    torch.tensor(values, dtype=torch.float64, device=device) for values in (mean, divisor, filled)
                )
            self._held[device] = (text, first, second, third)
        return self._held[device][1:]

    def features(self, inputs: Tensor) -> Tensor:
        """Standardized, with missing values filled in; (b, d) in `dtype`."""
        mean, divisor, fill = self._tensors(inputs.device)
        if self.settings.missing == "mean":
            inputs = torch.where(inputs.isnan(), fill, inputs)
        return ((inputs - mean) / divisor).to(self.dtype)

    def model(self) -> nn.Module:
        """Logits (b, classes), or numbers (b, 1)."""
        given = self.settings
        if given.model == "linear":
            return nn.Sequential(nn.Linear(self.size, (self.classes or 1))).to(self.dtype)
        return network(
            "mlp",
            (self.size,),
            (self.classes or 1),
            width=given.width,
            norm=given.norm,
            projection=given.projection,
            extractor=given.extractor,
            dtype=self.dtype,
        )

    def _target_scale(self) -> tuple[float, float]:
        mean, divisor = factors(self.scale, [self.how.target])
        return mean[0], divisor[0]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross entropy, nats; of a number the mean squared error in units of its deviation."""
        if not self.numeric:
            return super().loss(model, batch)
        inputs, targets = batch
        mean, divisor = self._target_scale()
        return functional.mse_loss(model(self.features(inputs)).squeeze(1), ((targets - mean) / divisor).to(self.dtype))

    def outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (b, c) and classes (b,); numbers (b,) in their own units and the targets (b,)."""
        if not self.numeric:
            return super().outputs(model, batch)
        inputs, targets = batch
        mean, divisor = self._target_scale()
        return model(self.features(inputs)).squeeze(1).double() * divisor + mean, targets

    def judge(self, outputs: Any, targets: Any) -> Mapping[str, float | Tensor]:
        """Sums: cross entropy and right answers; of a number its squared error in units of its deviation, as trained,
        and squared and absolute error in its own."""
        if not self.numeric:
            return super().judge(outputs, targets)
        off = outputs - targets
        square = (off * off).sum()
        return {"loss": square / self._target_scale()[1] ** 2, "mse": square, "mae": off.abs().sum()}

    def explain(self) -> Mapping[str, str]:
        """Inputs, target, standardization, missing values and test set."""
        given, how = self.settings, self.how
        classes = f"{len(self.class_names)} classes: {listed(self.class_names)}"
        lines = {
            "inputs": f"{len(how.names)} from {len(how.inputs)} columns: {listed(how.names)}",
            "target": f"{how.target}, {'a number' if self.numeric else classes}",
        }
        if given.standardize is True:
            lines["standardization"] = (
                f"{listed(self.census.names if self.census else ())}: by mean and deviation over the training parts "
                "of all who are on the roll before round 1"
            )
        elif given.standardize:
            lines["standardization"] = "as given: " + listed(
                f"{name} ({mean:g}, {deviation:g})" for name, (mean, deviation) in self.scale.items()
            )
        else:
            lines["standardization"] = "none: numbers are learnt as they are; task.standardize = true changes that"
        filled = "filled with the column's mean" if given.missing == "mean" else f"filled with {given.missing}"
        lines["missing cells"] = "an error" if given.missing is None else filled
        if (test := self.central()) is not None:
            lines["test set"] = f"{len(test)} examples, read by the server alone"
        return lines


def _test_part(path: Path) -> str | None:
    """The table of a folder that is the central test set."""
    try:
        part = part_of(path, test=True)
    except SettingsError:
        return None
    return None if part == part_of(path) else part
