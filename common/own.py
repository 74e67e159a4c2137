"""What an experiment names of the user's own: "package.module:name" for a task, a model, a metric, an algorithm."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from common.data.grant import granted
from common.errors import SettingsError
from common.settings import shown


def load(reference: str, setting: str, kind: str = "name") -> Any:
    """What `reference` names; `setting` is the key that holds it, `kind` what it should be.

    Raises Denied, before anything is imported, where the site has not allowed it; SettingsError if there is none.
    """
    granted().task(reference, setting)
    what = f"{setting} = {shown(reference)}"
    if not all(reference.partition(":")):
        raise SettingsError(f"{what}; allowed: package.module:{kind}")
    try:
        return resolve_name(reference)
    except Exception as error:
        raise SettingsError(f"{what} cannot be imported: {cause(error)}") from error


def cause(error: Exception) -> str:
    """An error of the user's own code in a line."""
    return str(error) if isinstance(error, SettingsError) else f"{type(error).__name__}: {error}"
