"""The plan of a comparison: one base experiment, a grid and variants of it, seeds; as a list of cells to run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from common.errors import SettingsError
from common.experiment import Experiment
from common.metrics.target import Target
from common.settings import Name, Section, checked, dotted, merged, tables_of, text_of
from server.compare.folder_names import point_slug, shortened, slug

Tables = dict[str, Any]
Point = dict[str, Any]
"""Dotted key of an experiment -> its value: a point of a grid, or a candidate of a tuning."""

TUNING = "tuning"
OWNED = {"name": "a cell's name is its folder's", "seed": "the plan's `seeds` give it"}
"""Keys of an experiment that a plan's parts cannot set."""


class Tuning(Section):
    """`[tuning]`: how the candidates of `[variants.tune]` are judged."""

    seeds: list[int] = Field([100], min_length=1, description="seeds of the candidates' runs, best apart from `seeds`")
    rounds: int | None = Field(None, ge=1, description="rounds of a candidate's run; default: the experiment's")
    score: Literal["last", "best"] = Field("last", description="mean of the last `window` evaluations, or the best one")
    window: int = Field(5, ge=1)

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: list[int]) -> list[int]:
        return _distinct_seeds(value)


class Variant(BaseModel):
    """`[[variants]]`: a row of a table. All keys but `name` and `tune` are overrides of the experiment."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = Field(min_length=1)
    tune: dict[str, Any] = {}

    @property
    def overrides(self) -> Tables:
        """Dotted keys and tables, as written."""
        return dict(self.__pydantic_extra__ or {})


class Plan(Section):
    """A plan file.

    Seeds, grid points and variants may be added to a plan that has run: only what is new then runs. Grid and `tune`
    take every combination of their lists. A tuned variant is tuned for each grid point.
    """

    name: Name
    seeds: list[int] = Field([0], min_length=1)
    targets: list[float | str] = Field([], description="for rounds-to-target: of the headline, or 'METRIC=NUMBER'")
    base: str | dict[str, Any] = Field({}, description="an experiment's tables, or its file, relative to the plan's")
    grid: dict[str, Any] = Field({}, description="dotted key -> values; every combination is run")
    variants: list[Variant] = Field([Variant(name="base")], min_length=1)
    tuning: Tuning = Tuning()

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: list[int]) -> list[int]:
        return _distinct_seeds(value)

    @field_validator("targets")
    @classmethod
    def _targets(cls, value: list[float | str]) -> list[float | str]:
        for target in value:
            Target.parse(target)
        return value

    @classmethod
    def read(cls, path: str | Path) -> tuple[str, Plan]:
        """A plan file's text and, checked, what it says with the experiment file that it may name.

        Raises SettingsError naming the file, the key, the value and what is allowed.
        """
        path = Path(path)
        text = text_of(path, "plan file")
        return text, cls.parse(text, str(path), path.parent)

    @classmethod
    def parse(cls, text: str, source: str = "plan", folder: Path = Path()) -> Plan:
        """Read and check TOML text; `folder`: from where a base's path starts."""
        return cls.of(tables_of(text, source), source, folder)

    @classmethod
    def of(cls, tables: Tables, source: str = "plan", folder: Path = Path()) -> Plan:
        """A plan from tables; what `base` names is read into it."""
        plan = checked(cls, tables, source)
        if faults := _incoherent(plan):
            raise SettingsError("\n".join(f"{source}: {fault}" for fault in faults))
        if isinstance(plan.base, str):
            file = folder / plan.base
            return plan.model_copy(update={"base": tables_of(text_of(file, f"{source}: base"), str(file))})
        return plan

    def portable(self) -> Plan:
        """The same plan in portable arithmetic. The base has been read."""
        assert isinstance(self.base, dict)
        return self.model_copy(update={"base": merged(self.base, {"local": {"arithmetic": "portable"}})})


@dataclass(frozen=True)
class Cell:
    """One run of a plan. `folder`: relative to the plan's; `tuned`: the candidate that it runs, {} if none."""

    folder: str
    variant: str
    point: Point
    seed: int
    stage: Literal["final", "tune"]
    tuned: Point
    tables: Tables

    @cached_property
    def experiment(self) -> Experiment:
        """The cell's experiment. Raises SettingsError, with the cell, for tables that make none."""
        return checked(Experiment, self.tables, self.about())

    def about(self) -> str:
        """For messages."""
        given = [f"{key} = {json.dumps(value)}" for key, value in (self.point | self.tuned).items()]
        return ", ".join([f"variant {self.variant!r}", *given, f"seed {self.seed}"])


