"""What settings are made of: strict tables, checked, with errors that name key, value and what is allowed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import SettingsError

M = TypeVar("M", bound=BaseModel)

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


def is_name(text: str) -> bool:
    """Whether a text can name an experiment or a site, which become folders: letters, digits, '.', '_' and '-', at most
    100, no leading sign."""
    return re.fullmatch(NAME, text) is not None


class Section(BaseModel):
    """A table of the experiment file: unknown keys are errors, types are taken as written, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OpenSection(BaseModel):
    """A table whose further keys belong to the named task or strategy, which checks them itself."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys beside `name`."""
        return dict(self.__pydantic_extra__ or {})


def text_of(path: str | Path, what: str) -> str:
    """The text of a settings file. Raises SettingsError with `what` it should have been."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {error}") from None


def tables_of(text: str, source: str) -> dict[str, Any]:
    """The tables of TOML text. Raises SettingsError with its `source`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source} is not valid TOML: {error}") from None


def checked(model: type[M], values: dict[str, Any], source: str) -> M:
    """Build settings from a dict, or raise SettingsError with one line per fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join(_line(source, model, fault) for fault in error.errors())) from None


def _line(source: str, model: type[BaseModel], fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        allowed = ", ".join(_section(model, fault["loc"][:-1]).model_fields)
        return f"{source}: {where} = {fault['input']!r}: unknown key; allowed here: {allowed}"
    return f"{source}: {where} = {fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}"


def _section(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    for part in path:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model


def dotted(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key, such as "local.lr", and value of everything in nested tables that is no table itself."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
