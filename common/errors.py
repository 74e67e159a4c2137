"""The errors that a user is meant to read: one message, no stack trace."""

from __future__ import annotations

from collections.abc import Iterable


class SettingsError(ValueError):
    """Something the user wrote cannot work; found before round 1. The command ends with exit code 2."""


class Sayable(Exception):
    """Its text holds what an experiment or a message says and words of this project, nothing else: where it is raised,
    only these have been seen. A site may send it back; the text of any other error stays there."""

    code = "message-invalid"
    """One of `client.reasons.CODES`."""


class ExperimentError(SettingsError, Sayable):
    """A fault in the experiment's own words."""

    code = "experiment-invalid"


class MessageError(ValueError, Sayable):
    """A fault in what a message carries."""


class Unfit(SettingsError, Sayable):
    """The experiment asks for an arithmetic that this process has not."""

    code = "arithmetic"


class SiteError(SettingsError):
    """Data or a device of a site that do not do. The text stays there; `code` says what it is about. `names`: what may
    be told of names of columns, where the site lets these out."""

    def __init__(self, code: str, text: str, names: str = "") -> None:
        super().__init__(text)
        self.code, self.names = code, names

    def __reduce__(self) -> tuple[type[SiteError], tuple[str, str, str]]:
        return type(self), (self.code, str(self), self.names)


class Denied(Sayable):
    """What was asked for is more than the site allows. `code` says what it is about; `detail` stays there."""

    def __init__(self, code: str, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.code, self.detail = code, detail

    def __reduce__(self) -> tuple[type[Denied], tuple[str, str, str]]:
        return type(self), (self.code, str(self), self.detail)


class RunError(RuntimeError):
    """A run that had started could not go on. The command ends with exit code 1."""


def not_one_of(what: str, value: object, allowed: Iterable[str]) -> SettingsError:
    """The error for a name that is not in a registry: names the thing, the value and what is allowed."""
    return SettingsError(f"{what}: {value!r} is unknown; allowed: {', '.join(sorted(allowed))}")


def located(error: BaseException) -> str:
    """An error of somebody's own code in a line: what it is, and the file and line where it was raised."""
    if isinstance(error, SettingsError):
        return str(error)
    trace, where = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "site-packages" not in file:  # where a library was called, not where in it
            where = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{where}"
