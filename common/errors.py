"""The errors that a user is meant to read: one message, no stack trace."""

from __future__ import annotations

from collections.abc import Iterable


class SettingsError(ValueError):
    """Something the user wrote cannot work; found before round 1. The command ends with exit code 2."""


class RunError(RuntimeError):
    """A run that had started could not go on. The command ends with exit code 1."""


def not_one_of(what: str, value: object, allowed: Iterable[str]) -> SettingsError:
    """The error for a name that is not in a registry: names the thing, the value and what is allowed."""
    return SettingsError(f"{what}: {value!r} is unknown; allowed: {', '.join(sorted(allowed))}")
