"""What settings are made of: strict tables, checked, with errors that name key, value and what is allowed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from common.errors import ExperimentError, SettingsError

M = TypeVar("M", bound=BaseModel)

MOST_SHOWN = 80


def shown(value: Any) -> str:
    """A value for an error message: its repr, of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


def printable(text: str, instead: str = "?") -> str:
    """A text that somebody else wrote without what would drive a terminal, end a line or turn its direction: `instead`
    stands for each such character."""
    return "".join(each if each.isprintable() else instead for each in text)


def name_fault(name: str) -> str:
    """Why a text cannot name an experiment or a client, which become folders, as a sentence; "" if it can."""
    return "" if re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) else f"{shown(name)} is no name: {NAMES}"


NAMES = "a name has 1 to 100 of the letters a-z and A-Z, digits, '.', '_' and '-', and begins with a letter or a digit"


def _named(name: str) -> str:
    if name_fault(name):
        raise ValueError(NAMES)
    return name


Name = Annotated[str, AfterValidator(_named)]
"""A field that holds the name of an experiment or a plan."""


class _Opened:
    """Marks what `Opened` annotates."""


Opened = Annotated[str, _Opened()]
"""A field that names a file, a folder or something to fetch: `common.data.places` and `common.data.grant` say whether
it may be, and a test sees that they are asked. Every other field of text is but text."""


class Section(BaseModel):
    """A table of the experiment file: unknown keys are errors, types are taken as written, numbers are finite, values
    never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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
        return Path(path).read_text("utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {error}") from None


def tables_of(text: str, source: str) -> dict[str, Any]:
    """The tables of TOML text. Raises SettingsError with its `source`."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source} is not valid TOML: {error}") from None


def checked(model: type[M], values: dict[str, Any], source: str) -> M:
    """Build settings from a dict, or raise SettingsError with one line per fault. A `source` in brackets, such as
    "[task]", is a table of an experiment: then the error, as the values, is of its words alone (ExperimentError)."""
    kind = ExperimentError if source.startswith("[") else SettingsError
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise kind("\n".join(_line(source, model, fault) for fault in error.errors())) from None


def _line(source: str, model: type[BaseModel], fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        allowed = ", ".join(_section(model, fault["loc"][:-1]).model_fields)
        return f"{source}: {where} = {shown(fault['input'])}: unknown key; allowed here: {allowed}"
    return f"{source}: {where} = {shown(fault['input'])}: {fault['msg'].removeprefix('Value error, ')}"


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


def merged(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with overrides: nested tables are merged, dotted keys reach into them."""
    result = dict(tables)
    for key, value in overrides.items():
        head, _, rest = key.partition(".")
        inner = {rest: value} if rest else value
        held = result.get(head)
        if isinstance(inner, Mapping):
            result[head] = merged(held if isinstance(held, Mapping) else {}, inner)
        else:
            result[head] = inner
    return result


def given(texts: Iterable[str]) -> dict[str, Any]:
    """Values by dotted key of texts KEY=VALUE, as `--set` takes them: a value as in TOML, and a text without quotes if
    it is a plain word. Of a key that is given twice the last counts.

    Raises SettingsError naming key, value and what is allowed.
    """
    return dict(map(_assigned, texts))


def _assigned(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key):
        raise SettingsError(f"--set {shown(text)}: allowed: KEY=VALUE, KEY a name or names with dots, such as local.lr")
    try:
        found = tomllib.loads(f"value = {value}")
        if len(found) > 1:  # a second line of a text is a second key
            raise tomllib.TOMLDecodeError("more than one value")
        return key, found["value"]
    except tomllib.TOMLDecodeError as error:
        # A shell takes quotes away: what can only be meant as a text is one.
        if re.fullmatch(r"[A-Za-z_./~][^\s\"'\[\]{}#]*", value):
            return key, value
        raise SettingsError(
            f"--set {key} = {shown(value)}: no TOML value ({error}); allowed: a number, true or false, a list in "
            "brackets, a text in quotes or a plain word"
        ) from None