@dataclass(frozen=True)
class Row:
    """A variant at a grid point: all its cells. `candidates`: one of them, {}, if nothing is tuned."""

    variant: Variant
    point: Point
    candidates: list[Point] = field(default_factory=lambda: [{}])

    @property
    def slug(self) -> str:
        """The folder of its final cells."""
        return "__".join(filter(None, [slug(self.variant.name), point_slug(self.point)]))


def rows(plan: Plan) -> list[Row]:
    """Every variant at every grid point."""
    points = combinations(axes(plan.grid, "grid"))
    return [
        Row(variant, point, combinations(axes(variant.tune, "tune"))) for point in points for variant in plan.variants
    ]


def final_cells(plan: Plan, row: Row, tuned: Point) -> list[Cell]:
    """The cells of a row's table entry."""
    return [_cell(plan, row, tuned, seed, row.slug, "final") for seed in plan.seeds]


def tune_cells(plan: Plan, row: Row) -> list[Cell]:
    """The cells that choose among a row's candidates; none if nothing is tuned."""
    if not row.variant.tune:
        return []
    return [
        _cell(plan, row, candidate, seed, f"{TUNING}/{row.slug}/{point_slug(candidate)}", "tune")
        for candidate in row.candidates
        for seed in plan.tuning.seeds
    ]


def _cell(plan: Plan, row: Row, tuned: Point, seed: int, folder: str, stage: Literal["final", "tune"]) -> Cell:
    assert isinstance(plan.base, dict)
    tables = merged(plan.base, row.point)
    tables = merged(merged(tables, row.variant.overrides), tuned)
    name = folder.removeprefix(f"{TUNING}/").replace("/", "__")
    tables |= {"name": name if len(name) <= 100 else shortened(name), "seed": seed}
    if stage == "tune" and plan.tuning.rounds is not None:
        tables["rounds"] = plan.tuning.rounds
    return Cell(f"{folder}/seed-{seed}", row.variant.name, row.point, seed, stage, tuned, tables)


def flat(tables: Mapping[str, Any], source: str) -> Point:
    """Dotted keys in place of tables. Raises ValueError for a key that is given twice or is not a plan's to set."""
    found: Point = {}
    for name, value in dotted(tables):
        if name in found:
            raise ValueError(f"{source}: {name} is given twice")
        if name in OWNED:
            raise ValueError(f"{source}: {name} cannot be set here: {OWNED[name]}")
        found[name] = value
    return found


def axes(tables: Mapping[str, Any], source: str) -> dict[str, list[Any]]:
    """Dotted key -> the values that it takes. Raises ValueError unless they are lists of different values."""
    found = flat(tables, source)
    for key, values in found.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{source}: {key} = {values!r}: give a list of values")
        if any(values.count(value) > 1 for value in values):
            raise ValueError(f"{source}: {key} = {values!r}: a value is given twice")
    return dict(sorted(found.items()))


def combinations(values: Mapping[str, list[Any]]) -> list[Point]:
    """Every combination, the last key fastest; [{}] of nothing."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _incoherent(plan: Plan) -> list[str]:
    """What is wrong with a plan beside the types of its keys."""
    faults: list[str] = []
    varied = _axes(plan.grid, "grid", faults)
    seen: dict[str, str] = {}
    for variant in plan.variants:
        who = f"variant {variant.name!r}"
        folder = slug(variant.name)
        if not folder or folder == TUNING:
            faults.append(f"{who}: its name makes no folder's name of its own")
        elif folder in seen:
            faults.append(f"{who} and {seen[folder]} would share the folder {folder!r}: give them other names")
        seen[folder] = who
        tuned = _axes(variant.tune, f"{who}, tune", faults)
        try:
            own = set(flat(variant.overrides, who))
        except ValueError as error:
            faults.append(str(error))
            own = set()
        faults += [f"{who}: {key} is set here and varied by the grid" for key in sorted(varied & own)]
        faults += [f"{who}: {key} is tuned here and varied by the grid" for key in sorted(varied & tuned)]
        faults += [f"{who}: {key} is set and tuned" for key in sorted(own & tuned)]
    return faults


def _axes(tables: Tables, source: str, faults: list[str]) -> set[str]:
    try:
        return set(axes(tables, source))
    except ValueError as error:
        faults.append(str(error))
        return set()


def _distinct_seeds(seeds: list[int]) -> list[int]:
    if len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError("seeds are different numbers, 0 or above")
    return seeds
